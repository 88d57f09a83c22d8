"""The memory plan: what is allocated, freed, handed on, and what is never touched."""

from __future__ import annotations

from dataclasses import replace

import torch

import minicompile as mc
from minicompile.lowering.ir import PRODUCTS, LoopGraph
from minicompile.options import Options
from minicompile.scheduling.memory import Liveness
from minicompile.scheduling.nodes import Schedule
from minicompile.scheduling.schedule import schedule
from minicompile.shapes.expr import size_symbol
from tests.scheduling.building import (
    GraphBuilder,
    T,
    check,
    compiled,
    example_inputs,
    flat,
    random_graph,
)

S0 = size_symbol("s0")
APART = Options(verify=True, fusion=False)
POOL = replace(APART, memory_pool=True)


def step(b: GraphBuilder, x: T) -> T:
    return b.pointwise(lambda ops, u: ops.add(u, u), x)


def chain(length: int) -> tuple[LoopGraph, Schedule]:
    b = GraphBuilder()
    x = b.input((16, 16))
    for _ in range(length):
        x = step(b, x)
    graph = b.finish(x)
    return graph, schedule(graph, APART)


def reuses(result: Schedule) -> dict[str, str]:
    return {a.buffer: a.reuses for s in result.memory.allocate for a in s if a.reuses is not None}


def test_a_chain_stays_in_one_piece_of_memory() -> None:
    graph, result = chain(6)
    assert reuses(result) == {f"buf{k + 1}": f"buf{k}" for k in range(5)}
    assert result.memory.peak_bytes == 16 * 16 * 8
    check(graph, result)


def test_a_chain_that_turns_around_alternates_between_two_pieces() -> None:
    b = GraphBuilder()
    x = b.input((16, 16))
    for _ in range(6):
        x = step(b, x.t())
    graph = b.finish(x)
    result = schedule(graph, APART)
    assert reuses(result) == {"buf2": "buf0", "buf3": "buf1", "buf4": "buf2", "buf5": "buf3"}
    assert result.memory.peak_bytes == 2 * 16 * 16 * 8
    check(graph, result)


def test_each_buffer_and_input_is_freed_after_its_last_use() -> None:
    _, result = chain(3)
    assert result.memory.free == [["in0"], ["buf0"], ["buf1"]]


def test_graph_outputs_keep_their_memory() -> None:
    b = GraphBuilder()
    first = step(b, b.input((16,)))
    graph = b.finish(step(b, step(b, step(b, first))), first)
    result = schedule(graph, APART)
    assert "buf0" not in reuses(result).values()
    check(graph, result)


def test_only_memory_of_the_same_size_and_dtype_is_reused() -> None:
    b = GraphBuilder()
    x = b.input((16, 16))
    graph = b.finish(b.reduce(step(b, x), (1,), "sum"))
    assert reuses(schedule(graph, APART)) == {}


def test_a_scatter_lives_in_its_targets_memory_until_the_result_is_dead() -> None:
    b = GraphBuilder()
    rows = b.input((6,), torch.int64)
    out = b.scatter_add(b.fill(0.0, (6, 8)), rows, b.input((6, 8)))
    graph = b.finish(step(b, step(b, step(b, out))))
    result = schedule(graph, APART)
    assert result.memory.aliases == {"buf1": "buf0"}
    assert all(a.buffer != "buf1" for s in result.memory.allocate for a in s)
    assert reuses(result) == {"buf3": "buf2", "buf4": "buf3"}, (
        "buf0 holds buf1: no kernel overwrites it"
    )
    check(graph, result)


def test_what_a_library_call_read_is_not_reused_if_its_result_may_be_a_view() -> None:
    b = GraphBuilder()
    u = step(b, b.input((16, 16)))
    seen = b.extern(torch.ops.aten.relu.default, (u,), (16, 16))
    graph = b.finish(step(b, step(b, step(b, seen))))
    result = schedule(graph, APART)
    assert not {"buf0", "buf1"} & set(reuses(result).values())
    check(graph, result)


def test_a_product_writes_into_planned_memory() -> None:
    b = GraphBuilder()
    x = b.input((16, 16))
    u = step(b, step(b, x).t())
    graph = b.finish(step(b, b.extern(torch.ops.aten.mm.default, (u, x), (16, 16))))
    result = schedule(graph, APART)
    assert torch.ops.aten.mm.default in PRODUCTS
    assert reuses(result) == {"buf2": "buf0", "buf3": "buf2"}
    check(graph, result)


