"""Which kernels sweep long rows: those that gain from wide loads, or from the cache.

Rows of a length that no wide load divides begin anywhere in memory, and all their loads would be narrow.
Rows that are swept twice are read twice from memory, unless so few are in work that the cache holds them.
"""

from __future__ import annotations

from minicompile.codegen.phases import loop_needs
from minicompile.codegen.plan import TritonPlan, plan_rule, power_of_two
from minicompile.codegen.triton_rules import clamp, rows_are_contiguous, stores_rows
from minicompile.ops.device import Gpu, gpu_of
from minicompile.options import Options
from minicompile.scheduling.body import LoopBody, Value
from minicompile.shapes.expr import ZERO, contiguous_strides, same

LONG_ROWS = "long_rows"
"""The kind of reduction that these kernels have, and the name of what prints them."""

WIDE = 16
"""Bytes of a thread's widest load."""

HELD = 16384
"""Elements of rows that a multiprocessor's programs have in work together."""


@plan_rule("triton:cached_rows", before="triton:tiles")
def choose_cached_rows(plan: TritonPlan, options: Options) -> str | None:
    """Few rows are in work where these are read again and written: the cache holds them until then."""
    if plan.tiles or not sweeps_rows(plan) or not stores_rows(plan):
        return None
    cached = rows_to_cache(plan, gpu_of(plan.device))
    if cached:
        plan.tiles = {"x": 1, "r": min(power_of_two(plan.row_length), HELD // cached)}
        plan.num_warps = clamp(plan.tiles["r"] // 512, 1, 32)
        plan.side_by_side = cached > 1
    return f"{cached} rows in each multiprocessor stay in the cache"


@plan_rule("triton:long_rows")
def choose_long_rows(plan: TritonPlan, options: Options) -> str | None:
    """Tiles of swept rows begin where wide loads do, and rows that are swept again stay in the cache."""
    if not sweeps_rows(plan):
        return None
    wide = granule(plan)
    if wide == 1 and not rows_to_cache(plan, gpu_of(plan.device)):
        return None
    plan.reduction = LONG_ROWS
    return f"tiles begin at multiples of {wide} elements"


def sweeps_rows(plan: TritonPlan) -> bool:
    """Does the kernel sweep rows whose elements lie side by side?"""
    return plan.reduction == "looped" and rows_are_contiguous(plan)


def rows_to_cache(plan: TritonPlan, gpu: Gpu) -> int:
    """How many rows, one or two, each multiprocessor may have in work so that a second sweep finds all of
    them in the cache; 0 where no row is swept twice."""
    sweeps = loop_needs(plan.body, plan.loop, riders=plan.riders).values()
    again = [v for v in plan.body.loads if v in plan.loop and sum(v in s for s in sweeps) > 1]
    row = plan.row_length * sum(v.dtype.itemsize for v in again)
    return min(3 * gpu.l2_bytes // 4 // (gpu.multiprocessors * row), 2) if row else 0


def granule(plan: TritonPlan) -> int:
    """Where rows begin anywhere in memory: the elements of a wide load, in which a tile then begins. 1 where
    that doesn't help, and where sizes vary."""
    body = plan.body
    along = [v for v in (*body.loads, *body.stores) if along_rows(v, body)]
    if not along or body.scans or not all(isinstance(n, int) for n in body.all_ranges.values()):
        return 1
    wide = WIDE // min(v.dtype.itemsize for v in along)
    # the tensor's end must be one of a wide load: none goes beyond it
    ends = plan.row_length % wide != 0 == plan.rows * plan.row_length % wide
    return wide if ends else 1


def along_rows(value: Value, body: LoopBody) -> bool:
    """The access goes through all rows, one after the other: its index is that of the iteration."""
    if value.op not in ("load", "store") or value.mask is not None or value.indirect:
        return False
    ranges = body.all_ranges
    steps = zip(ranges, contiguous_strides(list(ranges.values())), strict=True)
    return bool(same(value.index, sum((var * step for var, step in steps), ZERO)))
