"""Kernels that reduce columns: threads share chunks of rows; as few loop nests as possible do the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import minicompile
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
    (sums, 2), (gradient_of_a_bias, 2), (scaled, 3), (extremes, 2), (normalized, None), (softmax, None),
    (slope, 2),
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
    compiled = minicompile.compile(fn, fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(compiled(x, b), fn(x, b), rtol=1e-4, atol=1e-4)
    kernels = minicompile.trace(compiled, x, b).forward.kernels
    if size == (1000, 64):
        (kernel,) = kernels
        assert "chunks" in kernel.text
        if nests and not dynamic:
            assert loop_nests(kernel.text) == nests


@pytest.mark.parametrize(("fn", "nests"), PROGRAMS)
def test_columns_match_eager_in_triton(fn: Callable[..., Any], nests: int | None) -> None:
    x, b = torch.randn(300, 20), torch.randn(20)
    compiled = minicompile.compile(fn, fullgraph=True, options={"device_codegen": "triton"})
    torch.testing.assert_close(compiled(x, b), fn(x, b), rtol=1e-4, atol=1e-4)
