"""The arithmetic of random loop programs: functions of a handler and a dtype, well conditioned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
I64, I32, U8, BOOL = torch.int64, torch.int32, torch.uint8, torch.bool


def number(ops: Any, value: float, dtype: torch.dtype) -> Any:
    return ops.constant(value, dtype)


def plus_one(ops: Any, x: Any, dtype: torch.dtype) -> Any:
    """|x| + 1: a divisor that is never near 0."""
    return ops.add(ops.abs(x), number(ops, 1, dtype))


def low_bits(ops: Any, x: Any, dtype: torch.dtype, least: int = 0) -> Any:
    """A whole number from `least` to `least + 7`."""
    return ops.add(ops.bitwise_and(x, number(ops, 7, dtype)), number(ops, least, dtype))


@dataclass(frozen=True)
class Fn:
    """Arithmetic on loaded values. `slope`: how much it can enlarge an error; exact: it rounds as eager."""

    name: str
    arity: int
    kinds: str
    """Of the dtypes it takes: f, i, b."""
    fn: Callable[..., Any]
    exact: bool = True
    slope: float = 1
    step: bool = False
    """Jumps: only for operands without an error."""
    result: torch.dtype | None = None
    chooses: bool = False
    """Gives numbers of a half type if it is given such numbers."""


def plain(names: str, arity: int, kinds: str, **more: Any) -> list[Fn]:
    """Operations of the table as they are."""

    def of(name: str) -> Callable[..., Any]:
        return lambda ops, dtype, *values: getattr(ops, name)(*values)

    return [Fn(name, arity, kinds, of(name), **more) for name in names.split()]


FUNCTIONS = [
    *plain("neg abs", 1, "fi", chooses=True),
    *plain("sigmoid tanh sin erf", 1, "f", exact=False, slope=1.2),
    *plain("floor trunc round", 1, "f", step=True, chooses=True),
    *plain("sign", 1, "fi", step=True),
    *plain("isnan signbit", 1, "f", step=True, result=BOOL),
    *plain("logical_not", 1, "b"),
    *plain("bitwise_not", 1, "ib"),
    *plain("add sub", 2, "fi"),
    *plain("mul", 2, "fib"),
    *plain("maximum minimum", 2, "fi", chooses=True),
    *plain("logical_and logical_xor", 2, "b"),
    *plain("bitwise_and bitwise_xor", 2, "ib"),
    *plain("eq lt ge", 2, "fi", step=True, result=BOOL),
    *plain("copysign", 2, "f", step=True),
    *plain("fma", 3, "f", exact=False),
    Fn("exp", 1, "f", lambda o, d, x: o.exp(o.minimum(x, number(o, 2, d))), False, 8),
    Fn("log", 1, "f", lambda o, d, x: o.log(plus_one(o, x, d)), False),
    Fn("rsqrt", 1, "f", lambda o, d, x: o.rsqrt(plus_one(o, x, d)), False),
    Fn("truediv", 2, "f", lambda o, d, x, y: o.truediv(x, plus_one(o, y, d))),
    Fn("remainder_f", 2, "f", lambda o, d, x, y: o.remainder(x, plus_one(o, y, d)), step=True),
    Fn("remainder", 2, "i", lambda o, d, x, y: o.remainder(x, low_bits(o, y, d, 1))),
    Fn("floordiv", 2, "i", lambda o, d, x, y: o.floordiv(x, low_bits(o, y, d, 1))),
    Fn("lshift", 2, "i", lambda o, d, x, y: o.lshift(x, low_bits(o, y, d))),
    Fn("rshift", 2, "i", lambda o, d, x, y: o.rshift(x, low_bits(o, y, d))),
]
SLOPES = {f.name: f.slope for f in FUNCTIONS}
REDUCTIONS = {
    "f": "sum sum sum max min argmax argmin",
    "i": "sum max min argmax prod",
    "b": "any all",
}
SCANS = {"f": "sum", "i": "sum prod"}


def kind_of(dtype: torch.dtype) -> str:
    return "f" if dtype.is_floating_point else "b" if dtype is BOOL else "i"
