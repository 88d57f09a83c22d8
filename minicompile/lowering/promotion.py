"""Type promotion as eager does it, for any number of operands.

Tensors with dimensions decide before 0-d tensors, and these before Python numbers; a weaker operand matters
only if its kind (bool < int < float) is higher. The real compiler: elementwise_dtypes in
torch/_prims_common/__init__.py; eager: ResultTypeState in aten/src/ATen/native/TypeProperties.cpp.
"""

from __future__ import annotations

import functools

import sympy
import torch

from minicompile.lowering.value import TensorValue
from minicompile.shapes.expr import Size

Scalar = Size | float | bool
Operand = TensorValue | Scalar


def scalar_dtype(value: Scalar) -> torch.dtype:
    """A Python number's dtype as an operand."""
    if isinstance(value, bool):
        return torch.bool
    return torch.int64 if isinstance(value, int | sympy.Expr) else torch.get_default_dtype()


def promote(*operands: Operand) -> torch.dtype:
    """The dtype in which eager computes with these operands."""
    strengths: list[torch.dtype | None] = [None, None, None]
    for operand in operands:
        if isinstance(operand, TensorValue):
            strength, dtype = (0 if operand.size else 1), operand.dtype
        else:
            strength, dtype = 2, scalar_dtype(operand)
        have = strengths[strength]
        strengths[strength] = dtype if have is None else torch.promote_types(have, dtype)
    return functools.reduce(_stronger, [d for d in strengths if d is not None])


def promote_float(*operands: Operand) -> torch.dtype:
    """As `promote`, with ints and bools becoming the default float: true division, exp, ..."""
    dtype = promote(*operands)
    return dtype if dtype.is_floating_point else torch.get_default_dtype()


def _stronger(strong: torch.dtype, weak: torch.dtype) -> torch.dtype:
    return torch.promote_types(strong, weak) if _kind(weak) > _kind(strong) else strong


def _kind(dtype: torch.dtype) -> int:
    if dtype is torch.bool:
        return 0
    return 2 if dtype.is_floating_point else 1
