"""What a compilation of over a second is doing, or max-autotune: a line on a terminal or in a notebook, gone
at the end.

Silent where stderr is a pipe or a file, and with `MINICOMPILE_PROGRESS=0`. A thread draws, since the
compiler waits for others; it ends with the compilation, however that ends.
"""

from __future__ import annotations

import contextvars
import shutil
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from minicompile.ops.events import Compilation, Event, observer
from minicompile.options import moves_cursor

DELAY, REFRESH = 1.0, 0.25
"""Seconds before the line appears, and between two of them."""
THREAD = "minicompile progress"

NEXT = {
    "start": "capturing", "capture": "autograd", "aot": "lowering", "loops": "scheduling",
    "schedule": "planning kernels", "plans": "generating code", "building": "building",
}  # fmt: skip
"""What begins after an event."""


def notebook() -> Any:
    """The notebook that the program runs in, if any."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell if hasattr(shell, "kernel") else None


def screen() -> Callable[[str], object]:
    """What shows a line over the one before: in a notebook's output, or on the terminal."""
    if notebook() is not None:
        from IPython.display import display

        shown = display({"text/plain": ""}, raw=True, display_id=True)
        return lambda line: shown.update({"text/plain": line}, raw=True)
    longest = shutil.get_terminal_size().columns - 1
    write = partial(print, end="", file=sys.stderr, flush=True)
    return lambda line: write(f"\r\x1b[K{line[:longest]}")


class Progress:
    """The observer: `running` has what each compilation at work is doing, `stop` ends the thread."""

    def __init__(self) -> None:
        self.running: dict[int, tuple[Compilation, float, str]] = {}
        self.lock, self.stop = threading.Lock(), threading.Event()
        self.thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        of, thread = event.of, None
        measured = event.subject if event.kind == "autotuning" else None
        ends = measured.done if measured else event.kind == "done"
        if event.kind == "start" or (measured and not ends):
            if not of.options.progress or not (moves_cursor(sys.stderr) or notebook()):
                return
        elif id(of) not in self.running:
            return
        with self.lock:
            _, began, stage = self.running.get(id(of), (of, time.monotonic(), ""))
            stage = measured.stage if measured else NEXT.get(event.kind, stage)
            self.running[id(of)] = of, began, stage
            if ends:
                del self.running[id(of)]
                if not self.running:
                    self.stop.set()
                    thread, self.thread = self.thread, None
            elif self.thread is None:
                self.stop = stop = threading.Event()
                run = contextvars.copy_context().run  # the notebook's cell is found in it
                self.thread = threading.Thread(
                    target=run, args=(self.draw, stop), name=THREAD, daemon=True
                )
                self.thread.start()
        if thread is not None:
            thread.join()

    def line(self) -> str | None:
        """About the newest compilation that takes its time."""
        now = time.monotonic()
        for of, began, stage in reversed(list(self.running.values())):
            if now - began >= DELAY:
                return f"minicompile {of} {of.name}: {stage}, {now - began:.0f} s"
        return None

    def draw(self, stop: threading.Event) -> None:
        if stop.wait(DELAY):
            return
        show = screen()
        try:
            while not stop.wait(REFRESH):
                if (line := self.line()) is not None:
                    show(line)
        finally:
            show("")


observer("progress")(Progress())
