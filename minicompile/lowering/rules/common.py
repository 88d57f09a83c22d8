"""What rules share: operands broadcast to one size, numbers as constants, conversions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import sympy
import torch

from minicompile.errors import Unsupported
from minicompile.lowering import views
from minicompile.lowering.context import LoweringContext
from minicompile.lowering.value import TensorValue
from minicompile.ops.dtypes import computation_dtype, is_int
from minicompile.ops.handler import Index, Ops, V
from minicompile.shapes.expr import Size, is_float

aten = torch.ops.aten
prims = torch.ops.prims

Scalar = Size | float | bool
Operand = TensorValue | Scalar
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


def common_dtype(*operands: Operand) -> torch.dtype:
    """The tensors' dtype: eager's promotions are conversions in the graph by now (aot/levels.py)."""
    found = {o.dtype for o in operands if isinstance(o, TensorValue)}
    if len(found) != 1:
        raise Unsupported("operands of several dtypes")
    return found.pop()


def common_device(*operands: Operand) -> torch.device:
    """Where the operands lie; formulas that read nothing can be computed anywhere."""
    tensors = [o for o in operands if isinstance(o, TensorValue)]
    reading = [o for o in tensors if o.storage.buffer is not None or o.storage.cost.storages]
    found = {o.device for o in reading or tensors}
    if len(found) != 1:
        raise Unsupported("operands on several devices")
    return found.pop()


def number(value: Scalar, dtype: torch.dtype) -> float | int | bool:
    """A Python number as `dtype` holds it, rounded for half types. Raises Unsupported if it does not fit."""
    if isinstance(value, sympy.Expr) and not value.is_number:
        raise Unsupported("a number known at run time")
    if dtype is torch.bool:
        return bool(value)
    if dtype.is_floating_point:
        found = float(value)
        if math.isfinite(found) and abs(found) > torch.finfo(dtype).max:
            raise Unsupported(f"{value} does not fit {dtype}")
        half = computation_dtype(dtype) is not dtype
        return float(torch.tensor(found, dtype=dtype)) if half else found
    info = torch.iinfo(dtype)
    if not info.min <= int(value) <= info.max:
        raise Unsupported(f"{value} does not fit {dtype}")
    return int(value)


def wrapped(value: int, dtype: torch.dtype) -> int:
    """A number as an integer operand: what doesn't fit wraps around, in eager too."""
    low = torch.iinfo(dtype).min
    return (value - low) % 2 ** (8 * dtype.itemsize) + low


def constant(ops: Ops, value: Scalar, dtype: torch.dtype) -> V:
    """A number, or one known at run time, as a value."""
    if isinstance(value, sympy.Expr) and not value.is_number:
        if is_float(value) and not dtype.is_floating_point:
            raise Unsupported(f"a float known at run time as {dtype}")
        return ops.index_expr(value, dtype)
    return ops.constant(number(value, dtype), dtype)


def elementwise(
    ctx: LoweringContext,
    formula: Formula,
    *operands: Operand,
    dtypes: Sequence[torch.dtype] | None = None,
) -> TensorValue:
    """`formula` over broadcast operands, each converted to its own of `dtypes` (default: the common one)."""
    chosen = dtypes if dtypes is not None else [common_dtype(*operands)] * len(operands)
    size, device = broadcast_size(*operands), common_device(*operands)

    def body(ops: Ops, index: Sequence[Index]) -> V:
        def element(operand: Operand, dtype: torch.dtype) -> V:
            if isinstance(operand, int) and is_int(dtype):
                operand = wrapped(operand, dtype)
            if not isinstance(operand, TensorValue):
                return constant(ops, operand, dtype)
            return operand.load_as(ops, views.broadcast_index(index, operand.size, size), dtype)

        return formula(ops, *map(element, operands, chosen))

    return ctx.pointwise(size, device, body)


def converted(ctx: LoweringContext, value: TensorValue, dtype: torch.dtype) -> TensorValue:
    """The value in another dtype; itself if it has it."""
    if value.dtype is dtype:
        return value
    return ctx.pointwise(value.size, value.device, lambda ops, i: value.load_as(ops, i, dtype))


def canonical_dims(dim: int | Sequence[int] | None, count: int) -> list[int]:
    """Sorted dimensions to reduce: None or nothing means all."""
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return list(range(count))
    chosen = [dim] if isinstance(dim, int) else dim
    return sorted({views.wrap_dim(d, count) for d in chosen}) if count else []
