"""Pooling: averages and maxima of windows (windows.py). Sums are added in eager's order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from minicompile.lowering.context import LoweringContext, lowering
from minicompile.lowering.rules.common import aten, converted
from minicompile.lowering.value import TensorValue
from minicompile.ops.dtypes import computation_dtype
from minicompile.ops.handler import Index, Ops, V
from minicompile.ops.table import reduction_identity
from minicompile.plugins.image_windows.windows import (
    INT,
    Strided,
    Turned,
    folded,
    summation_dtype,
    unfolded,
)
from minicompile.shapes.expr import Size

Axes = Sequence[Strided]
NOWHERE = 2**62
"""A position after every element."""


def strided(
    size: Sequence[Size], counts: Sequence[Size], kernel: Any, step: Any = (), padding: Any = (0,),
    dilation: Any = (1,), ceil_mode: bool = False, padded: bool = True,
) -> Axes:  # fmt: skip
    """The two last dimensions, in so many windows; a list of one number is for both."""
    pairs = [[*each] * (3 - len(each)) for each in (kernel, step or kernel, padding, dilation)]
    both = zip(size[-2:], counts[-2:], *pairs, strict=True)
    return [Strided(n, count, k, s, p, d, padded) for n, count, k, s, p, d in both]


def turned(axes: Axes) -> Axes:
    """The windows of each element, as the elements of each window."""
    return [Turned(axis) for axis in axes]


def result_size(ctx: LoweringContext) -> Sequence[Size]:
    assert ctx.layouts[0] is not None
    return ctx.layouts[0].size


def divided(
    ctx: LoweringContext, x: TensorValue, axes: Axes, divisor: int | None, dtype: torch.dtype
) -> TensorValue:
    """Each window's element by the divisor, or by how many elements the window has, as `dtype`."""
    wide = computation_dtype(x.dtype)
    quotient = "truediv" if wide.is_floating_point else "truncdiv"

    def body(ops: Ops, index: Sequence[Index]) -> V:
        value = x.load_as(ops, index, wide)
        if divisor:
            count = ops.constant(divisor, INT)
        else:
            count = ops.mul(*(a.length(ops, i) for a, i in zip(axes, index[-2:], strict=True)))
        value = ops.pointwise(quotient, value, ops.to_dtype(count, wide))
        return ops.to_dtype(value, dtype)

    return ctx.pointwise(x.size, x.device, body)


@lowering(aten.avg_pool2d.default)
def average(
    ctx: LoweringContext, x: TensorValue, kernel: Any, step: Any = (), padding: Any = (0,),
    ceil_mode: bool = False, padded: bool = True, divisor: int | None = None,
) -> TensorValue:  # fmt: skip
    axes = strided(x.size, result_size(ctx), kernel, step, padding, padded=padded)
    wide = converted(ctx, x, computation_dtype(x.dtype))
    return divided(ctx, folded(ctx, "sum", unfolded(ctx, wide, axes)), axes, divisor, x.dtype)


@lowering(aten.avg_pool2d_backward.default)
def average_gradient(
    ctx: LoweringContext, grad: TensorValue, x: TensorValue, kernel: Any, step: Any, padding: Any,
    ceil_mode: bool, padded: bool, divisor: int | None,
) -> TensorValue:  # fmt: skip
    axes = strided(x.size, grad.size, kernel, step, padding, padded=padded)
    part = divided(ctx, grad, axes, divisor, summation_dtype(grad))
    return converted(ctx, folded(ctx, "sum", unfolded(ctx, part, turned(axes))), grad.dtype)


def flat(axes: Axes, places: Sequence[Index]) -> Index:
    """The number that stands for an element in the indices of maxima."""
    return places[-2] * axes[1].extent + places[-1]


@lowering(aten.max_pool2d_with_indices.default)
def maximum(
    ctx: LoweringContext, x: TensorValue, *window: Any, **options: Any
) -> tuple[TensorValue, TensorValue]:
    """(the largest elements, where they are): the first of equals, but the last NaN."""
    axes = strided(x.size, result_size(ctx), *window, **options)
    windows = unfolded(ctx, x, axes, reduction_identity("max", x.dtype))
    best = folded(ctx, "max", windows)
    numbered = ctx.pointwise(x.size, x.device, lambda ops, i: ops.index_expr(flat(axes, i), INT))
    places = unfolded(ctx, numbered, axes, NOWHERE)

    def key(ops: Ops, index: Sequence[Index]) -> V:
        """The smallest is wanted; a NaN's is negative."""
        value, at = windows.load(ops, index), places.load(ops, index)
        chosen = ops.eq(value, best.load(ops, index[:-2]))
        found = ops.where(chosen, at, ops.constant(NOWHERE, INT))
        if not x.dtype.is_floating_point:
            return found
        return ops.where(ops.isnan(value), ops.bitwise_not(at), found)

    keys = folded(ctx, "min", ctx.pointwise(windows.size, x.device, key))

    def position(ops: Ops, index: Sequence[Index]) -> V:
        found = keys.load(ops, index)
        return ops.where(ops.lt(found, ops.constant(0, INT)), ops.bitwise_not(found), found)

    return best, ctx.pointwise(best.size, x.device, position)


@lowering(aten.max_pool2d_with_indices_backward.default)
def maximum_gradient(
    ctx: LoweringContext, grad: TensorValue, x: TensorValue, *window: Any
) -> TensorValue:
    """Each window gives its gradient to its largest element, whose position is the last argument."""
    axes = strided(x.size, grad.size, *window[:-1])
    positions = unfolded(ctx, window[-1], turned(axes), -1)
    parts = unfolded(ctx, converted(ctx, grad, summation_dtype(grad)), turned(axes))

    def body(ops: Ops, index: Sequence[Index]) -> V:
        mine = ops.index_expr(flat(axes, index[:-2]), INT)
        chosen = ops.eq(positions.load(ops, index), mine)
        return ops.where(chosen, parts.load(ops, index), ops.constant(0.0, parts.dtype))

    terms = ctx.pointwise(parts.size, grad.device, body)
    return converted(ctx, folded(ctx, "sum", terms), grad.dtype)
