"""The arithmetic of loop bodies: one row per pointwise operation, shared by every `ops` handler.

A row gives the arity, the dtype of the result and a rough cost; an operation does what torch's function of
its name does. Printers keep their own tables of how to write each operation; tests check that they cover
this one, and that what they write gives eager's results. The real compiler: torch/_inductor/ops_handler.py,
codegen/common.py (OpOverrides) and dtype_propagation.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from minicompile.ops import philox

ResultType = Literal["same", "bool", "float", "int", "random"]


@dataclass(frozen=True)
class OpSpec:
    """`result`: "same" (the operands' dtype), "bool", "float" or "int" (these operands only, same dtype), or
    "random" (float32, of a seed and an element's number, both int64: ops/philox.py)."""

    name: str
    arity: int
    result: ResultType
    flops: int


TABLE: tuple[tuple[int, ResultType, int, str], ...] = (
    # arithmetic: operands of one dtype, result of that dtype
    (2, "same", 1, "add sub mul maximum minimum"),
    (2, "same", 6, "remainder fmod"),
    (2, "int", 6, "floordiv truncdiv"),
    (2, "same", 20, "pow"),
    (2, "float", 1, "copysign"),
    (2, "float", 4, "truediv"),
    (2, "float", 8, "hypot"),
    (2, "float", 20, "atan2"),
    (1, "same", 1, "neg abs sign floor ceil trunc round"),
    (3, "float", 2, "fma"),
    # roots and transcendental functions
    (1, "float", 4, "sqrt rsqrt reciprocal"),
    (1, "float", 12, "exp exp2 log log2 log10"),
    (1, "float", 14, "expm1 log1p"),
    (1, "float", 16, "sin cos tanh sigmoid"),
    (1, "float", 20, "tan asin acos atan sinh cosh asinh acosh atanh erf erfc lgamma"),
    # comparison
    (2, "bool", 1, "eq ne lt le gt ge"),
    (1, "bool", 1, "isnan signbit"),
    # logic on bools, bits on ints and bools
    (2, "bool", 1, "logical_and logical_or logical_xor"),
    (1, "bool", 1, "logical_not"),
    (2, "int", 1, "bitwise_and bitwise_or bitwise_xor lshift rshift"),
    (1, "int", 1, "bitwise_not"),
    # where(condition, a, b): a and b of one dtype
    (3, "same", 1, "where"),
    # number `offset` of a generator's numbers, evenly from 0 to 1 or normally distributed
    (2, "random", 40, "rand"),
    (2, "random", 60, "randn"),
)
"""Arity, result and cost of operations by name; torch has most of them under the same name."""

POINTWISE: dict[str, OpSpec] = {
    name: OpSpec(name, arity, result, flops)
    for arity, result, flops, names in TABLE
    for name in names.split()
}

OTHERWISE_NAMED: dict[str, Callable[..., Any]] = {
    "floordiv": functools.partial(torch.div, rounding_mode="floor"),
    "truncdiv": functools.partial(torch.div, rounding_mode="trunc"),
    "truediv": torch.true_divide,
    "fma": lambda a, b, c: torch.addcmul(c, a, b),
    "lshift": torch.bitwise_left_shift,
    "rshift": torch.bitwise_right_shift,
    "rand": philox.rand,
    "randn": philox.randn,
}
EAGER = {name: OTHERWISE_NAMED.get(name) or getattr(torch, name) for name in POINTWISE}
"""Eager's own function for each operation: what a printer must match."""

BOOL_AS_LOGIC = {
    "add": "logical_or",
    "mul": "logical_and",
    "maximum": "logical_or",
    "minimum": "logical_and",
    "bitwise_or": "logical_or",
    "bitwise_and": "logical_and",
    "bitwise_xor": "logical_xor",
    "bitwise_not": "logical_not",
    "sub": "logical_xor",
    "ne": "logical_xor",
}
"""Arithmetic on bools is logic: printers need to know no other."""

ReductionKind = Literal["sum", "prod", "max", "min", "any", "all", "argmax", "argmin"]
ScanKind = Literal["sum", "prod"]
POSITIONS = ("argmax", "argmin")
"""Reductions that find a place: the first of the best elements."""


def reduction_identity(kind: ReductionKind, dtype: torch.dtype) -> float | int | bool:
    """The value that changes nothing: what an accumulator starts with and a masked lane holds.

    argmax and argmin give that of max and min; their position starts at 0.
    """
    if kind in ("any", "all"):
        return kind == "all"
    if kind in ("sum", "prod"):
        neutral = 1 if kind == "prod" else 0
        return float(neutral) if dtype.is_floating_point else neutral
    low = kind in ("max", "argmax")
    if dtype.is_floating_point:
        return float("-inf") if low else float("inf")
    info = torch.iinfo(dtype)
    return info.min if low else info.max


def result_dtype(name: str, operands: tuple[torch.dtype, ...]) -> torch.dtype:
    """Dtype of a pointwise operation. Raises TypeError when operands differ or aren't allowed."""
    spec = POINTWISE[name]
    values = operands[1:] if name == "where" else operands
    floats, seeds = values[0].is_floating_point, values[0] is torch.int64
    wrong_kind = {"float": not floats, "int": floats, "random": not seeds}
    if len(operands) != spec.arity or len(set(values)) != 1 or wrong_kind.get(spec.result):
        told = ", ".join(map(str, operands))
        raise TypeError(f"ops.{name} needs operands of one dtype, {spec.arity} in all; got {told}")
    return {"bool": torch.bool, "random": torch.float32}.get(spec.result, values[0])
