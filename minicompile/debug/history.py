"""What became of a compiled function's calls: what `mc.explain` and `mc.timeline` tell.

    Timeline    := the misses of one function, and how many calls each version answered
    Explanation := every Capture, GraphBreak and Timeline of a compiled function

The real compiler: ExplainOutput in torch/_dynamo/backends/debugging.py, CompilationMetrics in utils.py.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from minicompile.api import compile, dispatcher_of
from minicompile.dynamo.dispatch import Dispatcher
from minicompile.dynamo.module import original_of
from minicompile.dynamo.result import (
    SHAPE_KINDS,
    Capture,
    GraphBreak,
    GuardFailure,
    Miss,
    failure_lines,
)
from minicompile.errors import OptionError
from minicompile.ops.display import Several, Shown, count_text, listed, method
from minicompile.ops.graph import target_name, unpacks


@dataclass(frozen=True)
class Timeline(Shown):
    """A compiled function's calls in order, as far as that is known: from one miss to the next, how many
    calls each version answered. A call whose graph raised counts for its version and in eager.
    """

    name: str
    misses: tuple[Miss, ...]
    answered: dict[int, int]
    """The counts by now, as in a `Miss`."""

    @property
    def stretches(self) -> list[tuple[Miss, dict[int, int]]]:
        """Each miss, and who answered that call and those up to the next miss."""
        ends = [*(miss.answered for miss in self.misses[1:]), self.answered]
        pairs = zip(self.misses, ends)
        return [(m, {n: end[n] - m.answered.get(n, 0) for n in sorted(end)}) for m, end in pairs]

    def __str__(self) -> str:
        calls, versions = sum(self.answered.values()), len(self.answered) - 1
        about = f"{count_text(calls, 'call')}, {count_text(versions, 'version')}"
        lines = [f"timeline of {self.name}: {about}, {self.answered.get(0, 0)} in eager"]
        for miss, answered in self.stretches:
            names = ((f"by version {v}" if v else "in eager", n) for v, n in answered.items())
            who = (f"{n} {name}" for name, n in names if n)
            last = miss.call + sum(answered.values()) - 1
            told = [str(miss), *failure_lines(miss.failures)]
            told.append(f"  calls {miss.call} to {last}: {', '.join(who)}")
            lines.append(textwrap.indent("\n".join(told), "  "))
        return "\n".join(lines)


@dataclass
class Explanation(Shown):
    """What became of a compiled function's calls: `mc.explain(fn)(*args)`."""

    name: str
    captures: list[Capture]
    breaks: list[GraphBreak]
    """Why frames (or parts of them) ran in eager, in order, without repetitions."""
    eager_calls: int = 0
    """Calls that ran the frame in eager."""
    compiled_calls: int = 0
    limit_reached: bool = False
    timelines: tuple[Timeline, ...] = ()
    """Of the function, what goes on after its breaks, and what eager code below it calls."""

    @property
    def failures(self) -> Several[GuardFailure]:
        """Why cached captures were not reused, one for each entry that a call missed."""
        return Several(f for line in self.timelines for miss in line.misses for f in miss.failures)

    def __post_init__(self) -> None:
        listed(self, "captures", "breaks")

    @property
    def graph_count(self) -> int:
        return len(self.captures)

    @property
    def op_count(self) -> int:
        return sum(capture.graph.op_count for capture in self.captures)

    @property
    def guard_count(self) -> int:
        return sum(len(capture.guards) for capture in self.captures)

    @property
    def shape_guard_count(self) -> int:
        return sum(g.kind in SHAPE_KINDS for capture in self.captures for g in capture.guards)

    @property
    def operators(self) -> Counter[str]:
        """How often each operator occurs in the graphs."""
        calls = (n for c in self.captures for n in c.graph.nodes if n.op.startswith("call"))
        return Counter(target_name(n.target) for n in calls if not unpacks(n))

    @property
    def code(self) -> tuple[str, ...]:
        """Each graph as readable Python."""
        return tuple(str(capture.graph) for capture in self.captures)

    def __str__(self) -> str:
        lines = [
            f"explanation of {self.name}: {count_text(self.graph_count, 'graph')}, "
            f"{count_text(self.op_count, 'operation')}, {count_text(self.guard_count, 'guard')} "
            f"({self.shape_guard_count} on shapes), {count_text(len(self.breaks), 'break')}",
            f"calls: {self.compiled_calls} compiled, {self.eager_calls} in eager"
            + (" (recompile limit reached)" if self.limit_reached else ""),
        ]
        lines += [f"break {number}: {found}" for number, found in enumerate(self.breaks, 1)]
        lines += [str(timeline) for timeline in self.timelines if len(timeline.misses) > 1]
        if self.operators:
            counts = (f"{name} {count}" for name, count in self.operators.most_common())
            lines += textwrap.wrap(f"operators: {', '.join(counts)}", 100, subsequent_indent="  ")
        for number, capture in enumerate(self.captures, 1):
            about = count_text(capture.graph.op_count, "operation")
            lines += ["", f"===== capture {number}: {capture.name}, {about}", "", capture.flow]
            if capture.graph.op_count:
                lines += ["", str(capture.graph)]
            short = len(capture.guards) <= MANY_GUARDS
            lines += ["", "guards:", *(f"  {guard}" for guard in capture.guards if short)]
            lines += capture.size_lines
        return "\n".join(lines)


MANY_GUARDS = 40
"""More guards are only counted."""


@method(Dispatcher, "explanation")
def explanation(dispatcher: Dispatcher) -> Explanation:
    """Calls are those of the function; the rest includes resume functions and nested frames."""
    parts = dispatcher.parts
    return Explanation(
        name=dispatcher.name,
        captures=[entry.capture for part in parts for entry in part.entries],
        breaks=list(dict.fromkeys(found for part in parts for found in part.breaks)),
        eager_calls=dispatcher.eager_calls,
        compiled_calls=sum(entry.hits for entry in dispatcher.entries),
        limit_reached=any(part.limit_reached for part in parts),
        timelines=tuple(Timeline(p.name, tuple(p.misses), p.answered()) for p in parts),
    )


def explain(
    target: Any, *, dynamic: bool | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Explanation]:
    """`explain(fn)(*args)`: run once with the captured graphs as they are, and say what happened.

    What `compile` returned is itself called, and all its calls so far are told: why it was captured again.
    """

    def run(*args: Any, **kwargs: Any) -> Explanation:
        known = dispatcher_of(target)
        if known is not None and dynamic is None and options is None:
            target(*args, **kwargs)
            return explanation(known)
        compiled = compile(original_of(target), dynamic=dynamic, backend="eager", options=options)
        compiled(*args, **kwargs)
        found = dispatcher_of(compiled)
        if found is None:
            raise OptionError(f"there is nothing to explain: {target!r} is under mc.disable")
        return explanation(found)

    return run


def timeline(target: Any) -> Several[Timeline]:
    """The calls of what `compile` returned so far; of what goes on after its breaks; of nested frames."""
    found = dispatcher_of(target)
    if found is None:
        raise OptionError(f"{target!r} has no timeline: give what mc.compile returned")
    return Several(found.explanation().timelines)
