"""The nursery: a process that has imported torch and the compiler, and forks a kernel for each answer.

    grader --a socket a notebook--> nursery: imports, once
                                       +-- fork --> branch of a notebook <--"start", "stop"-- runner (nbval)
                                                       +-- fork --> kernel of ex1, confined

An answer's kernel so starts in a fraction of a second, and finds the memory of a process that has only
imported: no other answer, no check, no channel of the grader's. A branch lives as long as its notebook is
graded, and kills what a kernel leaves behind. It knows no secret; an answer that kills it ends its own
notebook's grading.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
from typing import Any, NoReturn

from minicompile.lessons.confine import Place, confine, guard_self, kill_descendants
from minicompile.options import replace_environment


def main(descriptor: int) -> None:
    """Import what kernels need; then fork a branch for each socket that comes, until the grader hangs up."""
    guard_self()
    warm()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who ends needs no waiting for
    with socket.socket(fileno=descriptor) as control:
        while True:
            _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not descriptors:
                break
            if os.fork() == 0:
                control.close()
                branch(socket.socket(fileno=descriptors[0]))
                os._exit(0)
            os.close(descriptors[0])
    kill_descendants()
    os._exit(0)  # to take all that was imported apart would take a second


def warm() -> None:
    """Import what a first compilation imports, without building or running a kernel."""
    import ipykernel.kernelapp
    import ipykernel.zmqshell  # noqa: F401
    import torch

    import minicompile as mc
    from minicompile.lessons import exercise, model  # noqa: F401

    weight = torch.ones(2, 2, requires_grad=True)
    mc.trace(lambda x: torch.softmax(torch.relu(x @ weight) + 1, -1), torch.ones(2, 2))
    mc.reset()


def branch(orders: socket.socket) -> None:
    """Start and stop the kernels of one notebook as its runner says, until that hangs up."""
    guard_self()
    with contextlib.suppress(OSError), orders.makefile("rw", encoding="utf-8") as lines:
        for line in lines:
            order = json.loads(line)
            if order:
                child = os.fork()
                if child == 0:
                    os.close(orders.fileno())
                    kernel(order)
                answer = child
            else:
                kill_descendants()
                answer = 0
            lines.write(f"{answer}\n")
            lines.flush()
    kill_descendants()


def kernel(order: dict[str, Any]) -> None:
    """Become the kernel of an answer: IPython's, in a folder and environment of its own, confined."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.chdir(order["folder"])
    replace_environment(order["environment"])
    tempfile.tempdir = None
    from sympy.parsing import sympy_parser

    sympy_parser.eval_expr = refuse_text
    confine(Place(order["readable"], order["writable"]), order["seconds"])
    from ipykernel.kernelapp import IPKernelApp

    try:
        IPKernelApp.launch_instance(["-f", "kernel.json", "--HistoryManager.enabled=False"])
    finally:
        os._exit(0)


def refuse_text(*_: object) -> NoReturn:
    """Stand in for sympy's evaluation of texts, by which many of its functions would run any Python."""
    raise TypeError("sympy evaluates no text while an answer is graded")


if __name__ == "__main__":
    main(int(sys.argv[1]))
