"""Which kernels reduce columns in vectors, the width of their tiles, and where threads share rows."""

from __future__ import annotations

from minicompile.codegen.cpp_rules import PARALLEL_NANOSECONDS, nanoseconds
from minicompile.codegen.phases import contiguous_uses
from minicompile.codegen.plan import CppPlan, plan_rule
from minicompile.options import Options
from minicompile.shapes.expr import size_hint

WIDEST_TILE, FEW_TILES = 2048, 8
COLUMN_CHUNK, MOST_COLUMN_CHUNKS = 64, 16
"""Most columns of a tile; with fewer tiles, threads share rows, at least so many at a time."""


FEW_ROWS, LONG_ROW = 8, 32768
"""Fewer rows than this, each at least this long, are shared by threads in chunks of r."""

CHUNK, MOST_CHUNKS = 16384, 256
"""Least elements of such a chunk, and most chunks."""


@plan_rule("cpp:columns", before="cpp:stash")
def choose_axis(plan: CppPlan, options: Options) -> str | None:
    """Vectorise the loop over columns where these lie side by side, and elements of rows don't."""
    body = plan.body
    if not body.reduction_ranges:
        return None
    inner_x, inner_r = next(reversed(body.ranges), None), next(reversed(body.reduction_ranges))
    used = list(plan.loop)
    if inner_x is not None:  # what varies along one loop alone is read again from the cache
        both = {inner_x, inner_r}
        used = [v for v in used if v.index is not None and both <= v.index.free_symbols] or used
    along_r, along_x, width = contiguous_uses(inner_r, used), -1, 0
    if inner_x is not None:
        along_x = contiguous_uses(inner_x, used)
        width = size_hint(body.ranges[inner_x], plan.hints)
    other = "x"
    if along_x > along_r and width >= 4:
        plan.vector_axis, plan.reduction, other = "x", "columns", "r"
        plan.tiles = tiles_of_columns(plan, width)
    uses = f"{along_r} accesses are contiguous along r, {along_x} along x (jumps subtracted)"
    plan.reject(f"vectors along {other}", uses)
    return uses


@plan_rule("cpp:chunks", before="cpp:stash")
def choose_chunks(plan: CppPlan, options: Options) -> str | None:
    """Threads share few long rows."""
    few = plan.rows < FEW_ROWS and plan.row_length >= LONG_ROW
    if plan.reduction != "looped" or plan.body.scans or not few:
        return None
    plan.tiles, plan.reduction = chunks(plan, CHUNK, MOST_CHUNKS), "chunks"
    return f"threads share {plan.rows} rows of {plan.row_length} elements"


@plan_rule("cpp:rows", before="cpp:double_sums")
def choose_rows(plan: CppPlan, options: Options) -> None:
    """Helpers reduce rows that lie in memory."""
    if plan.reduction == "looped":
        plan.reduction = "rows"


def tiles_of_columns(plan: CppPlan, width: int) -> dict[str, int]:
    """Wide tiles read memory in order; when there are too few for all threads, these share the rows."""
    outer, tile = plan.rows // max(width, 1), min(-(-width // 16) * 16, WIDEST_TILE)
    worth_it = (
        not plan.body.scans
        and plan.row_length >= COLUMN_CHUNK * 4
        and nanoseconds(plan) >= PARALLEL_NANOSECONDS
    )
    if worth_it and outer * -(-width // tile) < FEW_TILES:
        return {"x": tile} | chunks(plan, COLUMN_CHUNK, MOST_COLUMN_CHUNKS)
    return {"x": tile}


def chunks(plan: CppPlan, least: int, most: int) -> dict[str, int]:
    """Chunks of the outermost r: at most `most`, of at least `least` elements of the row."""
    outermost = size_hint(next(iter(plan.reduction_ranges.values())), plan.hints)
    inside = max(plan.row_length // max(outermost, 1), 1)
    return {"r": max(-(-least // inside), -(-outermost // most)), "chunks": most}
