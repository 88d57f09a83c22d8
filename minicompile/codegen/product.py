"""Matrix products: which tiles are worth measuring, and what else could compute the same.

A program makes one tile, `y` rows by `x` columns, in steps of `r` terms. A multiprocessor has one such program
at work, or two small ones. By estimate it takes, for all of its tiles one after the other,

    steps * max(arithmetic at the tensor cores' rate, factors at the L2 cache's rate) + a start for each tile

so large tiles win (each factor is loaded less often) until there are fewer of them than multiprocessors, or
the last round of them leaves most multiprocessors idle. The best few by this estimate are candidates; the
device decides. The rivals of the kernel:

    library   the library's product into memory, then a kernel of what follows it
    split     where few tiles have many terms, programs share those of a tile; their sums are added in order

The real compiler: torch/_inductor/template_heuristics/triton.py (configs); SubgraphChoiceCaller, decompose_k
in torch/_inductor/kernel/mm.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from minicompile.codegen.plan import (
    KernelPlan,
    LibraryProduct,
    Product,
    Rival,
    count,
    find_product,
    plan_rule,
    power_of_two,
)
from minicompile.codegen.split import split
from minicompile.lowering.ir import Template
from minicompile.ops.device import gpu_of
from minicompile.options import Options
from minicompile.scheduling.nodes import Allocation, FusedSchedulerNode, Schedule

Shape = tuple[int, int, int, int, int]
"""y, x, r, warps, stages."""

SHAPES: tuple[Shape, ...] = (
    (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (256, 128, 64, 8, 4),
    (128, 128, 64, 8, 3), (128, 128, 64, 4, 3), (128, 128, 64, 4, 4), (128, 128, 128, 8, 3),
    (64, 256, 64, 4, 4), (256, 64, 64, 4, 4), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4),
    (64, 64, 64, 4, 4), (64, 64, 128, 4, 3), (64, 32, 64, 4, 4), (32, 64, 64, 4, 4),
    (32, 32, 64, 2, 4), (128, 128, 32, 8, 4), (128, 64, 32, 4, 4), (64, 64, 32, 4, 4),
    (16, 64, 64, 4, 4), (64, 16, 64, 4, 4), (16, 16, 64, 2, 4),
)  # fmt: skip
"""What is considered."""

CANDIDATES = 10
"""How many are measured."""

SHARED_BYTES = 227 * 1024
"""Memory of a multiprocessor for the tiles of factors that are on their way."""

FLOPS, L2_BYTES, START = 5e12, 4e10, 3e-6
"""A multiprocessor's arithmetic and loads from the L2 cache a second; seconds until a tile's first step."""

LEAST_TERMS = 256
"""Of a share of a split product."""


class Extent(NamedTuple):
    """A product's sizes, at the hints."""

    batch: int
    rows: int
    columns: int
    terms: int
    itemsize: int


def extent(plan: KernelPlan, found: Product) -> Extent:
    batch, rows, columns = (
        count(loops.values(), plan.hints) for loops in (found.batch, found.rows, found.columns)
    )
    return Extent(batch, rows, columns, plan.row_length, found.left.dtype.itemsize)


