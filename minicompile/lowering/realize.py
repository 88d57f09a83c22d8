"""When is an intermediate written to memory, and when is it computed again by each of its readers?

Inlining saves a write and a read; realizing saves computing twice, and lets the scheduler choose: a buffer
that only one kernel touches costs nothing. Every `ComputedBuffer.why` comes from here or from a rule.
The real compiler: StorageBox.realize_hint, should_realize_on_reuse in torch/_inductor/ir.py.
"""

from __future__ import annotations

import sympy

from minicompile.lowering.value import Storage
from minicompile.ops.table import POINTWISE
from minicompile.shapes.expr import Size, exact_quotient

MAX_READS = 8
"""Most buffers that one formula reads."""
MAX_FLOPS = 500
"""Most arithmetic in a formula written out."""
MAX_DEPTH = 40
"""Most values nested in one formula."""
CHEAP_FLOPS = POINTWISE["truediv"].flops + 4
"""Most arithmetic that is worth repeating to save a read."""
BROADCAST = 16
"""Readers that an element of an operand has in one value, from which on reading it again costs nothing."""
FREE_FLOPS = 32
"""Most arithmetic worth repeating for a value that reads nothing (masks from indices, constants)."""


def too_large(value: Storage) -> str | None:
    """Why one formula has grown enough, or None."""
    reads = len(value.cost.reached()[0])
    if reads > MAX_READS:
        return f"reads {reads} buffers"
    if value.cost.depth > MAX_DEPTH:
        return f"a formula of {value.cost.depth} nested values"
    if value.cost.flops > MAX_FLOPS:
        return f"a formula of {value.cost.flops} operations"
    return None


def small_beside(part: Size, whole: Size) -> bool:
    """Whether reading `part` elements counts for nothing where `whole` are computed: it is broadcast."""
    if part in (0, 1):
        return True
    times = exact_quotient(sympy.sympify(whole), sympy.sympify(part))
    return times is not None and not (times.is_Integer and times < BROADCAST)


def worth_keeping(value: Storage, users: int) -> str | None:
    """Why a value with several readers should be computed once, or None."""
    if users < 2:
        return None
    buffers = value.cost.reached()[0].values()
    reads = sum(
        1 for buffer in buffers if not small_beside(buffer.layout.numel, value.layout.numel)
    )
    if reads == 0 and value.cost.flops <= FREE_FLOPS:
        return None
    if reads <= 1 and value.cost.flops <= CHEAP_FLOPS:
        return None
    return f"{users} users, {value.cost.flops} operations on {reads} buffers"
