"""The arithmetic of loop bodies: one row per pointwise operation, shared by every `ops` handler.

A row gives the arity, the dtype of the result, eager's own function (the reference semantics: what an
interpreter runs and a printer must match) and a rough cost. Printers keep their own tables of how to write
each operation; a test checks that they cover this one. The real compiler: torch/_inductor/ops_handler.py,
codegen/common.py (OpOverrides) and dtype_propagation.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

ResultType = Literal["same", "bool", "float"]


@dataclass(frozen=True)
class OpSpec:
    """`result`: "same" (the operands' dtype), "bool", or "float" (float operands only, same dtype)."""

    name: str
    arity: int
    result: ResultType
    reference: Callable[..., Any]
    flops: int = 1


def _trunc_div(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.div(a, b, rounding_mode="trunc")


def _floor_div(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.div(a, b, rounding_mode="floor")


_ROWS: list[OpSpec] = [
    # arithmetic: operands of one dtype, result of that dtype
    OpSpec("add", 2, "same", torch.add),
    OpSpec("sub", 2, "same", torch.sub),
    OpSpec("mul", 2, "same", torch.mul),
    OpSpec("truediv", 2, "float", torch.true_divide, 4),
    OpSpec("floordiv", 2, "same", _floor_div, 6),
    OpSpec("truncdiv", 2, "same", _trunc_div, 6),
    OpSpec("remainder", 2, "same", torch.remainder, 6),
    OpSpec("fmod", 2, "same", torch.fmod, 6),
    OpSpec("maximum", 2, "same", torch.maximum),
    OpSpec("minimum", 2, "same", torch.minimum),
    OpSpec("pow", 2, "same", torch.pow, 20),
    OpSpec("atan2", 2, "float", torch.atan2, 20),
    OpSpec("copysign", 2, "float", torch.copysign),
    OpSpec("hypot", 2, "float", torch.hypot, 8),
    OpSpec("neg", 1, "same", torch.neg),
    OpSpec("abs", 1, "same", torch.abs),
    OpSpec("sign", 1, "same", torch.sign),
    OpSpec("floor", 1, "same", torch.floor),
    OpSpec("ceil", 1, "same", torch.ceil),
    OpSpec("trunc", 1, "same", torch.trunc),
    OpSpec("round", 1, "same", torch.round),
    OpSpec("fma", 3, "float", lambda a, b, c: torch.addcmul(c, a, b), 2),
    # transcendental
    OpSpec("sqrt", 1, "float", torch.sqrt, 4),
    OpSpec("rsqrt", 1, "float", torch.rsqrt, 4),
    OpSpec("reciprocal", 1, "float", torch.reciprocal, 4),
    OpSpec("exp", 1, "float", torch.exp, 12),
    OpSpec("exp2", 1, "float", torch.exp2, 12),
    OpSpec("expm1", 1, "float", torch.expm1, 14),
    OpSpec("log", 1, "float", torch.log, 12),
    OpSpec("log2", 1, "float", torch.log2, 12),
    OpSpec("log10", 1, "float", torch.log10, 12),
    OpSpec("log1p", 1, "float", torch.log1p, 14),
    OpSpec("sin", 1, "float", torch.sin, 16),
    OpSpec("cos", 1, "float", torch.cos, 16),
    OpSpec("tan", 1, "float", torch.tan, 20),
    OpSpec("asin", 1, "float", torch.asin, 20),
    OpSpec("acos", 1, "float", torch.acos, 20),
    OpSpec("atan", 1, "float", torch.atan, 20),
    OpSpec("sinh", 1, "float", torch.sinh, 20),
    OpSpec("cosh", 1, "float", torch.cosh, 20),
    OpSpec("tanh", 1, "float", torch.tanh, 16),
    OpSpec("sigmoid", 1, "float", torch.sigmoid, 16),
    OpSpec("erf", 1, "float", torch.erf, 20),
    # comparison
    OpSpec("eq", 2, "bool", torch.eq),
    OpSpec("ne", 2, "bool", torch.ne),
    OpSpec("lt", 2, "bool", torch.lt),
    OpSpec("le", 2, "bool", torch.le),
    OpSpec("gt", 2, "bool", torch.gt),
    OpSpec("ge", 2, "bool", torch.ge),
    OpSpec("isnan", 1, "bool", torch.isnan),
    OpSpec("isinf", 1, "bool", torch.isinf),
    OpSpec("signbit", 1, "bool", torch.signbit),
    # logic on bools, bits on ints and bools
    OpSpec("logical_and", 2, "bool", torch.logical_and),
    OpSpec("logical_or", 2, "bool", torch.logical_or),
    OpSpec("logical_xor", 2, "bool", torch.logical_xor),
    OpSpec("logical_not", 1, "bool", torch.logical_not),
    OpSpec("bitwise_and", 2, "same", torch.bitwise_and),
    OpSpec("bitwise_or", 2, "same", torch.bitwise_or),
    OpSpec("bitwise_xor", 2, "same", torch.bitwise_xor),
    OpSpec("bitwise_not", 1, "same", torch.bitwise_not),
    OpSpec("lshift", 2, "same", torch.bitwise_left_shift),
    OpSpec("rshift", 2, "same", torch.bitwise_right_shift),
    # where(condition, a, b): a and b of one dtype
    OpSpec("where", 3, "same", torch.where),
]

POINTWISE: dict[str, OpSpec] = {row.name: row for row in _ROWS}

ReductionKind = Literal["sum", "prod", "max", "min", "any", "all", "argmax", "argmin"]

REDUCTION_KINDS: tuple[ReductionKind, ...] = (
    "sum",
    "prod",
    "max",
    "min",
    "any",
    "all",
    "argmax",
    "argmin",
)


def reduction_identity(kind: ReductionKind, dtype: torch.dtype) -> float | int | bool:
    """The value that changes nothing: what an accumulator starts with and a masked lane holds.

    argmax and argmin give that of max and min; their position starts at 0.
    """
    if kind == "sum":
        return 0.0 if dtype.is_floating_point else 0
    if kind == "prod":
        return 1.0 if dtype.is_floating_point else 1
    if kind == "any":
        return False
    if kind == "all":
        return True
    low = kind in ("max", "argmax")
    if dtype.is_floating_point:
        return float("-inf") if low else float("inf")
    if dtype is torch.bool:
        return not low
    info = torch.iinfo(dtype)
    return info.min if low else info.max


def result_dtype(name: str, operands: tuple[torch.dtype, ...]) -> torch.dtype:
    """Dtype of a pointwise operation. Raises TypeError when operands differ or aren't allowed."""
    spec = POINTWISE[name]
    if len(operands) != spec.arity:
        raise TypeError(f"ops.{name} takes {spec.arity} values, got {len(operands)}")
    values = operands[1:] if name == "where" else operands
    if len(set(values)) != 1:
        raise TypeError(f"ops.{name} needs operands of one dtype, got {[str(d) for d in operands]}")
    if name == "where" and operands[0] is not torch.bool:
        raise TypeError(f"ops.where needs a bool condition, got {operands[0]}")
    if spec.result == "bool":
        return torch.bool
    if spec.result == "float" and not values[0].is_floating_point:
        raise TypeError(f"ops.{name} needs floating-point operands, got {values[0]}")
    return values[0]
