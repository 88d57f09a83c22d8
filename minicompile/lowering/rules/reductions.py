"""Reductions. The result is always a buffer; half types accumulate in float32, ints in int64.

The real compiler: make_reduction, var_mean_ in torch/_inductor/lowering.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from minicompile.errors import Unsupported
from minicompile.lowering import views
from minicompile.lowering.context import LoweringContext
from minicompile.lowering.promotion import Scalar
from minicompile.lowering.registry import Rule, lowering
from minicompile.lowering.rules.common import (
    aten,
    canonical_dims,
    constant,
    converted,
    elementwise,
)
from minicompile.lowering.value import TensorValue
from minicompile.ops.dtypes import computation_dtype
from minicompile.ops.handler import Index, Ops, V
from minicompile.ops.table import ReductionKind
from minicompile.shapes.expr import ZERO, Size, product


def reduce(
    ctx: LoweringContext,
    kind: ReductionKind,
    x: TensorValue,
    dims: Sequence[int],
    keepdim: bool,
    *,
    source: torch.dtype | None = None,
    result: torch.dtype | None = None,
    prepare: Callable[[Ops, V, Sequence[Index]], V] | None = None,
) -> TensorValue:
    """Reduce dimensions `dims` (sorted) of x.

    Values are converted to `source` (x's dtype), then given to `prepare` with their index; the reduced
    value is converted to `result` (`source`). Kept dimensions are loops of length 1.
    """
    source = source or x.dtype
    gone = set(dims)
    size: list[Size] = [1 if d in gone else s for d, s in enumerate(x.size)]
    if not keepdim:
        size = [s for d, s in enumerate(x.size) if d not in gone]

    def body(ops: Ops, index: Sequence[Index], rindex: Sequence[Index]) -> V:
        outer, inner = iter(index), iter(rindex)
        at: list[Index] = []
        for d in range(x.dim):
            if d in gone:
                at.append(next(inner))
                if keepdim:
                    next(outer)
            else:
                at.append(next(outer))
        value = x.load(ops, at)
        value = value if x.dtype is source else ops.to_dtype(value, source)
        return prepare(ops, value, at) if prepare is not None else value

    ranges = [x.size[d] for d in dims]
    return ctx.reduction(kind, size, ranges, source, result or source, x.device, body)


def sum_dtype(x: TensorValue, dtype: torch.dtype | None) -> torch.dtype:
    """Ints and bools are summed as int64."""
    if dtype is not None:
        return dtype
    return x.dtype if x.dtype.is_floating_point else torch.int64


def reduce_sum(
    ctx: LoweringContext,
    kind: ReductionKind,
    x: TensorValue,
    dim: Any,
    keepdim: bool,
    dtype: torch.dtype | None,
) -> TensorValue:
    dtype = sum_dtype(x, dtype)
    if dtype is torch.bool:
        raise Unsupported(f"{kind} as bool")
    dims = canonical_dims(dim, x.dim)
    narrow = converted(ctx, x, dtype) if dtype.is_floating_point else x  # eager rounds first
    return reduce(ctx, kind, narrow, dims, keepdim, source=computation_dtype(dtype), result=dtype)


@lowering(aten.sum.default)
def sum_all(ctx: LoweringContext, x: TensorValue, dtype: torch.dtype | None = None) -> TensorValue:
    return reduce_sum(ctx, "sum", x, None, False, dtype)


@lowering(aten.sum.dim_IntList)
def sum_dims(
    ctx: LoweringContext,
    x: TensorValue,
    dim: Sequence[int] | None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> TensorValue:
    return reduce_sum(ctx, "sum", x, dim, keepdim, dtype)


@lowering(aten.prod.default)
def prod_all(ctx: LoweringContext, x: TensorValue, dtype: torch.dtype | None = None) -> TensorValue:
    return reduce_sum(ctx, "prod", x, None, False, dtype)


@lowering(aten.prod.dim_int)
def prod_dim(
    ctx: LoweringContext,
    x: TensorValue,
    dim: int,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> TensorValue:
    return reduce_sum(ctx, "prod", x, dim, keepdim, dtype)


@lowering(aten.mean.default)
def mean_all(ctx: LoweringContext, x: TensorValue, dtype: torch.dtype | None = None) -> TensorValue:
    return mean_dims(ctx, x, None, False, dtype)


@lowering(aten.mean.dim)
def mean_dims(
    ctx: LoweringContext,
    x: TensorValue,
    dim: Sequence[int] | None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> TensorValue:
    dtype = dtype or x.dtype
    if not dtype.is_floating_point:
        raise Unsupported("mean of integers")
    dims = canonical_dims(dim, x.dim)
    return converted(ctx, wide_mean(ctx, converted(ctx, x, dtype), dims, keepdim), dtype)


def wide_mean(
    ctx: LoweringContext, x: TensorValue, dims: Sequence[int], keepdim: bool
) -> TensorValue:
    """The mean in the computation dtype, not rounded."""
    wide = computation_dtype(x.dtype)
    total = reduce(ctx, "sum", x, dims, keepdim, source=wide)
    count = product(x.size[d] for d in dims)
    return divided(ctx, total, count)


def divided(ctx: LoweringContext, x: TensorValue, count: Scalar) -> TensorValue:
    return elementwise(
        ctx, lambda ops, v: ops.truediv(v, constant(ops, count, x.dtype)), x, wide=False
    )


@lowering(aten.var.correction)
def var(
    ctx: LoweringContext,
    x: TensorValue,
    dim: Sequence[int] | None = None,
    correction: Scalar | None = None,
    keepdim: bool = False,
) -> TensorValue:
    return var_mean(ctx, x, dim, correction, keepdim)[0]


@lowering(aten.std.correction)
def std(
    ctx: LoweringContext,
    x: TensorValue,
    dim: Sequence[int] | None = None,
    correction: Scalar | None = None,
    keepdim: bool = False,
) -> TensorValue:
    wide, _ = wide_var_mean(ctx, x, dim, correction, keepdim)
    root = elementwise(ctx, lambda ops, v: ops.sqrt(v), wide, wide=False)
    return converted(ctx, root, x.dtype)


@lowering(aten.var_mean.correction)
def var_mean(
    ctx: LoweringContext,
    x: TensorValue,
    dim: Sequence[int] | None = None,
    correction: Scalar | None = None,
    keepdim: bool = False,
) -> tuple[TensorValue, TensorValue]:
    variance, mean = wide_var_mean(ctx, x, dim, correction, keepdim)
    return converted(ctx, variance, x.dtype), converted(ctx, mean, x.dtype)


def wide_var_mean(
    ctx: LoweringContext,
    x: TensorValue,
    dim: Sequence[int] | None,
    correction: Scalar | None,
    keepdim: bool,
) -> tuple[TensorValue, TensorValue]:
    """Two passes: the mean, then the squared distances from it. In the computation dtype."""
    if not x.dtype.is_floating_point:
        raise Unsupported("variance of integers")
    ctx.reuse(x)
    dims = canonical_dims(dim, x.dim)
    wide = computation_dtype(x.dtype)
    kept = wide_mean(ctx, x, dims, keepdim=True)
    ctx.realize(kept, "mean that the variance's second pass reads")

    def squared_distance(ops: Ops, value: V, at: Sequence[Index]) -> V:
        center = kept.load(ops, [ZERO if d in dims else i for d, i in enumerate(at)])
        step = ops.sub(value, center)
        return ops.mul(step, step)

    squares = reduce(ctx, "sum", x, dims, keepdim, source=wide, prepare=squared_distance)
    count = product(x.size[d] for d in dims)
    free = count - (1 if correction is None else correction)
    if isinstance(free, int | float):
        free = max(free, 0)
    mean = kept if keepdim or not dims else ctx.view(kept, views.squeeze(kept.size, dims))
    return divided(ctx, squares, free), mean


# -- extremes


def extreme(kind: ReductionKind, logic: ReductionKind) -> Callable[..., TensorValue]:
    """max or min over dimensions; of bools it is any or all."""

    def rule(
        ctx: LoweringContext, x: TensorValue, dim: Any = None, keepdim: bool = False
    ) -> TensorValue:
        chosen = logic if x.dtype is torch.bool else kind
        dims = canonical_dims(dim, x.dim)
        _nonempty(kind, x, dims)
        return reduce(ctx, chosen, x, dims, keepdim)

    return rule


def _nonempty(kind: str, x: TensorValue, dims: Sequence[int]) -> None:
    if any(isinstance(x.size[d], int) and x.size[d] == 0 for d in dims):
        raise Unsupported(f"{kind} of no elements")


amax = lowering(aten.amax.default)(extreme("max", "any"))
amin = lowering(aten.amin.default)(extreme("min", "all"))


@lowering(aten.max.default)
def max_all(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    return amax(ctx, x)


@lowering(aten.min.default)
def min_all(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    return amin(ctx, x)


def position_of_extreme(kind: ReductionKind) -> Callable[..., TensorValue]:
    def rule(
        ctx: LoweringContext, x: TensorValue, dim: int | None = None, keepdim: bool = False
    ) -> TensorValue:
        dims = canonical_dims(dim, x.dim)
        _nonempty(kind, x, dims)
        source = torch.uint8 if x.dtype is torch.bool else x.dtype
        return reduce(ctx, kind, x, dims, keepdim, source=source, result=torch.int64)

    return rule


argmax = lowering(aten.argmax.default)(position_of_extreme("argmax"))
argmin = lowering(aten.argmin.default)(position_of_extreme("argmin"))


@lowering(aten.max.dim)
def max_dim(
    ctx: LoweringContext, x: TensorValue, dim: int, keepdim: bool = False
) -> tuple[TensorValue, TensorValue]:
    ctx.reuse(x)
    return amax(ctx, x, dim, keepdim), argmax(ctx, x, dim, keepdim)


@lowering(aten.min.dim)
def min_dim(
    ctx: LoweringContext, x: TensorValue, dim: int, keepdim: bool = False
) -> tuple[TensorValue, TensorValue]:
    ctx.reuse(x)
    return amin(ctx, x, dim, keepdim), argmin(ctx, x, dim, keepdim)


@lowering(aten.aminmax.default)
def aminmax(
    ctx: LoweringContext, x: TensorValue, dim: int | None = None, keepdim: bool = False
) -> tuple[TensorValue, TensorValue]:
    ctx.reuse(x)
    return amin(ctx, x, dim, keepdim), amax(ctx, x, dim, keepdim)


# -- truth


def truth(kind: ReductionKind) -> Rule:
    def rule(
        ctx: LoweringContext, x: TensorValue, dim: Any = None, keepdim: bool = False
    ) -> TensorValue:
        no_dims = isinstance(dim, tuple | list) and not dim  # any and all then reduce nothing
        dims = [] if no_dims else canonical_dims(dim, x.dim)
        result = torch.uint8 if x.dtype is torch.uint8 else torch.bool  # eager's exception
        return reduce(ctx, kind, x, dims, keepdim, source=torch.bool, result=result)

    return rule


lowering(aten.any.default, aten.any.dim, aten.any.dims)(truth("any"))
lowering(aten.all.default, aten.all.dim, aten.all.dims)(truth("all"))


@lowering(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count_nonzero(ctx: LoweringContext, x: TensorValue, dim: Any = None) -> TensorValue:
    truths = converted(ctx, x, torch.bool)
    return reduce(ctx, "sum", truths, canonical_dims(dim, x.dim), False, source=torch.int64)
