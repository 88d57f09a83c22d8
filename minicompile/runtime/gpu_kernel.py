"""A Triton kernel as its compilation and launch need it: text, types, constants and options, from its plan.

    GpuKernel   a kernel's text, and what the compiler must be told
    Tiles       how many elements a program holds

`runtime/triton.py` compiles, loads and launches these.
"""

from __future__ import annotations

import hashlib
import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from minicompile.codegen.plan import (
    INT32_END,
    KernelSource,
    TemplatePlan,
    TritonPlan,
    count,
    power_of_two,
)
from minicompile.ops.device import gpu_of
from minicompile.ops.dtypes import LOOP_DTYPES, short
from minicompile.ops.generated import GeneratedText
from minicompile.shapes.expr import Size, floor_div, is_float, product, size_hint

POINTER_TYPES = {dtype: f"*{short(dtype)}".replace("*f", "*fp") for dtype in LOOP_DTYPES}
POINTER_TYPES[torch.bool] = "*u8"
"""Bools are bytes in memory, and kernels read them as such."""

ALIGNMENT = 16
"""Bytes of the widest load; also what Triton's divisibility hint promises."""

MOST_REGISTERS = 255
"""That a thread can have."""

MOST_ROWS = 64
"""That a program holds side by side if they turn out to be short."""


@dataclass(frozen=True)
class Tiles:
    """Elements of the flattened x, r and y axes that one program holds, powers of two; and its warps."""

    x: int = 0
    r: int = 1
    num_warps: int = 4
    y: int = 1
    stages: int = 0
    """How many of a loop's tiles are on their way from memory at once; 0: as Triton likes."""
    way: str = ""
    """The rival that runs instead of the kernel, if any (TritonPlan.rivals): tiles are those of its product,
    or of its last kernel."""


@dataclass(frozen=True)
class GpuKernel:
    """A kernel as text, and what it takes to compile it."""

    name: str
    """Without its place in the schedule, so that equal kernels compile once."""
    module: str
    types: dict[str, str]
    """Triton's type of each argument: pointers, integers, floats."""
    constants: dict[str, int]
    options: dict[str, Any]
    device: int


def gpu_kernel(source: KernelSource, tiles: Tiles, wide: bool | None = None) -> GpuKernel:
    """A kernel with some tiles; indices are int64 if they are `wide`, or by default if the hints need it."""
    plan, index = source.plan, source.plan.device.index
    here = plan.device.type == "cuda" and index is None
    if wide is None:
        wide = needs_int64(plan, expected_sizes(plan))
    return GpuKernel(
        base_name(source),
        module_text(source),
        signature(plan, wide),
        blocks(plan, tiles),
        compiler_options(plan, tiles) | register_limit(registers(plan), tiles.num_warps),
        torch.cuda.current_device() if here else index or 0,
    )


def registers(plan: TritonPlan) -> int:
    """How many a program may have, so that another fits beside it; 0: all."""
    return gpu_of(plan.device).registers // 2 if plan.side_by_side else 0


def module_text(source: KernelSource) -> str:
    """A module that holds the kernel: imports, helpers, the kernel.

    Its name doesn't tell its place in the schedule, so that equal kernels compile once.
    """
    return source.prelude + re.sub(
        r"^def (\w+)_\d+\(", r"def \1(", source.text, count=1, flags=re.M
    )


def base_name(source: KernelSource) -> str:
    """The kernel's name without its place."""
    return re.sub(r"_\d+$", "", source.name)


def planned_tiles(plan: TritonPlan) -> Tiles:
    """The plan's tiles; a persistent row always fits its tile."""
    persistent = plan.reduction == "persistent"
    r = power_of_two(plan.row_length) if persistent else plan.tiles.get("r", 1)
    return Tiles(
        plan.tiles["x"], r, plan.num_warps, plan.tiles.get("y", 1), plan.tiles.get("stages", 0)
    )


