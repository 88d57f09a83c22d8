"""Loading Triton kernels: compiled ahead with a generated launcher on a GPU, interpreted elsewhere.

Triton's own `kernel[grid](...)` analyses every argument on every call, 8 to 12 microseconds. A kernel's
argument types are known here, so it is compiled before its first call, and a launcher is generated that calls
straight into Triton's C launcher. What depends on sizes it works out once for all calls of those sizes: the
grid, and the version, of which there is one for each `Version` of facts that make a kernel faster.

    def launch(in_ptr0, out_ptr0, s0):
        if current_device() != 0: ...
        in_ptr0 = in_ptr0.data_ptr()
        ...
        run, function, metadata, grid, more = known.get((aligned, s0)) or prepare(aligned, s0)
        run(grid, 1, 1, stream(0), function, metadata, None, None, None, in_ptr0, out_ptr0, s0, *more)

The real compiler: torch/_inductor/runtime/triton_heuristics.py (CachingAutotuner), static_cuda_launcher.py.
"""

from __future__ import annotations

import hashlib
import importlib.util
import linecache
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import sympy
import torch

from minicompile import compat
from minicompile.codegen.plan import INT32_END, KernelPlan, KernelSource, power_of_two
from minicompile.errors import BackendError
from minicompile.ops.dtypes import LOOP_DTYPES, short
from minicompile.shapes.expr import Size, floor_div, is_float, product, size_hint, size_symbol

Launcher = Callable[..., None]
"""`launcher(*tensors, *sizes)`, in the order of the plan's arguments and sizes."""

POINTER_TYPES = {dtype: f"*{short(dtype)}".replace("*f", "*fp") for dtype in LOOP_DTYPES}
POINTER_TYPES[torch.bool] = "*u8"
"""Bools are bytes in memory, and kernels read them as such."""

MOST_SIZES = 4096
"""Of which a launcher remembers what they lead to."""

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


def blocks(plan: KernelPlan, tiles: Tiles) -> dict[str, int]:
    """The tiles as a kernel knows them."""
    return {f"{axis.upper()}BLOCK": getattr(tiles, axis) for axis in plan.axes}


def constants(plan: KernelPlan, tiles: Tiles, whole: bool) -> dict[str, int]:
    """The kernel's constants: its last parameters."""
    found = blocks(plan, tiles)
    return {**found, "WHOLE": whole} if plan.varying else found


def fills(length: int, tiles: Tiles) -> bool:
    """A row fills its tiles."""
    return 0 == length % tiles.r < length


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
    constants: dict[str, int],
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


class Version(NamedTuple):
    """What a compiled version of a kernel relies on."""

    aligned: bool
    """Every pointer is a multiple of ALIGNMENT."""
    divisible: tuple[bool, ...]
    """Of `passed_integers`: which are."""
    wide: bool
    """Indices are int64, though others are int32."""
    row: int
    """The tile of a row whose length varies; 0 where none does."""
    whole: bool
    """Such a row, or one that is swept, fills its tiles."""


class CudaKernel:
    """A kernel on one device: its compiled versions, and `launch`."""

    def __init__(self, source: KernelSource, tiles: Tiles) -> None:
        self.source, self.tiles = source, tiles
        plan = source.plan
        index = plan.device.index
        self.device = torch.cuda.current_device() if index is None else index
        self.function, _ = execute(source)
        self.variants: dict[Version, tuple[Callable[..., Any], Any, Any, int]] = {}
        current_device, stream = compat.cuda_launch_state()
        namespace: dict[str, Any] = {
            "current_device": current_device,
            "stream": stream,
            "on_device": torch.cuda.device,
            "known": {},
            "variants": self.variants,
            "variant": self.variant,
        }
        text = launcher_text(plan, tiles, self.device)
        exec(compile(text, f"<launcher of {source.name}>", "exec"), namespace)
        self.launch: Launcher = namespace["launch"]
        namespace["prepare"](True, *(plan.hints.get(s, ALIGNMENT) for s in plan.integers))

    def variant(self, *facts: Any) -> tuple[Callable[..., Any], Any, Any, int]:
        """The version for a launch, and its XBLOCK."""
        version, plan = Version(*facts), self.source.plan
        divisible = [a.name for a in plan.arguments] if version.aligned else []
        pairs = zip(passed_integers(plan), version.divisible, strict=True)
        divisible += [str(s) for s, divides in pairs if divides]
        tiles = for_row(self.tiles, version.row) if version.row else self.tiles
        given = constants(plan, tiles, version.whole)
        wide = version.wide or plan.index_dtype is torch.int64
        with torch.cuda.device(self.device):
            target = compat.current_gpu_target()
            compiled = compile_kernel(
                self.source, self.function, tiles, given, divisible, wide, target
            )
            self.variants[version] = *compat.triton_launch(compiled), tiles.x
        return self.variants[version]


