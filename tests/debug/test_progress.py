"""Progress: a line for compilations that take over a second, on terminals and in notebooks alone."""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Iterator

import pytest
import torch

import minicompile as mc
from minicompile.debug import progress
from minicompile.extension import graph_pass, scoped
from minicompile.ops.events import observer


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def here(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.redirect_stderr(self)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Stands for stderr inside of `here()`; a second is 0.05 s there."""
    out = Terminal()
    monkeypatch.setattr(progress, "DELAY", 0.05)
    monkeypatch.setattr(progress, "REFRESH", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    return out


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    """Whatever a test does, no thread and no compilation is left over."""
    yield
    assert all(thread.name != progress.THREAD for thread in threading.enumerate())
    assert observer["progress"].running == {}  # type: ignore[attr-defined]


def slow(seconds: float, error: BaseException | None = None) -> None:
    """Register a pass that takes its time, and may raise."""

    @graph_pass("slow", stage="joint")
    def wait(gm: torch.fx.GraphModule, mode: object) -> int:
        time.sleep(seconds)
        if error is not None:
            raise error
        return 0


def act(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


def shown(out: Terminal) -> list[str]:
    return out.getvalue().split("\r\x1b[K")


def test_it_says_what_is_done_and_vanishes(terminal: Terminal) -> None:
    with scoped(), terminal.here():
        slow(0.3)
        mc.compile(act)(torch.ones(3))
    first, *lines, last = shown(terminal)
    assert first == last == "" and len(lines) > 3
    assert all(f"] {act.__qualname__}: " in line and line.endswith(" s") for line in lines)
    assert any(": autograd, " in line for line in lines)


def test_a_quick_compilation_shows_nothing(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "DELAY", 60.0)
    began = time.monotonic()
    with terminal.here():
        mc.compile(act)(torch.ones(3))
    assert terminal.getvalue() == "" and time.monotonic() - began < 30


@pytest.mark.parametrize("why", ["pipe", "environment", "option", "dumb"])
def test_it_is_silent(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "environment":
        monkeypatch.setenv("MINICOMPILE_PROGRESS", "0")
    elif why == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    elif why == "pipe":
        monkeypatch.setattr(terminal, "isatty", lambda: False)
    with scoped(), terminal.here():
        slow(0.15)
        mc.compile(act, options={"progress": False} if why == "option" else None)(torch.ones(3))
    assert terminal.getvalue() == ""


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("x"), KeyboardInterrupt(), mc.Unsupported("x")]
)
def test_an_exception_leaves_no_line(terminal: Terminal, error: BaseException) -> None:
    with scoped(), terminal.here():
        slow(0.15, error)
        with pytest.raises(type(error)):
            mc.compile(act, fullgraph=True)(torch.ones(3))
        assert shown(terminal)[-1] == "" and len(shown(terminal)) > 2
        with pytest.raises(type(error)):
            mc.trace(act, torch.ones(3))


def test_threads_share_one_line(terminal: Terminal) -> None:
    with scoped(), terminal.here():
        slow(0.1)
        work = [lambda n=n: mc.compile(lambda x: x * n)(torch.ones(3)) for n in range(4)]
        threads = [threading.Thread(target=run) for run in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = shown(terminal)
    assert lines[-1] == "" and len({line.split()[1] for line in lines if line}) == 4
    assert all(line.count("minicompile") <= 1 for line in lines)


def test_a_compilation_inside_another_is_told_first_then_the_outer_one(terminal: Terminal) -> None:
    inner = mc.compile(lambda x: x.cos(), options={"progress": True})

    def backend(gm: torch.fx.GraphModule, fakes: object) -> object:
        time.sleep(0.1)
        with torch.utils._python_dispatch._disable_current_modes():
            inner(torch.ones(2))
        time.sleep(0.1)
        return gm.forward

    with terminal.here():
        mc.compile(act, backend=backend)(torch.ones(3))
    names = [line.split()[2] for line in shown(terminal) if line]
    assert names and names[0] == names[-1] == "act:"


def test_in_a_notebook_it_is_an_output_that_ends_empty(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ipykernel would get: here a shell that collects it."""
    display = pytest.importorskip("IPython.display")
    outputs: list[str] = []

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            outputs.append(data["text/plain"])

    def show(data: dict[str, str], raw: bool, display_id: bool) -> Handle:
        outputs.append(data["text/plain"])
        return Handle()

    monkeypatch.setattr(display, "display", show)
    monkeypatch.setattr(progress, "notebook", lambda: object())
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    with scoped(), terminal.here():
        slow(0.3)
        mc.compile(act)(torch.ones(3))
    assert outputs[0] == outputs[-1] == "" and any("act: autograd" in text for text in outputs)
    assert terminal.getvalue() == ""


def test_many_rounds_leave_nothing(terminal: Terminal) -> None:
    for number in range(5):
        with terminal.here():
            mc.compile(lambda x, n=number: x + n)(torch.ones(3))
    assert shown(terminal)[-1] == ""
