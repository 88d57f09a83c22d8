"""Windows: several elements of an image for each result, along two new dimensions at the end, the taps.

`unfolded` gives them, `folded` adds them or takes the largest, each tap written out. A gradient is the same
with another question: which windows hold an element? So nothing is scattered. The real compiler: the pooling
rules in torch/_inductor/lowering.py, which leave large windows to eager, too.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch

from minicompile.errors import Unsupported
from minicompile.lowering.context import LoweringContext
from minicompile.lowering.rules.creation import only_where
from minicompile.lowering.value import TensorValue
from minicompile.ops.dtypes import computation_dtype
from minicompile.ops.handler import Index, Ops, V
from minicompile.shapes.expr import FloorDiv, Size, bounds, is_nonnegative, loop_symbol
from minicompile.shapes.expr import simplify_index as simplified

MOST_TAPS = 25
"""Windows of more are left to the library."""

INT = torch.int64
COMBINED = {"sum": "add", "max": "maximum", "min": "minimum"}


class Axis:
    """One dimension: results in `count` windows of at most `taps` of its `extent` elements."""

    extent: Size
    count: Size
    taps: int

    def place(self, ops: Ops, window: Index, tap: Index) -> tuple[Index, list[V]]:
        """A window's tap-th element, and conditions under which there is one."""
        raise NotImplementedError


@dataclass(eq=False)
class Strided(Axis):
    """Windows that begin `step` apart, the first one `padding` before the dimension. Places are formulas,
    conditions expressions that must not be negative.
    """

    extent: Size
    count: Size
    taps: int
    step: int
    padding: int

    def __post_init__(self) -> None:
        if not all(isinstance(n, int) for n in (self.taps, self.step, self.padding)):
            raise Unsupported("windows whose size is only known at run time")

    def element(self, window: Index, tap: Index) -> tuple[Index, list[Index]]:
        at = window * self.step - self.padding + tap
        return at, [at, self.extent - 1 - at]

    @functools.lru_cache(256)  # noqa: B019  holds sizes alone
    def can_fail(self, tap: int | None) -> list[bool]:
        """Which conditions can, whatever the window."""
        outer, inner = loop_symbol("outer"), loop_symbol("inner")
        ranges = {outer: self.count, inner: self.taps}
        _, conditions = self.element(outer, inner if tap is None else sympy.Integer(tap))
        found = [bounds(simplified(sympy.expand(c), ranges), ranges) for c in conditions]
        return [limits is None or not is_nonnegative(limits[0]) for limits in found]

    def place(self, ops: Ops, window: Index, tap: Index) -> tuple[Index, list[V]]:
        at, conditions = self.element(window, tap)
        chosen = itertools.compress(conditions, self.can_fail(int(tap) if tap.is_Integer else None))
        zero = ops.constant(0, INT)
        return at, [ops.ge(ops.index_expr(condition, INT), zero) for condition in chosen]


class Turned(Strided):
    """The windows that hold an element, instead of the elements of a window."""

    def __init__(self, axis: Strided) -> None:
        self.axis, self.reach = axis, axis.taps - 1
        self.extent, self.count, self.taps = axis.count, axis.extent, self.reach // axis.step + 1

    def element(self, window: Index, tap: Index) -> tuple[Index, list[Index]]:
        axis, back = self.axis, self.taps - 1 - tap
        at = FloorDiv(window + axis.padding, sympy.Integer(axis.step)) - back
        found = [at, self.extent - 1 - at]
        farthest = back if back.is_Integer else self.taps - 1
        if (farthest + 1) * axis.step > axis.taps:
            found.append(self.reach + axis.element(at, 0)[0] - window)
        return at, found


def unfolded(
    ctx: LoweringContext, x: TensorValue, axes: Sequence[Axis], other: float | int = 0
) -> TensorValue:
    """The elements of each window of x's two last dimensions, `other` where there are fewer."""

    def body(ops: Ops, index: Sequence[Index]) -> V:
        lead, windows, taps = index[:-4], index[-4:-2], index[-2:]
        places = [a.place(ops, *at) for a, *at in zip(axes, windows, taps, strict=True)]
        checks = [check for _, found in places for check in found]
        mask = functools.reduce(ops.logical_and, checks) if checks else None
        where = [*lead, *(at for at, _ in places)]
        return only_where(ops, mask, lambda inner: x.load(inner, where), other)

    size = (*x.size[:-2], *(axis.count for axis in axes), *(axis.taps for axis in axes))
    return ctx.pointwise(size, x.device, body)


def folded(ctx: LoweringContext, kind: str, x: TensorValue) -> TensorValue:
    """The sum, maximum or minimum of each window's taps. Sums of a half type are rounded one by one."""
    size, sides, wide = x.size[:-2], x.size[-2:], computation_dtype(x.dtype)
    narrow = kind == "sum" and wide is not x.dtype
    if math.prod(sides) > MOST_TAPS:
        raise Unsupported("windows of many elements")

    def body(ops: Ops, index: Sequence[Index]) -> V:
        taps = itertools.product(*(map(sympy.Integer, range(taps)) for taps in sides))
        found, *others = (x.load_as(ops, [*index, *tap], wide) for tap in taps)
        for value in others:
            # the later one first: among equals eager keeps the earlier
            found = ops.pointwise(COMBINED[kind], value, found)
            found = ops.to_dtype(ops.to_dtype(found, x.dtype), wide) if narrow else found
        return ops.to_dtype(found, x.dtype)

    return ctx.pointwise(size, x.device, body)


def summation_dtype(x: TensorValue) -> torch.dtype:
    """In which eager adds up a gradient: on a CPU in the half type itself."""
    return x.dtype if x.device.type == "cpu" else computation_dtype(x.dtype)
