"""Elementwise operators give eager's values, dtypes and strides."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from tests.lowering.conftest import check, check_each, lowered, run

aten = torch.ops.aten
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
ALL = [*FLOATS, *INTS, torch.bool]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -2.5, 3.5, 100.0, math.inf, -math.inf, math.nan]


def sample(dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.tensor(SPECIAL, dtype=dtype)
    if dtype is torch.bool:
        return torch.tensor([True, False, True])
    low = 0 if dtype is torch.uint8 else -5
    return torch.tensor([*range(low, 6), torch.iinfo(dtype).max], dtype=dtype)


UNARY = """neg abs sign floor ceil trunc round sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p
sin cos tan asin acos atan sinh cosh
tanh sigmoid erf isnan isinf signbit logical_not relu square""".split()  # noqa: SIM905


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_unary_operators_equal_eager(dtype: torch.dtype) -> None:
    fns = {name: getattr(aten, name) for name in UNARY}
    check_each(fns, sample(dtype), rtol=0, atol=0)


BINARY = """add sub mul div maximum minimum eq ne lt le gt ge logical_and logical_or logical_xor
atan2 copysign pow remainder fmod""".split()  # noqa: SIM905
PAIRS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.bfloat16),
    (torch.int32, torch.float32),
    (torch.int64, torch.bfloat16),
    (torch.int8, torch.int64),
    (torch.uint8, torch.int8),
    (torch.bool, torch.int32),
    (torch.bool, torch.bool),
    (torch.float32, torch.float64),
]


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_binary_operators_equal_eager(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    integral = not any(d.is_floating_point for d in dtypes)
    by_library = ("remainder", "fmod", "pow") if integral else ()
    fns = {name: getattr(aten, name) for name in BINARY if name not in by_library}
    x, y = (sample(d) for d in dtypes)
    check_each(fns, x[:, None], y, rtol=0, atol=0)
    check_each(fns, y, x[:, None], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_python_numbers_promote_and_round_as_in_eager(dtype: torch.dtype) -> None:
    fns = {}
    for name in ["add", "sub", "rsub", "mul", "div", "eq", "lt", "ge"]:
        for number in (2, -3, 0.1, True, 0):
            wraps = dtype is torch.uint8 and number == -3
            if not wraps:
                fns[f"{name} {number}"] = partial(_with_number, getattr(aten, name), number)
    check_each(fns, sample(dtype), rtol=0, atol=0)


def _with_number(op, number: float, x: torch.Tensor) -> torch.Tensor:
    return op(x, number)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize(
    "other", [torch.tensor(0.1), torch.tensor(3), torch.tensor(0.1, dtype=torch.float64)], ids=str
)
def test_zero_dimensional_tensors_do_not_raise_the_dtype(
    dtype: torch.dtype, other: torch.Tensor
) -> None:
    for op in (torch.add, torch.mul, torch.div, torch.lt, torch.maximum):
        check(op, sample(dtype), other)
        check(op, other, sample(dtype))


@pytest.mark.parametrize(
    "dtype, mode",
    [(dtype, None) for dtype in (torch.float32, torch.bfloat16)]
    + [(dtype, mode) for dtype in (torch.int64, torch.int8) for mode in (None, "trunc", "floor")],
    ids=str,
)
def test_division_rounds_as_eager_does_for_either_sign(
    dtype: torch.dtype, mode: str | None
) -> None:
    x = torch.arange(-9, 10).to(dtype)
    for divisor in (3, -4, 7):
        check(lambda x, d=divisor: torch.div(x, d, rounding_mode=mode), x)
        check(lambda x, d=divisor: [torch.remainder(x, d), torch.fmod(x, d)], x)


def test_division_without_a_fraction_is_eagers_and_zero_raises() -> None:
    x, y = torch.tensor([7, -7]), torch.tensor([2, 0])
    for a, b in ((x / 2, y / 2), (x, y)):
        graph = lowered(lambda x, y: x // y, a, b)
        assert [extern.op.overloadpacket for extern in graph.externs] == [torch.ops.aten.div]
    with pytest.raises(RuntimeError, match="ZeroDivision"):
        run(graph, x, y)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint8], ids=str
)
def test_powers_equal_eager(dtype: torch.dtype) -> None:
    exponents = (0, 1, 2, 3, 5, -1, -2, 0.5, -0.5, 1.7)
    check_each({str(e): lambda x, e=e: x**e for e in exponents}, sample(dtype))


def test_a_negative_power_of_integers_is_left_to_eager_which_raises() -> None:
    graph = lowered(lambda x: x**-2, torch.tensor([1, 2]))
    with pytest.raises(RuntimeError, match="negative integer powers"):
        run(graph, torch.tensor([1, 2]))


@pytest.mark.parametrize("bounds", [(None, 1), (-1, None), (-1, 1), (2, -2), (0.5, 2.5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_clamp_keeps_nan_and_promotes(
    dtype: torch.dtype, bounds: tuple[float | None, float | None]
) -> None:
    check(lambda x: torch.clamp(x, *bounds), sample(dtype))
    tensors = [None if b is None else torch.tensor(b) for b in bounds]
    check(lambda x: torch.clamp(x, *tensors), sample(dtype))


def test_a_number_that_does_not_fit_half_is_left_to_eager() -> None:
    x = torch.ones(3, dtype=torch.float16)
    graph = lowered(lambda x: aten.masked_fill.Scalar(x, x > 0, -1e9), x)
    assert "does not fit" in graph.externs[0].reason


@pytest.mark.parametrize("source", ALL, ids=str)
def test_conversions_equal_eager(source: torch.dtype) -> None:
    x = sample(source)
    check_each(
        {
            str(t): partial(torch.Tensor.to, dtype=t)
            for t in ALL
            if t.is_floating_point or t is torch.bool
        },
        x,
    )
    if source.is_floating_point:  # what lies outside the integer's range is undefined in C
        x = torch.tensor([0.0, 0.7, 1.9, 100.2], dtype=source)
    check_each({str(t): partial(torch.Tensor.to, dtype=t) for t in ALL}, x)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(()),
        torch.randn(0, 3),
        torch.randn(1, 1, 4),
        torch.randn(4, 6).t(),
        torch.randn(4, 6)[::2, 1::2],
        torch.randn(3, 1).expand(3, 5),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
    ids=["0-d", "empty", "ones", "transposed", "strided", "expanded", "channels-last"],
)
def test_results_lie_as_eagers_do(x: torch.Tensor) -> None:
    check(lambda x: [(x * 2 + 1).relu(), x.clone(), x + x.sum()], x, externs=int(x.numel() == 0))


def test_a_copy_is_never_an_alias_of_its_input() -> None:
    x = torch.randn(3)
    graph = check(lambda x: [x.clone(), x.abs().abs(), torch.ops.aten._to_copy(x)], x)
    assert all(output.buffer != "x" for output in graph.outputs)
    found = run(graph, x)
    assert all(t.data_ptr() != x.data_ptr() for t in found)
    unsigned = torch.tensor([1, 2], dtype=torch.uint8)
    graph = check(lambda x: [x.abs(), x.floor()], unsigned)
    assert all(t.data_ptr() != unsigned.data_ptr() for t in run(graph, unsigned))