def for_row(tiles: Tiles, r: int) -> Tiles:
    """Tiles for rows of another length: about as many elements, and warps for them."""
    most = tiles.x * tiles.r
    x = min(max(most // r, 1), max(tiles.x, MOST_ROWS))
    warps = min(max(x * r * tiles.num_warps // most, 1), 32)
    return replace(tiles, x=x, r=r, num_warps=warps)


def fitting(plan: TritonPlan, tiles: Tiles, sizes: Mapping[sympy.Symbol, int]) -> Tiles:
    """Tiles for a launch: those given, but for a row of varying length that one of them must hold."""
    if not (plan.varying and plan.reduction == "persistent"):
        return tiles
    return for_row(tiles, power_of_two(count([plan.length], sizes)))


def blocks(plan: TritonPlan, tiles: Tiles) -> dict[str, int]:
    """The tiles as a kernel knows them."""
    return {f"{axis.upper()}BLOCK": getattr(tiles, axis) for axis in plan.axes}


def programs(plan: TritonPlan, tiles: Tiles) -> Size:
    """How many programs run."""
    loops = (
        (product(plan.axes[axis].values()), getattr(tiles, axis))
        for axis in plan.axes
        if axis != "r"
    )
    return product([*plan.batch.values(), *(-floor_div(-size, tile) for size, tile in loops)])


def signature(plan: TritonPlan, wide: bool) -> dict[str, str]:
    """Triton's type of each argument."""
    types = {a.name: POINTER_TYPES[a.dtype] for a in plan.arguments}
    return types | {str(s): "fp64" if is_float(s) else integer_type(wide) for s in plan.sizes}


def integer_type(wide: bool) -> str:
    return "i64" if wide else "i32"


def compiler_options(plan: TritonPlan, tiles: Tiles) -> dict[str, Any]:
    """Multiply and add round apart and small numbers stay, as in eager; index checks stay in the code.
    Kernels of templates round as they like."""
    if isinstance(plan, TemplatePlan):
        return {"num_warps": tiles.num_warps, "num_stages": tiles.stages}
    return {
        "num_warps": tiles.num_warps,
        "enable_fp_fusion": False,
        "debug": bool(plan.checked),
        "sanitize_overflow": False,
        "enable_reflect_ftz": False,
    } | ({"num_stages": tiles.stages} if tiles.stages else {})


def register_limit(registers: int, warps: int) -> dict[str, int]:
    """Each thread's share of a program's registers."""
    most = registers // (32 * warps)
    return {"maxnreg": most} if 0 < most < MOST_REGISTERS else {}


def expected_sizes(plan: TritonPlan) -> dict[sympy.Symbol, int]:
    """The hints; integers without one are taken for multiples of 16."""
    return {symbol: plan.hints.get(symbol, ALIGNMENT) for symbol in plan.integers}


def needs_int64(plan: TritonPlan, known: Mapping[sympy.Symbol, int]) -> bool:
    """Are a launch's indices int64?"""
    ends = (size_hint(end, known) for end in plan.index_reach)
    return plan.index_dtype is torch.int64 or any(end >= INT32_END for end in ends)


def module_file(name: str, text: str) -> str:
    """What line tables call a kernel's module: the same for the same text."""
    return f"<{name} {hashlib.sha256(text.encode()).hexdigest()[:12]}>"


_texts: weakref.WeakValueDictionary[str, GeneratedText] = weakref.WeakValueDictionary()


def execute(name: str, text: str) -> tuple[Any, dict[str, Any]]:
    """Run a kernel's module, which imports Triton: (the kernel's JITFunction, the module's namespace)."""
    filename = module_file(name, text)
    shown = _texts.get(filename) or GeneratedText(filename, text)  # Triton reads it back
    shown.show()
    _texts[filename] = shown
    namespace: dict[str, Any] = {"__name__": filename, "__text__": shown}
    exec(compile(text, filename, "exec"), namespace)
    return namespace[name], namespace
