"""Loading Triton kernels: compiled ahead with a generated launcher on a GPU, interpreted elsewhere.

Triton's own `kernel[grid](...)` analyses every argument on every call, 8 to 12 microseconds. A kernel's
argument types are known here, so it is compiled before its first call, once per pattern of alignment, and
a launcher is generated that computes the grid, picks the version, and calls straight into Triton's C
launcher:

    def launch(in_ptr0, out_ptr0, s0):
        if current_device() != 0: ...
        in_ptr0 = in_ptr0.data_ptr()
        ...
        run, function, metadata = variants.get(key) or variant(key)
        run((1024*s0 + 1023) // 1024, 1, 1, stream(0), function, metadata, None, None, None, in_ptr0, ...)

The real compiler: torch/_inductor/runtime/triton_heuristics.py (CachingAutotuner), static_cuda_launcher.py.
"""

from __future__ import annotations

import hashlib
import importlib.util
import linecache
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from minicompile import compat
from minicompile.codegen.plan import KernelPlan, KernelSource, power_of_two
from minicompile.codegen.printing import INT32_END
from minicompile.errors import BackendError
from minicompile.ops.dtypes import LOOP_DTYPES, short
from minicompile.shapes.expr import Size, floor_div, is_float, product, size_hint, size_symbol

Launcher = Callable[..., None]
"""`launcher(*tensors, *sizes)`, in the order of the plan's arguments and sizes."""

POINTER_TYPES = {dtype: f"*{short(dtype)}".replace("*f", "*fp") for dtype in LOOP_DTYPES}
POINTER_TYPES[torch.bool] = "*u8"
"""Bools are bytes in memory, and kernels read them as such."""

ALIGNMENT = 16
"""Bytes of the widest load; also what Triton's divisibility hint promises."""


MOST_ROWS = 64
"""That a program holds side by side if they turn out to be short."""


@dataclass(frozen=True)
class Tiles:
    """Elements of the flattened x, r and y axes that one program holds, powers of two; and its warps."""

    x: int
    r: int = 1
    num_warps: int = 4
    y: int = 1


def load_kernel(source: KernelSource, tiles: Tiles | None = None) -> Launcher:
    """A callable kernel. `tiles` overrides the plan's.

    CUDA kernels compile now; kernels for CPU tensors run in Triton's interpreter. Raises BackendError when
    Triton or the GPU is missing.
    """
    require_triton()
    device = source.plan.device
    if device.type == "cpu":
        from minicompile.runtime.interpreter import InterpretedKernel

        return InterpretedKernel(source, tiles)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise BackendError(f"Triton kernels for {device} need a CUDA GPU, and torch sees none.")
    return CudaKernel(source, tiles or planned_tiles(source.plan)).launch


def require_triton() -> None:
    """Raise BackendError with the way out when Triton isn't installed."""
    if importlib.util.find_spec("triton") is None:
        raise BackendError(
            "Triton is not installed: `pip install triton` (Linux), or choose device_codegen='cpp'."
        )


def planned_tiles(plan: KernelPlan) -> Tiles:
    """The plan's tiles; a persistent row always fits its tile."""
    persistent = plan.reduction == "persistent"
    r = power_of_two(plan.row_length) if persistent else plan.tiles.get("r", 1)
    return Tiles(plan.tiles["x"], r, plan.num_warps, plan.tiles.get("y", 1))


