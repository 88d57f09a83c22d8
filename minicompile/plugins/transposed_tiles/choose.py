"""Which kernels work in squares, and which loops these span."""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from minicompile.codegen.phases import is_update
from minicompile.codegen.plan import CppPlan, Tiling, TritonPlan, plan_rule
from minicompile.codegen.triton_rules import busy
from minicompile.ops.device import gpu_of
from minicompile.options import Options
from minicompile.scheduling.body import LoopBody, Value
from minicompile.shapes.expr import coefficient_of, size_hint

SQUARES = "squares"
"""The kind of kernel whose C code is printed in squares."""

SQUARE, TURNED, MOST_SQUARES = 64, 16, 4
"""On CPUs: side of a square, extent of loops from which one pays, and most squares at a time."""

SIDE = 32
"""On GPUs: side of a tile, and extent of loops from which on tiles are squares."""


@plan_rule("cpp:squares", before="cpp:stash")
def choose_squares(plan: CppPlan, options: Options) -> None:
    """Loads that jump along the inner loop are read in squares, which fit into the cache, and turned."""
    if not plan.reduction_ranges and (tiles := sides(plan)):
        plan.tiles, plan.reduction = tiles, SQUARES


def sides(plan: CppPlan) -> dict[str, int]:
    """The sides of squares by loop variable; none where nothing is turned."""
    found = turned(plan.body, plan.hints, TURNED)
    if found is None or found[2] > MOST_SQUARES:
        return {}
    return {str(var): SQUARE for var in found[:2]}


@plan_rule("triton:squares", before="triton:tiles")
def choose_square_tiles(plan: TritonPlan, options: Options) -> None:
    """Tiles are squares where loads and stores run along different loops."""
    if plan.reduction != "none" or plan.tiles:
        return
    if found := turned(plan.body, plan.hints, SIDE):
        large = plan.rows >= busy(gpu_of(plan.device)) * 2**14
        loops = list(plan.ranges.items())
        inner = list(plan.ranges).index(found[0]) + 1
        plan.tiling = Tiling({"y": dict(loops[:inner]), "x": dict(loops[inner:])}, {})
        plan.num_warps = 8 if large else 4
        plan.tiles = {"y": 128, "x": 64} if large else {"y": SIDE, "x": SIDE}


def transposed(load: Value, inner: sympy.Symbol, across: sympy.Symbol) -> bool:
    """A load that jumps along `inner` while its elements lie side by side along `across`."""
    if load.op != "load" or load.mask is not None or load.indirect:
        return False
    jump = coefficient_of(load.index, inner)
    return jump not in (None, 0, 1) and coefficient_of(load.index, across) == 1


def turned(
    body: LoopBody, hints: Mapping[sympy.Symbol, int], least: int
) -> tuple[sympy.Symbol, sympy.Symbol, int] | None:
    """The loop along which most loads are contiguous that jump along the innermost one, that one, and how
    many do; both make at least `least` steps."""
    loops = [var for var, size in body.ranges.items() if size != 1]
    long = [var for var in loops if size_hint(body.ranges[var], hints) >= least]
    if len(long) < 2 or long[-1] is not loops[-1] or any(map(is_update, body.stores)):
        return None
    *others, inner = long
    found = {var: sum(transposed(v, inner, var) for v in body.loads) for var in others}
    across = max(found, key=found.__getitem__)
    return (across, inner, found[across]) if found[across] else None
