"""Bytes and operations of kernels and extern calls, counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import minicompile
from minicompile.debug.roofline import DeviceSpec, cost_of_call, costs_of, device_spec, seconds_of
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


def test_pointwise_reads_and_writes_every_element_once():
    assert costs(lambda x, y: (x + y) * y, floats(8, 16), floats(8, 16)) == [
        Cost(2 * 128 * 4, 128 * 4, 2 * 128)
    ]


def test_a_row_that_is_broadcast_is_read_once():
    assert costs(lambda x, row: x * row, floats(8, 16), floats(16)) == [
        Cost((128 + 16) * 4, 128 * 4, 128)
    ]


def test_a_tensor_and_its_transpose_are_the_same_elements():
    assert costs(lambda x: x + x.t(), floats(16, 16)) == [Cost(256 * 4, 256 * 4, 256)]


def test_what_a_kernel_hands_on_inside_is_no_traffic():
    """softmax: the largest element, the exponentials and their sum stay in the kernel."""
    (found,) = costs(lambda x: torch.softmax(x, -1), floats(8, 16))
    row, element = ops(), 1 + ops(sub=1, exp=1) + 1 + ops(truediv=1)
    assert found == Cost(128 * 4, 128 * 4, 8 * row + 128 * element)


def test_a_reduction_is_one_operation_for_each_element():
    assert costs(lambda x: (x * 2).sum(1) + 1, floats(8, 16)) == [
        Cost(128 * 4, 8 * 4, 128 * (1 + 1) + 8)
    ]


def test_a_scan_is_one_operation_for_each_element():
    assert costs(lambda x: x.cumsum(1), floats(8, 16)) == [Cost(128 * 4, 128 * 4, 128)]


def test_a_gather_reads_at_most_its_table():
    few, many = torch.tensor([1, 0]), torch.arange(100) % 5
    table = floats(5, 16)
    (found,) = costs(lambda t, i: t[i], table, few)
    assert found == Cost(2 * 16 * 4 + 2 * 8, 2 * 16 * 4, 0)
    (found,) = costs(lambda t, i: t[i], table, many)
    assert found == Cost(5 * 16 * 4 + 100 * 8, 100 * 16 * 4, 0)


def test_a_scatter_writes_what_it_touches():
    def put(x: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.index_add(x, 0, rows, values)

    copy, add = costs(put, floats(50, 4), torch.tensor([1, 2, 3]), floats(3, 4))
    assert copy == Cost(200 * 4, 200 * 4, 0)
    assert add == Cost((12 + 12) * 4 + 3 * 8, 12 * 4, 12), "an addition reads where it writes"


def test_a_strided_slice_counts_the_elements_it_touches():
    assert costs(lambda x: x[:, ::2] * 2, floats(8, 16)) == [Cost(64 * 4, 64 * 4, 64)]
    assert costs(lambda x: x[2:4] + x[6:8], floats(8, 16)) == [Cost(64 * 4, 32 * 4, 32)]
    assert costs(lambda x: x[:, ::2] + x[:, 1::2], floats(8, 16)) == [Cost(128 * 4, 64 * 4, 64)]


def test_overlapping_windows_are_read_once():
    found = costs(lambda x: x[:-2] + x[1:-1] + x[2:], floats(100))
    assert found == [Cost(100 * 4, 98 * 4, 2 * 98)]
    assert costs(lambda x: x.unfold(0, 3, 1).sum(1), floats(100)) == [Cost(400, 98 * 4, 98 * 3)]


def test_a_reversed_tensor_is_the_same_elements():
    assert costs(lambda x: x + x.flip(0), floats(64)) == [Cost(64 * 4, 64 * 4, 64)]


def test_indices_with_divisions():
    """Reading an element twice, or three times, moves it once."""
    repeated = costs(lambda x: x.repeat_interleave(2) * 2, floats(64))
    assert repeated == [Cost(64 * 4, 128 * 4, 128)]
    tiled = costs(lambda x: x.repeat(3) * 2, floats(64))
    assert tiled == [Cost(64 * 4, 192 * 4, 192)]


def test_padding_reads_no_more_than_there_is():
    assert costs(lambda x: F.pad(x, (1, 1)), floats(8, 6)) == [
        Cost(48 * 4, 64 * 4, pad_operations())
    ]


def pad_operations() -> int:
    """Two comparisons, their conjunction and the choice, for each of 64 elements."""
    return 64 * ops(ge=1, lt=1, logical_and=1, where=1)


def test_a_tensor_that_is_updated_in_place_is_read_and_written():
    def step(x: torch.Tensor, g: torch.Tensor) -> None:
        x.sub_(g * 0.1)

    found = costs(step, floats(64), floats(64))
    assert sum(c.bytes_written for c in found) == 64 * 4 * len(found)
    assert found[0] == Cost(2 * 64 * 4, 64 * 4, 2 * 64)


def test_dtypes_count_in_their_own_width():
    (found,) = costs(lambda x: (x > 0).to(torch.uint8), floats(64).to(torch.bfloat16))
    assert (found.bytes_read, found.bytes_written) == (64 * 2, 64)


def test_an_inner_expression_that_two_results_need_counts_once():
    (found,) = costs(lambda x: (torch.exp(x) + 1, torch.exp(x) + 2), floats(64))
    assert found == Cost(64 * 4, 2 * 64 * 4, 64 * ops(exp=1, add=2))


def test_nothing_is_moved_for_empty_tensors():
    for cost in costs(lambda x: x[:0] * 2, floats(8, 4)):
        assert cost == Cost(0, 0, 0)


@pytest.mark.parametrize(
    ("fn", "args", "flops"),
    [
        (torch.mm, ((8, 16), (16, 4)), 2 * 8 * 16 * 4),
        (torch.bmm, ((3, 8, 16), (3, 16, 4)), 3 * 2 * 8 * 16 * 4),
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


def test_the_speed_of_this_machine_is_measured_once():
    spec = device_spec(torch.device("cpu"))
    assert spec is device_spec(torch.device("cpu"))
    assert spec.bytes_per_second > 1e8 and spec.flops_per_second > 1e8
    assert "measured" in str(spec)
    with pytest.raises(ValueError, match="meta"):
        device_spec(torch.device("meta"))
