"""Elementwise operators on special values, dtype by dtype, in both languages: what eager gives.

All operators that eager has for a dtype are one program; what they get are all pairs of that dtype's special
values. Integers and bools must be equal, floats within a few ulp, with eager's NaN, infinities and signs of
zero. An operator that is called as it is counts as a failure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import minicompile as mc
from tests.comparing import assert_as_eager

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
Function = Callable[..., Any]

UNARY = """
abs neg sign sgn square relu positive reciprocal sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos
tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid erf erfc floor ceil trunc round frac isnan
isinf isfinite isposinf isneginf signbit logical_not bitwise_not deg2rad rad2deg angle nan_to_num sinc
special.entr special.logit"""
BINARY = """
add sub mul maximum minimum fmax fmin eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and
bitwise_or bitwise_xor atan2 hypot copysign heaviside logaddexp logaddexp2 xlogy special.xlog1py
true_divide"""

DIVISIONS: dict[str, Function] = {
    "floor_divide": torch.floor_divide,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "div_trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "div_floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
}
SHIFTS: dict[str, Function] = {
    "lshift": torch.bitwise_left_shift,
    "rshift": torch.bitwise_right_shift,
}
FORMULAS: dict[str, Function] = {
    "add_number": lambda a, b: a + 3,
    "sub_scaled": lambda a, b: torch.sub(a, b, alpha=2),
    "rsub": lambda a, b: 1 - a,
    "mul_number": lambda a, b: a * -7,
    "half": lambda a, b: a / 2,
    "square": lambda a, b: a**2,
    "cube": lambda a, b: a**3,
    "fifth": lambda a, b: a**5,
    "clamp": lambda a, b: torch.clamp(a, 1, 5),
    "clamp_tensors": lambda a, b: torch.clamp(a, min=b, max=b.flip(0)),
    "where": lambda a, b: torch.where(a > b, a, b),
    "mixed_int": lambda a, b: a + torch.ones_like(b, dtype=torch.int16),
    "mixed_float": lambda a, b: a * torch.ones_like(b, dtype=torch.float16),
    "to_float": lambda a, b: a.to(torch.float32),
    "to_bool": lambda a, b: a.to(torch.bool),
    "lerp": lambda a, b: torch.lerp(a, b, 0.25),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=2),
}


EITHER_ZERO = {"maximum", "minimum", "fmax", "fmin", "clamp_tensors"}
"""IEEE 754 leaves open which of +0 and -0 is larger; eager answers differently by dtype and device."""


CANCELS = {"logaddexp2"}
"""Where its result is nearly 0, rounding the product apart from the sum makes the last digit of a summand."""


def special(dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.tensor([False, True])
    if dtype.is_floating_point:
        some = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 3.0, -7.25, 0.1, 1e-3, 100.0, -100.0]
        return torch.tensor([*some, math.inf, -math.inf, math.nan], dtype=dtype)
    info = torch.iinfo(dtype)
    some_ints = [0, 1, 2, 3, 7, 31, 63, 100, info.max, info.max - 1]
    some_ints += [-1, -2, -100, info.min, info.min + 1] if info.min < 0 else []
    return torch.tensor(some_ints, dtype=dtype)


def pairs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    values = special(dtype)
    a, b = torch.meshgrid(values, values, indexing="ij")
    return a.reshape(-1).clone(), b.reshape(-1).clone()


def divisible(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Without what eager refuses, and without the quotient that doesn't fit: there the processor traps."""
    a, b = pairs(dtype)
    if dtype.is_floating_point:
        return a, b
    keep = b != 0
    if dtype is not torch.bool and torch.iinfo(dtype).min < 0:
        keep &= ~((a == torch.iinfo(dtype).min) & (b == -1))
    return a[keep], b[keep]


def functions(dtype: torch.dtype) -> dict[str, Function]:
    """By name; every one takes two tensors, and eager has it for the dtype."""

    def named(name: str) -> Function:
        owner, _, last = name.rpartition(".")
        return getattr(torch.special if owner else torch, last)

    def of_the_first(f: Function) -> Function:
        return lambda a, b: f(a)

    found: dict[str, Function] = {n: of_the_first(named(n)) for n in UNARY.split()}
    found |= {n: named(n) for n in BINARY.split()} | FORMULAS
    found |= {} if dtype.is_floating_point else SHIFTS
    return {name: f for name, f in found.items() if eager_has(f, dtype)}


