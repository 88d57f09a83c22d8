"""Checks of lesson 12: scheduling and fusion."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import minicompile as mc
from minicompile.errors import VerifyError
from minicompile.lessons.exercise import Lesson, Run
from minicompile.lessons.model import Block, GPTConfig
from minicompile.lowering.ir import LoopGraph
from minicompile.pipeline_result import Trace
from minicompile.scheduling.fusion import FusionPolicy, fusion_rule
from minicompile.scheduling.nodes import Schedule, SchedulerNode, SingleNode
from minicompile.scheduling.schedule import Explained, make_nodes

lesson = Lesson("12")

SMALL = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8)


def apart(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> Trace:
    """A trace in which lowering inlines nothing."""
    return mc.trace(mc.compile(function, options={"inline": "never", **options}), *inputs)


def moved(trace: Trace) -> int:
    """Bytes that the kernels read and write."""
    return sum(plan.cost.bytes for plan in trace.plans)


def small_block() -> Block:
    return Block(SMALL).requires_grad_(False)


def kernels_text(trace: Trace) -> str:
    return "\n".join(map(str, trace.kernels))


# -- programs


def transposed_sum(x: Tensor) -> Tensor:
    y = torch.relu(x)
    u = y * 2
    return u + u.t()


def soft(x: Tensor) -> Tensor:
    return torch.softmax(torch.relu(x), -1)


def around_a_product(x: Tensor) -> Tensor:
    y = torch.exp(x)
    return y @ y + y


def around_two_products(x: Tensor) -> Tensor:
    y = torch.exp(x)
    return (y @ x) @ x + y


def chain(x: Tensor) -> Tensor:
    return torch.tanh(torch.relu(x) * 2) + 1


def intermediate_returned(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.exp(x)
    return y, y * 2


def shared_with_a_product(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.exp(x)
    return y @ x, y * 2


def scattered(x: Tensor) -> Tensor:
    column = (x > 0).long()
    return x.scatter_add(1, column, x).gather(1, column)


def turned(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.exp(x)
    return y.flip(0) * 2, y + 1


def parts(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.exp(x)
    return y[1:] * 2, y.reshape(-1) + 1


def normalized(x: Tensor) -> Tensor:
    y = torch.exp(x)
    s = y.sum(0)
    return y / s * s.sum()


def only_a_product(x: Tensor) -> Tensor:
    return torch.exp(x) @ x


def sum_then_doubled(x: Tensor) -> Tensor:
    return x.sum(1) * 2


def side_by_side(x: Tensor) -> tuple[Tensor, Tensor]:
    return x + 1, x * 2


def corners(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, :4] + 1, x[:4] * 2


# -- 1: what never reaches memory


@lesson.exercise(
    "ex1",
    points=2,
    level="read",
    visible=[intermediate_returned, transposed_sum, chain],
    hidden=[shared_with_a_product, around_a_product, only_a_product, soft, normalized],
    forbidden=["internal", "memory", "allocate", "blocks"],
)
def memory_is_saved(run: Run, in_registers: Callable[[Schedule], set[str]]) -> str:
    """Compares with the memory plan."""
    found: list[str] = []
    for function in run.cases:
        schedule = apart(function, torch.randn(8, 8)).schedule
        found = sorted(schedule.memory.internal)
        got = run.seen(in_registers(schedule))
        run.that(isinstance(got, set), f"in_registers for {function.__name__}", "a set", repr(got))
        run.same(sorted(got), found, f"in_registers for {function.__name__}")
    return f"{len(found)} buffers never reach memory, as the memory plan says"


# -- 2: a cycle


@lesson.exercise(
    "ex2",
    points=3,
    level="construct",
    visible=[(8, 8)],
    hidden=[(5, 12), (16, 3)],
    forbidden=["fusion_rule", "Verdict", "mock"],
)
def loop_between_loops(run: Run, cyclic: Callable[[Tensor], Any]) -> str:
    """A refusal whose cause is a cycle through a loop."""
    for shape in run.cases:
        x = torch.randn(shape)
        trace, what = apart(cyclic, x), f"cyclic(f32{list(shape)})"
        calls = run.seen([str(call.op) for call in trace.loops.externs])
        run.that(not calls, what, "no library call", ", ".join(calls))
        nodes = trace.schedule.before
        loops = run.seen([node.name for node in nodes if isinstance(node, SchedulerNode)])
        decisions = trace.schedule.decisions
        between = run.seen([list(d.between) for d in decisions if d.cause == "cycle"])
        through = any(names and set(names) <= set(loops) for names in between)
        kernels = ["+".join(n.name for n in k.nodes) for k in trace.schedule.kernels]
        kept = [f"{d.producer} and {d.consumer} apart: {d.cause}" for d in decisions if not d.fused]
        names, apart_from = run.seen(kernels), run.seen(kept)
        got = f"kernels {', '.join(names)}; {', '.join(apart_from) or 'no two loops kept apart'}"
        run.that(through, what, "two loops kept apart by a cycle through a third loop", got)
        eager = run.seen(cyclic(x))
        compiled = mc.compile(cyclic, options={"inline": "never"})
        run.close(compiled(x), eager, what, rtol=1e-4, atol=1e-5)
    return "refused: a loop must run between the two, and no library call is left"


# -- 3: can_fuse

Group = Sequence[SingleNode]
CanFuse = Callable[[list[SingleNode], list[SingleNode], list[SingleNode]], tuple[bool, str]]


def flaw(p: Group, c: Group, nodes: Group) -> str:
    """Why the two groups can't be one kernel by the exercise's three rules; "" if they can."""
    loops = [node for node in (*p, *c) if isinstance(node, SchedulerNode)]
    spaces = list(dict.fromkeys(tuple(node.body.all_ranges.values()) for node in loops))
    if len(spaces) > 1:
        return f"loops {list(spaces[0])} and {list(spaces[1])} differ"
    written = {d.buffer: d.index for node in p for d in node.writes}
    for node in c:
        for d in node.reads:
            if d.buffer in written and (d.index is None or d.index != written[d.buffer]):
                return f"{d.buffer} written at {written[d.buffer]}, {node.name} reads {d.index}"
    through: dict[str, str] = {}
    for node in nodes:
        reads = {d.buffer for d in node.reads}
        if node in c and reads & through.keys():
            return f"{through[min(reads & through.keys())]} must run between"
        if node not in p and node not in c and reads & (through.keys() | written.keys()):
            through |= {d.buffer: node.name for d in node.writes}
    return ""


class Asked(FusionPolicy):
    """Asks an answer, and notes what it says of each pair."""

    def __init__(self, can_fuse: CanFuse) -> None:
        self.answer = can_fuse
        self.graph: LoopGraph | None = None
        self.nodes: list[SingleNode] = []
        self.said: list[tuple[str, bool, Any, str]] = []
        """The pair, the verdict, the reason, and what the answer gave if that is not two things."""
        self.groups: list[tuple[Group, Group, Group]] = []

    def can_fuse(self, producer: Any, consumer: Any, context: Any) -> tuple[bool, str]:
        if self.graph is not context.graph:
            self.graph, self.nodes = context.graph, make_nodes(context.graph)
        by_name = {node.name: node for node in self.nodes}
        p, c = ([by_name[n.name] for n in nest.nodes] for nest in (producer, consumer))
        said = self.answer(list(p), list(c), list(self.nodes))
        both = isinstance(said, tuple | list) and len(said) == 2
        verdict, reason = said if both else (said, None)
        pair = " -> ".join("+".join(node.name for node in group) for group in (p, c))
        self.said.append((pair, bool(verdict), reason, "" if both else repr(said)))
        self.groups.append((p, c, self.nodes))
        return bool(verdict), reason if isinstance(reason, str) else ""


def judge_verdicts(run: Run, asked: Asked, where: str) -> None:
    """Raises Wrong for the first verdict that is not what the rules say."""
    for (pair, verdict, reason, other), groups in zip(run.seen(asked.said), asked.groups):
        run.that(not other, f"{where}{pair}", "(verdict, reason)", other)
        why = flaw(*groups)
        words = ("refusal", "fusion") if why else ("fusion", "refusal")
        what = f"{where}{pair}: {why or 'all three rules hold'}"
        run.that(verdict is not bool(why), what, *words)
        in_words = isinstance(reason, str) and bool(reason)
        run.that(in_words, f"{where}{pair}", "a reason in words", repr(reason))
    asked.said.clear()
    asked.groups.clear()


@lesson.exercise(
    "ex3",
    points=5,
    level="implement",
    visible=[transposed_sum, around_a_product, soft, around_two_products],
    hidden=[
        scattered,
        turned,
        parts,
        normalized,
        chain,
        sum_then_doubled,
        side_by_side,
        corners,
    ],
    forbidden=["align", "FusionPolicy", "schedule", "what_if", "decisions", "Fuser", "fusion_rule"],
    without=["fusion:policy"],
)
def right_is_decided(run: Run, can_fuse: CanFuse) -> str:
    """The scheduler asks the answer, and nobody else."""
    block, h = small_block(), torch.randn(1, 8, 16)
    x = torch.randn(8, 8)
    before = apart(transposed_sum, x), apart(block, h)
    asked = Asked(can_fuse)
    fusion_rule("policy")(lambda: asked)
    fuser = "minicompile.scheduling.fusion:Fuser"
    with (  # the scheduler's own refusals, so that the answer is asked first
        run.replaced(f"{fuser}._cycle", lambda fuser, a, b: None),
        run.replaced(f"{fuser}._hazard", lambda fuser, producer, consumer: None),
    ):
        for function in run.cases:
            with contextlib.suppress(VerifyError):  # of two loops that may not be one kernel
                apart(function, torch.randn(8, 8))
            judge_verdicts(run, asked, f"{function.__name__}, ")
    mc.reset()
    after = apart(transposed_sum, x), apart(block, h)
    run.changed(kernels_text(before[1]), kernels_text(after[1]), "the block's kernels")
    compiled = mc.compile(block, options={"inline": "never"})
    run.close(compiled(h), block(h), "the block", rtol=1e-4, atol=1e-5)
    compiled = mc.compile(transposed_sum, options={"inline": "never"})
    run.close(compiled(x), transposed_sum(x), "relu(x) * 2 and its transpose")
    counts = " -> ".join(str(len(stages[0].kernels)) for stages in (before, after))
    bytes_ = " -> ".join(str(moved(stages[0])) for stages in (before, after))
    return f"{counts} kernels, {bytes_} bytes"


# -- 4: score


def regret(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> Tensor:
    b = torch.exp(x) * y + z
    a = torch.sin(x) * y - z
    c = torch.cos(x) * z - y
    return (b @ w) * a + c


def other_order(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> Tensor:
    a = torch.sin(x) * y - z
    b = torch.exp(x) * y + z
    c = torch.cos(x) * z - y
    return (b @ w) * a + c


def product_first(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> Tensor:
    b = (torch.exp(x) * y + z) @ w
    a = torch.sin(x) * y - z
    c = torch.cos(x) * z - y
    return b * a + c


def four_terms(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> Tensor:
    return regret(x, y, z, w) * ((x + y) * z)


@lesson.exercise(
    "ex4",
    points=4,
    level="real",
    visible=[(regret, 16)],
    hidden=[(regret, 24), (other_order, 16), (product_first, 8), (four_terms, 8)],
    forbidden=["FusionPolicy", "super", "fusion_rule", "what_if"],
)
def score_looks_further(run: Run, score: Callable[..., Any]) -> str:
    """The answer is the policy's score."""

    class Scored(FusionPolicy):
        def score(self, producer: Any, consumer: Any, context: Any) -> Any:
            found = score(producer, consumer, context)
            return tuple(found) if isinstance(found, list) else found

    block, h = small_block(), torch.randn(1, 8, 16)
    usual, cases = apart(block, h), []
    for function, n in run.cases:
        tables = [torch.randn(n, n) for _ in range(4)]
        cases.append((function, n, tables, apart(function, *tables)))
    fusion_rule("policy")(Scored)
    mc.reset()
    for function, n, tables, before in cases:
        after = apart(function, *tables)
        old = moved(before)
        new = run.seen(moved(after))
        what = f"{function.__name__} of tables {n} x {n}, bytes"
        run.that(new < old, what, f"fewer than {old}", new)
        run.changed(kernels_text(before), kernels_text(after), f"the kernels of {what}")
    function, _, tables, _ = cases[0]
    found = mc.compile(function, options={"inline": "never"})(*tables)
    run.close(found, function(*tables), function.__name__, rtol=1e-4, atol=1e-4)
    old = moved(usual)
    new = run.seen(moved(apart(block, h)))
    run.that(new <= old, "the block, bytes", f"at most {old}", new)
    return "fewer bytes than with the built-in score; a block moves no more than before"