def test_waiting_memory_never_raises_the_peak() -> None:
    b = GraphBuilder()
    x = b.input((16, 16))
    small = step(b, x)
    wide = b.input((64, 64))
    large = step(b, step(b, wide))
    total = b.reduce(small, (0, 1), "sum")
    top = b.reduce(large, (0, 1), "sum")
    both = b.pointwise(lambda ops, u, v: ops.add(u, v), total, top)
    graph = b.finish(b.pointwise(lambda ops, u, v: ops.add(u, v), x, both))
    result = schedule(graph, APART)
    alone = 2 * 64 * 64 * 8
    assert result.memory.peak_bytes <= alone + 16 * 16 * 8 + 2 * 8
    check(graph, result)


def test_running_a_small_chain_late_lowers_the_peak() -> None:
    b = GraphBuilder()
    x = b.input((16,))
    wide = [b.pointwise(lambda ops, u, v: ops.mul(u, v), x, b.input((64, 16))) for _ in range(4)]
    sums = [b.reduce(w, (0, 1), "sum") for w in wide]
    graph = b.finish(*sums)
    result = schedule(graph, APART)
    assert result.memory.peak_bytes < 2 * 64 * 16 * 8 + 100
    check(graph, result)


def test_handing_memory_on_never_raises_the_peak_of_random_graphs() -> None:
    handed_on, lower = 0, 0
    for seed in range(120):
        result = schedule(random_graph(seed, 14), APART)
        handed_on += len(reuses(result))
        plain = max(Liveness(result.graph, result.nodes).live_bytes())
        assert result.memory.peak_bytes <= plain
        lower += result.memory.peak_bytes < plain
    assert handed_on > 50 and lower > 20


def test_blocks_that_live_at_the_same_time_lie_apart() -> None:
    for seed in range(60):
        result = schedule(random_graph(seed, 14), POOL if seed % 2 else APART)
        blocks = result.memory.blocks
        assert sorted(n for b in blocks for n in b.buffers) == sorted(
            life.name for life in Liveness(result.graph, result.nodes).lives
        )
        for i, one in enumerate(blocks):
            assert one.offset % 64 == 0
            for other in blocks[:i]:
                if one.born <= other.dies and other.born <= one.dies and one.bytes and other.bytes:
                    assert (
                        one.offset + one.bytes <= other.offset
                        or other.offset + other.bytes <= one.offset
                    )


def test_two_waiting_pieces_of_memory_count_together() -> None:
    b = GraphBuilder()

    def total_of(size: int, count: int) -> list[T]:
        made = [step(b, b.input((size,))) for _ in range(count)]
        return [b.reduce(m, (0,), "sum") for m in made]

    graph = b.finish(*total_of(16, 2), *total_of(100, 1), *total_of(16, 2), *total_of(116, 1))
    result = schedule(graph, APART)
    plain = Liveness(result.graph, result.nodes).live_bytes()
    assert len(reuses(result)) == 1, "a second one would not fit under the peak"
    assert result.memory.peak_bytes == max(plain)


def sized_chain(rows: int) -> LoopGraph:
    """Intermediates of growing sizes, each made from all of the one before."""
    b = GraphBuilder()
    x = b.input((rows, 16))
    for width in (16, 17, 18, 19):
        top = b.reduce(step(b, x), (1,), "max", keepdim=True)
        x = b.pointwise(lambda ops, u, v: ops.add(u, v), top, b.input((rows, width)))
    return b.finish(b.reduce(x, (1,), "sum"))


def test_a_pool_holds_what_nobody_else_keeps() -> None:
    b = GraphBuilder()
    kept = step(b, b.input((16, 16)))
    inner = step(b, step(b, kept.t()).t())
    seen = b.extern(torch.ops.aten.relu.default, (inner,), (16, 16))
    graph = b.finish(b.reduce(step(b, step(b, seen).t()), (0,), "sum"), kept)
    result = schedule(graph, POOL)
    homes = {name: block.home for block in result.memory.blocks for name in block.buffers}
    assert homes == {"buf0": "output", "buf1": "pool", "buf2": "own", "buf3": "library"} | {
        "buf4": "pool", "buf5": "pool", "buf6": "output"
    }  # fmt: skip
    (pool,) = result.memory.pools.values()
    assert (pool.born, pool.dies, pool.bytes) == (1, 6, 2 * 16 * 16 * 8)
    have = check(graph, result)
    assert have[0].untyped_storage().nbytes() == 16 * 8


