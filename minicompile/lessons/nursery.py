"""The nursery: a process that has imported torch and the compiler, and forks a keeper for each answer.

    nursery: imports, once
       +-- fork --> keeper of ex1: waits, kills what is left, judges the data, gives one line
                       +-- fork --> nbval runs set-up, answer and probe, confined; leaves answer.json

An answer so starts in a fraction of a second, and finds the memory of a process that has only imported: no
other answer, no check, no solution. Its process holds nbval and the notebook's kernel too, for nothing that
they say earns a point: the keeper reads checks and solutions when that process has ended, and judges the
data that it left (`lessons/judge.py`). An answer that kills its keeper has no verdict.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from minicompile.lessons import exercise
from minicompile.lessons.confine import confine, guard_self, kill_descendants
from minicompile.lessons.processes import environment_of
from minicompile.options import replace_environment

OPTIONS = (
    "-q -p nbval -p no:cacheprovider --rootdir=. -c pytest.ini --nbval-lax --nbval-current-env"
)
JUDGING = 600
"""Longest time, in seconds, that judging may take."""


def main(descriptor: int) -> None:
    """Import what answers need; then fork a keeper for each socket that comes, until the grader hangs up."""
    guard_self()
    warm()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who ends needs no waiting for
    with socket.socket(fileno=descriptor) as control:
        while descriptors := socket.recv_fds(control, 1, 1)[1]:
            if os.fork() == 0:
                control.close()
                keep(socket.socket(fileno=descriptors[0]))
                os._exit(0)
            os.close(descriptors[0])
    kill_descendants()
    os._exit(0)  # to take all that was imported apart would take a second


def warm() -> None:
    """Import what a first compilation imports, without building or running a kernel."""
    import nbval.plugin
    import torch
    from ipykernel.inprocess import ipkernel  # noqa: F401
    from nbval.kernel import RunningKernel

    import minicompile as mc
    from minicompile.lessons import model  # noqa: F401

    class OwnKernel(RunningKernel):  # type: ignore[misc]  # nbval has no types
        """A kernel in the process that nbval runs in."""

        language = "python"

        def __init__(self, *_: object, **__: object) -> None:
            from ipykernel.inprocess.manager import InProcessKernelManager

            self.km = InProcessKernelManager()
            self.km.start_kernel()
            self.kc = self.km.client()
            self.kc.start_channels()

        def get_message(self, stream: str, timeout: float | None = None) -> Any:
            return getattr(self.kc, f"{stream}_channel").get_msg(timeout=timeout)

        def stop(self) -> None:
            """It ends with its process."""

    nbval.plugin.RunningKernel = OwnKernel
    weight = torch.ones(2, 2, requires_grad=True)
    mc.trace(lambda x: torch.softmax(torch.relu(x @ weight) + 1, -1), torch.ones(2, 2))
    mc.reset()


def keep(channel: socket.socket) -> None:
    """Run one answer in a process of its own, end what that leaves behind, and give its verdict."""
    guard_self()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with channel, channel.makefile("rw", encoding="utf-8") as lines:
        order = json.loads(lines.readline())
        child = os.fork()
        if child == 0:
            os.close(channel.fileno())
            run_answer(order)
        said = how_it_ended(child, order["seconds"])
        kill_descendants()
        if not said:
            from minicompile.lessons.judge import judged

            signal.alarm(JUDGING)
            said = judged(order["lesson"], order["exercise"], Path(order["folder"]))
        lines.write(f"{json.dumps(said)}\n")


def how_it_ended(child: int, seconds: float) -> str:
    """Wait for a process: "" if it ended by itself in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return "the kernel died" if status else ""
        time.sleep(0.02)
    return f"it took longer than {seconds:g} seconds"


def run_answer(order: dict[str, Any]) -> NoReturn:
    """Run the notebook of an answer under nbval, in a folder and environment of its own, confined."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    folder = Path(order["folder"])
    os.chdir(folder)
    replace_environment(environment_of(folder))
    tempfile.tempdir = None
    Path("pytest.ini").write_text("[pytest]\n")
    from sympy.parsing import sympy_parser

    sympy_parser.eval_expr = refuse_text
    exercise.checks = exercise.Lesson  # the lesson's own checks are out of reach
    confine(order["readable"], [str(folder)], order["seconds"])
    import pytest

    class Failures:
        """Writes down why the first cell that failed did."""

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_makereport(self, item: Any, call: Any) -> Iterator[None]:
            report: Any = yield  # type: ignore[misc]  # what the other plugins made of it
            if report.failed and not Path("failed.txt").exists():
                raised = [o for o in item.test_outputs or () if o.output_type == "error"]
                told = [f"{o['ename']}: {o['evalue']}" for o in raised] or [str(call.excinfo.value)]
                Path("failed.txt").write_text(told[0], encoding="utf-8")
            return report

    pytest.main([*OPTIONS.split(), f"{order['exercise']}.ipynb"], plugins=[Failures()])
    os._exit(0)


def refuse_text(*_: object) -> NoReturn:
    """Stand in for sympy's evaluation of texts, by which many of its functions would run any Python."""
    raise TypeError("sympy evaluates no text while an answer is graded")
