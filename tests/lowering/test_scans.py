"""Scans give eager's values, places and strides, over dtypes, dimensions and special values."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from tests.lowering.conftest import check, check_each, lowered

aten = torch.ops.aten
NAMES = ["cumsum", "cumprod"]
DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
SHAPES = [(3, 4, 5), (4,), (2, 3), (70,)]
INF, NAN = math.inf, math.nan


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scans_equal_eager(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape) * 3
    x = (x.abs() if dtype is torch.uint8 else x).to(dtype)
    fns = {
        f"{name} {dim}": lambda x, name=name, dim=dim: [getattr(torch, name)(x, dim)]
        for name in NAMES
        for dim in ((0, -1) if len(shape) < 2 else (0, 1, -1))
    }
    half = dtype.is_floating_point and dtype.itemsize == 2
    check_each(fns, x, **({"rtol": 2e-2, "atol": 2e-2} if half else {}))


@pytest.mark.parametrize("to", DTYPES, ids=str)
def test_sums_and_products_in_another_dtype(to: torch.dtype) -> None:
    """Elements are converted first: 1.5 as an integer is 1. As bools eager refuses."""
    fns = {name: partial(getattr(torch, name), dim=0, dtype=to) for name in ("cumsum", "cumprod")}
    if to is torch.bool:
        with pytest.raises(RuntimeError, match="not implemented for 'Bool'"):
            torch.cumsum(torch.ones(3), 0, dtype=to)
        graph = lowered(lambda x: aten.cumsum(x, 0, dtype=to), torch.ones(3))
        assert [kernel.reason for kernel in graph.externs] == ["a running sum as torch.bool"]
        return
    for x in (torch.tensor([1.5, 2.5, 100.0, 2.9]), torch.tensor([100, 200, 3, 255])):
        check_each(fns, x)
        check_each(fns, x.to(torch.bfloat16))


def test_long_sums_are_as_accurate_as_eagers() -> None:
    """Eager's CPU kernels add float32 in float64: every digit is right."""
    x = torch.full((100_000,), 0.1)
    check(lambda x: [x.cumsum(0)], x, rtol=0, atol=0)


def test_integers_wrap_around() -> None:
    x = torch.tensor([2**62, 2**62, 2**62, 3])
    check(lambda x: [x.cumsum(0), x.cumprod(0), x.to(torch.int32).cumsum(0)], x)
