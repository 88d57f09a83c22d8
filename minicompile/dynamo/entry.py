"""One cache entry: generated code that checks the guards, runs the compiled graph and rebuilds the result.

    entry.call(*arguments) -> the frame's result, or MISS if a guard does not hold

Guards on objects that the entry holds (the module's own attributes, globals) are checked apart from those on
the call's arguments: `HeldCheck` first asks whether any of those objects changed at all (`snapshot.py`), and
evaluates the guards only if one did. Inputs are fetched once, for the guards and for the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from minicompile import compat
from minicompile.dynamo.capture import CapturedFrame, held_sources, is_held, restored_state
from minicompile.dynamo.guards import (
    FETCH_ERRORS,
    WHOLE,
    SourceCode,
    condition,
    find_failure,
    generate,
    guard_rules,
)
from minicompile.dynamo.interpreter import Marker
from minicompile.dynamo.result import Capture, Guard, GuardFailure, Source
from minicompile.dynamo.snapshot import Facts, NotCoveredError, Snapshot, take_snapshot

MISS = Marker("MISS")
"""What an entry gives when a guard does not hold."""

BoxedGraph = Callable[[list[Any]], Sequence[Any]]
"""A compiled graph: takes a list of inputs in placeholder order, may empty it, gives the outputs in order."""


class CheckCode(SourceCode):
    """Fetches each source once, into a variable."""

    def __init__(self, parent: SourceCode) -> None:
        super().__init__(parent.held, parent.types_of)
        self.lines: list[str] = []

    def expression(self, source: Source) -> str:
        if source.kind in ("local", "held"):
            return self.variables.get(source) or self.fetch(source)
        name = self.variables.get(source)
        if name is None:
            text = self.fetch(source)
            name = self.variables[source] = f"s{len(self.variables)}"
            self.lines.append(f"{name} = {text}")
        return name

    def require(self, guard: Guard) -> None:
        text = condition(self, guard)
        if text is not None:
            self.lines.append(f"if not ({text}): return MISS")


class HeldCheck:
    """Guards on what the entry holds, and the tensors found there."""

    def __init__(
        self,
        captured: CapturedFrame,
        guards: list[Guard],
        fetched: list[Source],
        roots: dict[Source, Any],
    ) -> None:
        self.code, self.guards, self.fetched, self.roots = captured.code, guards, fetched, roots
        self.slow = self.generate(guards, fetched)
        self.always: Callable[[], Any] | None = None
        """Checks the guards that a snapshot can't cover."""
        self.facts: Facts | None = None
        self.snapshot: Snapshot | None = None
        self.volatile: set[int] = set()
        self.tensors: list[Any] = []

    def generate(self, guards: list[Guard], fetched: list[Source]) -> Callable[[], Any]:
        """A function that evaluates guards and gives the tensors, or MISS."""
        code = CheckCode(self.code)
        code.names["MISS"] = MISS
        for source, value in self.roots.items():
            code.variables[source] = code.constant(value)
        for guard in guards:
            code.require(guard)
        tensors = ", ".join(code.expression(source) for source in fetched)
        text = "def check_held():\n" + "".join(
            f"    {line}\n" for line in [*code.lines, f"return [{tensors}]"]
        )
        found: Callable[[], Any] = generate(text, code.names, "check_held")
        return found

    def __call__(self) -> Any:
        """The tensors, or MISS."""
        if self.snapshot is not None and self.snapshot.unchanged():
            return self.tensors if self.always is None or self.always() is not MISS else MISS
        self.snapshot = None
        found = self.slow()
        if found is not MISS:
            self.tensors = found
            self.renew()
        return found

    def renew(self) -> None:
        """Note the facts under which the guards, just checked, hold."""
        if self.facts is not None:
            self.volatile |= self.facts.changed()
        facts = self.facts = Facts(self.code.held, self.roots, self.volatile)
        uncovered: list[Guard] = []
        for guard in self.guards:
            try:
                facts.cover(guard)
            except (NotCoveredError, *FETCH_ERRORS):
                uncovered.append(guard)
        try:
            for source in self.fetched:
                facts.resolve(source)
        except (NotCoveredError, *FETCH_ERRORS):
            return  # some tensor's path is beyond facts: evaluate the guards on every call
        self.always = self.generate(uncovered, []) if uncovered else None
        self.snapshot = take_snapshot(facts)


