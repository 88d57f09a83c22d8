"""A Triton kernel as a launch needs it: text, types, constants and options, all found out from its plan.

    GpuKernel   what is kept of a kernel on disk, at the hints; nothing of it needs Triton or a GPU
    Tiles       how many elements a program holds
    Version     the facts of a launch that make a kernel faster: `versioned` is the kernel that relies on them
    launcher    Python that calls the driver, and works out once for all calls of the same sizes what depends
                on these: the grid, and the version

    def launch(in_ptr0, out_ptr0, s0):
        if current_device() != 0: ...
        in_ptr0 = in_ptr0.data_ptr()
        ...
        run, grid = known.get((aligned, s0)) or prepare(aligned, s0)
        run(grid, stream(0), in_ptr0, out_ptr0, s0)

`runtime/triton.py` compiles and loads these.
"""

from __future__ import annotations

import hashlib
import json
import re
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import sympy
import torch

from minicompile.codegen.plan import (
    INT32_END,
    KernelSource,
    TemplatePlan,
    TritonPlan,
    power_of_two,
    size_text,
)
from minicompile.ops.device import gpu_of
from minicompile.ops.dtypes import LOOP_DTYPES, short
from minicompile.ops.generated import GeneratedText
from minicompile.shapes.expr import Size, floor_div, is_float, product, size_hint, size_symbol

POINTER_TYPES = {dtype: f"*{short(dtype)}".replace("*f", "*fp") for dtype in LOOP_DTYPES}
POINTER_TYPES[torch.bool] = "*u8"
"""Bools are bytes in memory, and kernels read them as such."""

MOST_SIZES = 4096
"""Of which a launcher remembers what they lead to."""

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
    """A kernel as text, and all that it takes to compile, load and launch it: what is kept of it on disk.

    Types, constants and options are those at the hints; `versioned` has them for other sizes.
    """

    name: str
    """Without its place in the schedule, so that equal kernels compile once."""
    module: str
    types: dict[str, str]
    """Triton's type of each argument: pointers, integers, floats."""
    counts: list[int]
    """How many of each."""
    constants: dict[str, int]
    options: dict[str, Any]
    registers: int
    """That a program may have, so that another fits beside it; 0: all."""
    launcher: str
    device: int
    expected: list[int]
    """The integers to expect."""

    @property
    def key(self) -> str:
        return json.dumps(asdict(self))

    @property
    def pointers(self) -> list[str]:
        """What a launch passes first: the tensors."""
        return list(self.types)[: self.counts[0]]

    @property
    def integers(self) -> list[str]:
        """What a launch passes after the tensors, less the floats."""
        pointers, integers, _ = self.counts
        return list(self.types)[pointers:][:integers]


def gpu_kernel(source: KernelSource, tiles: Tiles) -> GpuKernel:
    """What the launcher needs of a kernel."""
    plan, index = source.plan, source.plan.device.index
    here = plan.device.type == "cuda" and index is None
    device = torch.cuda.current_device() if here else index or 0
    pointers, integers, sizes = len(plan.arguments), len(plan.integers), expected_sizes(plan)
    registers = gpu_of(plan.device).registers // 2 if plan.side_by_side else 0
    return GpuKernel(
        base_name(source),
        module_text(source),
        signature(plan, needs_int64(plan, sizes)),
        [pointers, integers, len(plan.sizes) - integers],
        blocks(plan, tiles),
        compiler_options(plan, tiles) | register_limit(registers, tiles.num_warps),
        registers,
        launcher_text(plan, tiles, device),
        device,
        list(sizes.values()),
    )


def gpu_kernels(sources: Iterable[KernelSource]) -> dict[str, GpuKernel]:
    """By name, with the planned tiles."""
    return {source.name: gpu_kernel(source, planned_tiles(source.plan)) for source in sources}


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


class Version(NamedTuple):
    """What a compiled version of a kernel relies on."""

    aligned: bool
    """Every pointer is a multiple of ALIGNMENT."""
    divisible: tuple[bool, ...]
    """Of `GpuKernel.integers`: which are."""
    wide: bool
    """Indices are int64."""
    row: int
    """The tile of a row whose length varies; 0 where none does."""


def versioned(kernel: GpuKernel, version: Version) -> GpuKernel:
    """The kernel with the types, constants and options that follow from a version's facts."""
    types = kernel.types | dict.fromkeys(kernel.integers, integer_type(version.wide))
    constants, options = dict(kernel.constants), dict(kernel.options)
    if version.row:
        x, r, warps = constants["XBLOCK"], constants["RBLOCK"], options["num_warps"]
        tiles = for_row(Tiles(x, r, warps), version.row)
        constants |= {"XBLOCK": tiles.x, "RBLOCK": tiles.r}
        options.pop("maxnreg", None)
        shared = kernel.registers if tiles.r <= r else 0  # longer rows need more
        options |= {"num_warps": tiles.num_warps} | register_limit(shared, tiles.num_warps)
    return replace(kernel, types=types, constants=constants, options=options)


def launcher_text(plan: TritonPlan, tiles: Tiles, device: int) -> str:
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
        f"    run, grid = known.get(({key})) or prepare({key})",
        f"    run(grid, stream({device}), {parameters})",
        "",
        f"def prepare({key}):",
    ]
    divisible = "".join(f"{n} % {ALIGNMENT} == 0, " for n in plan.integers)
    beyond = [f"{size_text(end)} >= {INT32_END}" for end in plan.index_reach]
    wide = " or ".join(beyond) or str(plan.index_dtype is torch.int64)
    grid, row = programs(plan, tiles), "0"
    if plan.varying and plan.reduction == "persistent":
        lines.append(f"    row = 1 << ({size_text(plan.length)} - 1).bit_length()")
        grid, row = -floor_div(-rows, size_symbol("XBLOCK")), "row"
    lines += [
        f"    version = aligned, ({divisible}), {wide}, {row}",
        "    run, XBLOCK = variants.get(version) or variant(*version)",
        f"    if len(known) == {MOST_SIZES}:",
        "        known.clear()",
        f"    known[{key}] = found = run, {size_text(grid)}",
        "    return found",
    ]
    return "\n".join(lines)


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
