"""The memory plan: what is allocated, freed, handed on, and what is never touched."""

from __future__ import annotations

import torch

import minicompile as mc
from minicompile.lowering.ir import PRODUCTS, LoopGraph
from minicompile.options import Options
from minicompile.scheduling.memory import Liveness
from minicompile.scheduling.nodes import Schedule
from minicompile.scheduling.schedule import schedule
from minicompile.shapes.expr import size_symbol
from minicompile.show.schedule import offsets_of
from tests.scheduling.building import (
    GraphBuilder,
    T,
    check,
)
from tests.scheduling.loop_programs import generate

S0 = size_symbol("s0")
APART = Options(verify=True, fusion=False)


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
        result = schedule(generate(seed, 14).build(), APART)
        handed_on += len(reuses(result))
        plain = max(Liveness(result.graph, result.nodes).live_bytes())
        assert result.memory.peak_bytes <= plain
        lower += result.memory.peak_bytes < plain
    assert handed_on > 50 and lower > 20


def test_every_piece_of_memory_is_in_one_block_and_blocks_alive_at_once_are_drawn_apart() -> None:
    for seed in range(60):
        result = schedule(generate(seed, 14).build(), APART)
        blocks = result.memory.blocks
        assert sorted(n for b in blocks for n in b.buffers) == sorted(
            life.name for life in Liveness(result.graph, result.nodes).lives
        )
        drawn = list(zip(blocks, offsets_of(blocks)))
        for i, (one, start) in enumerate(drawn):
            for other, there in drawn[:i]:
                if one.born <= other.dies and other.born <= one.dies and one.bytes and other.bytes:
                    assert start + one.bytes <= there or there + other.bytes <= start


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
