"""Loops without choices: bodies in pieces and short loops written out compute what eager does."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor

import minicompile as mc
from minicompile.plugins.loop_pieces.pieces import (
    Cut,
    cutting_places,
    leaves,
    pieces,
    written_out,
)
from minicompile.scheduling.body import verify
from tests.codegen.fusing import Program

F32, BF16, I64 = torch.float32, torch.bfloat16, torch.int64


def numbers(*size: int, dtype: torch.dtype = F32) -> Tensor:
    """Random ones, and a few that are special."""
    x = torch.randn(*size, generator=torch.Generator().manual_seed(len(size))).to(dtype)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0], dtype=dtype)
    x.view(-1)[: 3 * len(special)] = special.repeat(3)
    return x


def compared(op: str, step: int, threshold: int, size: int = 40) -> Program:
    """A comparison of `step * i + 3` with a threshold picks one of two loads."""
    p = Program()
    p.input("x", (size,))

    def pick(ops: Any, i: Any) -> Any:
        at = ops.index_expr(step * i[0] + 3, I64)
        holds = ops.pointwise(op, at, ops.constant(threshold, I64))
        x = ops.load("x", i[0])
        return ops.where(holds, x, ops.mul(x, ops.constant(-1.0, F32)))

    p.pointwise("out", (size,), pick)
    return p


HALVES: list[Callable[..., Any]] = [
    lambda x, y: torch.cat([x * 2, y + 1], -1),
    lambda x, y: torch.cat([F.relu(x), y, x], 0),
    lambda x, y: torch.stack([x, -y, x + y], -1),
    lambda x, y: torch.roll(x, 5, -1) + y,
    lambda x, y: F.pad(x, (2, 1, 1, 3), value=7.0) * 2,
    lambda x, y: x * torch.cat([-y.chunk(2, -1)[1], y.chunk(2, -1)[0]], -1),
    lambda x, y: torch.arange(x.shape[-1]).eq(4).logical_not() & (x > y),
    lambda x, y: F.pixel_shuffle(torch.stack([x, y, y, x]), 2),
]


@pytest.mark.parametrize("dtype", [F32, BF16, I64])
@pytest.mark.parametrize("number", range(len(HALVES)))
def test_what_positions_choose_matches_eager(number: int, dtype: torch.dtype) -> None:
    fn = HALVES[number]
    x, y = (numbers(6, 52).nan_to_num(9.0, 8.0, -8.0).to(dtype) for _ in range(2))
    if dtype.is_floating_point:
        x = numbers(6, 52, dtype=dtype)
    torch.testing.assert_close(mc.compile(fn)(x, y), fn(x, y), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("sides", [(8, 8), (9, 30), (56, 56)])
@pytest.mark.parametrize(
    "pool",
    [
        lambda x: F.max_pool2d(F.relu(x), 3, stride=2, padding=1),
        lambda x: F.max_pool2d(x, 2, ceil_mode=True),
        lambda x: F.avg_pool2d(x, 3, stride=2, padding=1),
        lambda x: F.avg_pool2d(x, 3, stride=2, padding=1, count_include_pad=False),
        lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"),
        lambda x: F.interpolate(x, size=(17, 23), mode="nearest"),
    ],
)
def test_windows_with_borders_match_eager(
    pool: Callable[[Tensor], Tensor], sides: tuple[int, int], dtype: torch.dtype
) -> None:
    given = [numbers(2, 3, *sides, dtype=dtype).requires_grad_() for _ in range(2)]
    found, expected = mc.compile(pool)(given[0]), pool(given[1])
    torch.testing.assert_close(found, expected, equal_nan=True)
    down = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    slopes = [
        torch.autograd.grad(*pair, down) for pair in zip((found, expected), given, strict=True)
    ]
    torch.testing.assert_close(*slopes, equal_nan=True)


@pytest.mark.parametrize("step", [1, 3, -2])
@pytest.mark.parametrize("op", ["lt", "le", "gt", "ge", "eq", "ne"])
def test_every_threshold_cuts_where_the_answer_changes(op: str, step: int) -> None:
    for threshold in range(-90, 130, 3):
        body = compared(op, step, threshold).plan().body
        answers = getattr(torch, op)(step * torch.arange(40) + 3, threshold).tolist()
        changes = [i for i in range(1, 40) if answers[i] != answers[i - 1]]
        assert cutting_places(body, sympy.Symbol("x0", integer=True, nonnegative=True)) == changes
        for piece in leaves(pieces(body)) if changes else ():
            verify(piece)
            assert not {"lt", "le", "gt", "ge", "eq", "ne"} & {v.op for v in piece.values}


@pytest.mark.parametrize(("threshold", "index"), [(32, "x0"), (31, "16*x0 + x1")])
def test_a_condition_has_one_answer_for_an_inner_loop_where_it_can(
    threshold: int, index: str
) -> None:
    def compare(ops: Any, i: Any) -> Any:
        place = ops.index_expr(16 * i[0] + i[1], torch.int64)
        return ops.ge(place, ops.constant(threshold, torch.int64))

    p = Program()
    p.pointwise("out", (6, 16), compare, torch.bool)
    kept = [str(v.index) for v in p.plan().body.values if v.op == "index_expr"]
    assert kept == [index]


def test_a_border_is_cut_off_and_nothing_is_left_to_choose() -> None:
    plan = mc.trace(lambda x: F.pad(x, (1, 1, 1, 1)), torch.randn(5, 20, 30)).kernels[0].plan
    assert isinstance(plan.details, Cut)
    bodies = leaves(plan.details)
    assert len(bodies) == 5  # above, left, inside, right, below
    assert all(v.op in ("constant", "load", "store") for body in bodies for v in body.values)
    assert plan.facts()["template"].startswith("pieces: ")


def test_vectors_run_along_the_channels_in_every_piece() -> None:
    x = numbers(2, 8, 12, 12).to(memory_format=torch.channels_last)
    for pool in (lambda x: F.max_pool2d(x, 3, 2, 1), lambda x: F.avg_pool2d(x, 3, 1, 1)):
        kernel = mc.trace(pool, x).kernels[0]
        lines = [line.text.strip() for line in kernel.lines]
        after = [lines[i + 1] for i, text in enumerate(lines) if re.match("#pragma.* simd", text)]
        assert isinstance(kernel.plan.details, Cut)
        assert len(after) == len(leaves(kernel.plan.details))
        assert all(text.startswith("for (int64_t x3 = 0; x3 < 8;") for text in after)
        torch.testing.assert_close(mc.compile(pool)(x), pool(x), equal_nan=True)


def test_windows_with_borders_are_cut_by_themselves_rather_than_summed() -> None:
    x, down = torch.randn(2, 3, 12, 12), torch.randn(2, 3, 6, 6)

    def fn(x: Tensor, at: Tensor, down: Tensor) -> Tensor:
        windows = [3, 3], [2, 2], [1, 1], [1, 1], False
        slope = torch.ops.aten.max_pool2d_with_indices_backward(down, x, *windows, at)
        return torch.stack([slope.sum((0, 2, 3)), slope.square().sum((0, 2, 3))])

    at = F.max_pool2d(x, 3, 2, 1, return_indices=True)[1]
    trace = mc.trace(fn, x, at, down)
    refused = [d for d in trace.schedule.decisions if "loads in windows that end" in d.reason]
    assert refused and not any(d.fused for d in refused)
    assert isinstance(trace.plans[0].details, Cut) and trace.plans[0].reduction == "none"
    torch.testing.assert_close(mc.compile(fn)(x, at, down), fn(x, at, down))


def test_a_short_inner_loop_is_written_out() -> None:
    x, y = torch.randn(50), torch.randn(50)
    plan = mc.trace(lambda x, y: torch.stack([x, y], -1), x, y).kernels[0].plan
    assert list(plan.ranges.values()) == [50, 1]
    assert len(plan.body.stores) == 2
    verify(plan.body)


def test_a_short_loop_of_loaded_indices_stays() -> None:
    p = Program()
    p.input("index", (20, 2), I64)
    p.input("x", (9,))
    p.pointwise(
        "out",
        (20, 2),
        lambda ops, i: ops.load("x", ops.indirect_indexing(ops.load("index", 2 * i[0] + i[1]), 9)),
    )
    body = p.plan().body
    assert [*body.ranges.values()] == [20, 2]
    assert written_out(body) is None


def test_a_division_that_eager_reports_is_reported_from_every_piece() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(torch.arange(20) < 5, a, torch.div(a, b, rounding_mode="floor"))

    a, b = torch.arange(20), torch.ones(20, dtype=I64)
    b[2] = 0  # whose quotient nobody chooses
    for run in (fn, mc.compile(fn)):
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            run(a, b)
