"""The inline float32 functions: error in units in the last place over all exponents, and special values."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from minicompile.codegen.cpp_ops import HELPERS, prelude
from minicompile.ops.build import Module, start_build
from minicompile.options import Options
from tests.codegen.minimax import Fit, fits, float32, remez

FUNCTIONS = {
    "mc_exp": (torch.exp, 1.0),
    "mc_log": (torch.log, 1.0),
    "mc_tanh": (torch.tanh, 1.5),
    "mc_sigmoid": (torch.sigmoid, 2.0),
    "mc_erf": (torch.erf, 1.2),
}
"""Eager's function (in float64 the reference) and the error allowed, in ulp."""


@pytest.fixture(scope="module")
def library() -> Module:
    text = ""
    for name in FUNCTIONS:
        text += f"""
int64_t run_{name}(const float* x, float* y, int64_t n) {{
    #pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = {name}(x[i]);
    return 0;
}}
"""
    for half in ("bf16", "f16"):
        text += f"""
int64_t widen_{half}(const uint16_t* x, float* y, int64_t n) {{
    #pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = mc_from_{half}(x[i]);
    return 0;
}}
int64_t narrow_{half}(const float* x, uint16_t* y, int64_t n) {{
    #pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = mc_to_{half}(x[i]);
    return 0;
}}
"""
    return start_build(prelude(text) + text, Options()).result()


def call(library: Module, name: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    function = getattr(library, name)
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    function(x.data_ptr(), y.data_ptr(), x.numel())
    return y


def every_exponent() -> torch.Tensor:
    """2,000 random float32 for each sign and exponent, and a dense grid where results are neither 0 nor 1."""
    generator = torch.Generator().manual_seed(0)
    high = torch.arange(512).repeat_interleave(2000) << 23
    low = torch.randint(0, 1 << 23, (high.numel(),), generator=generator)
    bits = torch.cat([high | low, torch.arange(512) << 23, (torch.arange(512) << 23) | 0x7FFFFF])
    spread = (bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32)
    return torch.cat([spread, torch.linspace(-10, 10, 1_000_001)])


def ulp_error(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Distance from the exact float64 in units of the float32 next to it."""
    rounded = exact.float()
    step = (
        torch.nextafter(rounded.abs(), torch.tensor(float("inf"))).double() - rounded.abs().double()
    )
    same = (found == rounded) | (found.isnan() & rounded.isnan())
    return torch.where(same, 0.0, (found.double() - exact).abs() / step)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_error_stays_below_the_promised_ulp(library: Any, name: str) -> None:
    reference, allowed = FUNCTIONS[name]
    x = every_exponent()
    found = call(library, f"run_{name}", x, torch.empty_like(x))
    exact = reference(x.double())
    if name == "mc_sigmoid":  # below e^-88 eager's float32 is 0 as well
        exact = torch.where(x < -88.7, torch.sigmoid(x).double(), exact)
    error = ulp_error(found, exact)
    worst = int(error.argmax())
    assert error[worst] <= allowed, (x[worst].item(), found[worst].item(), exact[worst].item())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_values_are_exact(library: Any, name: str) -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([0.0, -0.0, inf, -inf, nan, 1.0, 88.8, -200.0, 1e-45, -1e-45])
    found = call(library, f"run_{name}", x, torch.empty_like(x))
    expected = FUNCTIONS[name][0](x.double()).float()
    special = (expected == 0) | expected.isinf() | expected.isnan()
    torch.testing.assert_close(
        found[special], expected[special], rtol=0, atol=1e-38, equal_nan=True
    )
    zeros = expected == 0
    assert torch.equal(found[zeros].signbit(), expected[zeros].signbit())


@pytest.mark.parametrize(("half", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_all_half_numbers_widen_exactly(library: Any, half: str, dtype: torch.dtype) -> None:
    x = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(dtype)
    found = call(library, f"widen_{half}", x, torch.empty(x.shape))
    torch.testing.assert_close(found, x.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("half", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_narrowing_rounds_to_nearest_even(library: Any, half: str, dtype: torch.dtype) -> None:
    every = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(dtype).float()
    middle = (every + torch.nextafter(every, every + 1)) / 2
    ties = torch.cat([every[:-1], (every[:-1].double() + every[1:].double()).div(2).float()])
    x = torch.cat([every_exponent(), ties, middle])
    found = call(library, f"narrow_{half}", x, torch.empty(x.shape, dtype=dtype))
    torch.testing.assert_close(found, x.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_coefficients_in_the_header_come_from_the_minimax_fits() -> None:
    """The shortest fit, done again: its coefficients stand in the source."""
    import mpmath

    with mpmath.workdps(50):
        fit = next(f for f in fits() if f.name.startswith("tanh"))
        coefficients, worst = remez(fit)
    assert worst < 6e-9
    for coefficient in coefficients:
        assert f"{float32(coefficient):.9g}f" in HELPERS["mc_tanh"]


def test_the_exchange_finds_a_known_best_polynomial() -> None:
    """Of degree 1 on [0, 1], x^2 is best approximated by x - 1/8, with error 1/8."""
    import mpmath

    fit = Fit("square", lambda x: x * x, lambda x: mpmath.mpf(1), mpmath.mpf(0), mpmath.mpf(1), 1)
    (constant, slope), worst = remez(fit)
    assert abs(constant + 0.125) < 1e-5 and abs(slope - 1) < 1e-5 and abs(worst - 0.125) < 1e-5
