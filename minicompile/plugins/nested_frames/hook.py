"""The frame hook: what eager code calls is seen before it runs, and can be answered by something compiled.

    watched(decide, serial, function)(...)  calls the function; `decide` is asked about what it calls

CPython lets an extension evaluate frames (PEP 523); `frame_hook.c` does, and is built at first use. The hook
is on only in the thread that calls the watched function, and only while it runs. Generators and coroutines
run as they are. Without a C compiler, or under a Python newer than tested, nothing is asked. This module
imports no torch.
The real compiler: torch/csrc/dynamo/eval_frame.c.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from minicompile.dynamo.interpreter import Marker
from minicompile.ops.build import load_extension
from minicompile.versions import python_is_unknown

EXTENSION = Path(__file__).with_name("frame_hook.c")

LEAVE = Marker("LEAVE")
"""Run a frame as it is: decided for one serial, or answered by an entry for this call."""
NEVER = Marker("NEVER")
"""Run frames of this code as they are, always."""
QUIET = Marker("QUIET")
"""The same, and ask about nothing that they call."""

Decide = Callable[[FunctionType], Any]
"""From a function whose code was not seen before to one of the markers, or to an entry.

`entry(function, *locals)` is called in the place of the frame, with the parameters in the order of
`co_varnames`, and gives the frame's result or LEAVE. Keep it alive; once it is gone, `decide` is asked again.
"""

next_serial = itertools.count(1).__next__
"""Numbers for those who decide: each has decisions of its own."""


@functools.cache
def load_hook() -> ModuleType | None:
    """The C part; None without a compiler, and under a Python whose frames may look otherwise."""
    if python_is_unknown():
        return None
    extension = load_extension(EXTENSION)
    if extension is not None:
        extension.start(LEAVE, NEVER, QUIET)
        os.register_at_fork(after_in_child=extension.away)
    return extension


def watched(decide: Decide, serial: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, run as it is with the hook on: `decide` is asked about each code object below it."""
    extension = load_hook()
    if extension is None:
        return function
    return functools.partial(extension.enter, decide, serial, function)
