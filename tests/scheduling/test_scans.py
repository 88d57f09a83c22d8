"""Scans share kernels with what reads them at the same point, and their loop keeps its order."""

from __future__ import annotations

import torch

from minicompile.options import Options
from minicompile.scheduling.body import record
from minicompile.scheduling.nodes import SchedulerNode
from minicompile.scheduling.schedule import schedule
from minicompile.shapes.expr import loop_symbol, size_symbol
from tests.scheduling.building import F64, I64, GraphBuilder, T, check, example_inputs

OPTIONS = Options(verify=True)
S0 = size_symbol("s0")
X0, R0, R1 = map(loop_symbol, ("x0", "r0", "r1"))


def softmax(b: GraphBuilder, x: T) -> T:
    high = b.reduce(x, (1,), "max", keepdim=True)
    e = b.pointwise(lambda ops, u, m: ops.exp(ops.sub(u, m)), x, high)
    total = b.reduce(e, (1,), "sum", keepdim=True)
    return b.pointwise(lambda ops, u, t: ops.truediv(u, t), e, total)


def double(b: GraphBuilder, x: T) -> T:
    return b.pointwise(lambda ops, u: ops.add(u, u), x)


def test_a_body_scans_before_it_stores() -> None:
    b = GraphBuilder()
    x = b.input((3, 4), I64)
    b.scan(x, 0, "sum", I64)
    body = record(b.operations[0], {"in0": I64})  # type: ignore[arg-type]
    assert "ops.scan('sum', tmp0)" in str(body)
    assert [list(group.values()) for group in (body.ranges, body.reduction_ranges)] == [[4], [3]]
    assert [v.dtype for v in body.scans] == [torch.int64]


def test_softmax_then_a_running_sum_is_one_kernel() -> None:
    b = GraphBuilder()
    graph = b.finish(double(b, b.scan(softmax(b, b.input((8, 64))), 1, "sum")))
    result = schedule(graph, OPTIONS)
    (kernel,) = result.kernels
    assert kernel.ranges == {X0: 8} and kernel.reduction_ranges == {R0: 64}
    assert len(result.memory.internal) == 5
    assert "scan [8] along [64]" in str(result.before[4])
    assert {d.kind for d in result.decisions} == {"vertical", "reduction_epilogue"}
    (have,) = check(graph, result)
    torch.testing.assert_close(have, 2 * example_inputs(graph)[0].softmax(1).cumsum(1))


def test_scans_of_a_row_share_its_loop() -> None:
    b = GraphBuilder({S0: 5})
    x = b.input((S0, 6))
    graph = b.finish(b.scan(x, 1, "sum"), b.scan(x, 1, "prod"), b.reduce(x, (1,), "sum"))
    result = schedule(graph, OPTIONS)
    assert len(result.kernels) == 1
    check(graph, result)
    check(graph, result, {S0: 9})


def test_a_running_sum_of_a_running_sum_needs_no_second_sweep() -> None:
    b = GraphBuilder()
    graph = b.finish(b.scan(b.scan(b.input((4, 8)), 1, "sum"), 1, "sum"))
    result = schedule(graph, OPTIONS)
    assert len(result.kernels) == 1
    check(graph, result)


def test_scans_along_different_dimensions_stay_apart() -> None:
    b = GraphBuilder()
    graph = b.finish(b.scan(b.scan(b.input((4, 4)), 1, "sum"), 0, "sum"))
    result = schedule(graph, OPTIONS)
    assert len(result.kernels) == 2
    check(graph, result)


def test_what_reads_another_element_waits_for_the_whole_scan() -> None:
    b = GraphBuilder()
    total = b.scan(b.input((4, 8)), 1, "sum")
    last = total.viewed((4, 1), (8, 1), 7)
    graph = b.finish(
        b.pointwise(lambda ops, u, v: ops.truediv(u, v), total, last), b.flip(total, 1)
    )
    result = schedule(graph, OPTIONS)
    producers = [d for d in result.decisions if d.producer == "buf0" and not d.fused]
    assert any("buf0 is written at" in d.reason for d in producers)
    check(graph, result)


