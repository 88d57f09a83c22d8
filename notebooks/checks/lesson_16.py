"""Checks of lesson 16."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import minicompile as mc
from minicompile.api import backends
from minicompile.debug.accuracy import Accuracy
from minicompile.debug.variant import StageAccuracy
from minicompile.lessons.bugs import planted
from minicompile.lessons.exercise import Lesson, Run, Wrong, expects
from minicompile.lessons.model import Block, GPTConfig

lesson = Lesson("16")

TINY = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=16)
FORBIDDEN = ("bugs", "planted", "open", "inspect", "minifier", "bisect", "make_tensor")


def same(got: Tensor, expected: Tensor) -> bool:
    """Equal but for rounding, NaN for NaN."""
    return torch.allclose(got, expected, rtol=1e-3, atol=1e-4, equal_nan=True)


def by_loops(function: Callable[..., Any], *args: Any) -> Any:
    """What the reference interpreter gives for the function's loops."""
    assert "loops" in backends, "run the cells before the exercises"
    with torch.no_grad():
        return mc.compile(function, backend="loops", fullgraph=True)(*args)


# -- ex1


def damped(x: Tensor) -> Tensor:
    return torch.tanh(x) * -1 + F.silu(x)


def report_of(bug: str, function: Callable[..., Any]) -> tuple[str, Accuracy]:
    x = torch.randn(3, 9, requires_grad=True)
    with planted(*filter(None, [bug])):
        return f"mc.accuracy of {function.__name__}", mc.accuracy(function, x)


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def negative(x: Tensor) -> Tensor:
    return -x * 2


def far_off() -> tuple[str, Accuracy]:
    """A report of a rounding error that is far too large, made by lowering."""
    rows = [StageAccuracy("float64", verdict="reference")]
    rows += [StageAccuracy("eager", 1e-7, None, 0.0, 1.0, "baseline")]
    for stage in ("captured", "aot", "compiled", "loops"):
        verdict = "far from eager" if stage in ("loops", "compiled") else "as eager"
        rows.append(StageAccuracy(stage, 1e-3, None, 0.0, 1e4, verdict))
    return "a report with loops far from eager", Accuracy("f", tuple(rows))


def from_capture() -> tuple[str, Accuracy]:
    """A report as a bug of dynamo would give it."""
    rows = [StageAccuracy("float64", verdict="reference")]
    rows += [StageAccuracy("eager", 1e-7, None, 0.0, 1.0, "baseline")]
    for stage in ("captured", "aot", "compiled", "loops"):
        verdict = "raised" if stage == "captured" else "wrong"
        rows.append(StageAccuracy(stage, 1.0, None, 0.0, 1e7, verdict))
    return "a report with a wrong capture", Accuracy("f", tuple(rows))


@lesson.exercise(
    "ex1",
    points=2,
    level="read",
    visible=[
        (partial(report_of, "ragged", negative), expects("lowering")),
        (partial(report_of, "", damped), expects("")),
        (partial(report_of, "wrong base", softmax), expects("codegen")),
        (partial(report_of, "wrong slope", damped), expects("aot")),
    ],
    hidden=[
        (partial(report_of, "same sign", damped), expects("aot")),
        (from_capture, expects("dynamo")),
        (far_off, expects("lowering")),
    ],
    forbidden=[*FORBIDDEN, "ok"],
)
def the_room_to_blame(run: Run, blame: Callable[..., Any]) -> str:
    """Reports of planted bugs, and of none."""
    for make_report, room in run.cases:
        told, report = make_report()
        run.expect(blame(report), room, f"blame({told})")
    return f"{len(run.cases)} reports, each with the right room"


# -- ex2


def answers_of(function: Callable[..., Any], inputs: Any) -> list[Tensor]:
    """What the reference interpreter gives for each input."""
    return [by_loops(function, x) for x in inputs]