def seconds(shape: Shape, of: Extent, multiprocessors: int) -> float:
    """The estimate: see above."""
    y, x, r, _, _ = shape
    tiles = of.batch * -(-of.rows // y) * -(-of.columns // x)
    beside = 2 if y * x <= 64 * 128 else 1
    rounds = -(-tiles // (multiprocessors * beside))
    steps = -(-of.terms // r)
    rate = FLOPS * 2 / of.itemsize  # half types twice as fast
    step = max(2 * y * x * r / rate, (y + x) * r * of.itemsize / L2_BYTES)
    return rounds * beside * (steps * step + START / beside)


def fits(shape: Shape, of: Extent) -> bool:
    """Its steps in flight fit into shared memory, and it isn't twice as large as the matrix."""
    y, x, r, _, stages = shape
    small = y <= max(power_of_two(of.rows), 16) and x <= max(power_of_two(of.columns), 16)
    return small and stages * (y + x) * r * of.itemsize <= SHARED_BYTES and r <= 4 * of.terms


@plan_rule("triton:product")
def choose_product_tiles(plan: KernelPlan, options: Options) -> None:
    """The tiles of a product, best by estimate first."""
    found = plan.product
    if found is None:
        return
    of, gpu = extent(plan, found), gpu_of(plan.device)
    deepest = max(power_of_two(of.terms), 16)
    every = dict.fromkeys((y, x, min(r, deepest), w, s) for y, x, r, w, s in SHAPES)
    shapes = sorted(
        (shape for shape in every if fits(shape, of)),
        key=lambda shape: seconds(shape, of, gpu.multiprocessors),
    )
    plan.choices = tuple(
        dict(zip(("y", "x", "r", "warps", "stages"), shape, strict=True))
        for shape in shapes[:CANDIDATES]
    )
    plan.tiles = {axis: size for axis, size in plan.choices[0].items() if axis != "warps"}
    plan.num_warps = plan.choices[0]["warps"]


def shares(plan: KernelPlan) -> int:
    """How many programs should share the terms of a tile: 1 where there are tiles for all multiprocessors."""
    found = plan.product
    if found is None or len(plan.reduction_ranges) != 1:
        return 1
    of, gpu = extent(plan, found), gpu_of(plan.device)
    tiles = of.batch * -(-of.rows // plan.tiles["y"]) * -(-of.columns // plan.tiles["x"])
    most = min(gpu.multiprocessors // tiles, of.terms // LEAST_TERMS)
    even = (n for n in range(most, 1, -1) if of.terms % n == 0 and of.terms // n % 16 == 0)
    return next(even, 1)


def split_rival(plan: KernelPlan) -> Rival | None:
    """The product with its terms shared among programs. Its launches are still to be decided about."""
    if (parts := shares(plan)) == 1:
        return None
    whole = replace(plan, reduction="split", parts=parts, choices=(), tiles={})
    split(whole)
    for launch in whole.launches:
        if find_product(launch.body) is not None:
            launch.reduction = "product"
    return Rival("split", whole.launches, whole.workspace)


def without_product(
    node: FusedSchedulerNode, schedule: Schedule, position: int
) -> tuple[FusedSchedulerNode | None, Schedule, LibraryProduct]:
    """What follows a product, alone, in a schedule where that is in memory; and the library's call.

    Where one of its results lies as the product does, the product is made there, and what follows overwrites
    it element by element: what is still in the cache is read and written there.
    """
    place, template = next(
        (i, part.buffer.loops)
        for i, part in enumerate(node.nodes)
        if isinstance(part.buffer.loops, Template)
    )
    name, memory = node.nodes[place].name, schedule.memory
    layout, result = node.nodes[place].buffer.layout, name
    others = [i for i in range(len(node.nodes)) if i != place]
    bodies = [node.bodies[i] for i in others]
    rest = FusedSchedulerNode(
        [node.nodes[i] for i in others], bodies, ["elem"] * len(others), node.ranges, {}
    )
    (store,) = node.bodies[place].stores
    loads = [v.index for body in bodies for v in body.loads if v.buffer == name]
    given = list(memory.allocate[position]) if position < len(memory.allocate) else []
    if name in memory.internal and all(index == store.index for index in loads):
        for i, allocation in enumerate(given):
            made = schedule.graph.buffers[allocation.buffer].layout
            stored = [v for b in bodies for v in b.stores if v.buffer == allocation.buffer]
            alike = made == layout and [v.index for v in stored] == [store.index]
            if alike and not allocation.in_place:
                given[i] = Allocation(allocation.buffer, name, in_place=True)
                result = allocation.buffer
                break
    allocate = [*memory.allocate]
    allocate[position : position + 1] = [given]
    changed = replace(memory, internal=memory.internal - {name}, allocate=allocate)
    call = LibraryProduct(template.op, template.operands, result, layout)
    return rest if others else None, replace(schedule, memory=changed), call


def needs_memory(call: LibraryProduct, plan: KernelPlan) -> bool:
    """Is a product's memory none of the kernel's results?"""
    return call.result not in {a.buffer for a in plan.arguments}


def is_template(node: FusedSchedulerNode) -> bool:
    return any(isinstance(part.buffer.loops, Template) for part in node.nodes)
