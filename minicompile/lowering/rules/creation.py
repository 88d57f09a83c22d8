"""New tensors: computed where they are read, from numbers and indices.

Integers are computed as integers: `arange(11) * 1_000_000_000` must be right in int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from minicompile.errors import Unsupported
from minicompile.lowering.context import LoweringContext
from minicompile.lowering.registry import lowering
from minicompile.lowering.rules.common import Scalar, aten, constant, prims
from minicompile.lowering.value import Positions, TensorValue
from minicompile.ops.dtypes import computation_dtype, is_int
from minicompile.ops.handler import Index, Ops, V
from minicompile.shapes.expr import Size, to_size


def target_device(device: torch.device) -> torch.device:
    """The device of a new tensor, with its index as eager reports it."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@lowering(aten.full.default)
def full(
    ctx: LoweringContext,
    size: Sequence[Size],
    value: Scalar,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> TensorValue:
    """One number everywhere."""
    where = target_device(device)
    return ctx.pointwise(size, where, lambda ops, _: constant(ops, value, dtype), dtype)


@lowering(prims.iota.default)
def iota(
    ctx: LoweringContext,
    length: Size,
    *,
    start: Size,
    step: Size,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool = False,
) -> TensorValue:
    """start + i * step, in integers. What indexes with it needs no load."""
    if not is_int(dtype):
        raise Unsupported(f"an integer sequence of {dtype}")
    found = ctx.pointwise(
        (length,),
        target_device(device),
        lambda ops, i: ops.index_expr(i[0] * step + start, dtype),
        dtype,
    )
    last = to_size(start + step * (length - 1))
    low, high = (last, start) if isinstance(step, int) and step < 0 else (start, last)
    found.storage.positions = Positions(lambda i: i[0] * step + start, low, high)
    return found


@lowering(aten.arange.start_step)
def arange(
    ctx: LoweringContext,
    start: Scalar,
    end: Scalar,
    step: Scalar = 1,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **_: Any,
) -> TensorValue:
    """start + i * step as a float: of whole numbers, which are exact. Eager rounds others in its own way."""
    dtype = dtype or torch.get_default_dtype()
    if is_int(dtype):
        raise Unsupported("a sequence of integers with fractional bounds")
    if not all(isinstance(n, int | sympy.Expr) for n in (start, end, step)):
        raise Unsupported("a sequence with a fractional step")
    wide = computation_dtype(dtype)

    def body(ops: Ops, index: Sequence[Index]) -> V:
        return ops.to_dtype(ops.index_expr(index[0] * step + start, wide), dtype)

    return ctx.pointwise(ctx.result_size, target_device(torch.device(device or "cpu")), body, dtype)
