"""One frozen dataclass of options, and the only place that reads environment variables."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from minicompile.errors import OptionError, unknown
from minicompile.ops import plugins


def default_cache_dir() -> str:
    """`MINICOMPILE_CACHE_DIR`, else the user's cache folder."""
    if chosen := os.environ.get("MINICOMPILE_CACHE_DIR"):
        return chosen
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        base = Path(home) if home else Path.home() / ".cache"
    except RuntimeError:  # no home folder
        base = Path(tempfile.gettempdir())
    return str(base / "minicompile")


def default_debug_dir() -> str:
    """`MINICOMPILE_COMPILE_DEBUG_DIR`, else `minicompile_$USER` in the folder for temporary files.

    Where nothing says the user's name, it is the number."""
    if chosen := os.environ.get("MINICOMPILE_COMPILE_DEBUG_DIR"):
        return chosen
    user = os.environ.get("USER") or os.environ.get("USERNAME") or os.geteuid()
    return str(Path(tempfile.gettempdir()) / f"minicompile_{user}")


def default_plugins() -> tuple[str, ...]:
    """Return the plug-ins that `MINICOMPILE_PLUGINS` selects, "default" where it isn't set."""
    return plugins.select(os.environ.get("MINICOMPILE_PLUGINS") or "default")


def switched_on(name: str, default: str) -> bool:
    """Is an environment variable set to something that means yes?"""
    return os.environ.get(name, default).lower() not in ("", "0", "false", "no", "off")


def environment(**values: str) -> contextlib.AbstractContextManager[Any]:
    """Set environment variables inside a `with` block; what this process starts there inherits them."""
    from unittest import mock  # slow to import, and only lessons and the benchmark come here

    return mock.patch.dict(os.environ, values)


def child_environment(**values: str) -> dict[str, str]:
    """This process's environment with some variables set, for a process that it starts."""
    return {**os.environ, **values}


def replace_environment(values: Mapping[str, str]) -> None:
    """Make these variables the whole environment of this process."""
    os.environ.clear()
    os.environ.update(values)


def bisection() -> tuple[str, str]:
    """`MINICOMPILE_BISECT`, `MINICOMPILE_BISECT_REPORT`: a setting, where to report (debug/gates.py)."""
    return os.environ.get("MINICOMPILE_BISECT", ""), os.environ.get("MINICOMPILE_BISECT_REPORT", "")


def triton_variables() -> str:
    """The environment variables that change what Triton makes of a kernel."""
    names = (
        n for n in sorted(os.environ) if n.startswith(("TRITON_", "DISABLE_", "LLVM_", "MLIR_"))
    )
    return " ".join(f"{n}={os.environ[n]}" for n in names if not n.endswith(("_DIR", "_HOME")))


@dataclass(frozen=True)
class Options:
    """Everything that can be chosen about one compilation."""

    device_codegen: str = "auto"
    """Kernel language. "auto": C++ for CPU tensors, Triton for CUDA.

    "triton" on CPU tensors runs the kernels in the Triton interpreter. Also any language registered with
    `code_generator`."""
    inline: Literal["auto", "never"] = "auto"
    """"never" writes every intermediate to a buffer, so that fusion has something to show."""
    fusion: bool = True
    """False gives one kernel per buffer."""
    partitioner: Literal["min_cut", "default"] = "min_cut"
    """"default" saves every forward value that the backward pass reads."""
    plugins: tuple[str, ...] = field(default_factory=default_plugins)
    """`MINICOMPILE_PLUGINS`: "default", "all", "none" or names (`minicompile plugins` lists them)."""
    disable_passes: tuple[str, ...] = ()
    """Graph passes and patterns to leave out: "cse", "prims.fold_constants", "pattern:mine"."""
    fallback_random: bool = True
    """Random numbers are eager's: the same seed gives the same ones. False: kernels compute theirs, which
    fuses (ops/philox.py), from seeds that eager's generator draws, if a plug-in knows how."""
    library: bool = True
    """False: kernels of our own are all there is: every matrix product is one, not only where a template may
    beat the library's (packages for GPUs)."""
    assert_indirect_indexing: bool = True
    """Kernels look whether indices from memory are in range, and raise as eager does. False: nobody looks,
    and an index out of range reads or overwrites whatever is there."""
    memory_budget: float | None = None
    """From 0 (the backward recomputes all that it can) to 1 (like "default"). None: nothing expensive."""
    arena_bytes: int = 1 << 30
    """Most memory on the CPU that the process keeps for later calls, in pieces of 8 MiB and more. 0: none.
    (plugins/memory_arena)"""
    verify: bool = False
    """Run each IR's verifier between stages."""
    recompile_limit: int = 8
    """Compiled versions kept per code object; after that a frame runs in eager."""
    max_kernel_operations: int = 1024
    """Most operations in one kernel: its code grows with them, and the time to compile it."""
    cpp_compiler: str = field(default_factory=lambda: os.environ.get("CXX", ""))
    """`CXX`; "" looks for g++, then clang++, then cc."""
    cpp_flags: tuple[str, ...] = ()
    """Extra flags, after the built-in ones."""
    disk_cache: bool = True
    cache_dir: str = field(default_factory=default_cache_dir)
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = (
        "default"
    )
    """What `mc.compile(mode=...)` was given. "reduce-overhead" and "max-autotune" make CUDA graphs
    (plugins/cuda_graphs/replay.py). Both kinds of "max-autotune" measure tiles on the device, and
    matrix products in kernels of our own (plugins/matrix_products/tiles.py). On CPUs all mean the same."""
    logs: str = field(default_factory=lambda: os.environ.get("MINICOMPILE_LOGS", ""))
    """`MINICOMPILE_LOGS`: channels to print, "graph_breaks,+dynamo" (debug/logs.py has the list)."""
    trace: bool = field(default_factory=lambda: switched_on("MINICOMPILE_COMPILE_DEBUG", "0"))
    """`MINICOMPILE_COMPILE_DEBUG=1`: write every stage into `debug_dir` (debug/dump.py lists the files)."""
    debug_dir: str = field(default_factory=default_debug_dir)

    @property
    def cache_folder(self) -> Path:
        """`cache_dir`, but inside of `mc.fresh_cache()` its temporary folder."""
        return Path(os.environ.get("MINICOMPILE_FRESH_CACHE_DIR") or self.cache_dir)

    def __post_init__(self) -> None:
        object.__setattr__(self, "plugins", plugins.select(self.plugins))
        budget = self.memory_budget
        if budget is not None and not (type(budget) in (int, float) and 0 <= budget <= 1):
            raise OptionError(f"option memory_budget can't be {budget!r}: None or from 0 to 1")


CHOICES: dict[str, tuple[Any, ...]] = {
    name: get_args(kind)
    for name, kind in get_type_hints(Options).items()
    if get_origin(kind) is Literal
}
"""What an option can be, where that is listed."""


def make_options(
    mode: str | None = None, options: Mapping[str, Any] | Options | None = None
) -> Options:
    """Options from what `mc.compile` was given. Raises OptionError that lists what exists."""
    if isinstance(options, Options):
        return options
    if mode not in (None, *CHOICES["mode"]):
        raise unknown("mode", mode, map(repr, CHOICES["mode"]))
    options = {"mode": mode or "default", **(options or {})}
    known = [field.name for field in dataclasses.fields(Options)]
    for name, value in options.items():
        if name not in known:
            raise unknown("option", name, sorted(known))
        if value not in CHOICES.get(name, (value,)):
            allowed = ", ".join(map(repr, CHOICES[name]))
            raise OptionError(f"option {name} can't be {value!r}; one of {allowed}")
    return Options(**options)
