"""`trace.fusion_steps()`: every question of the scheduler in order, with the groups before and after it.

    FusionSteps := graph, schedule, [Question]
    Question    := number, decision, groups before and after, kernels left, bytes of traffic saved so far

The real compiler says a part of this in its log: TORCH_LOGS=fusion (torch/_inductor/scheduler.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from minicompile.ops.display import Several, Shown, bytes_text, count_text
from minicompile.scheduling.explain import Groups
from minicompile.scheduling.nodes import FusionDecision, SchedulerNode
from minicompile.scheduling.schedule import Explained


@dataclass(frozen=True)
class Question(Shown):
    """One question and its answer; `number` is its place in `schedule.decisions`."""

    number: int
    decision: FusionDecision
    before: Groups
    after: Groups
    kernels: int
    """Kernels left after it."""
    saved: int
    """Bytes of memory traffic that all fusions so far save."""

    @property
    def asked(self) -> Groups:
        """The two groups that it is about."""
        sides = (self.decision.producers, self.decision.consumers)
        names = ({node.name for node in side} for side in sides)
        return tuple(group for side in names for group in self.before if side >= {*group})

    @property
    def joined(self) -> Groups:
        """The group that it made, if it made one."""
        return tuple(group for group in self.after if group not in self.before)

    @property
    def totals(self) -> str:
        return f"{count_text(self.kernels, 'kernel')} left, {bytes_text(self.saved)} saved so far"

    def lines(self) -> list[str]:
        told = f"      {self.decision.numbers}; {self.totals}"
        return [f"{self.number:>4}  {self.decision}", told]

    def __str__(self) -> str:
        marked = {*self.asked, *self.joined}
        lines = self.lines()
        for title, groups in (("before", self.before), ("after", self.after)):
            names = (" + ".join(group) for group in groups)
            told = (f"[{name}]" if g in marked else name for g, name in zip(groups, names))
            lines.append(f"      {title + ':':<8}{' | '.join(told)}")
        return "\n".join(lines)


class FusionSteps(Several[Question]):
    """The questions about one graph in order; `steps[i]` is one of them."""

    def __init__(self, graph: str, schedule: Explained) -> None:
        super().__init__(questions(schedule))
        self.graph, self.schedule = graph, schedule

    @property
    def counts(self) -> str:
        """The whole run in one line."""
        fused = sum(question.decision.fused for question in self)
        if not self:
            off = "" if self.schedule.fuser.context.options.fusion else ": options.fusion is False"
            return f"no question was asked{off}"
        return (
            f"{count_text(len(self), 'question')}, {fused} fused, {len(self) - fused} kept apart: "
            f"{loops(self.schedule)} → {count_text(self[-1].kernels, 'kernel')}, "
            f"{bytes_text(self[-1].saved)} less memory traffic"
        )

    def __str__(self) -> str:
        return "\n".join(
            [f"fusion of {self.graph}: {self.counts}", *(line for q in self for line in q.lines())]
        )


def loops(schedule: Explained) -> int:
    """Kernels without any fusion."""
    return sum(isinstance(node, SchedulerNode) for node in schedule.before)


def questions(schedule: Explained) -> Iterator[Question]:
    """Each decision with the groups that it met and left."""
    steps, saved, kernels = schedule.steps(), 0, loops(schedule)
    before = after = next(steps).groups
    for number, decision in enumerate(schedule.decisions):
        if decision.fused:
            after, kernels, saved = next(steps).groups, kernels - 1, saved + decision.score
        yield Question(number, decision, before, after, kernels, saved)
        before = after