def eager_has(f: Function, dtype: torch.dtype) -> bool:
    try:
        f(*(torch.ones(2, dtype=dtype) for _ in range(2)))
    except (RuntimeError, TypeError):
        return False
    return True


def check(
    chosen: dict[str, Function], a: torch.Tensor, b: torch.Tensor, language: str, loops: bool = True
) -> None:
    fns = list(chosen.values())

    def program(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [f(a, b) for f in fns]

    compiled = mc.compile(program, options={"device_codegen": language})
    trace = mc.trace(compiled, a, b)
    externs = [str(op) for graph in trace.graphs.values() for op in graph.loops.externs]
    assert not (externs and loops), "\n".join(externs)
    found = compiled(a, b)
    wrong = [
        f"{name}: {why}"
        for name, f, got in zip(chosen, fns, found, strict=True)
        if (why := difference(got, f(a, b), f, a, b, name))
    ]
    assert not wrong, "\n".join(wrong)


def difference(
    found: torch.Tensor,
    eager: torch.Tensor,
    f: Function,
    a: torch.Tensor,
    b: torch.Tensor,
    name: str,
) -> str:
    """The first pair with a wrong result, and how many there are."""
    if found.dtype is not eager.dtype:
        return f"{found.dtype}, eager {eager.dtype}"
    if not eager.dtype.is_floating_point:
        bad = (found != eager).nonzero().flatten()
    else:
        step = torch.finfo(eager.dtype).eps
        exact = eager.double()
        if a.dtype.is_floating_point:  # eager's own half kernels err too
            exact = f(a.double(), b.double()).double()
        size = exact.abs().clamp(min=float(name in CANCELS))
        allowed = 4 * step * size + 2 * (eager.double() - exact).abs()
        near = (found.double() - exact).abs() <= allowed.nan_to_num(0, 0)
        same = (found == eager) | (found.isnan() & eager.isnan())
        zero = (eager == 0) & (found == 0)
        signs = zero & (name not in EITHER_ZERO | CANCELS) & (found.signbit() != eager.signbit())
        bad = (~(same | (near & found.isfinite() & eager.isfinite())) | signs).nonzero().flatten()
    if not len(bad):
        return ""
    at = bad[0]
    return f"({a[at].item()}, {b[at].item()}): {found[at].item()}, eager {eager[at].item()} ({len(bad)})"


@pytest.mark.long
@pytest.mark.parametrize("language", ["cpp", "triton"])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTS, torch.bool], ids=str)
def test_special_values_give_what_eager_gives(dtype: torch.dtype, language: str) -> None:
    check(functions(dtype), *pairs(dtype), language)


@pytest.mark.long
@pytest.mark.parametrize("language", ["cpp", "triton"])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTS], ids=str)
def test_divisions_give_what_eager_gives(dtype: torch.dtype, language: str) -> None:
    check(DIVISIONS, *divisible(dtype), language, loops=False)


PADDED: dict[str, Function] = {
    "a divisor": lambda a, b: a[:10] // b,
    "a divisor beyond a pad": lambda a, b: F.pad(a[:10] // b, (2, 2)),
    "a padded divisor": lambda a, b: a // F.pad(b, (2, 2), value=3),
    "a padded zero": lambda a, b: a // F.pad(b, (2, 2), value=0),
}


@pytest.mark.parametrize("language", ["cpp", "triton"])
@pytest.mark.parametrize("name", PADDED)
def test_a_zero_among_the_divisors_is_an_error(name: str, language: str) -> None:
    """Padding reads nothing there, and what it fills in is no divisor. Where it is one, it counts."""
    compiled = mc.compile(PADDED[name], options={"device_codegen": language})
    for b in (torch.arange(1, 11), torch.arange(10)):
        assert_as_eager(compiled, PADDED[name], torch.arange(14), b, rtol=0, atol=0)
