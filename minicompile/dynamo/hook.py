"""Functions that eager code calls, caught: Python's side of frame_hook.c (PEP 523).

A wrapper sees the calls that go through it. The hook sees every Python call of its thread, also a nested
function's that eager code makes, at 10 to 30 ns for each call that it leaves alone.

    hook = frame_hook()                     # Unsupported, with the reason, where it can't be built
    hook.install(lambda function: entry)    # asked once for each code object; None leaves it alone
    with hook.on(): ...                     # for this thread

Imports neither torch nor anything that does. The real compiler: torch/_dynamo/eval_frame.py.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, TypeAlias

from minicompile.dynamo import native
from minicompile.errors import Unsupported

Entry: TypeAlias = Callable[..., Any]
"""`entry(function, *parameters)` runs instead of a frame; `*args` and `**kwargs` are one parameter each."""


@dataclass(frozen=True)
class FrameHook:
    """The one hook of this process."""

    extension: Any

    def install(self, callback: Callable[[FunctionType], Entry | None]) -> None:
        """Ask `callback` what to do with a function, at the first call of its code in a thread that is on."""
        self.leave_alone(callback)
        self.extension.install(callback)

    def remove(self) -> None:
        """Python as it was. What code objects hold stays for the next `install`."""
        self.extension.install(None)

    @contextlib.contextmanager
    def on(self, on: bool = True) -> Iterator[None]:
        """On (or off) for this thread, within the block."""
        before = self.extension.enable(on)
        try:
            yield
        finally:
            self.extension.enable(before)

    def redirect(self, code: CodeType, entry: Entry) -> None:
        """Calls of `code` run `entry`. `code` holds it: let it refer weakly to the function."""
        self.leave_alone(entry)
        self.extension.set(code, entry)

    def leave_alone(self, function: CodeType | Callable[..., Any]) -> None:
        """Calls of this code, or Python function, run as they are."""
        code = function if isinstance(function, CodeType) else getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            self.extension.set(code, None)

    def forget(self, code: CodeType) -> None:
        """Ask again at the next call."""
        self.extension.set(code)

    def original(self, function: FunctionType) -> FunctionType:
        """`function` out of the hook's reach, with an entry's parameters: for a fall back to eager.

        Its frame runs as it is; functions that it calls are still caught.
        """
        code = function.__code__
        variadic = code.co_flags & (4 | 8)  # *args, **kwargs
        count = code.co_argcount + code.co_kwonlyargcount + variadic.bit_count()
        flat = code.replace(
            co_argcount=count,
            co_posonlyargcount=0,
            co_kwonlyargcount=0,
            co_flags=code.co_flags & ~variadic,
        )
        self.leave_alone(flat)
        closure = function.__closure__
        made = FunctionType(flat, function.__globals__, function.__name__, None, closure)
        made.__qualname__, made.__module__ = function.__qualname__, function.__module__
        return made


@functools.cache
def frame_hook() -> FrameHook:
    """The hook, built at first use. Raises Unsupported with the reason where there can't be one."""
    version = sys.version_info[:2]
    if platform.python_implementation() != "CPython" or not (3, 11) <= version <= (3, 13):
        raise Unsupported("the frame hook knows CPython 3.11 to 3.13 only")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise Unsupported("the frame hook needs a CPython with its global lock")
    if native.compiler() is None:
        raise Unsupported("the frame hook needs a C compiler", hint="install cc, gcc or clang")
    extension = native.load("frame_hook")
    if extension is None:
        raise Unsupported("frame_hook.c did not build", hint="it needs Python's internal headers")
    return FrameHook(extension)
