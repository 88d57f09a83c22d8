"""Questions to a finished schedule: why two nodes are one kernel or not, and what if they were.

    Answer     := a, b, what they have in common, the decisions about them in order, the one that counts
    FusionSteps := schedule, [FusionDecision]: every question in order
    WhatIf     := the schedule before and after with wishes: kernels, bytes, time, peak, decisions

Nothing is lowered again: fusion starts from the recorded nodes, or is asked about the groups it ended with.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from minicompile.debug.roofline import costs_of, device_spec, seconds_of
from minicompile.errors import OptionError
from minicompile.ops.display import Several, Shown, bytes_text, count_text, method
from minicompile.ops.origin import source_lines
from minicompile.pipeline_result import Trace
from minicompile.scheduling.fusion import MAX_NEIGHBOURS, Fuser, FusionContext, FusionPolicy
from minicompile.scheduling.nest import LoopNest
from minicompile.scheduling.nodes import (
    Cause,
    FusedSchedulerNode,
    FusionDecision,
    Pair,
    Schedule,
    SingleNode,
)
from minicompile.scheduling.reasons import Verdict
from minicompile.scheduling.schedule import Explained, finish

T = TypeVar("T")


@dataclass(frozen=True)
class Wishes:
    """Pairs of nodes that a learner wants in one kernel, or in two."""

    fuse: tuple[Pair, ...] = ()
    forbid: tuple[Pair, ...] = ()


@method(FusionDecision, "numbers")
def numbers(decision: FusionDecision) -> str:
    """`would save 64 KiB (buf4 64 KiB), distance 3, 12 operations`."""
    parts = ", ".join(f"{name} {bytes_text(count)}" for name, count in decision.saved)
    saved = f"{bytes_text(decision.score)} ({parts})" if decision.saved else "nothing"
    count = decision.operations
    size = "" if count is None else f", {count_text(count, 'operation')}"
    verb = "saves" if decision.fused else "would save"
    return f"{verb} {saved}, distance {decision.distance}{size}"


def asks(decision: FusionDecision, one: Iterable[str], other: Iterable[str]) -> bool:
    """Is a node of one on this side of the question and a node of the other on that side?"""
    producers, consumers = (
        {n.name for n in group} for group in (decision.producers, decision.consumers)
    )
    ways = ((producers, consumers), (consumers, producers))
    return any(not a.isdisjoint(one) and not b.isdisjoint(other) for a, b in ways)


class WishPolicy(FusionPolicy):
    """A policy that grants wishes, and asks another policy about all other pairs."""

    def __init__(self, policy: FusionPolicy, pairs: Wishes) -> None:
        self.policy, self.pairs, self.wishes = policy, pairs, (*pairs.fuse, *policy.wishes)

    @staticmethod
    def wished(pairs: Sequence[Pair], one: LoopNest, other: LoopNest) -> Pair | None:
        """The first of the pairs that has a node in either nest."""
        names, others = ({node.name for node in nest.nodes} for nest in (one, other))
        return next((p for p in pairs if names & {*p} and others & {*p}), None)

    def can_fuse(
        self, producer: LoopNest, consumer: LoopNest, context: FusionContext
    ) -> Verdict | tuple[bool, str]:
        if (pair := self.wished(self.pairs.forbid, producer, consumer)) is not None:
            return Verdict(False, f"what_if keeps {' and '.join(pair)} apart", "wish")
        if self.wished(self.pairs.fuse, producer, consumer) is not None:
            return Verdict(True, "what_if asks for it", "wish")
        return self.policy.can_fuse(producer, consumer, context)

    def score(
        self, producer: LoopNest, consumer: LoopNest, context: FusionContext
    ) -> int | tuple[int, ...]:
        if self.wished(self.pairs.fuse, producer, consumer) is not None:
            return sys.maxsize
        return self.policy.score(producer, consumer, context)


@dataclass(frozen=True)
class Answer(Shown):
    """Why two nodes are one kernel, or why they are not."""

    a: tuple[str, ...]
    b: tuple[str, ...]
    common: tuple[str, ...]
    """Buffers that both touch."""
    asked: tuple[tuple[int, FusionDecision], ...]
    """What the scheduler asked about the two, with the place in `schedule.decisions`."""
    decision: FusionDecision
    """The answer that counts: the fusion that joined them, or why their finished kernels stay apart."""
    step: int | None = None
    """The place of that fusion in `schedule.decisions` and `schedule.steps()`."""

    @property
    def same_kernel(self) -> bool:
        return self.decision.fused

    @property
    def headline(self) -> str:
        pair = f"{' + '.join(self.a)} and {' + '.join(self.b)}"
        if self.same_kernel:
            when = f"fused at step {self.step} because " if self.step is not None else ""
            return f"{pair}: same kernel, {when}{self.decision.reason}"
        return f"{pair}: two kernels, because {self.decision.reason}"

    @property
    def shared(self) -> str:
        return f"both touch {', '.join(self.common)}" if self.common else "no buffer in common"

    def __str__(self) -> str:
        lines = [self.shared, f"numbers: {numbers(self.decision)}"]
        lines += [f"decision {i}: {decision}" for i, decision in self.asked]
        lines += [f"from {line}" for line in source_lines(self.decision.origins)]
        return "\n  ".join([self.headline, *lines])


def parts(schedule: Schedule, name: str) -> list[SingleNode]:
    """The nodes that a name stands for: a buffer's, a node's, a kernel's. Raises OptionError."""
    for node in schedule.before:
        if name == node.name or any(d.buffer == name for d in node.writes):
            return [node]
    for i, kernel in enumerate(schedule.nodes):
        if name in (kernel.name, f"kernel {i}") and isinstance(kernel, FusedSchedulerNode):
            return list(kernel.nodes)
    given = [buffer.name for buffer in schedule.graph.given]
    told = "is given from outside: no kernel computes it" if name in given else "is not known"
    known = ", ".join(node.name for node in schedule.before)
    raise OptionError(f"{name} {told}; known: {known}, and kernels by their names")


