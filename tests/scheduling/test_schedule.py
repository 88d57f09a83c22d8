"""The scheduler fuses what belongs together, says why not, and never changes a result."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from minicompile.errors import Unsupported
from minicompile.lowering.ir import LoopGraph
from minicompile.ops.registry import scoped, without
from minicompile.options import Options
from minicompile.scheduling.align import Matching
from minicompile.scheduling.fusion import FusionContext, FusionPolicy, fusion_rule
from minicompile.scheduling.nest import LoopNest
from minicompile.scheduling.schedule import schedule
from minicompile.shapes.expr import loop_symbol, size_symbol
from tests.scheduling.building import F64, I64, GraphBuilder, T, check, example_inputs, random_graph

OPTIONS = Options(verify=True)
S0 = size_symbol("s0")
X0, X1, X2, R0 = map(loop_symbol, ("x0", "x1", "x2", "r0"))


def relu(b: GraphBuilder, x: T) -> T:
    return b.pointwise(lambda ops, u: ops.maximum(u, ops.constant(0, F64)), x)


def double(b: GraphBuilder, x: T) -> T:
    return b.pointwise(lambda ops, u: ops.add(u, u), x)


def add(b: GraphBuilder, x: T, y: T) -> T:
    return b.pointwise(lambda ops, u, v: ops.add(u, v), x, y)


def mul(b: GraphBuilder, x: T, y: T) -> T:
    return b.pointwise(lambda ops, u, v: ops.mul(u, v), x, y)


def softmax(b: GraphBuilder, x: T) -> LoopGraph:
    last = len(x.size) - 1
    high = b.reduce(x, (last,), "max", keepdim=True)
    e = b.pointwise(lambda ops, u, m: ops.exp(ops.sub(u, m)), x, high)
    total = b.reduce(e, (last,), "sum", keepdim=True)
    return b.finish(b.pointwise(lambda ops, u, t: ops.truediv(u, t), e, total))


def normalised(b: GraphBuilder, x: T, n: int) -> tuple[T, T]:
    """Layer norm's (x - mean) * rstd, and rstd."""
    last = (len(x.size) - 1,)
    total = b.reduce(x, last, "sum", keepdim=True)
    centred = b.pointwise(
        lambda ops, u, t: ops.sub(u, ops.truediv(t, ops.constant(n, F64))), x, total
    )
    squares = b.pointwise(lambda ops, u: ops.mul(u, u), centred)
    variance = b.reduce(squares, last, "sum", keepdim=True)
    rstd = b.pointwise(lambda ops, v: ops.rsqrt(ops.add(v, ops.constant(1e-5, F64))), variance)
    return mul(b, centred, rstd), rstd


def decision(result: Any, producer: str, consumer: str) -> Any:
    """The first answer about a pair."""
    found = [
        d
        for d in result.decisions
        if d.producer.endswith(producer) and d.consumer.startswith(consumer)
    ]
    assert found, f"nobody asked about {producer} and {consumer}"
    return found[0]


def test_softmax_is_one_kernel_and_only_its_result_reaches_memory() -> None:
    b = GraphBuilder()
    graph = softmax(b, b.input((8, 64)))
    result = schedule(graph, OPTIONS)
    (kernel,) = result.kernels
    assert kernel.ranges == {X0: 8} and kernel.reduction_ranges == {R0: 64}
    assert kernel.levels == ["elem", "elem", "elem", "elem"]
    assert len(result.memory.internal) == 3
    assert [a.buffer for step in result.memory.allocate for a in step] == ["buf3"]
    (have,) = check(graph, result)
    torch.testing.assert_close(have, example_inputs(graph)[0].softmax(-1))


def test_a_symbolic_batch_runs_through_softmax() -> None:
    b = GraphBuilder({S0: 5})
    graph = softmax(b, b.input((S0, 4, 16)))
    result = schedule(graph, OPTIONS)
    (kernel,) = result.kernels
    assert kernel.ranges == {X0: 4 * S0} and kernel.reduction_ranges == {R0: 16}
    check(graph, result)
    check(graph, result, {S0: 11})


def test_layer_norm_is_one_kernel() -> None:
    b = GraphBuilder()
    x, w, bias = b.input((4, 8, 32)), b.input((32,)), b.input((32,))
    hat, rstd = normalised(b, x, 32)
    graph = b.finish(add(b, mul(b, hat, w), bias), rstd)
    result = schedule(graph, OPTIONS)
    assert len(result.nodes) == 1
    assert result.kernels[0].ranges == {X0: 32}
    check(graph, result)


