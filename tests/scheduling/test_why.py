"""`schedule.why`, `what_if` and `steps`: an answer for every pair, true, and fusion again with wishes."""

from __future__ import annotations

import collections
import itertools
import re
from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile.lessons.model import GPT, GPTConfig
from minicompile.options import Options
from minicompile.scheduling.nodes import Schedule
from minicompile.scheduling.schedule import schedule
from tests.fuzz.loop_checks import compare
from tests.fuzz.loops import generate
from tests.scheduling.building import GraphBuilder, check, compiled
from tests.scheduling.claims import (
    check_answer,
    check_fused,
    pairs_with_common_buffers,
)

OPTIONS = Options(verify=True)


@pytest.fixture(scope="module")
def lesson() -> Any:
    """The lesson model's trace, forward and backward."""
    torch.manual_seed(0)
    idx = torch.randint(0, GPTConfig().vocab_size, (2, 64))
    return mc.trace(GPT(), idx, idx)


@pytest.mark.long
@pytest.mark.parametrize("graph", ("forward", "backward"))
def test_every_pair_of_the_lesson_model_has_an_answer_that_is_true(lesson: Any, graph: str) -> None:
    found: Schedule = lesson.graph(graph).schedule
    causes: collections.Counter[str] = collections.Counter()
    for one, other in pairs_with_common_buffers(found):
        answer = found.why(one.name, other.name)
        assert answer.common and answer.decision.origins
        check_answer(found, answer)
        causes[answer.decision.cause] += 1
        if answer.decision.cause == "loop_mismatch":
            x, y = re.findall(r"\[.*?\](?: over \[.*?\])?", answer.decision.reason)
            assert x != y
    assert sum(causes.values()) > 100 and len(causes) >= 6
    for decision in found.decisions:
        assert decision.score == sum(count for _, count in decision.saved)
        if decision.fused:
            check_fused(found, decision)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200))
def test_every_pair_of_a_random_graph_has_a_true_answer(seed: int) -> None:
    found = schedule(generate(seed, 4 + seed % 12).build(), OPTIONS)
    for one, other in pairs_with_common_buffers(found):
        check_answer(found, found.why(one.name, other.name))


def test_what_if_keeps_a_pair_apart_and_shows_both_sides() -> None:
    b = GraphBuilder()
    graph = b.finish(b.softmax(b.input((8, 64))))
    found = schedule(graph, OPTIONS)
    asked = found.what_if(forbid=[("buf1", "buf2")])
    assert len(asked.before.kernels) == 1 and len(asked.after.kernels) > 1
    names = [name for name, _, _ in asked.rows]
    assert names == ["kernels", "extern calls", "bytes moved", "least time", "memory peak"]
    check(graph, asked.after)
    answer = asked.after.why("buf1", "buf2")
    assert answer.decision.cause == "wish" and "what_if keeps" in answer.decision.reason
    assert asked.kernels == (found.kernels, asked.after.kernels)
    text = str(asked)
    assert text.startswith("what if: keep apart buf1 + buf2\n") and "before" in text
    assert "memory peak" in text and "kept apart" in text
    assert len(asked.after.what_if().after.kernels) == 1, "its own schedule without wishes"


def test_what_if_fuses_what_the_policy_would_not_but_never_what_is_wrong() -> None:
    b = GraphBuilder()
    x, y = b.input((8, 8)), b.input((8, 8))
    u = b.relu(x)
    turned = b.add(u, u.t())
    graph = b.finish(turned, b.double(y))
    found = schedule(graph, OPTIONS)
    assert len(found.kernels) == 3
    asked = found.what_if(fuse=[("buf1", "buf2"), ("buf0", "buf1")])
    assert [k.name for k in asked.after.kernels] == ["buf0", "buf1_buf2"]
    (refused,) = asked.refused
    assert refused.decision.cause == "index_mismatch" and "refused: " in str(asked)
    check(graph, asked.after)


@pytest.mark.parametrize("seed", range(40))
def test_wishes_never_change_a_result(seed: int) -> None:
    program = generate(seed, 4 + seed % 10)
    found = schedule(program.build(), OPTIONS)
    names = [n.name for n in found.before]
    fuse = [(a, b) for a, b in zip(names, names[2:], strict=False)]
    forbid = [(a, b) for a, b in itertools.pairwise(names)][seed % 2 :: 2]
    asked = found.what_if(fuse=fuse, forbid=forbid)
    assert compare(program, compiled(asked.after)) is None
    for pair in forbid:
        assert not asked.after.why(*pair).same_kernel
    assert {a.a + a.b for a in asked.refused} == {
        p for p in fuse if not asked.after.why(*p).same_kernel
    }
