"""What rules share: broadcasting, operands in the dtype eager computes in, numbers as constants."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from minicompile.errors import Unsupported
from minicompile.lowering import views
from minicompile.lowering.context import LoweringContext
from minicompile.lowering.ir import Layout
from minicompile.lowering.promotion import Operand, Scalar, promote
from minicompile.lowering.value import LazyValue, TensorValue
from minicompile.ops.dtypes import computation_dtype
from minicompile.ops.handler import Index, Ops, V
from minicompile.shapes.expr import ZERO, Size, same

aten = torch.ops.aten
prims = torch.ops.prims

Formula = Callable[..., V]
"""`formula(ops, *values)`: one element from one element of each operand."""


def broadcast_size(*operands: Operand) -> tuple[Size, ...]:
    """The size of the result of an elementwise operation."""
    shapes = [o.size for o in operands if isinstance(o, TensorValue)]
    out: list[Size] = [1] * max((len(shape) for shape in shapes), default=0)
    for shape in shapes:
        for dim in range(1, len(shape) + 1):
            if out[-dim] == 1 or (isinstance(shape[-dim], int) and shape[-dim] != 1):
                out[-dim] = shape[-dim]
    return tuple(out)


def result_device(*operands: Operand) -> torch.device:
    """Where the result lies: with the tensors that have dimensions, else with any tensor."""
    tensors = [o for o in operands if isinstance(o, TensorValue)]
    chosen = next((t for t in tensors if t.size), None)
    if chosen is None:
        chosen = next((t for t in tensors if t.device.type != "cpu"), tensors[0])
    return chosen.device


def on_device(ctx: LoweringContext, value: TensorValue, device: torch.device) -> TensorValue:
    """The value where a kernel on `device` can read it; another device's is copied by eager."""
    if value.device == device:
        return value
    if isinstance(value, LazyValue) and not value.inputs.buffers and not value.inputs.lazy:
        return ctx.pointwise(value.size, device, value.load)  # it reads no memory
    layout = Layout.contiguous(device, value.dtype, value.size)
    return move(ctx, value, device, layout)


def move(
    ctx: LoweringContext, value: TensorValue, device: torch.device, layout: Layout
) -> TensorValue:
    """An extern copy to another device."""
    found = ctx.extern(
        aten._to_copy.default,
        (value,),
        {"device": device, "memory_format": torch.contiguous_format},
        "copy between devices",
        [layout],
    )
    assert isinstance(found, TensorValue)
    return found


def broadcast_index(
    value: TensorValue, index: Sequence[Index], size: Sequence[Size]
) -> list[Index]:
    """The element of `value` at an index of a larger, broadcast size."""
    added = len(size) - len(value.size)
    return [ZERO if have == 1 else i for have, i in zip(value.size, index[added:], strict=True)]


def number(value: Scalar, dtype: torch.dtype) -> float | int | bool:
    """A Python number as `dtype` holds it, rounded for half types. Raises Unsupported if it does not fit."""
    if isinstance(value, complex):
        raise Unsupported("a complex number")
    if dtype is torch.bool:
        return bool(value)
    if dtype.is_floating_point:
        found = float(value)
        if math.isfinite(found) and abs(found) > torch.finfo(dtype).max:
            raise Unsupported(f"{value} does not fit {dtype}")
        half = computation_dtype(dtype) is not dtype
        return float(torch.tensor(found, dtype=dtype)) if half else found
    if isinstance(value, float) and not math.isfinite(value):
        raise Unsupported(f"{value} as {dtype}")
    info = torch.iinfo(dtype)
    if not info.min <= int(value) <= info.max:
        raise Unsupported(f"{value} does not fit {dtype}")
    return int(value)


def constant(ops: Ops, value: Scalar, dtype: torch.dtype) -> V:
    """A number, or a size known at run time, as a value."""
    if isinstance(value, sympy.Expr) and not value.is_number:
        return ops.index_expr(value, dtype)
    return ops.constant(number(value, dtype), dtype)


def load_as(
    ops: Ops, operand: Operand, index: Sequence[Index], size: Sequence[Size], dtype: torch.dtype
) -> V:
    """An operand's element, broadcast and converted."""
    if not isinstance(operand, TensorValue):
        return constant(ops, operand, dtype)
    value = operand.load(ops, broadcast_index(operand, index, size))
    return value if operand.dtype is dtype else ops.to_dtype(value, dtype)


def elementwise(
    ctx: LoweringContext,
    formula: Formula,
    *operands: Operand,
    dtype: torch.dtype | None = None,
    result: torch.dtype | None = None,
    wide: bool = True,
) -> LazyValue:
    """`formula` over broadcast operands, converted to `dtype` (by default eager's promotion of them).

    With `wide`, half types are computed in float32 and the result is rounded once, as one eager kernel does.
    `result` converts the formula's value; without it a wide formula is rounded to `dtype`.
    """
    dtype = dtype if dtype is not None else promote(*operands)
    compute = computation_dtype(dtype) if wide else dtype
    size, device = broadcast_size(*operands), result_device(*operands)
    there = [on_device(ctx, o, device) if isinstance(o, TensorValue) else o for o in operands]
    if result is None and compute is not dtype:
        result = dtype

    def body(ops: Ops, index: Sequence[Index]) -> V:
        found = formula(ops, *[load_as(ops, o, index, size, compute) for o in there])
        return found if result is None or result is compute else ops.to_dtype(found, result)

    return ctx.pointwise(size, device, body)


def converted(ctx: LoweringContext, value: TensorValue, dtype: torch.dtype) -> TensorValue:
    """The value in another dtype; itself if it has it."""
    if value.dtype is dtype:
        return value
    return ctx.pointwise(
        value.size, value.device, lambda ops, i: ops.to_dtype(value.load(ops, i), dtype), dtype
    )


def expanded(ctx: LoweringContext, value: TensorValue, size: Sequence[Size]) -> TensorValue:
    """The value broadcast to `size`, without a copy."""
    if len(size) == len(value.size) and all(map(same, size, value.size)):
        return value
    return ctx.view(value, views.expand(value.size, size))


def full(
    ctx: LoweringContext,
    size: Sequence[Size],
    value: Scalar,
    dtype: torch.dtype,
    device: torch.device,
) -> LazyValue:
    """One number everywhere."""
    return ctx.pointwise(size, device, lambda ops, _: constant(ops, value, dtype), dtype)


def within(ops: Ops, position: Index, low: Size, high: Size | None) -> V:
    """low <= position < high, leaving out a bound that can't fail (low of 0, no high)."""
    value = ops.index_expr(position, torch.int64)
    checks = []
    if not (isinstance(low, int) and low == 0):
        checks.append(ops.ge(value, constant(ops, low, torch.int64)))
    if high is not None:
        checks.append(ops.lt(value, constant(ops, high, torch.int64)))
    if not checks:
        return ops.constant(True, torch.bool)
    return checks[0] if len(checks) == 1 else ops.logical_and(checks[0], checks[1])


def canonical_dims(dim: Any, count: int) -> list[int]:
    """Sorted dimensions to reduce: None or nothing means all."""
    if dim is None or (isinstance(dim, tuple | list) and not dim):
        return list(range(count))
    chosen = [dim] if isinstance(dim, int) else dim
    return sorted({views.wrap_dim(d, count) for d in chosen}) if count else []
