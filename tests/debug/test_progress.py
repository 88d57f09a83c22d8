"""Progress: a line on terminals alone, which is gone when the compilation ends."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch

import minicompile as mc
from minicompile.extension import graph_pass, scoped


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def here(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.redirect_stderr(self)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Stands for stderr inside of `here()`."""
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


def act(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


def shown(out: Terminal) -> list[str]:
    return out.getvalue().split("\r\x1b[K")


def test_it_says_what_is_done_and_vanishes(terminal: Terminal) -> None:
    with terminal.here():
        mc.compile(act, options={"progress": True})(torch.ones(3))
    first, *lines, last = shown(terminal)
    assert first == last == ""
    stages = [line.partition(f"] {act.__qualname__}: ")[2] for line in lines if line]
    assert stages[0] == "capturing" and {"autograd", "scheduling", "building"} < {*stages}


@pytest.mark.parametrize("why", ["pipe", "environment", "option", "dumb"])
def test_it_is_silent(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "environment":
        monkeypatch.setenv("MINICOMPILE_PROGRESS", "0")
    elif why == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    elif why == "pipe":
        monkeypatch.setattr(terminal, "isatty", lambda: False)
    with terminal.here():
        mc.compile(act, options={"progress": False} if why == "option" else None)(torch.ones(3))
    assert terminal.getvalue() == ""


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("x"), KeyboardInterrupt(), mc.Unsupported("x")]
)
def test_an_exception_leaves_no_line(terminal: Terminal, error: BaseException) -> None:
    with scoped(), terminal.here():

        @graph_pass("broken", stage="joint")
        def broken(gm: torch.fx.GraphModule, mode: object) -> int:
            raise error

        with pytest.raises(type(error)):
            mc.compile(act, fullgraph=True, options={"progress": True})(torch.ones(3))
    assert shown(terminal)[-1] == "" and len(shown(terminal)) > 2