@lesson.exercise(
    "ex2",
    points=3,
    level="construct",
    visible=[("ragged", negative), ("lost nan", torch.relu)],
    hidden=[("hot softmax", softmax), ("hot sigmoid", torch.sigmoid), ("half rotation", F.silu)],
    forbidden=FORBIDDEN,
)
def inputs_that_catch(run: Run, hard_inputs: Callable[..., Any]) -> str:
    """Each bug changes the answer on some input; without bugs none does."""
    for bug, function in run.cases:
        answered = hard_inputs()
        inputs = run.seen(answered)
        told = f"hard_inputs() for {function.__name__}"
        good = isinstance(inputs, list) and 0 < len(inputs) <= 5
        run.that(good, told, "a list of one to five tensors", inputs)
        for x in inputs:
            fits = isinstance(x, Tensor) and x.dim() == 2 and x.dtype is torch.float32
            run.that(fits, told, "float32 tensors of two dimensions", x)
        eager = [function(x) for x in inputs]
        healthy = run.seen(answers_of(function, answered))
        same_everywhere = all(map(same, healthy, eager))
        run.that(same_everywhere, f"{told}, no bug", "eager's answer", "another")
        mc.reset()
        with planted(bug):
            sick = run.seen(answers_of(function, answered))
        nothing = f"the same answer on all {len(inputs)}"
        found = not all(map(same, sick, eager))
        run.that(found, f"{told}, a planted bug", "an input with another answer", nothing)
    return f"{len(run.cases)} planted bugs caught"


# -- ex3

LOWERED = ("sigmoid", "relu", "tanh", "neg", "exp", "mul", "add", "sub", "div", "sum", "amax")
RULES = [*(f"lowering:aten.{name}" for name in LOWERED), "decomposition:aten._softmax"]


def mixed(x: Tensor) -> Tensor:
    y = torch.sigmoid(x) * torch.relu(x) + torch.tanh(-x)
    return torch.softmax(x * 90, -1) + y - x.sum(-1, keepdim=True) / 9


class Probe:
    """`fails` of a program with a bug, which counts its questions."""

    def __init__(self, bug: str, function: Callable[..., Any], x: Tensor) -> None:
        self.bug, self.function, self.x, self.asked = bug, function, x, 0
        with torch.no_grad():
            self.expected = function(x)

    def __call__(self, left_out: Sequence[str]) -> bool:
        self.asked += 1
        mc.reset()
        with planted(self.bug), mc.without(*left_out):
            return not same(by_loops(self.function, self.x), self.expected)


def listed(names: Sequence[str], guilty: str | None) -> tuple[Sequence[str], Any, str | None]:
    """A list of names, of which one is guilty, without a compiler."""
    return names, lambda left_out: guilty not in left_out, guilty


def ordinary() -> Tensor:
    return torch.linspace(-3, 3, 2 * 9).reshape(2, 9)


@lesson.exercise(
    "ex3",
    points=4,
    level="implement",
    visible=lambda: [
        (RULES, Probe("ragged", mixed, ordinary()), expects("lowering:aten.neg")),
        listed(list("abcdefghi"), "i"),
    ],
    hidden=lambda: [
        (RULES, Probe("hot softmax", mixed, ordinary()), expects("decomposition:aten._softmax")),
        (RULES[:4], Probe("hot softmax", mixed, ordinary()), expects(None)),
        listed(list("abcdefgh"), "a"),
        listed(list("a"), "a"),
        listed(list("abc"), None),
    ],
    forbidden=FORBIDDEN,
)
def a_bisector(run: Run, guilty: Callable[..., Any]) -> str:
    """Finds rules in the compiler, and names in lists; then heals the block of the GPT."""
    said = ""
    for names, fails, expected in run.cases:
        asked: list[Sequence[str]] = []

        def counted(left_out: Any, fails: Any = fails, asked: Any = asked) -> bool:
            asked.append(list(left_out))
            return bool(fails(left_out))

        most = 2 + math.ceil(math.log2(len(names)))
        told = f"guilty of {len(names)} names"
        run.expect(guilty(list(names), counted), expected, told)
        questions = run.seen(len(asked))
        run.that(questions <= most, told, f"at most {most} questions", f"{questions} questions")
        said = said or f"{expected} of {len(names)} rules in at most {most} questions"
    torch.manual_seed(0)
    block, h = Block(TINY).requires_grad_(False), torch.randn(1, 4, 16)
    block.attention.qkv.weight.mul_(60)
    rules = ["decomposition:aten.native_layer_norm", "decomposition:aten._softmax"]
    found = guilty(rules, Probe("hot softmax", block, h))
    run.expect(found, rules[1], "guilty of two rules, in a block of the GPT")
    with planted("hot softmax"), torch.no_grad():
        before = mc.trace(block, h)
        with mc.without(found):
            after = mc.trace(block, h)
    texts = ["\n".join(k.text for k in t.kernels) for t in (before, after)]
    run.changed(*texts, "the kernels of a block of the GPT, without the rule found")
    return said


# -- ex4


