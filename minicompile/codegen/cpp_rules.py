"""What a C++ kernel's plan decides: vector axis, scratch rows, threads."""

from __future__ import annotations

import sys
from collections.abc import Collection

import sympy
import torch

from minicompile.codegen.phases import choose_stashed, float_sums, is_update, separates
from minicompile.codegen.plan import CppPlan, count, plan_rule
from minicompile.codegen.printing import SIGNS
from minicompile.ops.table import POSITIONS
from minicompile.options import Options
from minicompile.scheduling.body import Value

PARALLEL_NANOSECONDS = 8_000
"""Estimated time below which waking other threads costs more than it saves."""

STASH_BYTES = 512 * 1024 if sys.platform == "linux" else 128 * 1024
"""Most bytes of scratch rows, which lie on a thread's stack: small on other systems."""

NEAR_BYTES = 16 * 1024
"""Up to so many bytes they stay in the nearest cache."""

NEAR_COST, FAR_COST = 3, 12
"""Loop values cheaper than this are computed again, rather than kept in a near or a far scratch row."""

VECTOR_BYTES = 64


@plan_rule("cpp:vector")
def choose_vector(plan: CppPlan, options: Options) -> str:
    """Vectorise the innermost loop."""
    body = plan.body
    widest = max((v.dtype.itemsize for v in body.loads + body.stores), default=4)
    plan.vector_width = VECTOR_BYTES // max(widest, 4)
    if body.reduction_ranges:
        plan.vector_axis = "r"
    elif body.ranges:
        plan.vector_axis = "x"
    else:
        plan.vector_axis, plan.vector_width = "none", 1
    return f"{VECTOR_BYTES} bytes of the widest dtype, along the innermost loop"


@plan_rule("cpp:stash")
def choose_stash(plan: CppPlan, options: Options) -> None:
    """Keep dear loop values in scratch rows, where rows are short: they lie on a thread's stack."""
    known = all(isinstance(size, int) for size in plan.reduction_ranges.values())
    if plan.reduction != "looped" or not known:
        return
    length = max(plan.row_length, 1)
    worth = NEAR_COST if length * 4 <= NEAR_BYTES else FAR_COST
    plan.stashed = choose_stashed(plan.body, plan.loop, STASH_BYTES // length, worth)


def nanoseconds(plan: CppPlan) -> float:
    """Time on one thread: 10 bytes and 10 operations a nanosecond."""
    return 0.1 * (plan.cost.bytes_read + plan.cost.bytes_written + plan.cost.flops)


@plan_rule("cpp:parallel")
def choose_parallel(plan: CppPlan, options: Options) -> str | None:
    """Share the outer loop among threads when there is enough to do."""
    if any(map(is_update, plan.body.stores)):
        plan.reject("parallel loop", "two iterations may change one element")
        return None
    return share(plan)


def share(plan: CppPlan) -> str:
    """Let threads share the work if that takes longer than to wake them; return why."""
    time = nanoseconds(plan)
    sizes = plan.body.all_ranges.values()
    if all(isinstance(size, int) for size in sizes):
        plan.parallel = time >= PARALLEL_NANOSECONDS
        if not plan.parallel:
            plan.reject("parallel loop", f"about {time / 1000:.1f} us on one thread")
        return f"about {time / 1000:.1f} us on one thread"
    each = time / max(count(sizes, plan.hints), 1)
    plan.parallel, plan.parallel_above = True, int(PARALLEL_NANOSECONDS / max(each, 0.01))
    return "sizes vary: each call counts its iterations"


@plan_rule("cpp:double_sums", needed=True)
def choose_double_sums(plan: CppPlan, options: Options) -> None:
    """Accumulate sums of float32 as doubles, since their rounding errors would pile up."""
    sums = frozenset(v for v in float_sums(plan.body.values) if v.dtype is torch.float32)
    if sums and plan.reduction == "looped":
        plan.double_sums = sums


def vectorised(
    plan: CppPlan, values: Collection[Value], var: sympy.Symbol, riding: bool
) -> dict[Value, str] | None:
    """The reductions of a loop whose iterations are one vector, with their signs; None where they can't be.

    `riding`: the loop runs along r, and its reductions are accumulated across its iterations.
    """
    updates = [v for v in values if v.op == "store" and is_update(v)]
    if plan.vector_width == 1 or not all(separates(v, var, plan.body) for v in updates):
        return None
    carried = [v for v in values if riding and v.op in ("reduction", "scan")]
    for value in carried:
        extremum = value.kind in ("max", "min") and value.dtype.is_floating_point
        if extremum or value.op == "scan" or value.kind in POSITIONS:
            return None  # OpenMP's own max and min may drop a NaN
    return {v: SIGNS.get(v.kind, v.kind) for v in carried}
