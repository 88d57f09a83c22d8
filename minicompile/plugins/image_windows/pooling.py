"""Pooling: averages and maxima of windows (windows.py). Sums are added in eager's order."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from minicompile.lowering.context import LoweringContext, Rule, lowering
from minicompile.lowering.rules.common import aten, converted
from minicompile.lowering.value import TensorValue
from minicompile.ops.dtypes import computation_dtype
from minicompile.ops.handler import Index, Ops, V
from minicompile.ops.table import reduction_identity
from minicompile.plugins.image_windows.windows import (
    INT,
    Axis,
    Strided,
    Table,
    Tabled,
    folded,
    known,
    summation_dtype,
    unfolded,
)
from minicompile.shapes.expr import Size

Axes = Sequence[Axis]
Count = int | None
"""What an average divides by; None: the product of a window's sides, 0: by one side after the other."""
NOWHERE = 2**62
"""A position after every element."""


def strided(
    x: TensorValue, counts: Sequence[Size], kernel: Any, step: Any = (), padding: Any = (0,),
    dilation: Any = (1,), ceil_mode: bool = False, padded: bool = True,
) -> Axes:  # fmt: skip
    """The last dimensions of x, in so many windows; a list of one number is for all of them."""
    dims, given = len(counts), (kernel, step or kernel, padding, dilation)
    numbers = (each if len(each) == dims else [*each] * dims for each in given)
    places = zip(x.size[-dims:], counts, *numbers, strict=True)
    return [*itertools.starmap(functools.partial(Strided, padded=padded), places)]