class Network(nn.Module):
    """The second half of a block of the lesson model."""

    def __init__(self) -> None:
        super().__init__()
        block = Block(TINY).requires_grad_(False)
        self.norm, self.mlp = block.norm2, block.mlp

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.mlp(self.norm(x) * 2)
        return found


def scores(x: Tensor, w: Tensor) -> Tensor:
    hidden = torch.tanh(x.relu() + 1) * 200
    weights = torch.softmax(hidden.neg().cos() + hidden, -1)
    return (weights * 3) @ w + 1


def crashes(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Does lowering it fail, for the planted reason?"""
    try:
        by_loops(gm, *inputs)
    except Exception as error:
        return "the table is empty" in str(error)
    return False


def differs(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    with torch.no_grad():
        return any(not same(a, b) for a, b in zip(by_loops(gm, *inputs), gm(*inputs), strict=True))


def captured(function: Callable[..., Any], *args: Any) -> tuple[fx.GraphModule, list[Any]]:
    """The captured graph, with the real inputs it is called with."""
    found: list[Any] = []

    def keep(gm: fx.GraphModule, example_inputs: Any) -> Any:
        def run(*inputs: Any) -> Any:
            found.extend((gm, list(inputs)))
            return gm(*inputs)

        return run

    with torch.no_grad():
        mc.compile(function, backend=keep, fullgraph=True)(*args)
    gm, inputs = found
    return gm, inputs


def wiring(small: Any) -> list[list[Any]] | str:
    """A graph as data: the name of each node, and of the nodes that it reads."""
    if not isinstance(small, fx.GraphModule):
        return type(small).__name__
    rows: list[list[Any]] = []
    for node in small.graph.nodes:
        read: list[str] = []
        fx.map_arg((node.args, node.kwargs), lambda n, read=read: read.append(n.name))
        rows.append([node.name, read])
    return rows


def rewired(gm: fx.GraphModule, rows: list[list[Any]] | str, told: str) -> fx.GraphModule:
    """The part of a graph that `wiring` tells of. Raises Wrong if it is none."""
    copied = copy.deepcopy(gm)
    nodes, graph = {node.name: node for node in copied.graph.nodes}, copied.graph
    try:
        for name, read in rows:
            node, names = nodes[name], iter(read)
            node.args, node.kwargs = fx.map_arg(
                (node.args, node.kwargs), lambda _, names=names: nodes[next(names)]
            )
        kept = {name for name, _ in rows}
        for node in reversed(list(graph.nodes)):
            if node.name not in kept:
                graph.erase_node(node)
        graph.lint()
    except (KeyError, ValueError, TypeError, RuntimeError, StopIteration):
        got = rows if isinstance(rows, str) else f"nodes {', '.join(str(row[0]) for row in rows)}"
        raise Wrong(told, "an fx.GraphModule with a part of the nodes", got) from None
    copied.recompile()
    return copied


def left_out(
    small: fx.GraphModule,
    fails: Callable[..., bool],
    calls: Callable[..., Any],
    moves: Sequence[Callable[..., Any]],
) -> list[int]:
    """How many calls each single move takes away from a graph that fails without them too."""
    found = []
    for position in range(len(calls(small))):
        for move in moves:
            candidate = move(small, position)
            if candidate is None or len(calls(candidate)) >= len(calls(small)):
                continue
            if fails(candidate):
                found.append(len(calls(small)) - len(calls(candidate)))
    return found


@lesson.exercise(
    "ex4",
    points=5,
    level="real",
    visible=[("no table", crashes, "network")],
    hidden=[("hot softmax", differs, "scores"), ("no table", crashes, "network")],
    forbidden=FORBIDDEN,
)
def a_minimiser(
    run: Run,
    minimise: Callable[..., Any],
    cut: Callable[..., Any],
    bypass: Callable[..., Any],
    calls: Callable[..., Any],
) -> str:
    """Small graphs that fail for the same reason, from which no single call can be left out."""
    said = ""
    for bug, test, name in run.cases:
        torch.manual_seed(0)
        x = torch.randn(1, 4, 16)
        network = name == "network"
        gm, inputs = captured(*((Network(), x) if network else (scores, x[0], x[0].t())))
        before = str(gm.graph)
        with planted(bug):

            def fails(candidate: Any, test: Any = test, inputs: Any = inputs) -> bool:
                mc.reset()
                return bool(test(candidate, inputs))

            told = f"minimise({name}, {len(calls(gm))} calls)"
            run.that(fails(gm), told, "a program that fails", "one that does not")
            given = copy.deepcopy(gm)
            small = minimise(given, fails)
            run.expect(str(given.graph), before, f"{told}, the graph that was given")
            again = rewired(gm, run.seen(wiring(small)), told)
            run.that(fails(again), told, "a graph that still fails", "one that does not")
            count = len(calls(again))
            for more in left_out(again, fails, calls, (cut, bypass)):
                expected = "a graph in which every call is needed"
                run.that(False, told, expected, f"{count} calls, of which {more} can be left out")
        run.changed(before, str(small.graph), "the graph that fails")
        said = said or f"{len(calls(gm))} calls became a few, all needed, still failing"
    return said


# -- ex5


def breaks(x: Tensor, n: int) -> Tensor:
    return x * 2 if x.sum().item() > 0 else x


def healthy(x: Tensor, n: int) -> Tensor:
    return torch.relu(x) + 1


def breaks_and_scales(x: Tensor, n: int) -> Tensor:
    return x * n if x.sum().item() > 0 else x


def scaled(x: Tensor, n: int) -> Tensor:
    return x * n


def in_eager(x: Tensor, n: int) -> Tensor:
    """More versions than are kept."""
    return x + n


def told_of(function: Callable[..., Any], count: int) -> Any:
    compiled = mc.compile(function, dynamic=False, options={"recompile_limit": 4})
    x = torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in range(2, 2 + count):
            compiled(x, n)
        return mc.explain(compiled)(x, 2)


@lesson.exercise(
    "ex5",
    points=3,
    level="stretch",
    visible=[
        (healthy, 3, expects([])),
        (scaled, 3, expects(["recompiles"])),
        (breaks, 1, expects(["breaks"])),
    ],
    hidden=[
        (in_eager, 8, expects(["eager", "recompiles"])),
        (breaks_and_scales, 3, expects(["breaks", "recompiles"])),
        (healthy, 1, expects([])),
        (scaled, 1, expects([])),
    ],
    forbidden=[*FORBIDDEN, "str", "repr", "print"],
)
def why_it_is_slow(run: Run, why_slow: Callable[..., Any]) -> str:
    """Reports of functions with known ailments."""
    for function, count, expected in run.cases:
        told = f"why_slow of {function.__name__} after {count} call(s)"
        run.expect(why_slow(told_of(function, count)), expected, told)
    return f"{len(run.cases)} reports read"


# -- ex6

STAGES = ("captured", "functional", "decomposed", "loops", "kernels")


@dataclass(frozen=True)
class Row:
    """An operator of a table by operator."""

    operator: str
    largest: float
    dtype: torch.dtype
    roundings: float
    errors: dict[str, float]


def row(
    operator: str,
    largest: float = 1.0,
    dtype: Any = torch.float32,
    roundings: float = 1,
    **errors: float,
) -> Row:
    """A row in which all stages not named err as eager does."""
    eager = errors.get("eager", 1e-8)
    return Row(
        operator,
        largest,
        dtype,
        roundings,
        {**dict.fromkeys(STAGES, eager), "eager": eager, **errors},
    )


@lesson.exercise(
    "ex6",
    points=3,
    level="stretch",
    visible=[
        ("rounding alone", [row("sin"), row("mul", kernels=1e-7)], expects(None)),
        ("a wrong kernel", [row("sin"), row("mul", kernels=0.5)], expects(("kernels", "mul"))),
        (
            "two mistakes",
            [row("sin", loops=0.5), row("sum", functional=0.5)],
            expects(("functional", "sum")),
        ),
    ],
    hidden=[
        ("bfloat16", [row("mul", dtype=torch.bfloat16, kernels=0.01)], expects(None)),
        ("a long sum", [row("sum", 4096.0, roundings=13, loops=0.01)], expects(None)),
        (
            "eager is no better",
            [row("log", eager=0.3, captured=0.5, loops=0.7)],
            expects(("loops", "log")),
        ),
        ("small numbers", [row("mul", 1e-6, decomposed=1e-7)], expects(("decomposed", "mul"))),
        ("no number", [row("relu", loops=math.inf)], expects(("loops", "relu"))),
    ],
    forbidden=[*FORBIDDEN, "allclose", "isclose", "assert_close", "operator_accuracy"],
)
def how_far_is_too_far(run: Run, too_far: Callable[..., Any]) -> str:
    """Tables by operator, right ones and wrong ones."""
    for told, rows, expected in run.cases:
        run.expect(too_far(rows, list(STAGES)), expected, f"too_far of {told}")
    return f"{len(run.cases)} tables judged"
