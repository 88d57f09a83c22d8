"""Reductions. The result is always a buffer; half types accumulate in float32.

Means and variances are sums by now (aot/decompositions). The real compiler: make_reduction in
torch/_inductor/lowering.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minicompile.lowering.context import LoweringContext, Rule, lowering
from minicompile.lowering.rules.common import aten, canonical_dims, converted
from minicompile.lowering.value import TensorValue
from minicompile.ops.dtypes import computation_dtype
from minicompile.ops.handler import Index, Ops, V
from minicompile.ops.table import ReductionKind
from minicompile.shapes.expr import Size

Dims = int | Sequence[int] | None


def reduce(
    ctx: LoweringContext,
    kind: ReductionKind,
    x: TensorValue,
    dims: Sequence[int],
    keepdim: bool,
    *,
    source: torch.dtype | None = None,
    result: torch.dtype | None = None,
) -> TensorValue:
    """Reduce dimensions `dims` (sorted) of x, converted to `source` (x's dtype).

    The result is converted to `result` (`source`). Kept dimensions are loops of length 1.
    """
    source = source or x.dtype
    places = range(x.dim) if keepdim else [d for d in range(x.dim) if d not in dims]
    size: list[Size] = [1 if d in dims else x.size[d] for d in places]

    def body(ops: Ops, index: Sequence[Index], reduced: Sequence[Index]) -> V:
        at = dict(zip(places, index, strict=True)) | dict(zip(dims, reduced, strict=True))
        return x.load_as(ops, [at[d] for d in range(x.dim)], source)

    ranges = [x.size[d] for d in dims]
    return ctx.reduction(kind, size, ranges, result or source, x.device, body)


def accumulation(kind: ReductionKind) -> Rule:
    """sum or prod, in the dtype of eager's result."""

    def rule(
        ctx: LoweringContext,
        x: TensorValue,
        dim: Dims = None,
        keepdim: bool = False,
        dtype: torch.dtype | None = None,
    ) -> TensorValue:
        dtype = ctx.result.dtype
        narrow = converted(ctx, x, dtype) if dtype.is_floating_point else x  # eager rounds first
        dims = canonical_dims(dim, x.dim)
        source = computation_dtype(dtype)
        return reduce(ctx, kind, narrow, dims, keepdim, source=source, result=dtype)

    return rule


lowering(aten.sum.dim_IntList)(accumulation("sum"))
lowering(aten.prod.default, aten.prod.dim_int)(accumulation("prod"))


def extreme(kind: ReductionKind) -> Rule:
    """The largest or smallest, or where it is."""

    def rule(
        ctx: LoweringContext, x: TensorValue, dim: Dims = None, keepdim: bool = False
    ) -> TensorValue:
        dims = canonical_dims(dim, x.dim)
        return reduce(ctx, kind, x, dims, keepdim, result=ctx.result.dtype)

    return rule


lowering(aten.amax.default)(extreme("max"))
lowering(aten.amin.default)(extreme("min"))
lowering(aten.argmax.default)(extreme("argmax"))
lowering(aten.argmin.default)(extreme("argmin"))


def truth(kind: ReductionKind) -> Rule:
    def rule(
        ctx: LoweringContext, x: TensorValue, dim: Dims = None, keepdim: bool = False
    ) -> TensorValue:
        no_dims = isinstance(dim, tuple | list) and not dim  # any and all then reduce nothing
        dims = [] if no_dims else canonical_dims(dim, x.dim)
        return reduce(ctx, kind, x, dims, keepdim, source=torch.bool, result=ctx.result.dtype)

    return rule


lowering(aten.any.default, aten.any.dim, aten.any.dims)(truth("any"))
lowering(aten.all.default, aten.all.dim, aten.all.dims)(truth("all"))
