"""Scans: running sums, products, extrema and their places. The result is always a buffer.

Eager accumulates integers in int64, half types in float32 and, on a CPU, float32 in float64.
The real compiler: make_scan, cumsum in torch/_inductor/lowering.py.
"""

from __future__ import annotations

import torch

from minicompile.errors import Unsupported
from minicompile.lowering.context import LoweringContext, Rule, lowering
from minicompile.lowering.rules.common import aten, converted
from minicompile.lowering.value import TensorValue
from minicompile.lowering.views import wrap_dim
from minicompile.ops.dtypes import computation_dtype, sum_dtype
from minicompile.ops.table import POSITIONS, ScanKind


def scan(
    ctx: LoweringContext, kind: ScanKind, x: TensorValue, dim: int, dtype: torch.dtype
) -> TensorValue:
    """Scan x along `dim` in `dtype`; the result has x's dtype, or int64 for positions."""
    result = torch.int64 if kind in POSITIONS else x.dtype
    along = wrap_dim(dim, x.dim)
    return ctx.scan(
        kind, x.size, along, result, x.device, lambda ops, index: x.load_as(ops, index, dtype)
    )


def accumulation(kind: ScanKind) -> Rule:
    """Sums, products, and sums of exponentials; integers give int64 unless asked otherwise."""

    def rule(
        ctx: LoweringContext, x: TensorValue, dim: int, dtype: torch.dtype | None = None
    ) -> TensorValue:
        dtype = dtype or sum_dtype(x.dtype)
        if dtype is torch.bool or (kind == "logsumexp" and not dtype.is_floating_point):
            raise Unsupported(f"a running {kind} as {dtype}")
        wide = computation_dtype(sum_dtype(dtype))
        if dtype is torch.float32 and x.device.type == "cpu":
            wide = torch.float64
        return scan(ctx, kind, converted(ctx, x, dtype), dim, wide)

    return rule


lowering(aten.cumsum.default)(accumulation("sum"))
lowering(aten.cumprod.default)(accumulation("prod"))
lowering(aten.logcumsumexp.default)(accumulation("logsumexp"))


def extreme(kind: ScanKind, place: ScanKind) -> Rule:
    """The largest or smallest so far, and where it is: two scans that share their loops."""

    def rule(ctx: LoweringContext, x: TensorValue, dim: int) -> tuple[TensorValue, TensorValue]:
        dtype = torch.uint8 if x.dtype is torch.bool else computation_dtype(x.dtype)
        return scan(ctx, kind, x, dim, dtype), scan(ctx, place, x, dim, dtype)

    return rule


lowering(aten.cummax.default)(extreme("max", "argmax"))
lowering(aten.cummin.default)(extreme("min", "argmin"))
