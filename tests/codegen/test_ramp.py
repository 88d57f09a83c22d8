"""Linear biases of attention, as ALiBi's: each score takes one addition for them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.bench.attention import attention, causal, positions
from tests.codegen.test_attention import assert_close_as_the_library, compiled, kernel_texts, made

Scores = Callable[..., Tensor]


def distance(s: Tensor) -> Tensor:
    i, j = positions(s)
    return j - i


def computed_slopes(s: Tensor, *more: Tensor) -> Tensor:
    heads = torch.arange(1, s.shape[1] + 1, device=s.device)
    return causal(s + torch.exp2(-heads / 2)[:, None, None] * distance(s), *more[:2])


def padded(s: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
    return (s + slopes * distance(s)).masked_fill(bias[0, 0] > 1, -torch.inf)


RAMPS: dict[str, Scores] = {
    "of distances": lambda s, bias, slopes: causal(s + slopes * distance(s), bias, slopes),
    "taken away": lambda s, bias, slopes: causal(s - slopes * -distance(s), bias, slopes),
    "taken from it": lambda s, bias, slopes: slopes * distance(s) - s,
    "of keys": lambda s, bias, slopes: s + slopes * positions(s)[1],
    "of queries": lambda s, bias, slopes: s + slopes * positions(s)[0],
    "of both": lambda s, bias, slopes: (
        s + slopes * 0.1 * (3 * positions(s)[1] - 2 * positions(s)[0] + 5)
    ),
    "without slopes": lambda s, bias, slopes: causal(s + 0.25 * distance(s), bias, slopes),
    "as they are": lambda s, bias, slopes: causal(s + distance(s), bias, slopes),
    "rising": lambda s, bias, slopes: causal(s - slopes * distance(s), bias, slopes),
    "steep": lambda s, bias, slopes: causal(s + 50 * slopes * distance(s), bias, slopes),
    "scaled": lambda s, bias, slopes: causal(0.3 * (s + slopes * distance(s)), bias, slopes),
    "capped before": lambda s, bias, slopes: 5 * torch.tanh(s / 5) + slopes * distance(s),
    "computed slopes": computed_slopes,
    "padded": padded,
}


def ramped(texts: list[str]) -> list[bool]:
    return ["steepness(" in text for text in texts]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RAMPS)
def test_a_ramp_is_taken_out_of_the_scores(name: str, dtype: torch.dtype) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
        return attention(RAMPS[name], q, k, v, bias, slopes)

    given = made(150, 150, 32, dtype)
    assert ramped(kernel_texts(fn, given)) == [True] * 3
    assert_close_as_the_library(fn, given)


@pytest.mark.parametrize("rows, columns", [(1, 33), (130, 70), (65, 200)])
def test_any_lengths(rows: int, columns: int) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
        return attention(lambda s: s + slopes * distance(s), q, k, v)

    given = made(rows, columns, 32, torch.bfloat16, batch=2 if rows > 1 else 50)
    assert all(ramped(kernel_texts(fn, given)))
    assert_close_as_the_library(fn, given)


@pytest.mark.parametrize("mask", [torch.finfo(torch.bfloat16).min, -1e9, -1e4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_that_finite_numbers_mask_are_averaged(mask: float, dtype: torch.dtype) -> None:
    """In exponents of 2 such a number would be -inf."""

    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
        return attention(lambda s: s + slopes * distance(s) + bias, q, k, v)

    given = made(70, 70, 16, dtype)
    given[3] = torch.where(given[3] > 1, mask, 0.0)
    given[3][:, :3] = mask
    assert torch.allclose(compiled(fn)(*given).float(), fn(*given).float(), atol=0.03)


@pytest.mark.parametrize("slope", [0.0, math.inf, -math.inf, math.nan])
def test_slopes_without_bounds(slope: float) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
        return attention(RAMPS["of distances"], q, k, v, bias, slopes * 0 + slope)

    given = made(70, 70, 16, torch.bfloat16)
    assert torch.allclose(compiled(fn)(*given), fn(*given), atol=0.03, equal_nan=True)


def twice(s: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
    ramp = slopes * distance(s)
    return s + ramp + ramp


def doubled(s: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
    s = s + slopes * distance(s)
    return s + s


OTHERS: dict[str, Scores] = {
    "the same twice": twice,
    "a sum with itself": doubled,
    "with a bias": lambda s, bias, slopes: causal(s + bias + slopes * distance(s), bias, slopes),
    "two": lambda s, bias, slopes: s + slopes * distance(s) - 0.1 * positions(s)[1],
    "a finite mask": lambda s, bias, slopes: (s + slopes * distance(s)).masked_fill(
        distance(s) > 0, -1e9
    ),
    "no line": lambda s, bias, slopes: causal(s - slopes * distance(s).abs(), bias, slopes),
    "a curve of it": lambda s, bias, slopes: 5 * torch.tanh((s + slopes * distance(s)) / 5),
    "slopes of rows": lambda s, bias, slopes: causal(s + slopes * distance(s), bias, slopes),
    "steps": lambda s, bias, slopes: causal(s + slopes * (positions(s)[1] // 8), bias, slopes),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_ramp_stays(name: str) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
        return attention(OTHERS[name], q, k, v, bias, slopes)

    given = made(150, 150, 32, torch.bfloat16)
    if name == "slopes of rows":
        given[4] = torch.rand(3, 150, 1)
    assert ramped(kernel_texts(fn, given)) == [False] * 3
    assert_close_as_the_library(fn, given)


def test_a_score_takes_one_addition() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
        return attention(RAMPS["of distances"], q, k, v, bias, slopes)

    forward, queries, keys = kernel_texts(fn, made(150, 150, 32, torch.bfloat16))
    for text in (forward, queries):
        assert "    rise = steep * tl.arange(0, RBLOCK)[None, :]\n    for start" in text
    assert "    rise = steep * (j - first)\n    for start" in keys
    assert "weights = tl.exp2(s - (base - tile)[:, None])" in forward


def test_floats_keep_their_digits() -> None:
    """A difference of two products has fewer than the product of a difference."""

    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
        return attention(RAMPS["of distances"], q, k, v, bias, slopes)

    given = made(150, 150, 32, torch.float32)
    assert not any(ramped(kernel_texts(fn, given)))
    assert_close_as_the_library(fn, given)
