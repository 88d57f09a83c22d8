"""Sums of rows and columns on the CPU, and what is computed from them, err as little as eager's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import minicompile as mc


def squares(x: torch.Tensor) -> torch.Tensor:
    return ((x - 0.5) * (x + 0.25)).sum(-1)


def in_places(found: torch.Tensor, terms: torch.Tensor) -> float:
    """The largest error of sums of float32 `terms` in units of their results' last place."""
    exact = terms.double().sum(-1)
    place = torch.finfo(torch.float32).eps * exact.abs().log2().floor().exp2()
    return float(((found - exact).abs() / place).max())


@pytest.mark.long
@pytest.mark.parametrize("n", [1, 5, 12, 16, 25, 31])
def test_short_sums_in_a_few_rows_are_rounded_once(n: int) -> None:
    """However much cancels: of loads, of what the loop computes, and of what is kept."""
    torch.manual_seed(0)
    x = torch.randn(40, n)
    for fn, terms in (
        (squares, (x - 0.5) * (x + 0.25)),
        (lambda x: x.sum(-1), x),
        (lambda x: (x - (x * 2).sum(-1, keepdim=True) * 0).sum(-1), x),
    ):
        assert in_places(mc.compile(fn)(x), terms) < 0.51


@pytest.mark.parametrize("n", [1, 2, 5, 15])
def test_short_sums_of_a_few_columns_are_rounded_once(n: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, n, 7)
    terms = (x - 0.5) * (x + 0.25)

    def fn(x: torch.Tensor) -> Any:
        return ((x - 0.5) * (x + 0.25)).sum(1), x.sum(1), x.mean(1, keepdim=True) * x

    (squares, sums, _), found = mc.compile(fn)(x), [t.transpose(1, 2) for t in (terms, x)]
    assert max(map(in_places, (squares, sums), found)) < 0.51


def test_variances_of_columns_are_near() -> None:
    """Mean and variance of a few numbers: within 3 units of the last place, as the mean is rounded once."""
    torch.manual_seed(0)
    x = torch.randn(50, 5, 4)
    variance, mean = mc.compile(lambda x: torch.var_mean(x, 1))(x)
    exact, place = torch.var_mean(x.double(), 1), torch.finfo(torch.float32).eps
    assert ((variance - exact[0]).abs() < 3 * place * exact[0]).all()
    assert ((mean - exact[1]).abs() < 1.5 * place * exact[1].abs()).all()


SUMS: list[Any] = [lambda x: x.sum(1), lambda x: x.softmax(1), squares]


@pytest.mark.parametrize("fn", SUMS, ids=["sum", "softmax", "squares"])
@pytest.mark.parametrize("n", [31, 64, 1000])
@pytest.mark.parametrize("rows", [100, 2000])
def test_sums_of_a_row_are_as_exact_as_eager(n: int, rows: int, fn: Any) -> None:
    """Those of what a kernel keeps or computes too; what is left beside a row's vectors is no worse."""
    torch.manual_seed(0)
    x = torch.rand(rows, n)
    exact = ((x - 0.5) * (x + 0.25)).double().sum(-1) if fn is squares else fn(x.double())
    found, eager = ((f(x) - exact).norm() for f in (mc.compile(fn), fn))
    assert found < 1.05 * eager


def test_gradients_of_softmax_are_as_exact_as_in_eager() -> None:
    """Small differences of large numbers: few of many rows err by more than twice as much as eager's."""

    def softmax(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, 1)

    def gradient(fn: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(fn(x.requires_grad_()), x, grad.to(x.dtype))[0]

    torch.manual_seed(0)
    x, grad = torch.empty(20000, 3).uniform_(-9, 9), torch.randn(20000, 3)
    exact, compiled = gradient(softmax, x.double()), mc.compile(softmax, fullgraph=True)
    eager, ours = ((gradient(fn, x) - exact).abs().amax(1) for fn in (softmax, compiled))
    assert ours.mean() < 1.05 * eager.mean()
    assert (ours > 2 * eager).double().mean() < 0.15


def test_roots_of_halves_keep_their_digits_from_one_operation_to_the_next() -> None:
    """The gradient of a number over its own size is 0: a difference of two that are alike."""
    torch.manual_seed(0)
    x, grad = torch.randn(2, 1, 40, dtype=torch.bfloat16)
    compiled = mc.compile(lambda x: torch.nn.functional.normalize(x, p=0.5, dim=0))
    (found,) = torch.autograd.grad(compiled(x.requires_grad_()), x, grad)
    assert found.abs().max() < 1e-4


@pytest.mark.parametrize("columns", [40, 72, 136, 200])
def test_a_row_is_read_after_it_is_written(columns: int) -> None:
    """Whatever gcc takes the address of the scratch row to be a part of."""

    def largest(p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        row = torch.cat([p, q], -1)
        return row.amax(-1), row.amin(-1), row.argmax(-1)

    p, q = torch.randn(2, 16, columns)
    for one, other in zip(mc.compile(largest)(p, q), largest(p, q), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(mc.compile(lambda p, q: largest(p, q)[0])(p, q), largest(p, q)[0])
