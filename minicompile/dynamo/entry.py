"""One cache entry: generated code that checks the guards, runs the compiled graph and rebuilds the result.

    entry.call(*arguments) -> the frame's result, or MISS if a guard does not hold

Guards on objects that the entry holds (the module's own attributes, globals) are checked apart from those on
the call's arguments where a plug-in brings a quicker check than to evaluate them at each call (`held` of
`guards.quick_checks`). Inputs are fetched once, for the guards and for the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minicompile.dynamo.breaks import run
from minicompile.dynamo.capture import CapturedFrame
from minicompile.dynamo.guards import (
    FETCH_ERRORS,
    SourceCode,
    compare_settings,
    failures,
    generate,
    guard_rules,
)
from minicompile.dynamo.interpreter import Marker
from minicompile.dynamo.modes import GraphRaised
from minicompile.dynamo.result import SHAPE_KINDS, WHOLE, Guard, GuardFailure, Source

MISS = Marker("MISS")
"""What an entry gives when a guard does not hold."""

BoxedGraph = Callable[[list[Any]], Sequence[Any]]
"""A compiled graph: takes a list of inputs in placeholder order, may empty it, gives the outputs in order."""


class Entry:
    """A captured frame with its compiled graph."""

    def __init__(
        self,
        captured: CapturedFrame,
        compiled: BoxedGraph,
        parameters: Sequence[str],
        graph_raised: weakref.WeakMethod[Callable[[GraphRaised, tuple[Any, ...]], Any]],
        checks: Mapping[str, Callable[..., Any]],
    ) -> None:
        """`graph_raised()(raised, arguments)`: the frame in eager, after the graph raised that.
        `checks`: what `quick_checks` has."""
        self.captured, self.capture = captured, captured.capture
        self.counter = [0]
        """How many calls it has answered: generated code holds this cell, not the entry."""
        facts = (g.expected for g in self.capture.guards if g.kind == "global_state")
        captured.code.names.update(
            MISS=MISS,
            ERRORS=FETCH_ERRORS,
            hits=self.counter,
            graph=compiled,
            graph_raised=graph_raised,
            state_holds=checks.get("global_state", compare_settings)(*facts),
        )

        given = ", ".join(f"L_{name}" for name in parameters)
        self.begin: Callable[..., Any] = generate(
            f"run_entry({given})", self.lines(checks.get("held")), captured.code.names
        )
        """The call up to the end of the graph; `call` also runs the rest of a frame that was cut there."""
        self.call = self.begin
        if captured.runs_rest:  # once that function's locals are gone, which may hold much memory
            names = {"begin": self.begin, "MISS": MISS, "run": run}
            lines = [f"left = [begin({given})]", "return MISS if left[0] is MISS else run(left)"]
            self.call = generate(f"run_all({given})", lines, names)

    @property
    def hits(self) -> int:
        """How many calls it has answered."""
        return self.counter[0]

    def lines(self, held_check: Callable[..., Any] | None) -> list[str]:
        """Check the guards, run the graph, rebuild the result."""
        captured, code = self.captured, self.captured.code.part()
        guards = [
            guard
            for guard in self.capture.guards
            if guard.kind not in WHOLE and guard.kind in guard_rules
        ]
        tensors = [given.source for given in self.capture.inputs if given.real]
        numbers = [given.source for given in self.capture.inputs if not given.real]
        held: list[Guard] = []
        fetched: list[Source] = []
        if held_check is not None:
            held = [guard for guard in guards if not is_live(guard, code)]
            guards = [guard for guard in guards if is_live(guard, code)]
            fetched = [source for source in tensors if code.holds(source)]
        own = tensors[: len(tensors) - len(fetched)]  # these come first
        for guard in sorted(guards, key=lambda guard: not on_argument(guard)):
            code.require(guard)
        if held_check is not None and (held or fetched):
            code.names["held"] = held_check(captured.code, held, fetched, self.counter)
            code.lines.append("if not (held.unchanged() or held.check()): return MISS")
        inputs = "".join(f"{code.expression(source)}, " for source in own)
        code.lines.append(f"inputs = [{inputs}{'*held.tensors' if fetched else ''}]")
        given = "".join(f"{code.expression(source)}, " for source in numbers)
        return [
            *(["if not state_holds(): return MISS"] if "global_state" in guard_rules else []),
            "try:",
            *(f"    {line}" for line in code.lines),
            "except ERRORS:",
            "    return MISS",
            *(["if not tensors_hold(*inputs): return MISS"] if "tensor" in guard_rules else []),
            *([f"inputs += ({given})"] if numbers else []),
            *("hits[0] += 1", *captured.lines),
        ]

    def misfit(self, values: dict[str, Any]) -> tuple[GuardFailure | None, dict[Source, str]]:
        """The first guard that a call's arguments fail, and the sizes and numbers in which they differ,
        if they differ in nothing before these."""
        first, varied = None, dict[Source, str]()
        for failure, sizes in failures(self.capture.guards, self.captured.code, values):
            first = first or failure
            if not sizes and failure.guard.kind not in SHAPE_KINDS:
                break
            varied |= sizes
        return first, varied


def on_argument(guard: Guard) -> bool:
    """Is it the class or identity of an argument? These come first: fetching below relies on them."""
    return guard.kind in ("type", "identity") and guard.sources[0].kind == "local"


def is_live(guard: Guard, code: SourceCode) -> bool:
    """Is it about the call's arguments or a symbolic number, not only about what the entry holds?"""
    held = guard.kind not in SHAPE_KINDS and all(map(code.holds, guard.sources))
    return on_argument(guard) or not held
