"""The memory plan: what is allocated, freed, handed on, and what is never touched."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile.options import Options
from minicompile.scheduling.memory import Liveness
from minicompile.scheduling.nodes import Schedule
from minicompile.scheduling.schedule import schedule
from minicompile.show.schedule_pictures import offsets_of
from tests.fuzz.loops import generate
from tests.scheduling.building import (
    GraphBuilder,
    T,
    check,
)

APART = Options(verify=True, fusion=False)


def reuses(result: Schedule) -> dict[str, str]:
    return {a.buffer: a.reuses for s in result.memory.allocate for a in s if a.reuses is not None}


Build = Callable[[GraphBuilder], Any]
ROWS: dict[str, tuple[Build, dict[str, str] | None, int]] = {}
"""Programs by the names of the functions that build them, which buffers take over whose memory, and the most
bytes alive at once."""
SQUARE = 16 * 16 * 8


def plans(reused: dict[str, str] | None, peak: int) -> Callable[[Build], Build]:
    def add(build: Build) -> Build:
        ROWS[build.__name__] = build, reused, peak
        return build

    return add


@pytest.mark.parametrize("row", ROWS)
def test_memory_is_handed_on_as_each_row_says(row: str) -> None:
    build, reused, peak = ROWS[row]
    b = GraphBuilder()
    outputs = build(b)
    graph = b.finish(*(outputs if isinstance(outputs, tuple) else (outputs,)))
    result = schedule(graph, APART)
    assert reused is None or reuses(result) == reused
    assert result.memory.peak_bytes <= peak
    check(graph, result)


def steps(b: GraphBuilder, x: T, count: int) -> T:
    return functools.reduce(lambda x, _: b.double(x), range(count), x)


@plans({f"buf{k + 1}": f"buf{k}" for k in range(5)}, SQUARE)
def a_chain_stays_in_one_piece(b: GraphBuilder) -> T:
    return steps(b, b.input((16, 16)), 6)


@plans({"buf2": "buf0", "buf3": "buf1", "buf4": "buf2", "buf5": "buf3"}, 2 * SQUARE)
def a_chain_that_turns_around_alternates_between_two(b: GraphBuilder) -> T:
    return functools.reduce(lambda x, _: b.double(x.t()), range(6), b.input((16, 16)))


@plans({"buf2": "buf1", "buf3": "buf2"}, 2 * 16 * 8)
def outputs_keep_their_memory(b: GraphBuilder) -> tuple[T, ...]:
    first = b.double(b.input((16,)))
    return steps(b, first, 3), first


@plans({"buf3": "buf2", "buf4": "buf3"}, 2 * 6 * 8 * 8)
def a_scatter_lives_in_its_target_until_it_is_dead(b: GraphBuilder) -> T:
    out = b.scatter_add(b.fill(0.0, (6, 8)), b.input((6,), torch.int64), b.input((6, 8)))
    return steps(b, out, 3)


@plans({"buf3": "buf2", "buf4": "buf3"}, 3 * SQUARE)
def what_a_library_read_may_be_seen_through_its_result(b: GraphBuilder) -> T:
    u = b.double(b.input((16, 16)))
    return steps(b, b.extern(torch.ops.aten.relu.default, (u,), (16, 16)), 3)


@plans({"buf2": "buf0", "buf3": "buf2"}, 2 * SQUARE)
def a_product_writes_into_planned_memory(b: GraphBuilder) -> T:
    x = b.input((16, 16))
    return b.double(b.mm(b.double(b.double(x).t()), x))


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
        made = [b.double(b.input((size,))) for _ in range(count)]
        return [b.reduce(m, (0,), "sum") for m in made]

    graph = b.finish(*total_of(16, 2), *total_of(100, 1), *total_of(16, 2), *total_of(116, 1))
    result = schedule(graph, APART)
    plain = Liveness(result.graph, result.nodes).live_bytes()
    assert len(reuses(result)) == 1, "a second one would not fit under the peak"
    assert result.memory.peak_bytes == max(plain)


def test_eager_keeps_a_result_until_its_last_use_and_what_a_view_looks_at() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        u = (x @ x).t()
        v = x @ x
        w = v @ x
        return w @ x, u

    trace = mc.trace(f, torch.randn(32, 32))
    each = 32 * 32 * 4
    # u's product to the end, v until w is made, w until the last one is
    assert trace.eager_bytes() == 3 * each
