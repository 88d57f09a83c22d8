"""The inline float32 functions: error in units in the last place over all exponents, and special values."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import mpmath
import pytest
import torch

from minicompile.codegen.helpers import C_HELPERS, c_prelude
from minicompile.ops.build import Module, start_build
from minicompile.options import Options
from tests.codegen.minimax import Fit, fits, remez

FUNCTIONS = {
    "exp": 0.9, "exp2": 0.9, "expm1": 1.5, "log": 1.0, "log2": 1.1, "log10": 1.1, "log1p": 1.5,
    "sin": 1.6, "cos": 1.6, "tan": 1.4, "tanh": 1.5, "sigmoid": 2.0, "erf": 1.2, "erfc": 1.0,
}  # fmt: skip
"""`mc_` and torch's name, and the error allowed, in ulp; torch's float64 function is the reference."""


def build(calls: int) -> Module:
    """For each function `run_<name>(x, y, n)`, conversions of half types, and `run_pow(x, y, z, n)`.

    A comment names each function so many times more: what is called often is not inlined.
    """
    text = """
int64_t run_pow(const float* x, const float* y, float* z, int64_t n) {
    #pragma omp simd
    for (int64_t i = 0; i < n; i++) z[i] = mc_pow(x[i], y[i]);
    return 0;
}
"""
    for name in FUNCTIONS:
        text += f"""
int64_t run_{name}(const float* x, float* y, int64_t n) {{
    #pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = mc_{name}(x[i]);
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
    text += "//" + "".join(f" mc_{name}" for name in ["pow", *FUNCTIONS]) * calls
    source = c_prelude(text) + text
    assert ("MC_CALLED float mc_tanh" in source) == (calls > 0)
    return start_build(source, Options()).result()


@pytest.fixture(scope="module", params=[0, 9])
def library(request: pytest.FixtureRequest) -> Module:
    return build(request.param)


def call(library: Module, name: str, *tensors: torch.Tensor) -> torch.Tensor:
    """Run a function of arrays; the last tensor takes the result."""
    function = getattr(library, name)
    function.argtypes = [ctypes.c_void_p] * len(tensors) + [ctypes.c_int64]
    function(*(t.data_ptr() for t in tensors), tensors[0].numel())
    return tensors[-1]


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
    error = torch.where(same, 0.0, (found.double() - exact).abs() / step)
    return torch.where(error.isnan(), float("inf"), error)


def exact_of(name: str, x: torch.Tensor) -> torch.Tensor:
    """In float64. Where exp(-x) is infinite sigmoid is 0, as eager's is."""
    exact: torch.Tensor = getattr(torch, name)(x.double())
    return torch.where(x < -88.72, 0.0, exact) if name == "sigmoid" else exact


def error_of(library: Module, name: str, x: torch.Tensor) -> torch.Tensor:
    """In ulp, for each x."""
    return ulp_error(call(library, f"run_{name}", x, torch.empty_like(x)), exact_of(name, x))


@pytest.mark.long
@pytest.mark.parametrize("name", FUNCTIONS)
def test_error_stays_below_the_promised_ulp(library: Module, name: str) -> None:
    x = every_exponent()
    error = error_of(library, name, x)
    worst = int(error.argmax())
    assert error[worst] <= FUNCTIONS[name], (x[worst].item(), error[worst].item())


SPECIAL = [
    0.0,
    float("inf"),
    float("nan"),
    1.0,
    0.5,
    2.0,
    3.0,
    88.8,
    200.0,
    1e-45,
    1e-40,
    1e38,
    1e15,
    8388607.5,
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_values_are_exact(library: Module, name: str) -> None:
    x = torch.tensor([[v, -v] for v in SPECIAL]).reshape(-1)
    found = call(library, f"run_{name}", x, torch.empty_like(x))
    expected = getattr(torch, name)(x.double()).float()
    special = (expected == 0) | expected.isinf() | expected.isnan() | (expected == 1)
    special |= x.abs() < 1e-30
    special &= ~((x < -88.7) & (name == "sigmoid"))
    torch.testing.assert_close(found[special], expected[special], rtol=0, atol=0, equal_nan=True)
    zeros = special & (expected == 0)
    assert torch.equal(found[zeros].signbit(), expected[zeros].signbit())


@pytest.mark.parametrize("name", ["exp2", "log2", "log10"])
def test_exact_powers_stay_exact(library: Module, name: str) -> None:
    exponents = torch.arange(-149.0, 128.0) if name != "log10" else torch.arange(0.0, 11.0)
    powers = (10.0 if name == "log10" else 2.0) ** exponents.double()
    x, expected = powers.float(), exponents
    if name == "exp2":
        x, expected = expected, x
    assert torch.equal(call(library, f"run_{name}", x, torch.empty_like(x)), expected)


def powers(count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Bases and exponents: any bits; results of all sizes; bases near 1; small numbers; whole exponents."""
    generator = torch.Generator().manual_seed(0)

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.rand(count, generator=generator) * (high - low) + low

    def bits() -> torch.Tensor:
        whole = torch.randint(-(2**31), 2**31, (count,), generator=generator)
        return whole.to(torch.int32).view(torch.float32)

    base = bits().abs()
    yield bits(), bits()
    yield base, (uniform(-151, 129).double() / torch.log2(base.double())).float()
    yield uniform(0.999, 1.001), uniform(-80000, 80000)
    yield uniform(0, 10), uniform(-10, 10)
    yield uniform(-10, 10), uniform(-30, 30).round()


def test_pow_errs_less_than_an_ulp(library: Module) -> None:
    for x, y in powers(1_000_000):
        found = call(library, "run_pow", x, y, torch.empty_like(x))
        assert ulp_error(found, torch.pow(x.double(), y.double())).max() <= 0.6


def test_pow_of_special_values_is_as_c_defines_it(library: Module) -> None:
    some = torch.tensor([[v, -v] for v in [*SPECIAL, 1.5, 2.5, 16777215.0, 16777216.0]]).reshape(-1)
    x, y = (t.contiguous().view(-1) for t in torch.meshgrid(some, some, indexing="ij"))
    found = call(library, "run_pow", x, y, torch.empty_like(x))
    expected = torch.pow(x.double(), y.double()).float()
    assert ulp_error(found, torch.pow(x.double(), y.double())).max() <= 0.6
    assert torch.equal(found.signbit()[~found.isnan()], expected.signbit()[~found.isnan()])


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


@pytest.mark.long
@pytest.mark.parametrize("fit", fits(), ids=lambda fit: fit.name.split(":")[0])
def test_coefficients_in_the_header_come_from_the_minimax_fits(fit: Fit) -> None:
    header = "\n".join(C_HELPERS.blocks)
    with mpmath.workdps(50):
        coefficients, _ = remez(fit)
    assert [c for c in map(fit.literal, coefficients) if c not in header] == []


def test_the_exchange_finds_a_known_best_polynomial() -> None:
    """Of degree 1 on [0, 1], x^2 is best approximated by x - 1/8, with error 1/8."""
    fit = Fit("square", lambda x: x * x, lambda x: mpmath.mpf(1), mpmath.mpf(0), mpmath.mpf(1), 1)
    (constant, slope), worst = remez(fit)
    assert abs(constant + 0.125) < 1e-5 and abs(slope - 1) < 1e-5 and abs(worst - 0.125) < 1e-5
