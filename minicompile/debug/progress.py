"""Prints the current step of a compilation as one line of a terminal; the end of it clears the line.

Silent where stderr is a pipe, a file or a notebook's, and with `MINICOMPILE_PROGRESS=0`.
"""

from __future__ import annotations

import shutil
import sys

from minicompile.ops.events import Event, observer
from minicompile.options import moves_cursor

NEXT = {
    "start": "capturing", "capture": "autograd", "aot": "lowering", "loops": "scheduling",
    "schedule": "planning kernels", "plans": "generating code", "building": "building",
}  # fmt: skip
"""What begins after an event."""


@observer("progress")
def progress(event: Event) -> None:
    """Write the line, or clear it where nothing is known to begin."""
    of, stage = event.of, NEXT.get(event.kind, "")
    if not of.options.progress or not moves_cursor(sys.stderr):
        return
    if event.kind == "autotuning" and not event.subject.done:
        stage = event.subject.stage
    line = f"minicompile {of} {of.name}: {stage}" if stage else ""
    longest = shutil.get_terminal_size().columns - 1
    print(f"\r\x1b[K{line[:longest]}", end="", file=sys.stderr, flush=True)