def test_layer_norm_backward_for_the_input_is_one_kernel() -> None:
    b = GraphBuilder()
    grad, hat, rstd, w = b.input((8, 32)), b.input((8, 32)), b.input((8, 1)), b.input((32,))
    weighted = mul(b, grad, w)
    first = b.reduce(weighted, (1,), "sum", keepdim=True)
    second = b.reduce(mul(b, weighted, hat), (1,), "sum", keepdim=True)
    inner = b.pointwise(
        lambda ops, a, c, h, s: ops.sub(ops.sub(a, c), ops.mul(h, s)), weighted, first, hat, second
    )
    graph = b.finish(mul(b, inner, rstd))
    result = schedule(graph, OPTIONS)
    assert len(result.nodes) == 1
    check(graph, result)


def test_a_pointwise_chain_over_contiguous_memory_is_one_loop() -> None:
    b = GraphBuilder()
    x = b.input((8, 64, 64))
    graph = b.finish(double(b, relu(b, x)))
    (kernel,) = schedule(graph, OPTIONS).kernels
    assert kernel.ranges == {X0: 32768}


def test_a_reshape_between_two_loops_is_aligned_by_splitting() -> None:
    b = GraphBuilder()
    x, y, w = b.input((8, 512)), b.input((64, 64)), b.input((64,))
    u = relu(b, x)
    graph = b.finish(add(b, mul(b, u.reshape(64, 64), y), w))
    result = schedule(graph, OPTIONS)
    (kernel,) = result.kernels
    assert list(kernel.ranges.values()) == [64, 64]
    check(graph, result)


def test_different_splits_of_one_space_meet_in_the_common_finest() -> None:
    b = GraphBuilder()
    x, rows, cols = b.input((8, 512)), b.input((8, 1)), b.input((64,))
    u = add(b, x, rows)
    graph = b.finish(add(b, u.reshape(64, 64), cols))
    (kernel,) = schedule(graph, OPTIONS).kernels
    assert list(kernel.ranges.values()) == [8, 8, 64]
    check(graph, schedule(graph, OPTIONS))


def test_symbolic_splits_meet_too() -> None:
    b = GraphBuilder({S0: 3})
    x, cols = b.input((S0 * 64,)), b.input((64,))
    u = relu(b, x)
    graph = b.finish(add(b, u.reshape(S0, 64), cols))
    (kernel,) = schedule(graph, OPTIONS).kernels
    assert list(kernel.ranges.values()) == [S0, 64]
    b = GraphBuilder({S0: 3})
    x, cols = b.input((64, S0)), b.input((64,))
    graph = b.finish(add(b, relu(b, x).t(), cols))
    (kernel,) = schedule(graph, OPTIONS).kernels
    assert sorted(map(str, kernel.ranges.values())) == ["64", "s0"]
    check(graph, schedule(graph, OPTIONS), {S0: 7})


def test_rows_whose_length_is_a_sum_of_sizes() -> None:
    b = GraphBuilder({S0: 3})
    b.inputs.append(S0)
    x, y = b.input((4, S0 + 3)), b.input((4, 1))
    u = add(b, x, y)
    graph = b.finish(double(b, u.t()), b.reduce(u, (1,), "sum"))
    check(graph, schedule(graph, OPTIONS))
    check(graph, schedule(graph, OPTIONS), {S0: 7})


def test_a_transposed_consumer_joins_by_permuting_its_loops() -> None:
    b = GraphBuilder()
    u = relu(b, b.input((8, 32)))
    graph = b.finish(u, double(b, u.t()))
    result = schedule(graph, OPTIONS)
    assert len(result.nodes) == 1
    check(graph, result)


def test_adding_a_transpose_of_itself_is_refused_with_both_indices() -> None:
    b = GraphBuilder()
    u = double(b, relu(b, b.input((8, 8))))
    graph = b.finish(add(b, u, u.t()))
    result = schedule(graph, OPTIONS)
    assert len(result.kernels) == 2
    found = decision(result, "buf1", "buf2")
    assert not found.fused and found.kind == "vertical"
    told = "buf1 is written at 8*p0 + p1 but buf2 reads it at p0 + 8*p1, in another order"
    assert told in found.reason
    check(graph, result)


