"""Matrix products: which tiles are worth measuring, and what else could compute the same.

A program makes one tile, `y` rows by `x` columns, in steps of `r` terms. A multiprocessor has one such
program at work, or two small ones. By estimate it takes, for all of its tiles one after the other,

    steps * max(arithmetic at the tensor cores' rate, factors at the L2 cache's rate) + a start for each tile

so large tiles win (each factor is loaded less often) until there are fewer of them than multiprocessors, or
the last round of them leaves most multiprocessors idle. The best few by this estimate are candidates; the
device decides. The kernel's rival is the library's product into memory, then a kernel of what follows it.

On an H200 cuBLAS multiplies large bfloat16 matrices at 720 TFLOP/s, these kernels at 600, and what follows
waits for the last step of a tile: there the library's way wins or ties.

The real compiler: torch/_inductor/template_heuristics/triton.py (configs); SubgraphChoiceCaller
in torch/_inductor/codegen/subgraph.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import sympy
import torch
from sympy import sympify

from minicompile.codegen.plan import (
    KernelPlan,
    LibraryCall,
    Rival,
    Surroundings,
    Tiling,
    TritonPlan,
    count,
    plan_rule,
    power_of_two,
    rival_rule,
)
from minicompile.lowering.ir import Layout, Template
from minicompile.ops.device import Gpu, gpu_of
from minicompile.ops.dtypes import TENSOR_CORES
from minicompile.options import Options
from minicompile.scheduling.body import LoopBody, Value
from minicompile.scheduling.nodes import FusedSchedulerNode, Schedule
from minicompile.shapes.expr import Size

Shape = tuple[int, int, int, int, int]
"""y, x, r, warps, stages."""

SHAPES: tuple[Shape, ...] = (
    (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (256, 128, 64, 8, 4),
    (128, 128, 64, 4, 3), (128, 128, 64, 4, 2), (128, 128, 64, 8, 3), (128, 128, 32, 4, 4),
    (128, 128, 64, 4, 4), (128, 128, 128, 8, 3), (128, 64, 64, 4, 3), (64, 128, 64, 4, 3),
    (64, 256, 64, 4, 4), (256, 64, 64, 4, 4), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4),
    (64, 64, 64, 4, 4), (64, 64, 128, 4, 3), (64, 32, 64, 4, 4), (32, 64, 64, 4, 4),
    (32, 32, 64, 2, 4), (128, 128, 32, 8, 4), (128, 64, 32, 4, 4), (64, 64, 32, 4, 4),
    (16, 64, 64, 4, 4), (64, 16, 64, 4, 4), (16, 16, 64, 2, 4),
)  # fmt: skip
"""What is considered."""

CANDIDATES, VARIANTS = 6, 2
"""How many are measured, and how many of them with equal tiles."""

FLOPS, L2_BYTES, START = 5e12, 4e10, 3e-6
"""A multiprocessor's arithmetic and loads from the L2 cache a second; seconds until a tile's first step."""


@dataclass(frozen=True)
class Product:
    """sum over r of left * right, where left has no columns and right no rows: a matrix product."""

    total: Value
    """The sum."""
    left: Value
    right: Value
    batch: dict[sympy.Symbol, Size]
    rows: dict[sympy.Symbol, Size]
    columns: dict[sympy.Symbol, Size]


def find_product(body: LoopBody) -> Product | None:
    """The matrix product that a body's one reduction is, with the loop that is innermost in memory among its
    columns; None if it is something else."""
    if len(body.reductions) != 1 or body.scans or not body.ranges:
        return None
    (total,) = body.reductions
    term = total.inputs[0]
    if total.kind != "sum" or term.op != "mul" or term.dtype is not torch.float32:
        return None
    factors = [v.inputs[0] if v.op == "to_dtype" else v for v in term.inputs]
    if factors[0].dtype is not factors[1].dtype or factors[0].dtype not in TENSOR_CORES:
        factors = list(term.inputs)  # in float32
    places = [loops_below(v) for v in factors]
    if next(reversed(body.ranges)) in places[0]:
        factors.reverse()
        places.reverse()
    left, right = places
    kinds: dict[tuple[bool, bool], dict[sympy.Symbol, Size]] = {}
    for var, size in body.ranges.items():
        kinds.setdefault((var in left, var in right), {})[var] = size
    sides = kinds.get((True, False), {}), kinds.get((False, True), {})
    if not all(sides) or (False, False) in kinds:
        return None
    (first, second), (rows, columns) = factors, sides
    return Product(total, first, second, kinds.get((True, True), {}), rows, columns)


def loops_below(value: Value) -> frozenset[sympy.Symbol]:
    """The loops that a value differs with."""
    own = value.index.free_symbols if value.index is not None else ()
    return frozenset(own).union(*map(loops_below, value.operands))


class Extent(NamedTuple):
    """A product's sizes, at the hints."""

    batch: int
    rows: int
    columns: int
    terms: int
    itemsize: int

    def tiles(self, y: int, x: int) -> int:
        """How many tiles of y rows and x columns there are."""
        return self.batch * -(-self.rows // y) * -(-self.columns // x)


def extent(plan: TritonPlan, found: Product) -> Extent:
    batch, rows, columns = (
        count(loops.values(), plan.hints) for loops in (found.batch, found.rows, found.columns)
    )
    return Extent(batch, rows, columns, plan.row_length, found.left.dtype.itemsize)


def seconds(shape: Shape, of: Extent, multiprocessors: int) -> float:
    """The estimate: see above."""
    y, x, r, _, _ = shape
    tiles = of.tiles(y, x)
    beside = 2 if y * x <= 64 * 128 else 1
    rounds = -(-tiles // (multiprocessors * beside))
    steps = -(-of.terms // r)
    rate = FLOPS * 2 / of.itemsize  # half types twice as fast
    step = max(2 * y * x * r / rate, (y + x) * r * of.itemsize / L2_BYTES)
    return rounds * beside * (steps * step + START / beside)


def varied(shapes: Sequence[Shape]) -> list[Shape]:
    """The best few, of which at most VARIANTS have the same tiles: warps and stages differ little."""
    found: list[Shape] = []
    for shape in shapes:
        alike = [other for other in found if other[:2] == shape[:2]]
        if len(alike) < VARIANTS and len(found) < CANDIDATES:
            found.append(shape)
    return found


def fits(shape: Shape, of: Extent, gpu: Gpu) -> bool:
    """Its steps in flight fit into shared memory, and it isn't twice as large as the matrix."""
    y, x, r, _, stages = shape
    small = y <= max(power_of_two(of.rows), 16) and x <= max(power_of_two(of.columns), 16)
    deep = r <= max(4 * of.terms, 16)
    return small and deep and stages * (y + x) * r * of.itemsize <= gpu.shared_bytes


@plan_rule("triton:product", before="triton:index_dtype")
def choose_product_tiles(plan: TritonPlan, options: Options) -> None:
    """Let the template print a product; its tiles, best by estimate first."""
    found = find_product(plan.body) if is_template(plan.node) and plan.length != 1 else None
    if found is None:
        return
    axes = {"y": found.rows, "x": found.columns, "r": plan.reduction_ranges}
    plan.reduction, plan.tiling = "product", Tiling(axes, found.batch)
    of, gpu = extent(plan, found), gpu_of(plan.device)
    deepest = max(power_of_two(of.terms), 16)
    every = dict.fromkeys((y, x, min(r, deepest), w, s) for y, x, r, w, s in SHAPES)
    shapes = sorted(
        (shape for shape in every if fits(shape, of, gpu)),
        key=lambda shape: seconds(shape, of, gpu.multiprocessors),
    )
    plan.choices = tuple(
        dict(zip(("y", "x", "r", "warps", "stages"), shape, strict=True))
        for shape in varied(shapes)
    )
    plan.tiles = {axis: size for axis, size in plan.choices[0].items() if axis != "warps"}
    plan.num_warps = plan.choices[0]["warps"]


@rival_rule("products")
def rivals(plan: TritonPlan, around: Surroundings) -> Iterator[Rival]:
    """Give what else could do what a template's kernel does."""
    if plan.language != "triton" or not is_template(plan.node) or not around.options.library:
        return
    before, call, after, changed, spaces = taken_apart(plan.node, around.schedule)
    steps: list[KernelPlan | LibraryCall] = [around.make_plan(node, changed) for node in before]
    steps += [call, *([around.make_plan(after, changed)] if after is not None else [])]
    yield Rival("library", tuple(steps), spaces)


class Apart(NamedTuple):
    """A template's node taken apart: what makes its factors, the library's product, what follows."""

    before: list[FusedSchedulerNode]
    call: LibraryCall
    after: FusedSchedulerNode | None
    schedule: Schedule
    """One in which all of their results are in memory."""
    workspace: dict[str, Layout]
    """Those that are the kernel's own affair."""


def taken_apart(node: FusedSchedulerNode, schedule: Schedule) -> Apart:
    """The product goes into memory of its own, unless it is a result."""
    parts = list(zip(node.nodes, node.bodies, node.levels, strict=True))
    ((product, _, _),) = (p for p in parts if isinstance(p[0].buffer.loops, Template))
    template, layout, memory = product.buffer.loops, product.buffer.layout, schedule.memory
    assert isinstance(template, Template)
    before = [
        FusedSchedulerNode([part], [body], ["elem"], loops_of(body), {})
        for part, body, level in parts
        if level == "elem" and part is not product
    ]
    rest = [(part, body) for part, body, level in parts if level == "row"]
    bodies = [body for _, body in rest]
    after = FusedSchedulerNode(
        [part for part, _ in rest], bodies, ["elem"] * len(rest), node.ranges, {}
    )
    spaces = {part.name: part.nodes[0].buffer.layout for part in before}
    if product.name in memory.internal:
        spaces[product.name] = layout
    changed = replace(schedule, memory=replace(memory, internal=memory.internal - spaces.keys()))
    call = LibraryCall(template.op, template.operands, product.name, layout)
    return Apart(before, call, after if rest else None, changed, spaces)


def loops_of(body: LoopBody) -> dict[sympy.Symbol, Size]:
    """The loops that a body's store differs with."""
    (store,) = body.stores
    return {v: n for v, n in body.all_ranges.items() if v in sympify(store.index).free_symbols}


def is_template(node: FusedSchedulerNode) -> bool:
    return any(isinstance(part.buffer.loops, Template) for part in node.nodes)