class FusionSteps(Several[FusionDecision]):
    """Every question of the scheduler in order, refusals too; `steps[i]` is one of them."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule.decisions)
        self.schedule = schedule
        self.title = f"fusion of {schedule.graph.name}"

    @property
    def counts(self) -> str:
        """The whole run in one line."""
        fused, kernels = sum(decision.fused for decision in self), len(self.schedule.kernels)
        asked = (
            f"{count_text(len(self), 'question')}, {fused} fused, {len(self) - fused} kept apart"
        )
        saved = bytes_text(self.schedule.saved_bytes)
        return f"{asked}: {count_text(kernels, 'kernel')}, {saved} less memory traffic"

    def __str__(self) -> str:
        lines = [f"{i:>4}  {d}\n      {numbers(d)}" for i, d in enumerate(self)]
        return "\n".join([f"{self.title}: {self.counts}", *lines])


def totals(schedule: Schedule) -> dict[str, str]:
    """What a schedule costs: launches, memory traffic, the least time that needs, its peak of memory."""
    buffers, costs = schedule.graph.buffers, costs_of(schedule)
    seconds = sum(
        seconds_of(cost, device_spec(buffers[node.writes[0].buffer].layout.device))
        for node, cost in zip(schedule.nodes, costs, strict=True)
        if node.writes
    )
    return {
        "kernels": str(len(schedule.kernels)),
        "extern calls": str(len(schedule.nodes) - len(schedule.kernels)),
        "bytes moved": bytes_text(sum(cost.bytes for cost in costs)),
        "least time": f"{seconds * 1e6:,.1f} us",
        "memory peak": bytes_text(schedule.memory.peak_bytes),
    }


def only(
    first: Sequence[T], second: Sequence[T], key: Callable[[T], object]
) -> tuple[list[T], list[T]]:
    """What only the first have, and what only the second have."""
    one, other = ({key(item) for item in items} for items in (first, second))
    return [i for i in first if key(i) not in other], [i for i in second if key(i) not in one]


@dataclass(frozen=True)
class WhatIf(Shown):
    """Two schedules of the same nodes: as it was, and with wishes."""

    wishes: Wishes
    before: Explained
    after: Explained

    @property
    def refused(self) -> list[Answer]:
        """Wished fusions that would be wrong."""
        answers = [self.after.why(*pair) for pair in self.wishes.fuse]
        return [answer for answer in answers if not answer.same_kernel]

    @property
    def kernels(self) -> tuple[list[FusedSchedulerNode], list[FusedSchedulerNode]]:
        """Kernels that only the first schedule has, and those that only the second has."""
        return only(self.before.kernels, self.after.kernels, lambda kernel: kernel.name)

    @property
    def decisions(self) -> tuple[list[FusionDecision], list[FusionDecision]]:
        """Decisions that only the first schedule made, and those that only the second made."""
        return only(self.before.decisions, self.after.decisions, str)

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """Name, before, after."""
        old, new = totals(self.before), totals(self.after)
        return [(name, old[name], new[name]) for name in old]

    @property
    def title(self) -> str:
        wishes = (("fuse", self.wishes.fuse), ("keep apart", self.wishes.forbid))
        told = (f"{verb} {a} + {b}" for verb, pairs in wishes for a, b in pairs)
        return f"what if: {', '.join(told) or 'no wishes'}"

    def __str__(self) -> str:
        lines = [self.title, f"  {'':<14}{'before':>12}{'after':>12}"]
        lines += [f"  {name:<14}{old:>12}{new:>12}" for name, old, new in self.rows]
        lines += [f"  refused: {answer.headline}" for answer in self.refused]
        lines.append("kernels and decisions that changed:")
        for gone, new in (self.kernels, self.decisions):
            lines += [*(f"  - {old}" for old in gone), *(f"  + {one}" for one in new)]
        return "\n".join(lines)


@method(Explained, "why")
def why(schedule: Explained, a: str, b: str) -> Answer:
    """Return why two buffers, nodes or kernels are one kernel, or why they are not.

    Raises ValueError for a name that no node of the schedule has.
    """
    fuser, one, other = schedule.fuser, parts(schedule, a), parts(schedule, b)
    first, second = (tuple(node.name for node in nodes) for nodes in (one, other))
    touched = ({d.buffer for n in nodes for d in (*n.reads, *n.writes)} for nodes in (one, other))
    common = tuple(sorted(set.intersection(*touched)))
    asked = tuple((i, d) for i, d in enumerate(schedule.decisions) if asks(d, first, second))
    step, decision = next(((i, d) for i, d in asked if d.fused), (None, None))
    groups = [fuser.group(names[0]) for names in (first, second)]
    if groups[0] != groups[1]:
        decision = now(fuser, *groups)
        decision = next((d for _, d in asked[::-1] if {*d.nodes} == {*decision.nodes}), decision)
    elif decision is None:
        nodes, told = (tuple(one), tuple(other)), "they are the same node"
        decision = FusionDecision(*nodes, "vertical", True, "handed_over", told)
    return Answer(first, second, common, asked, decision, step)


def now(fuser: Fuser, a: int, b: int) -> FusionDecision:
    """Ask about two groups as fusion left them."""
    if not (a in fuser.nests and b in fuser.nests):
        groups = [[n for i, n in enumerate(fuser.nodes) if fuser.mask[g] >> i & 1] for g in (a, b)]
        return fuser.boundary(*(groups[::-1] if fuser.ancestors[a] & fuser.mask[b] else groups))
    decision, *_ = fuser.decide(a, b)
    cause: Cause = "not_asked"
    told = f"of the groups that share only a read with them, {MAX_NEIGHBOURS} are nearer"
    if not fuser.context.options.fusion:
        cause, told = "off", "fusion is switched off: options.fusion is False"
    return replace(decision, fused=False, cause=cause, reason=told) if decision.fused else decision


method(Explained, "steps")(FusionSteps)


@method(Trace, "fusion_steps")
def fusion_steps(trace: Trace, graph: str = "forward") -> FusionSteps:
    """Return every fusion decision in order, refusals too."""
    return FusionSteps(trace.graph(graph).schedule)


def wishes_of(schedule: Schedule, fuse: Sequence[Pair], forbid: Sequence[Pair]) -> Wishes:
    """Return pairs of names as pairs of nodes; a kernel is its first one. Raises as `why` does."""
    pairs = (
        tuple((parts(schedule, a)[0].name, parts(schedule, b)[0].name) for a, b in wished)
        for wished in (fuse, forbid)
    )
    return Wishes(*pairs)


@method(Explained, "what_if")
def what_if(schedule: Explained, fuse: Sequence[Pair] = (), forbid: Sequence[Pair] = ()) -> WhatIf:
    """Fuse once more with wishes; what would be wrong is refused."""
    old, wished = schedule.fuser, wishes_of(schedule, fuse, forbid)
    options = replace(old.context.options, fusion=True)
    context = FusionContext(old.context.graph, options, old.nodes)
    policy = old.policy.policy if isinstance(old.policy, WishPolicy) else old.policy
    again = Fuser(old.nodes, old.before, context, WishPolicy(policy, wished))
    return WhatIf(wished, schedule, finish(again))