def test_a_stencil_is_refused_for_its_shifted_index() -> None:
    b = GraphBuilder()
    u = relu(b, b.input((65,)))
    graph = b.finish(add(b, u.viewed((64,), (1,)), u.viewed((64,), (1,), 1)))
    result = schedule(graph, OPTIONS)
    assert len(result.kernels) == 2
    check(graph, result)
    found = decision(result, "buf0", "buf1").reason
    assert "buf0 is written at p0 but buf1 reads it at p0, only 64 of its 65 elements" in found


def test_a_cycle_through_a_third_node_is_refused() -> None:
    b = GraphBuilder()
    u = relu(b, b.input((8, 8)))
    product = b.extern(torch.ops.aten.mm.default, (u, u), (8, 8))
    graph = b.finish(add(b, u, product))
    result = schedule(graph, OPTIONS)
    assert len(result.kernels) == 2
    assert "cycle: ext1 must run between" in decision(result, "buf0", "buf2").reason
    check(graph, result)


def test_a_cycle_goes_away_when_the_third_node_joins() -> None:
    b = GraphBuilder()
    graph = softmax(b, b.input((8, 64)))
    with scoped():

        @fusion_rule("policy")
        class EndsFirst(FusionPolicy):
            def score(self, producer: LoopNest, consumer: LoopNest, context: FusionContext) -> int:
                return int(producer.name == "buf1" and consumer.name == "buf3")

        result = schedule(graph, OPTIONS)
    assert result.decisions[0].reason == (
        "cycle: buf2 must run between them, after buf1 and before buf3"
    )
    assert result.decisions[0].between == ("buf2",)
    assert len(result.kernels) == 1


def test_library_calls_are_a_boundary_with_their_reason() -> None:
    b = GraphBuilder()
    u = relu(b, b.input((8, 8)))
    product = b.extern(torch.ops.aten.mm.default, (u, u), (8, 8))
    graph = b.finish(relu(b, product))
    result = schedule(graph, OPTIONS)
    assert "aten.mm.default runs in a library" in decision(result, "buf0", "ext1").reason
    assert "aten.mm.default runs in a library" in decision(result, "ext1", "buf2").reason
    check(graph, result)


def test_a_gather_from_a_fused_buffer_is_refused() -> None:
    b = GraphBuilder()
    table, rows = relu(b, b.input((4, 8))), b.input((6,), I64)
    graph = b.finish(b.gather(table, rows))
    result = schedule(graph, OPTIONS)
    assert len(result.kernels) == 2
    assert "position known only at run time" in decision(result, "buf0", "buf1").reason
    check(graph, result)


def test_a_gather_from_elsewhere_fuses_with_its_user() -> None:
    b = GraphBuilder()
    table, rows, w = b.input((4, 8)), b.input((6,), I64), b.input((6, 8))
    graph = b.finish(add(b, b.gather(table, rows), w))
    result = schedule(graph, OPTIONS)
    assert len(result.kernels) == 1
    check(graph, result)


def test_a_scatter_shares_no_kernel_with_users_of_its_memory() -> None:
    b = GraphBuilder()
    rows, source = b.input((6,), I64), relu(b, b.input((6, 8)))
    zeros = b.fill(0.0, (4, 8))
    before = double(b, zeros)
    out = b.scatter_add(zeros, rows, source)
    graph = b.finish(double(b, out), before)
    result = schedule(graph, OPTIONS)
    kernel = next(k for k in result.kernels if any(n.name == "buf3" for n in k.nodes))
    assert [n.name for n in kernel.nodes] == ["buf0", "buf3"], "its value is computed in its kernel"
    assert (
        "complete only when all of its scatter has run" in decision(result, "buf3", "buf4").reason
    )
    order = [n.name for k in result.kernels for n in k.nodes]
    assert order.index("buf2") < order.index("buf3"), "another reader of the target runs before"
    assert result.memory.aliases == {"buf3": "buf1"}
    check(graph, result)


def test_a_reader_of_a_scatters_target_runs_before_in_a_kernel_of_its_own() -> None:
    b = GraphBuilder()
    rows, x = b.input((6,), I64), b.input((6, 8))
    target = b.fill(1.0, (6, 8))
    before = add(b, target, x)
    out = b.scatter_add(target, rows, x)
    graph = b.finish(before, out)
    result = schedule(graph, OPTIONS)
    assert "buf2 scatters into memory of buf0" in decision(result, "buf1", "buf2").reason
    check(graph, result)


