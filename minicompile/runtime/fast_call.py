"""A quick way from Python into a C kernel: an extension function instead of ctypes.

ctypes converts every argument by its own rules, one Python call per tensor besides. The extension, compiled
once per machine, fetches the tensors' addresses and lets other threads run while the kernel does. Without
Python's headers there is no extension, and runtime/cpp.py falls back to ctypes.
The real compiler makes such an entry per kernel: torch/_inductor/codecache.py (CppPythonBindingsCodeCache).
"""

from __future__ import annotations

import ctypes
import functools
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minicompile.errors import BackendError
from minicompile.options import Options
from minicompile.runtime.build import start_build

MOST_ARGUMENTS = 48

Bind = Callable[[int, int, int, Callable[[int], Any]], Callable[..., None]]
"""bind(address, tensors, sizes, fail): the kernel at `address` as a function of tensors, then sizes."""


def source() -> str:
    """The extension's C source, with one case for each number of arguments."""
    cases = []
    for n in range(MOST_ARGUMENTS + 1):
        types = ", ".join(["int64_t"] * n) or "void"
        values = ", ".join(f"a[{i}]" for i in range(n))
        cases.append(f"    case {n}: return ((int64_t (*)({types}))f)({values});")
    text = Path(__file__).with_name("fast_call.c").read_text().split("\n\n", 1)[1]
    return text.replace("CASES", "\n".join(cases)).replace("MOST_ARGUMENTS", str(MOST_ARGUMENTS))


def extension(options: Options) -> Bind | None:
    """The extension's `bind`; None where it can't be compiled."""
    return _extension(options.cpp_compiler, options.disk_cache, options.cache_dir)


@functools.cache
def _extension(compiler: str, disk_cache: bool, cache_dir: str) -> Bind | None:
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        return None
    flags = [f"-I{include}"]
    if sys.platform == "darwin":
        flags += ["-undefined", "dynamic_lookup"]
    options = Options(
        cpp_compiler=compiler, cpp_flags=tuple(flags), disk_cache=disk_cache, cache_dir=cache_dir
    )
    try:
        (library,) = start_build(source(), options).result().libraries
    except BackendError:
        return None
    # a PyDLL keeps the interpreter locked
    initialise = ctypes.PyDLL(None, handle=library._handle).PyInit_minicompile_fast_call
    initialise.restype = ctypes.py_object
    bind: Bind = initialise().bind
    return bind