def test_a_pool_packs_pieces_of_different_sizes() -> None:
    graph = sized_chain(8)
    result = schedule(graph, POOL)
    (pool,) = result.memory.pools.values()
    plain = schedule(graph, replace(APART, memory_pool=False))
    assert not plain.memory.pools and "memory_pool = False" in plain.memory.pool_reason
    apart = sum(block.bytes for block in plain.memory.blocks if block.home == "own")
    assert pool.bytes < 0.6 * apart
    check(graph, result)


def test_a_pool_pays_from_some_megabytes_on() -> None:
    small, large = (schedule(sized_chain(rows), APART).memory for rows in (8, 1 << 15))
    assert not small.pools and "too little" in small.pool_reason
    assert large.pools and "of fresh memory" in large.pool_reason
    assert (
        large.peak_bytes
        <= schedule(sized_chain(1 << 15), replace(APART, memory_pool=False)).memory.peak_bytes
    )


def test_a_pool_never_raises_the_peak_unasked() -> None:
    b = GraphBuilder()
    rows = 1 << 17
    x = b.input((rows, 16))
    for width in (16, 17):  # two large pieces early, at different times
        x = b.pointwise(
            lambda ops, u, v: ops.add(u, v),
            b.reduce(step(b, x), (1,), "max", keepdim=True),
            b.input((rows, width)),
        )
    outputs = [b.reduce(x, (1,), "sum")] + [b.index((rows, 12), 0) for _ in range(2)]
    late = step(
        b, b.pointwise(lambda ops, u, v: ops.add(u, v), outputs[0].reshape(rows, 1), outputs[1])
    )
    result = schedule(b.finish(*outputs, b.reduce(late, (1,), "sum")), APART)
    without = schedule(result.graph, replace(APART, memory_pool=False))
    assert result.memory.peak_bytes == without.memory.peak_bytes


def test_sizes_that_vary_stay_outside_of_the_pool() -> None:
    b = GraphBuilder({S0: 6})
    x, y = b.input((S0, 4)), b.input((8, 4))
    graph = b.finish(*(b.reduce(step(b, step(b, u).t()), (0,), "sum") for u in (x, y)))
    result = schedule(graph, POOL)
    homes = {name: block.home for block in result.memory.blocks for name in block.buffers}
    assert homes["buf0"] == "own" and homes["buf3"] == "pool"
    assert "size varies" in result.memory.pool_reason
    check(graph, result)
    check(graph, result, {S0: 9})


def test_random_graphs_give_their_results_from_a_pool() -> None:
    pooled = 0
    for seed in range(80):
        graph = random_graph(seed + 500, 6 + seed % 12)
        result = schedule(graph, replace(POOL, fusion=seed % 2 == 0))
        pooled += len(result.memory.pools)
        check(graph, result)
        outputs = compiled(result)(example_inputs(graph))
        for output in filter(torch.is_tensor, outputs):
            assert output.untyped_storage().nbytes() == flat(output).numel() * output.itemsize
    assert pooled > 40


def test_the_plan_tells_what_it_saves() -> None:
    _, result = chain(3)
    assert str(result.memory).splitlines() == [
        "memory plan: peak 2 KiB, 2 buffers in reused memory (2 in place), 0 never in memory",
        "  without reuse 6 KiB; eager, operator by operator, 0 B",
        "  step 0: 2 KiB alive; allocate [buf0], free [in0]",
        "  step 1: 2 KiB alive; allocate [buf1 in place of buf0], free [buf0]",
        "  step 2: 2 KiB alive; allocate [buf2 in place of buf1], free [buf1]",
        "  step 1: buf1 in place of buf0: each element is read where it is written, and never after",
        "  step 2: buf2 in place of buf1: each element is read where it is written, and never after",
    ]


def test_eager_keeps_a_result_until_its_last_use_and_what_a_view_looks_at() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        u = (x @ x).t()
        v = x @ x
        w = v @ x
        return w @ x, u

    trace = mc.trace(f, torch.randn(32, 32))
    each = 32 * 32 * 4
    # u's product to the end, v until w is made, w until the last one is
    assert trace.graphs["forward"].schedule.memory.eager_bytes == 3 * each