class Entry:
    """A captured frame with its compiled graph."""

    def __init__(
        self, captured: CapturedFrame, compiled: BoxedGraph, parameters: Sequence[str]
    ) -> None:
        self.captured = captured
        self.capture: Capture = captured.capture
        self.hits = 0
        self.text = ""
        self.call: Callable[..., Any] = self.build(captured, compiled, parameters)

    def build(
        self, captured: CapturedFrame, compiled: BoxedGraph, parameters: Sequence[str]
    ) -> Callable[..., Any]:
        guards = self.capture.guards
        identical = held_sources(guards)
        roots = {
            guard.sources[0]: guard.expected
            for guard in guards
            if guard.kind == "identity" and guard.sources[0] in identical
        }
        active = [
            guard for guard in guards if guard.kind not in WHOLE and guard.kind in guard_rules
        ]
        live = [
            guard
            for guard in active
            if not all(
                is_held(source, identical) or source in identical for source in guard.sources
            )
        ]
        live += [
            guard
            for guard in active
            if guard.sources[0] in identical and guard.kind in ("identity", "type")
        ]
        chosen = set(map(id, live))
        held = [guard for guard in active if id(guard) not in chosen]
        sources = [graph_input.source for graph_input in self.capture.inputs]
        fetched = [source for source in sources if is_held(source, identical)]

        code = CheckCode(captured.code)
        code.by_id, code.names = captured.code.by_id, captured.code.names
        code.names.update(
            MISS=MISS,
            ERRORS=FETCH_ERRORS,
            graph=compiled,
            entry=self,
            held=HeldCheck(captured, held, fetched, roots),
        )
        lines = self.state_lines(code)
        for guard in order_guards(live, code):
            code.require(guard)
        if held or fetched:
            code.lines += ["found = held()", "if found is MISS: return MISS"]
        own = [code.expression(source) for source in sources if not is_held(source, identical)]
        code.lines.append(
            f"inputs = [{''.join(f'{text}, ' for text in own)}{'*found' if fetched else ''}]"
        )
        lines += [
            "try:",
            *(f"    {line}" for line in code.lines),
            "except ERRORS:",
            "    return MISS",
        ]
        if captured.reals and "tensor" in guard_rules:
            code.names["tensors_hold"] = compat.tensor_guards(
                captured.reals, symbolic_dims(self.capture)
            )
            lines.append("if not tensors_hold(*inputs): return MISS")
        lines.append("entry.hits += 1")
        lines += captured.before
        lines += [f"{name} = inputs[{position}]" for position, name in captured.kept_inputs.items()]
        if captured.changes_state:
            code.names["graph"] = state_keeping(compiled)
        lines += ["out = graph(inputs)", *captured.lines]
        if captured.effects:
            lines += [f"result = {captured.result}", *captured.effects, "return result"]
        else:
            lines.append(f"return {captured.result}")
        head = ", ".join(f"L_{name}" for name in parameters)
        self.text = f"def run_entry({head}):\n" + "\n".join(f"    {line}" for line in lines) + "\n"
        found: Callable[..., Any] = generate(self.text, code.names, "run_entry")
        return found

    def state_lines(self, code: CheckCode) -> list[str]:
        if "global_state" not in guard_rules:
            return []
        code.names["state_holds"] = compat.global_state_check()
        return ["if not state_holds(): return MISS"]

    def failure(self, values: dict[str, Any]) -> GuardFailure | None:
        """The first guard that a call's arguments fail."""
        return find_failure(self.capture.guards, self.captured.code, values)


def symbolic_dims(capture: Capture) -> dict[int, list[int]]:
    """By input number, the dimensions whose sizes are symbolic."""
    found = {
        number: [
            dim for dim, size in enumerate(graph_input.fake.shape) if isinstance(size, torch.SymInt)
        ]
        for number, graph_input in enumerate(capture.inputs)
    }
    return {number: dims for number, dims in found.items() if dims}


def order_guards(guards: list[Guard], code: CheckCode) -> list[Guard]:
    """Types and identities of arguments first: fetching below an argument relies on them."""
    return sorted(
        guards,
        key=lambda guard: (
            not (guard.kind in ("type", "identity") and guard.sources[0].kind == "local")
        ),
    )


def state_keeping(compiled: BoxedGraph) -> BoxedGraph:
    """A graph that sets grad mode or autocast leaves them as they were, even if it raises."""

    def run(inputs: list[Any]) -> Sequence[Any]:
        with restored_state():
            return compiled(inputs)

    return run
