"""C kernels of columns: right, as exact as eager, and shared among threads."""

from __future__ import annotations

import pytest
import torch

import minicompile as mc
from tests.codegen.kernels import REFERENCE, one_reduction, special
from tests.codegen.kernels import run_cpp as run

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
