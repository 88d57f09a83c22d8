"""C kernels that reduce rows and columns in vectors.

- They give what eager gives, at fixed and symbolic sizes, as exact as eager.
- As few loop nests as possible do the work; threads share the rows of few columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import minicompile as mc
from tests.codegen.kernels import REFERENCE, one_reduction, special
from tests.codegen.kernels import run_cpp as run
from tests.codegen.races import loop_nests


def sums(x: torch.Tensor, b: torch.Tensor) -> Any:
    return x.sum(0), (x * x).sum(0)


def gradient_of_a_bias(x: torch.Tensor, b: torch.Tensor) -> Any:
    y = torch.sin(x + b) * x
    return y, y.sum(0)


def scaled(x: torch.Tensor, b: torch.Tensor) -> Any:
    """What the loop over rows needs of a column is computed once, before it."""
    return (x * b.exp()).sum(0) * b


def extremes(x: torch.Tensor, b: torch.Tensor) -> Any:
    return x.argmax(0), x.max(0).values, x.sum(0)


def normalized(x: torch.Tensor, b: torch.Tensor) -> Any:
    """One loop over the rows reads what another has found."""
    return (x - x.mean(0)) * torch.rsqrt(x.var(0, correction=0) + 1) * b


def slope(x: torch.Tensor, b: torch.Tensor) -> Any:
    """As in cross-entropy's backward: a few numbers of each row, and columns that are summed."""
    row = x[:, 0]
    return (x * row[:, None] * row.sin()[:, None] * b).sum(0)


def softmax(x: torch.Tensor, b: torch.Tensor) -> Any:
    return torch.softmax(x, 0)


PROGRAMS: list[tuple[Callable[..., Any], int | None]] = [
    (sums, 2), (gradient_of_a_bias, 3), (scaled, 3), (extremes, 2), (normalized, None), (softmax, None),
    (slope, 3),
]  # fmt: skip
"""Functions, and how many loop nests their kernel has where that is the point."""


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("size", [(1000, 64), (3000, 2100), (1000, 3)])
@pytest.mark.parametrize(("fn", "nests"), PROGRAMS)
def test_chunks_of_columns_match_eager(
    fn: Callable[..., Any], nests: int | None, size: tuple[int, int], dynamic: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, b = torch.randn(size, generator=generator), torch.randn(size[1], generator=generator)
    compiled = mc.compile(fn, fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(compiled(x, b), fn(x, b), rtol=1e-4, atol=1e-4)
    kernels = mc.trace(compiled, x, b).forward.kernels
    if size == (1000, 64):
        (kernel,) = kernels
        assert "chunks" in kernel.text
        if nests and not dynamic:
            assert loop_nests(kernel.text) == nests


@pytest.mark.parametrize(("fn", "nests"), PROGRAMS)
def test_columns_match_eager_in_triton(fn: Callable[..., Any], nests: int | None) -> None:
    x, b = torch.randn(300, 20), torch.randn(20)
    compiled = mc.compile(fn, fullgraph=True, options={"device_codegen": "triton"})
    torch.testing.assert_close(compiled(x, b), fn(x, b), rtol=1e-4, atol=1e-4)


# -- plans

F32, I64 = torch.float32, torch.int64


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sum", "max", "argmax"])
@pytest.mark.parametrize("size", [(5000, 70), (20_000, 1000), (5000, 3000)])
def test_few_columns_share_their_rows_among_threads(kind: str, size: tuple[int, int]) -> None:
    result = I64 if kind == "argmax" else F32
    plan = one_reduction(kind, *size, F32, result, True).plan()
    assert plan.vector_axis == "x" and plan.parallel
    assert plan.tiles["r"] > 0
    x = (special(*size) * 4).round()
    if kind != "sum":
        x[size[0] // 2, 5] = x[size[0] - 3, 5] = float("nan")
    out = torch.empty(size[1], dtype=result)
    run(plan, {"x": x, "out": out})
    torch.testing.assert_close(out, REFERENCE[kind](x.t()), equal_nan=True)


def test_what_threads_found_of_columns_is_combined_once_before_the_next_sweep() -> None:
    """Nothing stands between the sweeps of a softmax that could combine it on the way."""
    x = special(20_000, 32)
    softmax_of_columns = mc.compile(lambda x: torch.softmax(x, 0))
    (kernel,) = mc.trace(softmax_of_columns, x).kernels
    assert kernel.plan.vector_axis == "x" and kernel.plan.tiles["r"] > 0
    shared, combined = 3, 2
    assert kernel.text.count("c < chunks") == shared + combined
    expected = torch.softmax(x.double(), 0).float()
    torch.testing.assert_close(softmax_of_columns(x), expected, rtol=1e-5, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("size", [(1000, 4096), (8192, 2048), (515, 96)])
def test_sums_of_columns_are_as_exact_as_eager(size: tuple[int, int]) -> None:
    x = special(*size)
    out, exact = torch.empty(size[1]), x.double().sum(0)
    run(one_reduction("sum", *size, F32, F32, True).plan(), {"x": x, "out": out})
    found, eager = ((sums.double() - exact).norm() for sums in (out, x.sum(0)))
    assert found < eager


@pytest.mark.long
@pytest.mark.parametrize("size", [(8, 1, 3), (3, 1, 1), (2, 4, 77), (16, 3, 3136), (2, 2, 20_000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_sums_of_computed_terms_ride_along(
    size: tuple[int, int, int], dtype: torch.dtype, dynamic: bool
) -> None:
    """The terms of several sums, chosen by a comparison, are written down in short rows alone."""

    def fn(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> Any:
        normal = (x.float() - 0.5) * scale
        chosen = torch.where(torch.relu(normal) <= 0, 0.0, y.float())
        moments = [(chosen * t).sum((0, 2), keepdim=True) for t in (normal, scale)]
        return *moments, (chosen * scale - moments[0] * normal * 1e-3).to(x.dtype)

    compiled = mc.compile(fn, fullgraph=True, dynamic=dynamic)
    for number in (0.0, float("inf"), float("-inf"), float("nan")):
        x, y = special(*size, dtype=dtype), special(*size, dtype=dtype) + 0.25
        scale = special(1, size[1], 1).abs() + 0.5
        y[0, 0, -1] = x[-1, -1, 0] = number
        expected = fn(x.double(), y.double(), scale.double())
        found = compiled(x, y, scale)
        close = (
            {"rtol": 1e-5, "atol": 1e-3} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        )
        for ours, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.double(), exact, equal_nan=True, **close)
    (kernel,) = mc.trace(compiled, x, y, scale).kernels
    short = size[2] <= 256 and not dynamic
    assert ("_part[" in kernel.text) == short
    assert ("reduction(+:" in kernel.text) != short
