"""Scans: running sums and products. The result is always a buffer.

Eager accumulates integers in int64, half types in float32 and, on a CPU, float32 in float64.
The real compiler: make_scan, cumsum in torch/_inductor/lowering.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minicompile.errors import Unsupported
from minicompile.lowering.context import LoweringContext, Rule, lowering
from minicompile.lowering.rules.common import aten, converted
from minicompile.lowering.value import TensorValue
from minicompile.lowering.views import wrap_dim
from minicompile.ops.dtypes import computation_dtype, sum_dtype
from minicompile.ops.handler import Index, Ops, V
from minicompile.ops.table import ScanKind


def accumulation(kind: ScanKind) -> Rule:
    """Sums and products; integers give int64 unless asked otherwise."""

    def rule(
        ctx: LoweringContext, x: TensorValue, dim: int, dtype: torch.dtype | None = None
    ) -> TensorValue:
        dtype = ctx.result.dtype
        if dtype is torch.bool:
            raise Unsupported(f"a running {kind} as {dtype}")
        wide = computation_dtype(sum_dtype(dtype))
        if dtype is torch.float32 and x.device.type == "cpu":
            wide = torch.float64
        narrow = converted(ctx, x, dtype)

        def body(ops: Ops, index: Sequence[Index]) -> V:
            return narrow.load_as(ops, index, wide)

        return ctx.scan(kind, x.size, wrap_dim(dim, x.dim), dtype, x.device, body)

    return rule


lowering(aten.cumsum.default)(accumulation("sum"))
lowering(aten.cumprod.default)(accumulation("prod"))
