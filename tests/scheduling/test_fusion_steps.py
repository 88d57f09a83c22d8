"""`trace.fusion_steps()`: every question in order, its groups, and totals that the cost account confirms."""

from __future__ import annotations

import html
import itertools
import re
from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile.debug.roofline import costs_of
from minicompile.debug.why import FusionSteps
from minicompile.lessons.model import GPT, GPTConfig
from minicompile.ops.display import to_html
from minicompile.options import Options
from minicompile.pipeline_result import Trace
from minicompile.scheduling.nodes import Schedule, SchedulerNode
from minicompile.scheduling.schedule import schedule
from minicompile.show import fusion


def scores(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.relu(x) * 2, -1).sum(0)


def small(**options: Any) -> Trace:
    return mc.trace(mc.compile(scores, options=options), torch.randn(64, 128))


@pytest.fixture(scope="module")
def lesson() -> Trace:
    idx = torch.randint(0, GPTConfig().vocab_size, (2, 64))
    return mc.trace(mc.compile(GPT(), options={"inline": "never"}), idx, idx)


def moved(found: Schedule) -> int:
    return sum(cost.bytes for cost in costs_of(found))


def check(run: FusionSteps) -> None:
    """The groups lead from single nodes to the finished kernels; the totals are those of the schedules."""
    found = run.schedule
    assert [q.decision for q in run] == found.decisions
    assert run[0].before == tuple((node.name,) for node in found.before)
    ends = {frozenset(getattr(n, "nodes", [n])) for n in found.nodes}
    assert {frozenset(group) for group in run[-1].after} == {
        frozenset(part.name for part in parts) for parts in ends
    }
    for question, following in itertools.pairwise(run):
        assert question.after == following.before
    externs = {n.name for n in found.before if not isinstance(n, SchedulerNode)}
    for question in run:
        names = [
            {n.name for n in side}
            for side in (question.decision.producers, question.decision.consumers)
        ]
        assert [set(group) for group in question.asked] == names
        if question.decision.fused:
            assert [set(group) for group in question.joined] == [names[0] | names[1]]
        else:
            assert question.after == question.before and not question.joined
        assert question.kernels == sum(externs.isdisjoint(group) for group in question.after)
    apart = schedule(found.graph, Options(fusion=False))
    assert run[-1].saved == moved(apart) - moved(found)
    assert run[-1].kernels == len(found.kernels)


@pytest.mark.parametrize("inline", ["auto", "never"])
def test_a_small_run_leads_from_single_nodes_to_the_kernels(inline: str) -> None:
    check(small(inline=inline).fusion_steps())


@pytest.mark.long
@pytest.mark.parametrize("graph", ["forward", "backward"])
def test_so_do_both_graphs_of_a_training_step(lesson: Trace, graph: str) -> None:
    run = lesson.fusion_steps(graph)
    assert len(run) > fusion.MOST_LOOPS
    check(run)


def test_as_text_every_question_has_its_reason_its_numbers_and_the_totals() -> None:
    run = small(inline="never").fusion_steps()
    told = str(run)
    assert told.startswith("fusion of forward: 7 questions, 6 fused, 1 kept apart: 8 → 2 kernels")
    for question in run:
        for part in (question.decision.reason, question.decision.numbers, question.totals):
            assert part in told
    (refused,) = (q for q in run if not q.decision.fused)
    assert "[buf5] | [buf6 + buf7]" in str(refused)


def slides_of(page: str) -> list[str]:
    return re.findall(r"<details(?: open)?><summary>(\d+: [^<]*)<", page)


def test_as_slides_each_question_has_one_and_marks_the_groups_it_is_about() -> None:
    run = small(inline="never").fusion_steps()
    page = to_html(run)
    assert len(slides_of(page)) == len(run) == 7
    for question, content in zip(run, page.split("<details")[1:]):
        framed = re.findall(r'<span style="border[^"]*"><code[^>]*>(.*?)</code></span>', content)
        groups = [*question.asked, *question.joined]
        assert [html.unescape(name) for name in framed] == [" + ".join(g) for g in groups]
    assert page == to_html(small(inline="never").fusion_steps()), "not deterministic"


def test_a_long_run_has_a_slide_for_each_question_too(lesson: Trace) -> None:
    run = lesson.fusion_steps("backward")
    page = to_html(run)
    told = html.unescape(page)
    assert len(slides_of(page)) == len(run)
    assert all(q.decision.reason in told for q in run)
    assert 'print(trace.fusion_steps("backward")[i]) names all' in told
    assert len(page) < 2_000_000


def test_groups_that_are_far_away_are_counted_not_dropped() -> None:
    groups = tuple((f"b{i}",) for i in range(40))
    line = fusion.group_line(groups, {("b20",)}, "red")
    plain = html.unescape(re.sub("<.*?>", "", line))
    counted = sum(map(int, re.findall(r"… (\d+) groups …", plain)))
    assert counted + len(re.findall(r"b\d+", plain)) == 40 and "b19 | b20 | b21" in plain


def test_a_run_without_questions_says_why() -> None:
    run = small(fusion=False).fusion_steps()
    assert str(run) == "fusion of forward: no question was asked: options.fusion is False"
    assert "options.fusion is False" in to_html(run)
    with pytest.raises(AttributeError, match="has no backward graph; it has forward"):
        small().fusion_steps("backward")