def for_row(tiles: Tiles, r: int) -> Tiles:
    """Tiles for rows of another length: about as many elements, and warps for them."""
    most = tiles.x * tiles.r
    x = min(max(most // r, 1), max(tiles.x, MOST_ROWS))
    warps = min(max(x * r * tiles.num_warps // most, 1), 32)
    return replace(tiles, x=x, r=r, num_warps=warps)


def needs_int64(plan: KernelPlan, known: Mapping[sympy.Symbol, int]) -> bool:
    """Are a launch's indices int64?"""
    ends = (size_hint(end, known) for end in plan.index_reach)
    return plan.index_dtype is torch.int64 or any(end >= INT32_END for end in ends)


def module_text(source: KernelSource) -> str:
    """A module that holds the kernel: imports, helpers, the kernel.

    Its name doesn't tell its place in the schedule, so that equal kernels compile once.
    """
    return source.prelude + re.sub(
        r"^def (\w+)_\d+\(", r"def \1(", source.text, count=1, flags=re.M
    )


def execute(source: KernelSource) -> tuple[Any, dict[str, Any]]:
    """Run the kernel's module: (the kernel's JITFunction, the module's namespace).

    `__name__` is the file name that line tables give: the same for the same text.
    """
    text, name = module_text(source), re.sub(r"_\d+$", "", source.name)
    filename = f"<{name} {hashlib.sha256(text.encode()).hexdigest()[:12]}>"
    # Triton reads functions' source back
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    namespace: dict[str, Any] = {"__name__": filename}
    exec(compile(text, filename, "exec"), namespace)
    return namespace[name], namespace


def constants(
    plan: KernelPlan, tiles: Tiles, known: Mapping[sympy.Symbol, int]
) -> dict[str, int | bool]:
    """The kernel's constants: its last parameters."""
    found: dict[str, int | bool]
    found = {f"{axis.upper()}BLOCK": getattr(tiles, axis) for axis in plan.axes}
    if plan.varying:
        length = size_hint(plan.length, known)
        found["WHOLE"] = length > 0 and length % tiles.r == 0
    return found


def programs(plan: KernelPlan, tiles: Tiles) -> Size:
    """How many programs run."""
    if plan.folds:
        return plan.parts
    loops = (
        (product(plan.axes[axis].values()), getattr(tiles, axis))
        for axis in plan.axes
        if axis != "r"
    )
    return product(-floor_div(-size, tile) for size, tile in loops)


def compile_kernel(
    source: KernelSource,
    function: Any,
    tiles: Tiles,
    constants: Mapping[str, int | bool],
    divisible: list[str],
    wide: bool,
    target: Any,
) -> Any:
    """Triton's compiled kernel, for arguments of which those in `divisible` are multiples of 16.
    `wide`: sizes and indices are int64.

    Multiply and add round apart and small numbers stay, as in eager; index checks stay in the code.
    """
    plan = source.plan
    integer = "i64" if wide else "i32"
    types = {a.name: POINTER_TYPES[a.dtype] for a in plan.arguments}
    types |= {str(s): "fp64" if is_float(s) else integer for s in plan.sizes}
    types |= {str(s): integer for s in plan.derived}
    types |= dict.fromkeys(constants, "constexpr")
    options = {
        "num_warps": tiles.num_warps,
        "enable_fp_fusion": False,
        "debug": any(v.op == "indirect" and v.check for v in plan.body.values),
        "sanitize_overflow": False,
        "enable_reflect_ftz": False,
    }
    return compat.triton_compile(function, types, constants, divisible, target, options)


class CudaKernel:
    """A kernel on one device: its compiled versions, and `launch`."""

    def __init__(self, source: KernelSource, tiles: Tiles) -> None:
        self.source, self.tiles = source, tiles
        plan = source.plan
        index = plan.device.index
        self.device = torch.cuda.current_device() if index is None else index
        self.function, _ = execute(source)
        self.variants: dict[int, tuple[Callable[..., Any], Any, Any, int]] = {}
        current_device, stream = compat.cuda_launch_state()
        namespace: dict[str, Any] = {
            "current_device": current_device,
            "stream": stream,
            "on_device": torch.cuda.device,
            "variants": self.variants,
            "variant": self.variant,
        }
        text = launcher_text(plan, tiles, self.device)
        exec(compile(text, f"<launcher of {source.name}>", "exec"), namespace)
        self.launch: Launcher = namespace["launch"]
        integers, known = passed_integers(plan), planned_divisible(plan)
        key = 1 + sum(2 << i for i, s in enumerate(integers) if str(s) in known)
        rest = tiles.r * (plan.varying and plan.reduction == "persistent") << 2
        rest |= constants(plan, tiles, plan.hints).get("WHOLE", False) << 1
        rest |= bool(plan.index_reach) and needs_int64(plan, plan.hints)
        self.variant(key | rest << len(integers) + 1)

    def variant(self, key: int) -> tuple[Callable[..., Any], Any, Any, int]:
        """The version for a pattern, and its XBLOCK: bit 0 for all pointers aligned, then one bit for each
        divisible size, for int64 indices, for a row of whole tiles; and the tile of a varying row."""
        plan, integers = self.source.plan, passed_integers(self.source.plan)
        divisible = [a.name for a in plan.arguments] if key & 1 else []
        divisible += [str(s) for i, s in enumerate(integers) if key >> (i + 1) & 1]
        rest = key >> len(integers) + 1
        tiles = for_row(self.tiles, rest >> 2) if rest >> 2 else self.tiles
        given = {**constants(plan, tiles, plan.hints), "WHOLE": bool(rest & 2)}
        given = given if plan.varying else constants(plan, tiles, {})
        wide = bool(rest & 1) or plan.index_dtype is torch.int64
        with torch.cuda.device(self.device):
            target = compat.current_gpu_target()
            compiled = compile_kernel(
                self.source, self.function, tiles, given, divisible, wide, target
            )
            self.variants[key] = *compat.triton_launch(compiled), tiles.x
        return self.variants[key]


def passed_integers(plan: KernelPlan) -> list[sympy.Symbol]:
    """What a launch passes after the tensors, less the floats."""
    return [*plan.integers, *plan.derived]


def planned_divisible(plan: KernelPlan) -> set[str]:
    """Numbers that are multiples of 16, at the hints."""
    hints = {s: plan.hints.get(s, ALIGNMENT) for s in plan.integers}
    numbers = {s: s for s in plan.integers} | plan.derived
    return {str(s) for s, expr in numbers.items() if size_hint(expr, hints) % ALIGNMENT == 0}


def python(size: Size) -> str:
    return str(size).replace("Max(", "max(").replace("Min(", "min(")


def launcher_text(plan: KernelPlan, tiles: Tiles, device: int) -> str:
    """Python source of the launcher. Tensors without elements launch nothing."""
    pointers = [a.name for a in plan.arguments]
    sizes = [str(s) for s in plan.sizes]
    rows: Size = product(plan.ranges.values())
    blocks = {f"{axis.upper()}BLOCK": str(getattr(tiles, axis)) for axis in plan.axes}
    lines = [f"def launch({', '.join(pointers + sizes)}):"]
    if rows == 0:
        return "\n".join([*lines, "    return"])
    lines += [
        f"    if current_device() != {device}:",
        f"        with on_device({device}):",
        f"            return launch({', '.join(pointers + sizes)})",
    ]
    lines += [f"    {p} = {p}.data_ptr()" for p in pointers]
    lines += [f"    {s} = {python(expr)}" for s, expr in plan.derived.items()]
    integers = passed_integers(plan)
    key = [f"(({' | '.join(pointers)}) % {ALIGNMENT} == 0)"]
    key += [f"({s} % {ALIGNMENT} == 0) << {i + 1}" for i, s in enumerate(integers)]
    if plan.index_reach:
        beyond = " or ".join(f"{python(end)} >= {INT32_END}" for end in plan.index_reach)
        key.append(f"({beyond}) << {len(integers) + 1}")
    grid = programs(plan, tiles)
    if plan.varying:
        lines.append(f"    rnumel = {python(plan.length)}")
        if plan.reduction == "persistent":
            lines.append("    RBLOCK = 1 << (rnumel - 1).bit_length()")
            key.append(f"RBLOCK << {len(integers) + 3}")
            blocks = {"XBLOCK": "XBLOCK", "RBLOCK": "RBLOCK"}
            grid = plan.parts if plan.folds else -floor_div(-rows, size_symbol("XBLOCK"))
        lines.append(f"    whole = rnumel % {blocks['RBLOCK']} == 0 < rnumel")
        key.append(f"whole << {len(integers) + 2}")
        blocks["WHOLE"] = "whole"
    arguments = [*pointers, *sizes, *map(str, plan.derived), *blocks.values()]
    lines += [
        f"    key = {' | '.join(key)}",
        "    run, function, metadata, XBLOCK = variants.get(key) or variant(key)",
        f"    run({python(grid)}, 1, 1, stream({device}), function, metadata, None, None, None, "
        f"{', '.join(arguments)})",
    ]
    return "\n".join(lines)
