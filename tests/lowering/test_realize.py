"""What gets memory, and why; what is inlined; and that bodies stay small."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from minicompile.lowering.ir import ComputedBuffer, ExternKernel, LoopGraph
from tests.lowering.conftest import check, lowered


def whys(graph: LoopGraph) -> list[str]:
    return [op.why for op in graph.operations if isinstance(op, ComputedBuffer)]


KEPT: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "a costly value, read twice": (
        lambda x: [(y := x.exp().sin()).sum(0), y.sum(1)],
        ["2 users, 28 operations on 1 buffers", "reduction", "reduction"],
    ),
    "a mask made of indices": (
        lambda x: [
            x.masked_fill(m := torch.ones(4, 4).tril() == 0, 0.0).sum(0),
            x.masked_fill(m, 1.0).sum(1),
        ],
        ["reduction", "reduction"],
    ),
    "angles made of indices": (
        lambda x: [(x * (a := (torch.arange(4) * 0.5).cos())).sum(0), (x + a).sum(1)],
        ["reduction", "reduction"],
    ),
}
"""Programs, and why the values that get memory get it."""


@pytest.mark.parametrize("name", KEPT)
def test_what_gets_memory_and_why(name: str) -> None:
    program, reasons = KEPT[name]
    assert whys(check(program, torch.randn(4, 4), externs=None)) == reasons


def repeated(
    step: Callable[[torch.Tensor], torch.Tensor], times: int
) -> Callable[..., torch.Tensor]:
    return lambda x: functools.reduce(lambda value, _: step(value), range(times), x.sin())


CHAINS = {
    "diamonds": repeated(lambda x: x * x + x, 40),
    "squares": repeated(lambda x: x * x, 40),
    "sums": repeated(lambda x: x + 1, 700),
    "views": repeated(lambda x: x.flip(0), 400),
}


@pytest.mark.parametrize("name", CHAINS)
def test_long_chains_stay_linear_and_do_not_exhaust_the_stack(name: str) -> None:
    assert len(str(check(CHAINS[name], torch.rand(5) / 100))) < 60_000


def test_costly_values_of_empty_buffers() -> None:
    def fn(x, y):
        z = (x * x + y * y).sqrt().exp().sin().log1p().tanh()
        return [z * 2, z + 1, z.sum(0)]

    check(fn, torch.randn(0), torch.randn(0), externs=None)
    check(fn, torch.randn(4, 0), torch.randn(4, 1))


def test_a_value_realized_late_is_still_inlined_into_earlier_bodies() -> None:
    def fn(x, w):
        y = x + 1
        first = y.sum(0)  # y is inlined here
        return [first, torch.mm(y, w)]  # and needs memory here

    x, w = torch.randn(3, 3), torch.randn(3, 3)
    graph = check(fn, x, w, externs=1)
    order = [type(op) for op in graph.operations]
    assert order.count(ExternKernel) == 1


def test_what_nothing_reads_is_dropped_except_random_numbers() -> None:
    x = torch.randn(3, 4)
    graph = check(lambda x: x.max(1)[0], x)
    assert len(graph.operations) == 1
    graph = lowered(lambda x: [torch.rand(3), x.sin()][1], x)
    assert [str(kernel.op) for kernel in graph.externs] == ["aten.rand.default"]


def test_a_broadcast_operand_costs_nothing_to_read_again() -> None:
    """Rows minus their mean, read by two kernels: each subtracts for itself, as it would read the result."""

    def centered(x):
        y = x - x.mean(1, keepdim=True)
        return [y.sum(0), y.exp().sum(1)]

    reduced = ["reduction"] * 3
    assert whys(check(centered, torch.randn(8, 64))) == reduced
    few = whys(check(centered, torch.randn(64, 8)))  # here the means are an eighth of the rows
    assert any(why.startswith("2 users") for why in few)

    check(centered, torch.randn(0, 64), externs=None)

    def both(x, y):
        z = x + y  # two operands to read for one result
        return [z.sum(0), z.exp().sum(1)]

    few = whys(check(both, torch.randn(8, 64), torch.randn(8, 64)))
    assert any(why.startswith("2 users") for why in few)
