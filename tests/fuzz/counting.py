"""How programs ran: what of them was compiled, and why the rest was not."""

from __future__ import annotations

from collections import Counter

from minicompile.dynamo.result import Capture, GraphBreak
from minicompile.ops.events import Event


class Counting:
    """Listens to every compilation; `program` draws the line under one program.

    A program ran compiled if a graph with an operation was made of it. In one that ran partly so, a frame was
    left to Python as a whole.
    """

    def __init__(self) -> None:
        self.how: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        """Why frames ran in eager, in how many programs."""
        self.graphs, self.refused = 0, set[str]()

    def listen(self, event: Event) -> None:
        if event.kind == "done" and isinstance(event.subject, Capture):
            self.graphs += event.subject.graph.op_count > 0
        elif isinstance(event.subject, GraphBreak) and event.subject.kind == "frame":
            self.refused.add(event.subject.id or event.subject.reason)

    def program(self) -> None:
        refused = "compiled in part" if self.graphs else "in eager"
        nothing = "compiled" if self.graphs else "nothing to compile"
        self.how[refused if self.refused else nothing] += 1
        self.reasons.update(self.refused)
        self.graphs, self.refused = 0, set()

    def __str__(self) -> str:
        total = self.how.total() or 1
        lines = [f"  {kind}: {n} ({100 * n / total:.1f}%)" for kind, n in self.how.most_common()]
        lines += [f"    a frame in eager: {why}, {n}" for why, n in self.reasons.most_common(8)]
        return "\n".join(lines)
