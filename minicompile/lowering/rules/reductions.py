"""Reductions. The result is always a buffer; half types accumulate in float32, ints in int64.

Means and variances are sums by now (aot/decompositions). The real compiler: make_reduction in
torch/_inductor/lowering.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minicompile.errors import Unsupported
from minicompile.lowering.context import LoweringContext, Rule, lowering
from minicompile.lowering.rules.common import aten, canonical_dims, converted
from minicompile.lowering.value import TensorValue
from minicompile.ops.dtypes import computation_dtype, sum_dtype
from minicompile.ops.handler import Index, Ops, V
from minicompile.ops.table import POSITIONS, ReductionKind
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
    gone = set(dims)
    size: list[Size] = [1 if d in gone else s for d, s in enumerate(x.size)]
    if not keepdim:
        size = [s for d, s in enumerate(x.size) if d not in gone]

    def body(ops: Ops, index: Sequence[Index], rindex: Sequence[Index]) -> V:
        inner = iter(rindex)
        outer = iter([i for d, i in enumerate(index) if not (keepdim and d in gone)])
        return x.load_as(ops, [next(inner if d in gone else outer) for d in range(x.dim)], source)

    ranges = [x.size[d] for d in dims]
    return ctx.reduction(kind, size, ranges, result or source, x.device, body)


def accumulation(kind: ReductionKind) -> Rule:
    """sum or prod; of integers in int64."""

    def rule(
        ctx: LoweringContext,
        x: TensorValue,
        dim: Dims = None,
        keepdim: bool = False,
        dtype: torch.dtype | None = None,
    ) -> TensorValue:
        dtype = dtype or sum_dtype(x.dtype)
        if dtype is torch.bool:
            raise Unsupported(f"{kind} as bool")
        narrow = converted(ctx, x, dtype) if dtype.is_floating_point else x  # eager rounds first
        source, dims = computation_dtype(dtype), canonical_dims(dim, x.dim)
        return reduce(ctx, kind, narrow, dims, keepdim, source=source, result=dtype)

    return rule


lowering(aten.sum.dim_IntList)(accumulation("sum"))
lowering(aten.prod.default, aten.prod.dim_int)(accumulation("prod"))


def extreme(kind: ReductionKind, of_bools: ReductionKind | None = None) -> Rule:
    """The largest or smallest, or where it is; of bools any or all."""

    def rule(
        ctx: LoweringContext, x: TensorValue, dim: Dims = None, keepdim: bool = False
    ) -> TensorValue:
        dims = canonical_dims(dim, x.dim)
        if x.dtype is torch.bool and of_bools is not None:
            return reduce(ctx, of_bools, x, dims, keepdim)
        position = torch.int64 if kind in POSITIONS else None
        return reduce(ctx, kind, x, dims, keepdim, result=position)

    return rule


lowering(aten.amax.default)(extreme("max", of_bools="any"))
lowering(aten.amin.default)(extreme("min", of_bools="all"))
lowering(aten.argmax.default)(extreme("argmax"))
lowering(aten.argmin.default)(extreme("argmin"))


def truth(kind: ReductionKind) -> Rule:
    def rule(
        ctx: LoweringContext, x: TensorValue, dim: Dims = None, keepdim: bool = False
    ) -> TensorValue:
        no_dims = isinstance(dim, tuple | list) and not dim  # any and all then reduce nothing
        dims = [] if no_dims else canonical_dims(dim, x.dim)
        result = torch.uint8 if x.dtype is torch.uint8 else torch.bool  # eager's exception
        return reduce(ctx, kind, x, dims, keepdim, source=torch.bool, result=result)

    return rule


lowering(aten.any.default, aten.any.dim, aten.any.dims)(truth("any"))
lowering(aten.all.default, aten.all.dim, aten.all.dims)(truth("all"))
