"""What a C++ kernel's plan decides: vector axis, scratch rows, threads."""

from __future__ import annotations

from minicompile.codegen.phases import choose_stashed
from minicompile.codegen.plan import Alternative, KernelPlan
from minicompile.codegen.rules import contiguous_uses, count, is_update, plan_rule, transposed
from minicompile.options import Options
from minicompile.shapes.expr import size_hint

PARALLEL_NANOSECONDS = 8_000
"""Estimated time below which waking other threads costs more than it saves."""

STASH_BYTES = 128 * 1024
"""Most bytes of scratch rows per thread: they live on the stack."""

VECTOR_BITS = 512

FEW_ROWS = 8
LONG_ROW = 32768
"""Fewer rows than this, each at least this long, are shared by threads in chunks of r."""

WIDEST_TILE = 2048
FEW_TILES = 8
SCRATCH_BYTES = 1 << 20
COLUMN_CHUNK = 64
MOST_COLUMN_CHUNKS = 16
"""Columns of a tile; with fewer tiles than this, threads share its rows, at least so many at a time."""

SQUARE = 64
TURNED = 16
MOST_SQUARES = 4
"""Side of a square that is turned in the cache, extent from which that pays, and squares at a time."""

CHUNK = 16384
MOST_CHUNKS = 256


@plan_rule("cpp:vector")
def choose_vector(plan: KernelPlan, options: Options) -> None:
    """Vectorise the innermost loop whose elements lie side by side."""
    body = plan.body
    widest = max((v.dtype.itemsize for v in body.values if v.op in ("load", "store")), default=4)
    plan.vector_width = VECTOR_BITS // 8 // max(widest, 4)
    inner_x = next(reversed(body.ranges), None)
    if not body.reduction_ranges:
        plan.vector_axis = "x" if inner_x is not None else "none"
    else:
        inner_r = next(reversed(body.reduction_ranges))
        along_r = contiguous_uses(plan, inner_r, plan.loop)
        along_x = contiguous_uses(plan, inner_x, plan.loop) if inner_x is not None else -1
        width = count([body.ranges[inner_x]], plan.hints) if inner_x is not None else 0
        rows_win = along_x > along_r and width >= 4
        plan.vector_axis = "x" if rows_win else "r"
        other = "r" if rows_win else "x"
        plan.alternatives += (
            Alternative(
                f"vectors along {other}",
                f"{along_r} accesses are contiguous along r, {along_x} along x (jumps subtracted)",
            ),
        )
    if plan.vector_axis == "none":
        plan.vector_width = 1


@plan_rule("cpp:tiles")
def choose_tiles(plan: KernelPlan, options: Options) -> None:
    """Columns per tile, the chunks of long rows that threads share, or the squares of a transposition."""
    if not plan.reduction_ranges:
        _choose_squares(plan)
        return
    rows = count(plan.ranges.values(), plan.hints)
    length = count(plan.reduction_ranges.values(), plan.hints)
    if plan.vector_axis == "x":
        _choose_columns(plan, rows, length)
    elif rows < FEW_ROWS and length >= LONG_ROW:
        outermost = next(iter(plan.reduction_ranges.values()))
        extent = size_hint(outermost, plan.hints)
        inside = max(length // max(extent, 1), 1)
        chunk = max(-(-CHUNK // inside), -(-extent // MOST_CHUNKS))
        plan.tiles = {"r": chunk, "chunks": MOST_CHUNKS}


def _choose_columns(plan: KernelPlan, rows: int, length: int) -> None:
    """Wide tiles read memory in order; when there are too few for all threads, these share the rows."""
    inner = next(reversed(plan.ranges.values()))
    width = count([inner], plan.hints)
    tile = min(-(-width // 16) * 16, WIDEST_TILE)
    plan.tiles = {"x": tile}
    tiles = rows // max(width, 1) * -(-width // tile)
    if (
        tiles < FEW_TILES
        and length >= COLUMN_CHUNK * 4
        and nanoseconds(plan) >= PARALLEL_NANOSECONDS
    ):
        outermost = size_hint(next(iter(plan.reduction_ranges.values())), plan.hints)
        inside = max(length // max(outermost, 1), 1)
        chunk = max(-(-COLUMN_CHUNK // inside), -(-outermost // MOST_COLUMN_CHUNKS))
        plan.tiles |= {"r": chunk, "chunks": MOST_COLUMN_CHUNKS}


def _choose_squares(plan: KernelPlan) -> None:
    """Loads that jump along the inner loop are read in squares, which fit into the cache, and turned."""
    variables = [var for var, size in plan.ranges.items() if size != 1]
    wide = [var for var in variables if count([plan.ranges[var]], plan.hints) >= TURNED]
    if len(wide) < 2 or wide[-1] is not variables[-1]:
        return
    inner = wide[-1]
    turned = {var: sum(transposed(v, inner, var) for v in plan.body.loads) for var in wide[:-1]}
    across = max(turned, key=turned.__getitem__)
    if 0 < turned[across] <= MOST_SQUARES and not any(map(is_update, plan.body.stores)):
        plan.tiles = {str(across): SQUARE, str(inner): SQUARE}


@plan_rule("cpp:stash")
def choose_stash(plan: KernelPlan, options: Options) -> None:
    """Keep dear loop values in scratch rows, as long as the rows are short and known."""
    body = plan.body
    if plan.vector_axis != "r" or not body.reduction_ranges or "r" in plan.tiles:
        return
    length = 1
    for size in body.reduction_ranges.values():
        if not isinstance(size, int):
            reason = "the row's length is not known when compiling"
            plan.alternatives += (Alternative("scratch rows", reason),)
            return
        length *= size
    limit = STASH_BYTES // max(length * 8, 1)
    plan.stashed = choose_stashed(body, plan.loop, limit)
    if not plan.stashed and choose_stashed(body, plan.loop, 1):
        plan.alternatives += (
            Alternative("scratch rows", f"{length} elements are more than the scratch space holds"),
        )


def nanoseconds(plan: KernelPlan) -> float:
    """Time on one thread: 10 bytes and 10 operations a nanosecond."""
    moved = plan.cost.bytes_read + plan.cost.bytes_written
    return 0.1 * moved + 0.1 * plan.cost.flops


@plan_rule("cpp:parallel")
def choose_parallel(plan: KernelPlan, options: Options) -> None:
    """Share the outer loop among threads when there is enough to do."""
    time = nanoseconds(plan)
    sizes = plan.body.all_ranges.values()
    if all(isinstance(size, int) for size in sizes):
        plan.parallel = time >= PARALLEL_NANOSECONDS
        if not plan.parallel:
            plan.alternatives += (
                Alternative("parallel loop", f"about {time / 1000:.1f} us on one thread"),
            )
        return
    each = time / max(count(sizes, plan.hints), 1)
    plan.parallel, plan.parallel_above = True, int(PARALLEL_NANOSECONDS / max(each, 0.01))