# -- 5: right, but not wise


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:4] + 1, x[4:] * 2


def halves_and_a_sum(x: Tensor) -> tuple[Tensor, ...]:
    return x[:4] + 1, x[4:] * 2, x[4:] * 3


def halves_of_two(x: Tensor) -> tuple[Tensor, ...]:
    y = torch.exp(x)
    return y @ y, y[:4].sum(1), y[4:].sum(1)


def halves_and_a_product(x: Tensor) -> tuple[Tensor, ...]:
    return x[:4] + 1, x[4:] * 2, torch.exp(x @ x)


@lesson.exercise(
    "ex5",
    points=3,
    level="stretch",
    visible=[halves, halves_of_two],
    hidden=[halves_and_a_sum, halves_and_a_product],
    forbidden=["decisions", "fusion_steps", "steps"],
)
def forced_for_nothing(run: Run, unwise: Callable[[Explained], tuple[str, str, str]]) -> str:
    """A wished fusion is granted and saves nothing."""
    cause = ""
    for function in run.cases:
        trace = mc.trace(function, torch.randn(8, 8))
        what, schedule = f"unwise for {function.__name__}", trace.schedule
        a, b, cause = run.seen(unwise(schedule))
        answer = schedule.why(a, b)
        pair = f"{what}: {a} and {b}"
        run.that(not answer.same_kernel, pair, "two kernels", "one")
        tried = schedule.what_if(fuse=[(a, b)])
        why = tried.refused[0].decision.reason if tried.refused else ""
        run.that(not tried.refused, pair, "a fusion that is right", f"a refusal: {why}")
        rows = {name: values for name, *values in tried.rows}
        before, after = rows["bytes moved"]
        run.that(before == after, f"{pair}, bytes moved", before, after)
        run.same(cause, answer.decision.cause, f"{pair}, cause")
        run.changed(str(schedule), str(tried.after), f"the schedule of {function.__name__}")
    return f"one kernel less, not one byte less: {cause}"