def test_the_loop_of_a_scan_keeps_its_order_when_it_is_split() -> None:
    b = GraphBuilder()
    x, column = b.input((3, 24)), b.input((6, 1))
    total = b.scan(x, 1, "sum")
    split = b.pointwise(lambda ops, u, v: ops.mul(u, v), total.reshape(3, 4, 6), column.t())
    turned = b.pointwise(lambda ops, u: ops.neg(u), split.permute(2, 0, 1))
    graph = b.finish(split, turned)
    result = schedule(graph, OPTIONS)
    (kernel,) = result.kernels
    assert kernel.reduction_ranges == {R0: 4, R1: 6}
    check(graph, result)


def test_a_scan_and_a_reduction_that_count_differently_stay_apart() -> None:
    b = GraphBuilder()
    x = b.input((2, 24))
    place = b.reduce(x.reshape(2, 4, 6).permute(0, 2, 1), (1, 2), "argmax", dtype=I64)
    graph = b.finish(b.scan(x, 1, "sum"), place)
    result = schedule(graph, OPTIONS)
    assert len(result.kernels) == 2
    assert "they run over the row in different orders" in [d.reason for d in result.decisions]
    check(graph, result)


def test_a_scan_of_the_same_number_is_still_a_scan() -> None:
    b = GraphBuilder()
    graph = b.finish(b.scan(b.fill(2.0, (3, 5)), 0, "sum"))
    result = schedule(graph, OPTIONS)
    nodes = [node for node in result.before if isinstance(node, SchedulerNode)]
    assert [node.kind for node in nodes] == ["pointwise", "scan"]
    (have,) = check(graph, result)
    assert have.tolist() == [[2.0] * 5, [4.0] * 5, [6.0] * 5] and have.dtype == F64


def test_a_running_sum_from_the_end_is_kept_apart_from_what_reads_it_forwards() -> None:
    b = GraphBuilder({S0: 5})
    x, y = b.input((S0, 6)), b.input((6,))
    scaled = b.pointwise(lambda ops, u, v: ops.mul(u, v), x, y)
    total = b.flip(b.scan(b.flip(scaled, 1), 1, "sum"), 1)
    graph = b.finish(b.pointwise(lambda ops, u, v: ops.add(u, v), total, y), scaled)
    result = schedule(graph, OPTIONS)
    (have, _) = check(graph, result)
    inputs = example_inputs(graph)
    want = (inputs[0] * inputs[1]).flip(1).cumsum(1).flip(1) + inputs[1]
    torch.testing.assert_close(have, want)
    check(graph, result, {S0: 9})


def test_two_scans_in_opposite_directions_stay_apart() -> None:
    b = GraphBuilder()
    graph = b.finish(b.scan(b.flip(b.scan(b.input((4, 8)), 1, "sum"), 1), 1, "sum"))
    result = schedule(graph, OPTIONS)
    assert len(result.kernels) == 2
    check(graph, result)


def test_what_reads_a_row_in_both_directions_stays_apart() -> None:
    b = GraphBuilder()
    u = double(b, b.input((4, 8)))
    both = b.pointwise(lambda ops, v, w: ops.add(v, w), u, b.flip(u, 1))
    graph = b.finish(both, u)
    result = schedule(graph, OPTIONS)
    assert len(result.kernels) == 2
    check(graph, result)


def test_what_a_scatter_reads_backwards_stays_apart() -> None:
    """Where two indices are equal, the later write wins: the scatter keeps its order."""
    b = GraphBuilder()
    x, rows = b.input((6, 4)), b.input((6,), I64)
    u = double(b, x)
    graph = b.finish(b.scatter_add(b.fill(0.5, (5, 4)), rows, b.flip(u, 0)), u)
    check(graph, schedule(graph, OPTIONS))
