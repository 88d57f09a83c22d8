"""Reductions give eager's values over dtypes, dimensions and edge cases."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.lowering.conftest import check_each, lowered

aten = torch.ops.aten
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]
SHAPES = [(3, 4, 5), (4,), (1, 3), (3, 1)]


def sample(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(shape) * 3
    return (x.abs() if dtype is torch.uint8 else x).to(dtype)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reductions_equal_eager(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = sample(shape, dtype)
    fns = {}
    for name in "sum prod mean amax amin max min any all argmax argmin".split():  # noqa: SIM905
        fns[name] = getattr(torch, name)
    for keepdim in (False, True):
        for name in ["sum", "mean", "amax", "amin", "any", "all"]:
            for dim in ([0], [-1], [0, -1], []):
                fns[f"{name} {dim} {keepdim}"] = partial(_over, getattr(torch, name), dim, keepdim)
        with_position = [] if dtype is torch.bool else ["max", "min"]
        for name in ["prod", "argmax", "argmin", *with_position]:
            for dim in (0, -1):
                fns[f"{name} {dim} {keepdim}"] = partial(_over, getattr(torch, name), dim, keepdim)
    check_each(fns, x, **tolerance(dtype))


def _over(op, dim, keepdim: bool, x: torch.Tensor):
    return op(x, dim, keepdim)


def test_the_extreme_of_no_elements_is_left_to_eager_which_raises() -> None:
    with pytest.raises((RuntimeError, IndexError)):
        lowered(lambda x: x.amax(1), torch.randn(3, 0))
