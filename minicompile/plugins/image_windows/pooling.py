"""Pooling: averages and maxima of windows (windows.py). Sums are added in eager's order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from minicompile.errors import Unsupported
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
    dilation: Any = (1,), ceil_mode: bool = False,
) -> Axes:  # fmt: skip
    """The two last dimensions, in so many windows; a list of one number is for both."""
    if ceil_mode or set(dilation) != {1}:
        raise Unsupported("windows with gaps, or beyond the padding")
    pairs = [[*each] * (3 - len(each)) for each in (kernel, step or kernel, padding)]
    both = zip(size[-2:], counts[-2:], *pairs, strict=True)
    return [Strided(*each) for each in both]


def turned(axes: Axes) -> Axes:
    """The windows of each element, as the elements of each window."""
    return [Turned(axis) for axis in axes]


def result_size(ctx: LoweringContext) -> Sequence[Size]:
    assert ctx.layouts[0] is not None
    return ctx.layouts[0].size


def divided(ctx: LoweringContext, x: TensorValue, count: int, dtype: torch.dtype) -> TensorValue:
    """Each element by a number, as `dtype`."""
    wide = computation_dtype(x.dtype)
    quotient = "truediv" if wide.is_floating_point else "truncdiv"

    def body(ops: Ops, index: Sequence[Index]) -> V:
        value = ops.pointwise(quotient, x.load_as(ops, index, wide), ops.constant(count, wide))
        return ops.to_dtype(value, dtype)

    return ctx.pointwise(x.size, x.device, body)


def averaged(
    size: Sequence[Size], counts: Sequence[Size], kernel: Any, step: Any = (), padding: Any = (0,),
    ceil_mode: bool = False, padded: bool = True, divisor: int | None = None,
) -> tuple[Axes, int]:  # fmt: skip
    """Windows, and the elements of each."""
    if divisor or not (padded or set(padding) == {0}):
        raise Unsupported("averages of some elements of a window")
    axes = strided(size, counts, kernel, step, padding, ceil_mode=ceil_mode)
    return axes, axes[0].taps * axes[1].taps


@lowering(aten.avg_pool2d.default)
def average(ctx: LoweringContext, x: TensorValue, *window: Any, **options: Any) -> TensorValue:
    axes, count = averaged(x.size, result_size(ctx), *window, **options)
    wide = converted(ctx, x, computation_dtype(x.dtype))
    return divided(ctx, folded(ctx, "sum", unfolded(ctx, wide, axes)), count, x.dtype)


@lowering(aten.avg_pool2d_backward.default)
def average_gradient(
    ctx: LoweringContext, grad: TensorValue, x: TensorValue, *window: Any
) -> TensorValue:
    axes, count = averaged(x.size, grad.size, *window)
    part = divided(ctx, grad, count, summation_dtype(grad))
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