def test_a_reader_of_a_scatters_target_cant_be_delayed_past_it() -> None:
    b = GraphBuilder()
    rows, x = b.input((6,), I64), b.input((6, 8))
    target = b.fill(1.0, (6, 8))
    before = relu(b, target)
    out = b.scatter_add(target, rows, x)
    graph = b.finish(add(b, before, out), x)
    result = schedule(graph, OPTIONS)
    assert "cycle: buf2 must run between them" in decision(result, "buf1", "buf3").reason
    check(graph, result)


def test_kernels_that_fused_elsewhere_count_in_a_cycle() -> None:
    """buf0 runs before the last kernel only by way of two pairs that share nothing but an input."""
    b = GraphBuilder()
    x, y, z = b.input((8, 8)), b.input((8, 8)), b.input((8, 8))

    def turned(u: T, v: T) -> T:  # can't share a kernel with what computes u
        return b.pointwise(lambda ops, p, q, r: ops.add(ops.add(p, q), r), u, u.t(), v)

    first = double(b, y)
    one, its_pair = turned(turned(first, first), z), relu(b, z)
    other, its_own = turned(its_pair, x), relu(b, x)
    last = turned(its_own, y)
    graph = b.finish(one, other, last)
    result = schedule(graph, OPTIONS)
    assert "cycle" in decision(result, "buf0", last.buffer.name).reason
    check(graph, result)


def test_a_fused_kernel_is_checked_however_its_loops_were_matched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Matching, "match", lambda self, mine, theirs: True)
    for seed in range(60):
        graph = random_graph(seed, 8)
        check(graph, schedule(graph, OPTIONS))


def test_a_scatter_into_an_input_is_not_supported() -> None:
    b = GraphBuilder()
    graph = b.finish(b.scatter_add(b.input((4, 8)), b.input((6,), I64), b.input((6, 8))))
    with pytest.raises(Unsupported, match="in0, which the caller owns"):
        schedule(graph, OPTIONS)


def test_two_reductions_of_one_input_share_its_read() -> None:
    b = GraphBuilder()
    x = b.input((8, 64))
    graph = b.finish(b.reduce(x, (1,), "sum"), b.reduce(x, (1,), "max"))
    result = schedule(graph, OPTIONS)
    assert len(result.kernels) == 1
    assert result.decisions[0].kind == "horizontal" and result.decisions[0].score == 8 * 64 * 8
    check(graph, result)


def test_reductions_over_different_axes_stay_apart() -> None:
    b = GraphBuilder()
    x = b.input((8, 64))
    graph = b.finish(b.reduce(x, (1,), "sum"), b.reduce(x, (0,), "sum"))
    result = schedule(graph, OPTIONS)
    assert len(result.kernels) == 2
    assert "don't match" in decision(result, "buf0", "buf1").reason
    check(graph, result)


def test_square_reductions_over_different_axes_stay_apart() -> None:
    b = GraphBuilder()
    x = b.input((8, 8))
    u = relu(b, x)
    graph = b.finish(b.reduce(u, (1,), "sum"), b.reduce(u, (0,), "sum"))
    result = schedule(graph, OPTIONS)
    assert len(result.kernels) == 2
    check(graph, result)


def test_a_row_value_is_broadcast_inside_the_kernel() -> None:
    b = GraphBuilder()
    x, row = b.input((8, 64)), b.input((8, 1))
    scale = relu(b, row)
    scaled = mul(b, x, scale)
    total = b.reduce(scaled, (1,), "sum", keepdim=True)
    graph = b.finish(mul(b, scaled, total))
    result = schedule(graph, OPTIONS)
    (kernel,) = result.kernels
    assert kernel.levels[0] == "row" and set(kernel.levels[1:]) == {"elem"}
    check(graph, result)


def test_argmax_counts_in_the_order_of_its_own_loops() -> None:
    b = GraphBuilder()
    x = b.input((4, 3, 6))
    transposed = x.permute(1, 2, 0)
    u = relu(b, transposed)
    graph = b.finish(b.reduce(u, (1, 2), "argmax", dtype=I64), u)
    result = schedule(graph, OPTIONS)
    check(graph, result)
    b = GraphBuilder()
    x = b.input((4, 3, 6))
    one = b.reduce(x, (0, 2), "argmax", dtype=I64)
    two = b.reduce(x.permute(2, 1, 0), (0, 2), "argmax", dtype=I64)
    graph = b.finish(one, two)
    result = schedule(graph, OPTIONS)
    assert len(result.kernels) == 2
    assert "different orders" in decision(result, "buf0", "buf1").reason
    check(graph, result)