def adaptive(ctx: LoweringContext, x: TensorValue, counts: Sequence[Size]) -> Axes:
    """Windows that share a dimension as evenly as can be: neighbours may have one element in common."""
    known(*counts, *x.size[-len(counts) :])

    def axis(k: int, extent: int, count: int) -> Axis:
        if extent % count == 0:
            return Strided(extent, count, extent // count, extent // count, 0)
        window = torch.arange(count)
        start, end = window * extent // count, -(-(window + 1) * extent // count)
        at = start.unsqueeze(1) + torch.arange(int((end - start).max()))
        places = torch.where(at < end.unsqueeze(1), at, -1)
        return Tabled(ctx, x, Table(places, extent), f"axis{k}")

    return [
        axis(k, *both) for k, both in enumerate(zip(x.size[-len(counts) :], counts, strict=True))
    ]


def divided(
    ctx: LoweringContext, x: TensorValue, axes: Axes, dtype: torch.dtype, count: Count
) -> TensorValue:
    """Each window's element by the window's length, as `dtype`."""
    wide = computation_dtype(x.dtype)
    quotient = "truediv" if wide.is_floating_point else "truncdiv"

    def body(ops: Ops, index: Sequence[Index]) -> V:
        value, pairs = x.load_as(ops, index, wide), zip(axes, index[-len(axes) :], strict=True)
        counts = [ops.constant(count, INT)] if count else [a.length(ops, i) for a, i in pairs]
        if count is None:
            counts = [functools.reduce(ops.mul, counts)]
        for each in counts:
            value = ops.pointwise(quotient, value, ops.to_dtype(each, wide))
            value = ops.to_dtype(ops.to_dtype(value, dtype), wide)
        return ops.to_dtype(value, dtype)

    return ctx.pointwise(x.size, x.device, body, dtype)


def average(ctx: LoweringContext, x: TensorValue, axes: Axes, count: Count = 0) -> TensorValue:
    wide = converted(ctx, x, computation_dtype(x.dtype))
    total = folded(ctx, "sum", unfolded(ctx, wide, axes), len(axes))
    return converted(ctx, divided(ctx, total, axes, wide.dtype, count), x.dtype)


def average_gradient(
    ctx: LoweringContext, grad: TensorValue, axes: Axes, count: Count = 0
) -> TensorValue:
    part = divided(ctx, grad, axes, summation_dtype(grad), count)
    found = folded(ctx, "sum", unfolded(ctx, part, [axis.turned() for axis in axes]), len(axes))
    return converted(ctx, found, grad.dtype)


def flat(axes: Axes, places: Sequence[Index]) -> Any:
    """The number that stands for an element in the indices of maxima."""
    return functools.reduce(lambda a, b: a * b[0].extent + b[1], zip(axes, places, strict=True), 0)


def maximum(ctx: LoweringContext, x: TensorValue, axes: Axes) -> tuple[TensorValue, TensorValue]:
    """(the largest elements, where they are): the first of equals, but the last NaN."""
    dims = len(axes)
    windows = unfolded(ctx, x, axes, reduction_identity("max", x.dtype))
    best = folded(ctx, "max", windows, dims)
    numbered = ctx.pointwise(
        x.size, x.device, lambda ops, i: ops.index_expr(flat(axes, i[-dims:]), INT)
    )
    places = unfolded(ctx, numbered, axes, NOWHERE)

    def key(ops: Ops, index: Sequence[Index]) -> V:
        """The smallest is wanted; a NaN's is negative."""
        value, at = windows.load(ops, index), places.load(ops, index)
        chosen = ops.eq(value, best.load(ops, index[:-dims]))
        found = ops.where(chosen, at, ops.constant(NOWHERE, INT))
        if not x.dtype.is_floating_point:
            return found
        return ops.where(ops.isnan(value), ops.bitwise_not(at), found)

    keys = folded(ctx, "min", ctx.pointwise(windows.size, x.device, key, INT), dims)

    def position(ops: Ops, index: Sequence[Index]) -> V:
        found = keys.load(ops, index)
        return ops.where(ops.lt(found, ops.constant(0, INT)), ops.bitwise_not(found), found)

    return best, ctx.pointwise(best.size, x.device, position, INT)


def maximum_gradient(
    ctx: LoweringContext, grad: TensorValue, at: TensorValue, axes: Axes
) -> TensorValue:
    """Each window gives its gradient to its largest element."""
    dims, holders = len(axes), [axis.turned() for axis in axes]
    positions = unfolded(ctx, at, holders, -1)
    parts = unfolded(ctx, converted(ctx, grad, summation_dtype(grad)), holders)

    def body(ops: Ops, index: Sequence[Index]) -> V:
        mine = ops.index_expr(flat(axes, index[-2 * dims : -dims]), INT)
        chosen = ops.eq(positions.load(ops, index), mine)
        return ops.where(chosen, parts.load(ops, index), ops.constant(0.0, parts.dtype))

    terms = ctx.pointwise(parts.size, grad.device, body, parts.dtype)
    return converted(ctx, folded(ctx, "sum", terms, dims), grad.dtype)


def averaged(
    x: TensorValue, counts: Sequence[Size], kernel: Any, step: Any = (), padding: Any = (0,),
    ceil_mode: bool = False, padded: bool = True, divisor: int | None = None,
) -> tuple[Axes, Count]:  # fmt: skip
    return strided(x, counts, kernel, step, padding, padded=padded), divisor


def rules(dims: int) -> dict[str, Rule]:
    """Those of so many dimensions by name; further arguments are the windows."""

    def counts(ctx: LoweringContext) -> Sequence[Size]:
        assert ctx.layouts[0] is not None
        return ctx.layouts[0].size[-dims:]

    return {
        "avg_pool": lambda ctx, x, *w, **kw: average(ctx, x, *averaged(x, counts(ctx), *w, **kw)),
        "avg_pool_backward": lambda ctx, grad, x, *w: average_gradient(
            ctx, grad, *averaged(x, grad.size[-dims:], *w)
        ),
        "max_pool_with_indices": lambda ctx, x, *w, **kw: maximum(
            ctx, x, strided(x, counts(ctx), *w, **kw)
        ),
        "max_pool_with_indices_backward": lambda ctx, grad, x, *w: maximum_gradient(
            ctx, grad, w[-1], strided(x, grad.size[-dims:], *w[:-1])
        ),
        "_adaptive_avg_pool": lambda ctx, x, size: average(ctx, x, adaptive(ctx, x, size)),
        "_adaptive_avg_pool_backward": lambda ctx, grad, x: average_gradient(
            ctx, grad, adaptive(ctx, x, grad.size[-dims:])
        ),
        "adaptive_max_pool": lambda ctx, x, size: maximum(ctx, x, adaptive(ctx, x, size)),
        "adaptive_max_pool_backward": lambda ctx, grad, x, at: maximum_gradient(
            ctx, grad, at, adaptive(ctx, x, grad.size[-dims:])
        ),
    }


for _dims in (2, 3):
    for _name, _rule in rules(_dims).items():
        lowering(getattr(aten, _name.replace("pool", f"pool{_dims}d")).default)(_rule)
