"""Differences by node: what a pass or stage changed, and which of them it was."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

import minicompile as mc
from minicompile.debug.diff import Diff, corridor
from minicompile.lessons.model import GPT, GPTConfig
from minicompile.ops.graph import Listing
from minicompile.pipeline_result import Trace


def network(x, w, b):
    h = torch.relu(x @ w + b)
    p = torch.softmax(h, -1)
    q = p * 2 + p * 2
    return q.sum()


def line_of(function: Callable[..., Any], text: str) -> int:
    """The number of the line of a function that holds a text."""
    lines, first = inspect.getsourcelines(function)
    return next(first + i for i, line in enumerate(lines) if text in line)


def arguments() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size, requires_grad=True) for size in ((8, 16), (16, 32), (32,))]


def trace(function: Callable[..., Any] = network, *args: Any, **options: Any) -> Trace:
    return mc.trace(mc.compile(function, options=options), *(args or arguments()))


@pytest.fixture(scope="module")
def traced() -> Trace:
    return trace()


@pytest.fixture(scope="module")
def gpt() -> Trace:
    torch.manual_seed(0)
    model, tokens = GPT(GPTConfig(n_layer=4)), torch.randint(0, 20, (2, 32))

    def loss(x, y):
        return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())

    return mc.trace(loss, tokens, tokens)


PAIRS = [
    ("capture", "full"),
    ("capture", "aot.forward"),
    ("full", "core"),
    ("core", "prims"),
    ("prims", "aot.backward"),
    ("aot.forward", "aot.backward"),
    ("aot.forward", "loops"),
    ("loops", "schedule"),
    ("capture", "backward.schedule"),
    ("schedule", "kernels"),
]


def names_of(trace: Trace, stage: str) -> list[str]:
    """The names of a stage's things, from the stage's own object."""
    graphs = {"capture": trace.capture.graph, **trace.aot.levels}
    graphs |= {"aot.forward": trace.aot.forward, "aot.backward": trace.aot.backward}
    if stage in graphs:
        return [node.name for node in graphs[stage].nodes]
    compiled = trace.backward if stage.startswith("backward.") else trace.forward
    given = [buffer.name for buffer in compiled.loops.given]
    if stage == "loops":
        return [*given, *(operation.name for operation in compiled.loops.operations), "output"]
    if stage == "kernels":
        return [f"{k.name}:{i}" for k in compiled.kernels for i, _ in enumerate(k.lines, 1)]
    parts = [getattr(node, "nodes", [node]) for node in compiled.schedule.nodes]
    return [*given, *(part.name for several in parts for part in several), "output"]


@pytest.mark.long
@pytest.mark.parametrize("model", ["traced", "gpt"])
@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
def test_applied_to_the_one_side_the_rows_give_the_other(
    pair: tuple[str, str], model: str, request: pytest.FixtureRequest
) -> None:
    shown = request.getfixturevalue(model)
    diff = shown.diff(*pair)
    before, after = (names_of(shown, stage) for stage in pair)
    assert [row.after.name for row in diff.rows if row.after is not None] == after
    old = [row.before.name for row in diff.rows if row.before is not None]
    assert sorted(old) == sorted(before) and len(set(old)) == len(old)
    places = [before.index(row.before.name) for row in diff.rows if row.before is not None]
    assert places == sorted(places)
    for row in diff.rows:
        sides = (row.before is not None, row.after is not None)
        assert sides == (row.status != "added", row.status != "removed")


def check_same_rows(diff: Diff) -> int:
    """Nodes said to be the same call the same with the same, argument by argument."""
    partner = {row.before.name: row.after.name for row in diff.rows if row.before and row.after}
    checked = 0
    for row in diff.rows:
        old, new = (getattr(piece, "subject", None) for piece in (row.before, row.after))
        if old is None or new is None or not hasattr(old, "target"):
            continue
        found: list[str] = []

        def by_name(node: fx.Node, found: list[str] = found) -> str:
            found.append(node.name)
            return node.name

        renamed = fx.map_arg((old.args, old.kwargs), lambda n: partner.get(n.name, "none"))
        equal = old.op == new.op and (old.op == "placeholder" or old.target == new.target)
        equal = equal and repr(renamed) == repr(fx.map_arg((new.args, new.kwargs), by_name))
        equal = equal and row.before.detail == row.after.detail
        assert equal == (row.status == "same"), str(row)
        checked += equal
    return checked


@pytest.mark.long
def test_same_means_the_same_call_of_the_same_values(traced: Trace, gpt: Trace) -> None:
    for shown in (traced, gpt):
        steps, _ = corridor(shown)
        graphs = [p for p in steps.values() if isinstance(p.subject, Listing) and p.base]
        counts = [check_same_rows(shown.diff(p.name)) for p in graphs]
        assert sum(map(bool, counts)) > len(counts) / 2
    assert check_same_rows(gpt.diff("full", "core")) > 200


def test_a_pass_names_what_it_took_away_and_switched_off_it_took_nothing(traced: Trace) -> None:
    diff = traced.diff("prims.cse")
    record = next(r for r in traced.aot.passes if r.name == "prims.cse")
    gone = {n.name for n in record.before.nodes} - {n.name for n in record.after.nodes}
    assert {row.before.name for row in diff.rows if row.status == "removed"} == gone != set()
    assert len(diff.changes) == 2 * len(gone)  # and what read it
    cause = f"tests/debug/test_diff.py:{line_of(network, 'p * 2')}"
    assert {row.cause for row in diff.changes} == {cause}

    off = trace(disable_passes=("cse",))
    with pytest.raises(ValueError, match=r"nothing is called 'prims.cse'.*prims\.dead_code"):
        off.diff("prims.cse")
    between = traced.diff(off, "aot.forward")
    assert [row.status for row in between.changes] == ["added", "changed"]


def test_a_decomposition_is_the_cause_of_what_it_made(traced: Trace) -> None:
    diff = traced.diff("core", "prims")
    made = [r for r in diff.rows if "aten._softmax.default" in r.cause and r.after is not None]
    assert {line for row in made for line in row.after.lines} == {
        line for line in traced.source_lines() if "softmax" in line.text
    }
    assert {"amax", "exp", "div"} <= {row.after.name for row in made}
    pairs = [(row.before.name, row.after.name) for row in made if row.status == "changed"]
    assert ("softmax", "div") in pairs


def test_a_fused_buffer_names_the_decision(traced: Trace) -> None:
    schedule = traced.schedule
    changed = traced.diff("loops", "schedule").changes
    fused = [part.name for kernel in schedule.kernels for part in kernel.nodes[1:]]
    assert sorted(row.after.name for row in changed) == sorted(fused) != []
    for row in changed:
        told = [d for d in schedule.decisions if d.fused and str(d) in row.cause]
        assert any(row.after.name in {n.name for n in d.nodes} for d in told), row.cause
    assert trace(fusion=False).diff("loops", "schedule").changes == []


def test_a_trace_is_equal_to_itself_and_to_another_of_the_same(traced: Trace) -> None:
    for other in (traced, trace()):
        diff = traced.diff(other)
        assert diff.changes == [] and diff.rows == () and diff.summary == "no difference"
        assert all(before == after for _, before, after in diff.facts)
        assert traced.diff(other, "kernels").changes == []


def test_another_option_changes_what_comes_after_it(traced: Trace) -> None:
    other = trace(fusion=False)
    diff = traced.diff(other)
    stages = {row.part for row in diff.rows}
    assert stages and all(s.split(".")[1] in ("schedule", "kernels", "wrapper") for s in stages)
    facts = {name: (before, after) for name, before, after in diff.facts}
    assert facts["option fusion"] == ("True", "False")
    for at, shown in enumerate((traced, other)):
        lines = sum(len(kernel.lines) for kernel in shown.kernels)
        assert facts["forward.kernels"][at] == f"{lines} lines"


def first_version(x, y):
    a = torch.sin(x)
    b = torch.cos(y)
    c = b * 2
    return a + 1, c


def second_version(x, y):
    a = torch.sin(x)
    b = torch.tanh(y)
    c = b * 2
    return a + 1, c


def third_version(x, y):
    x = x * 5
    a = torch.sin(x)
    b = torch.cos(y)
    c = b * 2
    return a + 1, c


def test_one_changed_line_changes_what_came_from_it() -> None:
    old, new = (trace(f, torch.randn(8), torch.randn(9)) for f in (first_version, second_version))
    diff = old.diff(new)
    stages = {row.part for row in diff.rows}
    assert {"capture", "full", "prims", "aot.forward", "forward.loops", "forward.kernels"} <= stages
    for row in diff.changes:
        texts = [line.text for piece in (row.before, row.after) if piece for line in piece.lines]
        if row.part == "guards":
            assert re.search("tanh|cos|__code__", str(row))
        elif texts:
            assert any("(y)" in text for text in texts), str(row)
        else:
            assert row.part.endswith((".wrapper", ".kernels")), str(row)
    [row] = [row for row in diff.changes if row.part == "capture"]
    assert "cos" in row.before.text and "tanh" in row.after.text


def test_numbers_that_shifted_are_no_change() -> None:
    old, new = (trace(f, torch.randn(8), torch.randn(9)) for f in (first_version, third_version))
    diff = old.diff(new, "capture")
    [added, changed] = diff.changes
    assert (added.status, added.after.text) == ("added", "mul = operator.mul(x, 5)")
    assert (
        changed.before.text == "sin = torch.sin(x)" and changed.after.text == "sin = torch.sin(mul)"
    )
    renamed = next(row for row in diff.rows if row.note)
    assert renamed.status == "same" and renamed.note == "was mul"
    assert renamed.after.text == "mul_1 = operator.mul(cos, 2)"


def test_steps_hold_every_pass_in_order_also_idle_ones(traced: Trace) -> None:
    steps = traced.steps()
    titles = [diff.title for diff in steps.steps]
    ran = [
        f"{r.before.name}.{r.name}" if r.name.startswith("post_grad") else r.name
        for r in traced.aot.passes
    ]
    assert [title for title in titles if title in ran] == ran
    order = [
        "symbolic evaluation",
        "functionalization",
        "decomposition to core",
        "prims.cse",
        "forward.partition",
    ]
    order += ["forward.loops", "forward.schedule", "forward.kernels", "backward.partition"]
    assert [title for title in titles if title in order] == order
    told = str(steps)
    for record, name in zip(traced.aot.passes, ran):
        [line] = [line for line in told.split("\n") if line.startswith(f"  {name} ")]
        assert ("no difference" in line) == (not record.changed)
        assert f"{record.before.op_count} ops → {record.after.op_count} ops" in line


@pytest.mark.parametrize("name", ["nope", "prims.nope", "forward.nope", "backward.pre_grad"])
def test_a_wrong_name_lists_what_there_is(traced: Trace, name: str) -> None:
    for given in ((name,), ("capture", name), (name, "capture")):
        with pytest.raises(ValueError, match=rf"{name}.*forward\.loops.*aot\.forward"):
            traced.diff(*given)