def test_a_division_in_an_index_becomes_a_loop_of_its_own() -> None:
    b = GraphBuilder()
    x = b.input((8, 16))
    graph = b.finish(double(b, b.repeat_rows(relu(b, x), 4)))
    result = schedule(graph, OPTIONS)
    for kernel in result.kernels:
        for body in kernel.bodies:
            assert "//" not in str(body) and "%" not in str(body)
    check(graph, result)


def test_the_innermost_loop_is_where_writes_are_contiguous() -> None:
    b = GraphBuilder()
    x = b.input((32, 8), stride=(1, 32))
    y = b.input((32, 8), stride=(1, 32))
    graph = b.finish(add(b, x, y))
    (kernel,) = schedule(graph, OPTIONS).kernels
    (store,) = kernel.bodies[0].stores
    assert list(kernel.ranges.values()) == [32, 8]
    assert store.index == 8 * X0 + X1


def test_a_kernel_has_at_most_so_many_operations() -> None:
    b = GraphBuilder()
    x = b.input((16,))
    for _ in range(6):
        x = relu(b, x)
    graph = b.finish(x)
    result = schedule(graph, Options(verify=True, max_kernel_operations=4))
    assert [len(k.nodes) for k in result.kernels] == [2, 2, 2]
    refused = [d for d in result.decisions if d.cause == "size_limit"]
    assert refused and "more than options.max_kernel_operations = 4" in refused[0].reason
    check(graph, result)


def test_fusion_can_be_switched_off() -> None:
    b = GraphBuilder()
    graph = softmax(b, b.input((8, 64)))
    result = schedule(graph, Options(fusion=False, verify=True))
    assert len(result.kernels) == 4 and result.decisions == []
    check(graph, result)


def test_a_policy_from_outside_changes_the_number_of_kernels() -> None:
    b = GraphBuilder()
    graph = softmax(b, b.input((8, 64)))
    with scoped():

        @fusion_rule("policy")
        class NoEpilogues(FusionPolicy):
            def can_fuse(
                self, producer: LoopNest, consumer: LoopNest, context: FusionContext
            ) -> Any:
                if producer.is_reduction:
                    return False, "I want to see every reduction end its kernel"
                return super().can_fuse(producer, consumer, context)

        result = schedule(graph, OPTIONS)
        assert len(result.kernels) > 1
        assert any("I want to see" in d.reason for d in result.decisions)
        check(graph, result)
    with without("fusion:policy"):
        alone = schedule(graph, OPTIONS)
        assert len(alone.kernels) == 4 and {d.cause for d in alone.decisions} == {"policy", "cycle"}
    assert len(schedule(graph, OPTIONS).kernels) == 1


class Always(FusionPolicy):
    def can_fuse(self, producer: LoopNest, consumer: LoopNest, context: FusionContext) -> Any:
        return True, "why not"

    def score(self, producer: LoopNest, consumer: LoopNest, context: FusionContext) -> int:
        return 1


def test_a_policy_that_always_says_yes_never_gives_a_wrong_answer() -> None:
    with scoped():
        fusion_rule("policy")(Always)
        for seed in range(40):
            graph = random_graph(seed, 8)
            check(graph, schedule(graph, OPTIONS))


def test_different_devices_never_share_a_kernel() -> None:
    b = GraphBuilder()
    u = relu(b, b.input((8,)))
    v = double(b, u)
    layout = dataclasses.replace(v.layout, device=torch.device("cuda", 0))
    v.buffer.layout = layout
    result = schedule(b.finish(T(v.buffer, layout)), OPTIONS)
    assert "different devices: cpu and cuda:0" in decision(result, "buf0", "buf1").reason


def test_zero_dimensional_and_empty_tensors() -> None:
    b = GraphBuilder()
    scalar, empty = b.input(()), b.input((0, 4))
    total = b.reduce(empty, (0, 1), "sum")
    graph = b.finish(add(b, double(b, scalar), total), relu(b, empty), b.reduce(empty, (0,), "sum"))
    check(graph, schedule(graph, OPTIONS))


def test_a_schedule_prints_the_same_twice() -> None:
    texts = {str(schedule(random_graph(11, 12), OPTIONS)) for _ in range(2)}
    assert len(texts) == 1 and "0x" not in texts.pop()


@pytest.mark.parametrize("block", range(6))
def test_fusion_never_changes_results_on_random_graphs(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        graph = random_graph(seed, 4 + seed % 12)
        result = schedule(graph, OPTIONS)
        check(graph, result)
        if graph.size_hints:
            check(graph, result, dict.fromkeys(graph.size_hints, 5))
