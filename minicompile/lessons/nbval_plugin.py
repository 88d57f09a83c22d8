"""What the grader adds to nbval: `pytest -p minicompile.lessons.nbval_plugin --grading-results=DESCRIPTOR`.

nbval waits as long as a cell may take where the kernel has died, and without end where a cell never stops
printing. Here a dead kernel is noticed within a second, and one that is past its time is killed. Each cell's
outcome goes to the file descriptor, which no kernel inherits, as soon as it is known: a JSON object a line.
The last one of a notebook brings the data that its kernel left in a file. When a notebook is done, every
process that its kernel has started is killed. A cell's points (its metadata) become properties of its test
case in JUnit's report. Memory, processes, processor time and files of kernels are limited.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from nbval.kernel import RunningKernel
from nbval.plugin import IPyNbCell

MOST_OUTPUT = 2_000_000
"""Most characters that the cells of one exercise may print."""


MOST_DATA = 2**28
"""Most bytes of a file that a kernel sends."""

MOST_MEMORY, MOST_FILE, MORE_PROCESSES = 2**34, 2**30, 512
"""Limits of a kernel: bytes of address space, bytes of a file, more processes and threads than there are."""

BECOMES_PARENT = 36
"""Linux's PR_SET_CHILD_SUBREAPER: processes whose parent has ended become our children."""

UNREADABLE = 4
"""Linux's PR_SET_DUMPABLE: at 0 no process of the same user may trace this one or open its descriptors."""

DROP, TRACING = 24, 19
"""Linux's PR_CAPBSET_DROP of CAP_SYS_PTRACE: kernels that root starts get no exemption from `UNREADABLE`."""


class GradingKernel(RunningKernel):  # type: ignore[misc]  # nbval has no types
    """A kernel that is given up once it is dead, silent too long, or too talkative."""

    deadline = float("inf")
    printed = 0
    overdue = False

    def execute_cell_input(self, cell_input: str, allow_stdin: bool | None = None) -> Any:
        self.deadline = float("inf")
        return super().execute_cell_input(cell_input, allow_stdin)

    def get_message(self, stream: str, timeout: float | None = None) -> Any:
        end = min(time.monotonic() + (timeout or 5), self.deadline)
        while True:
            left = end - time.monotonic()
            if left <= 0:
                raise Empty
            try:
                message = super().get_message(stream, timeout=min(0.5, left))
            except Empty:
                if not self.is_alive():
                    raise RuntimeError("the kernel died") from None
                continue
            self.printed += len(str(message["content"].get("text", "")))
            if self.printed > MOST_OUTPUT:
                self.kill()
                raise RuntimeError(f"more than {MOST_OUTPUT:,} characters printed")
            return message

    def interrupt(self) -> None:
        """A cell is past its time: what may not listen to an interrupt is killed."""
        self.kill()
        self.overdue = True
        self.deadline = time.monotonic()

    def kill(self) -> None:
        self.km.shutdown_kernel(now=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "a file descriptor that gets each cell's outcome"
    parser.addoption("--grading-results", type=int, default=-1, help=what)


def pytest_configure(config: pytest.Config) -> None:
    import nbval.plugin

    os.set_inheritable(config.getoption("--grading-results"), False)
    set_limits(config.option.nbval_cell_timeout)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(BECOMES_PARENT, 1, 0, 0, 0)
        ctypes.CDLL(None).prctl(UNREADABLE, 0, 0, 0, 0)
        ctypes.CDLL(None).prctl(DROP, TRACING, 0, 0, 0)
    nbval.plugin.RunningKernel = GradingKernel


def set_limits(seconds: float) -> None:
    """Limit this process and the kernels that it starts."""
    processor = int(seconds * (os.cpu_count() or 1)) + 120
    for limit, most in (
        (resource.RLIMIT_AS, MOST_MEMORY),
        (resource.RLIMIT_FSIZE, MOST_FILE),
        (resource.RLIMIT_CPU, processor),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, threads_of_user() + MORE_PROCESSES),
    ):
        _, hard = resource.getrlimit(limit)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (most, most))


def processes() -> Iterator[tuple[int, int]]:
    """Processes and their parents, where the system says so."""
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, ValueError, IndexError):
            status = Path(f"/proc/{name}/stat").read_text(encoding="latin-1")
            yield int(name), int(status.rpartition(")")[2].split()[1])


def threads_of_user() -> int:
    """Threads that this user runs: the limit counts them all."""
    count = 0
    for process, _ in processes():
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{process}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{process}/task"))
    return count


def kill_descendants() -> None:
    """Kill every process that a kernel left behind, and those that they start meanwhile."""
    for _ in range(100):
        parents = dict(processes())
        below = {os.getpid()}
        while more := {p for p, parent in parents.items() if parent in below} - below:
            below |= more
        below.discard(os.getpid())
        for process in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not below:
            return
        time.sleep(0.01)


def data_in(folder: str) -> str:
    """What a kernel left in its folder, "" if that is no plain file."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(os.path.join(folder, "answer.json"), flags), "rb") as file:
            about = os.fstat(file.fileno())
            if stat.S_ISREG(about.st_mode) and about.st_size <= MOST_DATA:
                return file.read().decode()
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, IPyNbCell):
            data = item.cell.metadata
            # The verdict is printed; a warning, of a missing compiler say, is none.
            item.parent.skip_compare = (*item.parent.skip_compare, "stderr")
            item.name = item.cell.get("id", item.name)
            item.user_properties += [("points", data.get("points", 0))]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield  # type: ignore[misc]  # what the other plugins made of it
    if not isinstance(item, IPyNbCell):
        return report
    if report.when == "call" or report.outcome == "failed":
        last = bool(item.cell.metadata.get("last"))
        passed = report.outcome == "passed" and not hasattr(report, "wasxfail")
        row = {
            "notebook": item.path.stem,
            "cell": item.cell.get("id", ""),
            "passed": passed,
            "message": "" if report.outcome == "passed" else message_of(item, call),
            "last": last,
            "data": data_in(str(item.path.parent)) if last and passed else "",
        }
        line = json.dumps(row).encode() + b"\n"
        while line:
            line = line[os.write(item.config.getoption("--grading-results"), line) :]
    if item.cell.metadata.get("last") and report.when == "teardown":
        kill_descendants()  # the kernel itself has ended
    return report


def message_of(item: Any, call: Any) -> str:
    """Why a cell failed, in the words of its exception."""
    if item.parent.kernel.overdue:
        return f"it took longer than {item.config.option.nbval_cell_timeout:g} seconds"
    for output in item.test_outputs or ():
        if output.output_type == "error":
            prefix = "" if output["ename"] in ("Wrong", "NotAnswered") else f"{output['ename']}: "
            return f"{prefix}{output['evalue']}"
    return str(call.excinfo.value) if call.excinfo else "not run, since an earlier cell failed"


def pytest_unconfigure(config: pytest.Config) -> None:
    import nbval.plugin

    nbval.plugin.RunningKernel = RunningKernel
