"""The scheduler's specification: which loops share a kernel, which don't and why; a result never changes.

A row of ROWS is a small program, how many kernels it becomes, their loops, and the reasons for which pairs
were kept apart. Each is run, and compared with its loops run one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from minicompile.errors import Unsupported
from minicompile.ops.registry import scoped, without
from minicompile.options import Options
from minicompile.scheduling.align import Matching
from minicompile.scheduling.fusion import FusionContext, FusionPolicy, fusion_rule
from minicompile.scheduling.nest import LoopNest
from minicompile.scheduling.nodes import Schedule
from minicompile.scheduling.schedule import Explained, schedule
from minicompile.shapes.expr import Size, loop_symbol, size_symbol
from tests.fuzz.loop_checks import compare
from tests.fuzz.loops import generate
from tests.scheduling.building import I64, GraphBuilder, T, check, compiled

OPTIONS = Options(verify=True)
S0 = size_symbol("s0")
X0, X1 = loop_symbol("x0"), loop_symbol("x1")
Build = Callable[[GraphBuilder], Any]
ROWS: dict[str, Any] = {}
"""By the name of the function that builds the program: a check that it becomes what its row says."""


def becomes(
    kernels: int,
    *loops: list[Size],
    why: Mapping[str, str] | None = None,
    symbolic: bool = False,
    options: Options = OPTIONS,
) -> Callable[[Build], Callable[[], Schedule]]:
    """A row. `loops`: sizes of the first kernel's, and of those of its reduction. `why`: "buf0 buf1" stay
    apart for this reason. A symbolic program has a size s0, which is 5, and 9 in a second run."""

    def add(build: Build) -> Callable[[], Schedule]:
        def run() -> Schedule:
            b = GraphBuilder({S0: 5} if symbolic else {})
            outputs = build(b)
            graph = b.finish(*(outputs if isinstance(outputs, tuple) else (outputs,)))
            result = schedule(graph, options)
            assert len(result.kernels) == kernels, str(result)
            first = result.kernels[0]
            for sizes, ranges in zip(loops, (first.ranges, first.reduction_ranges)):
                assert list(ranges.values()) == sizes
            for pair, reason in (why or {}).items():
                decision = asked(result, *pair.split())
                assert not decision.fused and reason in decision.reason, decision
            for numbers in ({}, {S0: 9}) if symbolic else ({},):
                check(graph, result, numbers)
            return result

        ROWS[build.__name__] = run
        return run

    return add


def asked(result: Explained, producer: str, consumer: str) -> Any:
    """The first answer about a pair, or that of `why` if fusion did not ask about it."""
    answers = (
        d
        for d in result.decisions
        if d.producer.endswith(producer) and d.consumer.startswith(consumer)
    )
    return next(answers, None) or result.why(producer, consumer).decision


@pytest.mark.parametrize("row", ROWS)
def test_each_program_becomes_what_its_row_says(row: str) -> None:
    ROWS[row]()


# -- reductions, and what is around them


@becomes(1)
def a_row_value_is_broadcast_inside_the_kernel(b: GraphBuilder) -> T:
    scaled = b.mul(b.input((8, 64)), b.relu(b.input((8, 1))))
    return b.mul(scaled, b.reduce(scaled, (1,), "sum", keepdim=True))


@becomes(1)
def argmax_counts_in_the_order_of_its_own_loops(b: GraphBuilder) -> tuple[T, ...]:
    u = b.relu(b.input((4, 3, 6)).permute(1, 2, 0))
    return b.reduce(u, (1, 2), "argmax", dtype=I64), u


@becomes(2, why={"buf0 buf1": "different orders"})
def two_argmax_that_count_differently(b: GraphBuilder) -> tuple[T, ...]:
    x = b.input((4, 3, 6))
    one = b.reduce(x, (0, 2), "argmax", dtype=I64)
    return one, b.reduce(x.permute(2, 1, 0), (0, 2), "argmax", dtype=I64)


# -- loops that are split, merged, reordered


@becomes(1, [64, 64])
def a_reshape_between_two_loops_is_aligned_by_splitting(b: GraphBuilder) -> T:
    x, y, w = b.input((8, 512)), b.input((64, 64)), b.input((64,))
    return b.add(b.mul(b.relu(x).reshape(64, 64), y), w)


@becomes(1)
def a_transposed_consumer_joins_by_permuting_its_loops(b: GraphBuilder) -> tuple[T, ...]:
    u = b.relu(b.input((8, 32)))
    return u, b.double(u.t())


@becomes(2)
def a_division_in_an_index_becomes_a_loop_of_its_own(b: GraphBuilder) -> T:
    return b.double(b.repeat_rows(b.relu(b.input((8, 16))), 4))


# -- what stays apart


in_another_order = "buf1 is written at 8*p0 + p1 but buf2 reads it at p0 + 8*p1: 64 elements of 64"


@becomes(2, why={"buf1 buf2": in_another_order})
def a_matrix_and_its_transpose(b: GraphBuilder) -> T:
    u = b.double(b.relu(b.input((8, 8))))
    return b.add(u, u.t())


in_library = "aten.mm.default runs in a library"


@becomes(
    2,
    why={
        "buf0 buf2": "cycle: ext1 must run between",
        "buf0 ext1": in_library,
        "ext1 buf2": in_library,
    },
)
def a_library_call_between(b: GraphBuilder) -> T:
    u = b.relu(b.input((8, 8)))
    return b.add(u, b.mm(u, u))


@becomes(5, why={"buf0 buf6": "cycle"})
def a_cycle_through_kernels_that_fused_elsewhere(b: GraphBuilder) -> tuple[T, ...]:
    """buf0 runs before the last kernel only by way of two pairs that share nothing but an input."""
    x, y, z = b.input((8, 8)), b.input((8, 8)), b.input((8, 8))

    def turned(u: T, v: T) -> T:  # can't share a kernel with what computes u
        return b.pointwise(lambda ops, p, q, r: ops.add(ops.add(p, q), r), u, u.t(), v)

    first = b.double(y)
    one, its_pair = turned(turned(first, first), z), b.relu(z)
    other, its_own = turned(its_pair, x), b.relu(x)
    return one, other, turned(its_own, y)


@becomes(3, options=Options(verify=True, max_kernel_operations=4))
def a_kernel_has_at_most_so_many_operations(b: GraphBuilder) -> T:
    x = b.input((16,))
    for _ in range(6):
        x = b.relu(x)
    return x


# -- gathers and scatters


@becomes(2, why={"buf0 buf1": "position known only at run time"})
def a_gather_from_a_computed_table(b: GraphBuilder) -> T:
    return b.gather(b.relu(b.input((4, 8))), b.input((6,), I64))


complete = "which others use"


@becomes(3, why={"buf3 buf4": complete})
def a_scatter_shares_no_kernel_with_users_of_its_memory(b: GraphBuilder) -> tuple[T, ...]:
    rows, source = b.input((6,), I64), b.relu(b.input((6, 8)))
    zeros = b.fill(0.0, (4, 8))
    before = b.double(zeros)
    return b.double(b.scatter_add(zeros, rows, source)), before


@becomes(2, why={"buf1 buf2": "buf2 scatters into memory of buf0"})
def a_reader_of_a_scatters_target_runs_before(b: GraphBuilder) -> tuple[T, ...]:
    rows, x = b.input((6,), I64), b.input((6, 8))
    target = b.fill(1.0, (6, 8))
    return b.add(target, x), b.scatter_add(target, rows, x)


@becomes(3, why={"buf1 buf3": "cycle: buf2 must run between them"})
def a_reader_of_a_scatters_target_cant_be_delayed_past_it(b: GraphBuilder) -> T:
    rows, x = b.input((6,), I64), b.input((6, 8))
    target = b.fill(1.0, (6, 8))
    before = b.relu(target)
    return b.add(before, b.scatter_add(target, rows, x))


@becomes(3)
def a_scatter_keeps_its_order(b: GraphBuilder) -> tuple[T, ...]:
    """Where two indices are equal, the later write wins: what it reads backwards stays apart."""
    u = b.double(b.input((6, 4)))
    return b.scatter_add(b.fill(0.5, (5, 4)), b.input((6,), I64), b.flip(u, 0)), u


# -- scans: what reads the same point shares their loop, which keeps its order


@becomes(1, [8], [64])
def a_running_sum_of_softmax(b: GraphBuilder) -> T:
    return b.double(b.scan(b.softmax(b.input((8, 64))), 1, "sum"))


@becomes(1, symbolic=True)
def scans_of_a_row_share_its_loop(b: GraphBuilder) -> tuple[T, ...]:
    x = b.input((S0, 6))
    return b.scan(x, 1, "sum"), b.scan(x, 1, "prod"), b.reduce(x, (1,), "sum")


@becomes(3, why={"buf0 buf1": "buf0 is written at", "buf0 buf2": "buf0 is written at"})
def what_reads_another_element_waits_for_the_whole_scan(b: GraphBuilder) -> tuple[T, ...]:
    total = b.scan(b.input((4, 8)), 1, "sum")
    return b.mul(total, total.viewed((4, 1), (8, 1), 7)), b.flip(total, 1)


@becomes(1, [3], [4, 6])
def the_loop_of_a_scan_keeps_its_order_when_it_is_split(b: GraphBuilder) -> tuple[T, ...]:
    x, column = b.input((3, 24)), b.input((6, 1))
    split = b.mul(b.scan(x, 1, "sum").reshape(3, 4, 6), column.t())
    return split, b.double(split.permute(2, 0, 1))


@becomes(2, why={"buf0 buf1": "they run over the row in different orders"})
def a_scan_and_an_argmax_that_count_differently(b: GraphBuilder) -> tuple[T, ...]:
    x = b.input((2, 24))
    place = b.reduce(x.reshape(2, 4, 6).permute(0, 2, 1), (1, 2), "argmax", dtype=I64)
    return b.scan(x, 1, "sum"), place


# -- what a row can't say


def test_a_scatter_lives_in_its_targets_memory_and_runs_after_other_readers() -> None:
    result = a_scatter_shares_no_kernel_with_users_of_its_memory()
    order = [n.name for k in result.kernels for n in k.nodes]
    assert order.index("buf2") < order.index("buf3")
    kernel = next(k for k in result.kernels if any(n.name == "buf3" for n in k.nodes))
    assert [n.name for n in kernel.nodes] == ["buf0", "buf3"], "its value is computed in its kernel"
    assert result.memory.aliases == {"buf3": "buf1"}


def test_a_scatter_into_an_input_is_not_supported() -> None:
    b = GraphBuilder()
    graph = b.finish(b.scatter_add(b.input((4, 8)), b.input((6,), I64), b.input((6, 8))))
    with pytest.raises(Unsupported, match="in0, which the caller owns"):
        schedule(graph, OPTIONS)


def test_different_devices_never_share_a_kernel() -> None:
    b = GraphBuilder()
    v = b.double(b.relu(b.input((8,))))
    v.buffer.layout = layout = dataclasses.replace(v.layout, device=torch.device("cuda", 0))
    result = schedule(b.finish(T(v.buffer, layout)), OPTIONS)
    assert "different devices: cpu and cuda:0" in asked(result, "buf0", "buf1").reason


# -- policies


def test_a_policy_from_outside_changes_the_number_of_kernels() -> None:
    b = GraphBuilder()
    graph = b.finish(b.softmax(b.input((8, 64))))
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


# -- random programs


def results_differ(seed: int, count: int) -> str | None:
    """How a scheduled program's results differ from those of its loops one by one."""
    program = generate(seed, count)
    return compare(program, compiled(schedule(program.build(), OPTIONS), OPTIONS))


@pytest.mark.parametrize("block", range(6))
def test_fusion_never_changes_results(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        assert results_differ(seed, 4 + seed % 12) is None, seed


def test_a_policy_that_always_says_yes_never_gives_a_wrong_answer() -> None:
    with scoped():
        fusion_rule("policy")(Always)
        assert [results_differ(seed, 8) for seed in range(40)] == [None] * 40


def test_a_fused_kernel_is_checked_however_its_loops_were_matched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Matching, "match", lambda self, mine, theirs: True)
    assert [results_differ(seed, 8) for seed in range(60)] == [None] * 60
