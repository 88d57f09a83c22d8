"""Reductions give eager's values over dtypes, dimensions and edge cases."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch

from minicompile.lowering.ir import Reduction
from tests.lowering.conftest import check, check_each, lowered

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
SHAPES = [(3, 4, 5), (), (4,), (1, 3), (2, 0), (0,), (3, 1)]


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


def test_where_the_largest_bool_is() -> None:
    check(lambda x: list(x.max(1)), torch.tensor([[False, True], [False, False]]), externs=0)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_variance_equals_eager(dtype: torch.dtype) -> None:
    fns = {}
    for correction, dim in itertools.product((0, 1, 2, 0.5), (None, [-1], [0, 2], [])):
        for op, keepdim in itertools.product((torch.var_mean, torch.var, torch.std), (False, True)):
            options = {"dim": dim, "correction": correction, "keepdim": keepdim}
            fns[f"{op.__name__} {options}"] = partial(op, **options)
    check_each(fns, sample((3, 4, 5), dtype), **tolerance(dtype))


def test_variance_of_one_or_no_element_is_nan_as_in_eager() -> None:
    check(lambda x: [torch.var(x, 1), torch.mean(x, 1)], torch.randn(3, 1))
    check(lambda x: [torch.var(x, 1), torch.mean(x, 1), x.sum(1)], torch.randn(3, 0))


def test_extremes_propagate_nan() -> None:
    x = torch.tensor([[1.0, math.nan, 3.0], [-math.inf, 2.0, math.inf]])
    check(lambda x: [x.amax(1), x.amin(1), *x.max(1), *x.min(1), x.argmax(), x.argmin()], x)


def test_half_sums_accumulate_in_float32() -> None:
    x = torch.full((4096,), 1.0, dtype=torch.bfloat16)
    graph = check(lambda x: x.sum(), x)
    (buffer,) = graph.operations
    assert isinstance(buffer.loops, Reduction)
    assert "f32(" in str(buffer)
    assert buffer.layout.dtype is torch.bfloat16


def test_integer_sums_are_int64_and_do_not_wrap() -> None:
    check(lambda x: x.sum(), torch.full((1000,), 127, dtype=torch.int8))
    check(lambda x: x.prod(), torch.full((10,), 100, dtype=torch.int32))


def test_sum_and_mean_take_a_dtype() -> None:
    x = torch.randn(3, 4)
    check(lambda x: [x.sum(dtype=torch.float64), x.sum(1, dtype=torch.float64)], x)
    check(lambda x: x.bfloat16().mean(0, dtype=torch.float32), x)
    check(lambda i: i.mean(0, dtype=torch.float32), torch.arange(12).reshape(3, 4))
    check(lambda x: x.sum(0, dtype=torch.bfloat16), x, rtol=2e-2, atol=2e-2)


def test_reducing_dimensions_of_size_one_takes_no_loop() -> None:
    graph = check(lambda x: [x.sum(1), x.amax(1), x.argmax(1)], torch.randn(3, 1))
    assert not any(isinstance(op.loops, Reduction) for op in graph.operations)


def test_reductions_of_views_read_the_input_in_place() -> None:
    x = torch.randn(4, 6, 5)
    graph = check(lambda x: x.permute(2, 0, 1)[1:, ::2].sum((0, 2)), x)
    assert len(graph.operations) == 1


def test_the_extreme_of_no_elements_is_left_to_eager_which_raises() -> None:
    with pytest.raises((RuntimeError, IndexError)):
        lowered(lambda x: x.amax(1), torch.randn(3, 0))


def test_count_nonzero_counts_nan() -> None:
    x = torch.tensor([[0.0, math.nan, -0.0], [1.0, 0.0, 2.0]])
    check(lambda x: [aten.count_nonzero(x), aten.count_nonzero(x, [1])], x)
