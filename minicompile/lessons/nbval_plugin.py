"""What the grader adds to nbval: `pytest -p minicompile.lessons.nbval_plugin -p nbval --grading=JSON`.

nbval starts a kernel by a command, waits as long as a cell may take where the kernel has died, and without
end where a cell never stops printing. Here a branch of the nursery (`lessons/nursery.py`) starts and stops
kernels, a dead one is noticed within a second, and one that is past its time is killed. Each cell's outcome
goes to a file descriptor, which no kernel inherits, as soon as it is known: a JSON object a line. The last
one of a notebook brings the data that its kernel left in a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator
from queue import Empty
from typing import Any, ClassVar

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.connect import write_connection_file
from nbval.kernel import RunningKernel
from nbval.plugin import IPyNbCell

from minicompile.lessons.confine import guard_self
from minicompile.lessons.processes import BRANCH_ENDED

MOST_OUTPUT = 2_000_000
"""Most characters that the cells of one exercise may print."""


MOST_DATA = 2**28
"""Most bytes of a file that a kernel sends."""

START = 60
"""Seconds in which a kernel must answer for the first time."""


class Branch:
    """The runner's end of a branch of the nursery."""

    def __init__(self, descriptor: int, order: dict[str, Any]) -> None:
        self.order = order
        self.socket = socket.socket(fileno=descriptor)
        self.lines = self.socket.makefile("rw", encoding="utf-8")

    def ask(self, **more: Any) -> int:
        """Start a kernel, or stop all with no arguments: its process. Ends pytest if the branch was ended."""
        line = ""
        with contextlib.suppress(OSError):
            self.lines.write(json.dumps(more and self.order | more) + "\n")
            self.lines.flush()
            line = self.lines.readline()
        if not line:
            pytest.exit("the process that starts kernels has ended", returncode=BRANCH_ENDED)
        return int(line)


class GradingKernel(RunningKernel):  # type: ignore[misc]  # nbval has no types
    """A kernel from the nursery, given up once it is dead, silent too long, or too talkative."""

    branch: ClassVar[Branch]
    deadline = float("inf")
    printed = 0
    overdue = False
    language = "python"

    def __init__(self, kernel_name: str, cwd: str, startup_timeout: float = START) -> None:
        writable = [cwd, *self.branch.order["writable"]]
        address = os.path.join(cwd, "at")
        connection, _ = write_connection_file(
            os.path.join(cwd, "kernel.json"), ip=address, transport="ipc"
        )
        self.kc = BlockingKernelClient(connection_file=connection)
        self.kc.load_connection_file()
        self.process = self.branch.ask(folder=cwd, writable=writable)
        self.kc.start_channels(hb=False, stdin=False)
        end = time.monotonic() + startup_timeout
        while time.monotonic() < end:
            asked = self.kc.kernel_info()
            self.await_reply(asked, timeout=max(0.1, end - time.monotonic()))
            with contextlib.suppress(Empty):  # its output is not connected yet
                self.await_idle(asked, 0.1)
                return
        raise RuntimeError("the kernel did not start")

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
                message = super().get_message(stream, timeout=min(0.25, left))
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

    def is_alive(self) -> bool:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.process, 0)
            return True
        return False

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.process, signal.SIGKILL)

    def stop(self) -> None:
        """End the kernel and all that it started."""
        self.kc.stop_channels()
        self.branch.ask()


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "descriptors of the results and the nursery, and how kernels start: JSON"
    parser.addoption("--grading", type=json.loads, default=None, help=what)


def pytest_configure(config: pytest.Config) -> None:
    import nbval.plugin

    how = config.getoption("--grading")
    for name in ("results", "nursery"):
        os.set_inheritable(how[name], False)
    guard_self()
    GradingKernel.branch = Branch(how["nursery"], how["kernel"])
    nbval.plugin.RunningKernel = GradingKernel


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
            # The verdict is printed; a warning, of a missing compiler say, is none.
            item.parent.skip_compare = (*item.parent.skip_compare, "stderr")
            item.name = item.cell.get("id", item.name)


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
            line = line[os.write(item.config.getoption("--grading")["results"], line) :]
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