def passed_integers(plan: KernelPlan) -> list[sympy.Symbol]:
    """What a launch passes after the tensors, less the floats."""
    return [*plan.integers, *plan.derived]


def planned_divisible(plan: KernelPlan) -> list[str]:
    """Numbers that are multiples of 16, at the hints."""
    numbers = {s: s for s in plan.integers} | plan.derived
    hints = {s: plan.hints.get(s, ALIGNMENT) for s in plan.integers}
    return [str(s) for s, expr in numbers.items() if size_hint(expr, hints) % ALIGNMENT == 0]


def python(size: Size) -> str:
    return str(size).replace("Max(", "max(").replace("Min(", "min(")


def launcher_text(plan: KernelPlan, tiles: Tiles, device: int) -> str:
    """Python source of `launch`; and of `prepare`, for sizes that it hasn't had before. Tensors without
    elements launch nothing."""
    pointers = [a.name for a in plan.arguments]
    parameters = ", ".join([*pointers, *map(str, plan.sizes)])
    key = ", ".join(["aligned", *map(str, plan.integers)])
    rows: Size = product(plan.ranges.values())
    if rows == 0:
        return f"def launch({parameters}):\n    pass\n\ndef prepare({key}):\n    pass"
    lines = [
        f"def launch({parameters}):",
        f"    if current_device() != {device}:",
        f"        with on_device({device}):",
        f"            return launch({parameters})",
        *(f"    {p} = {p}.data_ptr()" for p in pointers),
        f"    aligned = ({' | '.join(pointers)}) % {ALIGNMENT} == 0",
        f"    run, function, metadata, grid, more = known.get(({key})) or prepare({key})",
        f"    run(grid, 1, 1, stream({device}), function, metadata, None, None, None, {parameters}, *more)",
        "",
        f"def prepare({key}):",
        *(f"    {s} = {python(expr)}" for s, expr in plan.derived.items()),
    ]
    beyond = [f"{python(end)} >= {INT32_END}" for end in plan.index_reach]
    divisible = "".join(f"{s} % {ALIGNMENT} == 0, " for s in passed_integers(plan))
    given: dict[str, int | str] = {**constants(plan, tiles, False)}
    grid, row, whole = programs(plan, tiles), "0", "False"
    if plan.varying:
        lines.append(f"    rnumel = {python(plan.length)}")
        if plan.reduction == "persistent":
            lines.append("    RBLOCK = 1 << (rnumel - 1).bit_length()")
            row, given = "RBLOCK", {name: name for name in given}
            grid = plan.parts if plan.folds else -floor_div(-rows, size_symbol("XBLOCK"))
        lines.append(f"    WHOLE = rnumel % {given['RBLOCK']} == 0 < rnumel")
        given["WHOLE"] = whole = "WHOLE"
    more = "".join(f"{n}, " for n in (*plan.derived, *given.values()))
    lines += [
        f"    version = aligned, ({divisible}), {' or '.join(beyond) or False}, {row}, {whole}",
        "    run, function, metadata, XBLOCK = variants.get(version) or variant(*version)",
        f"    if len(known) == {MOST_SIZES}:",
        "        known.clear()",
        f"    known[{key}] = found = run, function, metadata, {python(grid)}, ({more})",
        "    return found",
    ]
    return "\n".join(lines)
