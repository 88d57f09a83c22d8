"""Bytes and operations of kernels and extern calls, counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import minicompile
from minicompile.debug.roofline import DeviceSpec, cost_of_call, costs_of, seconds_of
from minicompile.ops.table import POINTWISE
from minicompile.scheduling.cost import Cost
from minicompile.scheduling.nodes import Schedule

F = torch.nn.functional


def schedule_of(fn: Callable[..., Any], *args: Any) -> Schedule:
    return minicompile.trace(fn, *args).schedule


def costs(fn: Callable[..., Any], *args: Any) -> list[Cost]:
    """The cost of each kernel and extern call, in running order."""
    found = schedule_of(fn, *args)
    return costs_of(found)


def ops(**counts: int) -> int:
    """Operations by the table."""
    return sum(POINTWISE[name].flops * count for name, count in counts.items())


def floats(*size: int) -> torch.Tensor:
    return torch.randn(*size)


def put(x: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.index_add(x, 0, rows, values)


X = floats(8, 16)
SOFTMAX = 1 + ops(sub=1, exp=1) + 1 + ops(truediv=1)
PADDING = ops(ge=1, lt=1, logical_and=1, where=1)
"""Two comparisons, their conjunction and the choice."""
ROWS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], list[Cost]]] = {
    "a transpose is the same elements": (
        lambda x: x + x.t(), (floats(16, 16),), [Cost(256 * 4, 256 * 4, 256)],
    ),
    "what stays inside a kernel is no traffic": (
        lambda x: torch.softmax(x, -1), (X,), [Cost(128 * 4, 128 * 4, 128 * SOFTMAX)],
    ),
    "a reduction": (
        lambda x: (x * 2).sum(1) + 1, (X,), [Cost(128 * 4, 8 * 4, 128 * (1 + 1) + 8)],
    ),
    "a scan": (lambda x: x.cumsum(1), (X,), [Cost(128 * 4, 128 * 4, 128)]),
    "a gather reads at most its table": (
        lambda t, i: t[i],
        (X, torch.arange(100) % 8),
        [Cost(128 * 4 + 100 * 8, 100 * 16 * 4, 0)],
    ),
    "an addition reads where it writes": (
        put,
        (floats(50, 4), torch.tensor([1, 2, 3]), floats(3, 4)),
        [Cost(200 * 4, 200 * 4, 0), Cost((12 + 12) * 4 + 3 * 8, 12 * 4, 12)],
    ),
    "a stencil reads once": (
        lambda x: x[:-2] + x[1:-1] + x[2:], (floats(100),), [Cost(100 * 4, 98 * 4, 2 * 98)],
    ),
    "padding reads no more than there is": (
        lambda x: F.pad(x, (1, 1)), (floats(8, 6),), [Cost(48 * 4, 64 * 4, 64 * PADDING)],
    ),
    "what two results need counts once": (
        lambda x: (torch.exp(x) + 1, torch.exp(x) + 2),
        (floats(64),),
        [Cost(64 * 4, 2 * 64 * 4, 64 * ops(exp=1, add=2))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_bytes_and_operations_are_those_counted_by_hand(row: str) -> None:
    fn, args, expected = ROWS[row]
    assert costs(fn, *args) == expected


def test_a_tensor_that_is_updated_in_place_is_read_and_written():
    def step(x: torch.Tensor, g: torch.Tensor) -> None:
        x.sub_(g * 0.1)

    found = costs(step, floats(64), floats(64))
    assert sum(c.bytes_written for c in found) == 64 * 4 * len(found)
    assert found[0] == Cost(2 * 64 * 4, 64 * 4, 2 * 64)


@pytest.mark.parametrize(
    ("fn", "args", "flops"),
    [
        (torch.mm, ((8, 16), (16, 4)), 2 * 8 * 16 * 4),
        (F.conv2d, ((2, 3, 10, 10), (5, 3, 3, 3)), 2 * 2 * 5 * 8 * 8 * 3 * 3 * 3),
    ],
)
def test_library_operators(fn: Callable[..., Any], args: tuple[Any, ...], flops: int):
    tensors = [floats(*size) for size in args]
    found = schedule_of(fn, *tensors)
    total = [cost_of_call(n, found) for n in found.nodes if n not in found.kernels]
    out = fn(*tensors).numel() * 4
    assert total == [Cost(sum(t.numel() for t in tensors) * 4, out, flops)]


def test_symbolic_sizes_count_at_their_hints():
    found = costs(minicompile.compile(lambda x: x * 2, dynamic=True), floats(24, 16))
    assert found == [Cost(24 * 16 * 4, 24 * 16 * 4, 24 * 16)]


def test_the_slower_of_traffic_and_arithmetic_is_the_time():
    spec = DeviceSpec("toy", bytes_per_second=100, flops_per_second=1000)
    assert seconds_of(Cost(150, 50, 1000), spec) == 2.0
    assert seconds_of(Cost(150, 50, 4000), spec) == 4.0
