"""One cache entry: generated code that checks the guards, runs the compiled graph and rebuilds the result.

    entry.call(*arguments) -> the frame's result, or MISS if a guard does not hold

Guards on objects that the entry holds (the module's own attributes, globals) are checked apart from those on
the call's arguments: `HeldCheck` first asks whether any of those objects changed at all (`snapshot.py`), and
evaluates the guards only if one did. Inputs are fetched once, for the guards and for the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from minicompile.dynamo.breaks import run
from minicompile.dynamo.capture import CapturedFrame
from minicompile.dynamo.guards import FETCH_ERRORS, SourceCode, failures, generate, guard_rules
from minicompile.dynamo.interpreter import Marker
from minicompile.dynamo.modes import AtOnce, Raised, held_by
from minicompile.dynamo.result import SHAPE_KINDS, WHOLE, GraphInput, Guard, GuardFailure, Source
from minicompile.dynamo.snapshot import Facts, NotCoveredError

MISS = Marker("MISS")
"""What an entry gives when a guard does not hold."""

BoxedGraph = Callable[[list[Any]], Sequence[Any]]
"""A compiled graph: takes a list of inputs in placeholder order, may empty it, gives the outputs in order."""


class HeldCheck:
    """Guards on what the entry holds, and the tensors found there.

    `unchanged()`: everything is as when `tensors` were found; else `check()` evaluates the guards.
    """

    __slots__ = (
        *("code", "evaluate", "fetched", "guards", "hits", "pause", "renewed", "tensors"),
        *("unchanged", "waits"),
    )

    def __init__(
        self, code: SourceCode, guards: list[Guard], fetched: list[Source], hits: list[int]
    ) -> None:
        """`hits`: how many calls the entry has answered."""
        self.code, self.guards, self.fetched, self.hits = code.part(), guards, fetched, hits
        self.renewed = -1
        """How many it had answered when the facts were noted."""
        self.pause = self.waits = 0
        """For how many calls the facts aren't noted again, and how many of these are left."""
        # `code.names` will refer to this object
        self.code.names, self.code.by_id = dict(code.names), dict(code.by_id)
        self.evaluate = self.generate(guards, fetched)
        self.unchanged: Callable[[], bool] = unknown
        self.tensors: list[Any] = []

    def generate(self, guards: list[Guard], fetched: list[Source]) -> Callable[[], Any]:
        """A function that evaluates guards and gives the tensors, or MISS."""
        code = self.code.part()
        code.variables = {source: code.constant(value) for source, value in code.held.items()}
        for guard in guards:
            code.require(guard)
        tensors = ", ".join(code.expression(source) for source in fetched)
        return generate("check_held()", [*code.lines, f"return [{tensors}]"], code.names)

    def check(self) -> bool:
        """Whether the guards hold. Fetches the tensors anew."""
        self.unchanged = unknown
        found = self.evaluate()
        if found is MISS:
            return False
        self.tensors = found
        if self.may_renew():
            self.renewed = self.hits[0]
            self.renew()
        return True

    def may_renew(self) -> bool:
        """Whether to note the facts; after they held for no call, not for a while, each time a longer one."""
        if self.waits:
            self.waits -= 1
        else:
            in_vain = self.hits[0] - self.renewed == 1
            self.pause = self.waits = min(2 * self.pause + 1, LONGEST_PAUSE) if in_vain else 0
        return not self.waits

    def renew(self) -> None:
        """Note the facts under which the guards, just checked, hold."""
        facts = Facts(self.code.held)
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
        if (snapshot := facts.snapshot()) is None:
            return
        self.unchanged = unchanged = snapshot.unchanged
        if uncovered:
            always = self.generate(uncovered, [])
            self.unchanged = lambda: unchanged() and always() is not MISS


LONGEST_PAUSE = 63


def unknown() -> bool:
    return False


class Entry:
    """A captured frame with its compiled graph."""

    def __init__(
        self,
        captured: CapturedFrame,
        compiled: BoxedGraph,
        parameters: Sequence[str],
        graph_raised: weakref.WeakMethod[Callable[[Raised, tuple[Any, ...]], Any]],
    ) -> None:
        """`graph_raised()(raised, arguments)`: the frame in eager, after the graph raised that."""
        self.captured, self.capture = captured, captured.capture
        self.counter = [0]
        """How many calls it has answered: generated code holds this cell, not the entry."""
        captured.code.names.update(
            MISS=MISS,
            ERRORS=FETCH_ERRORS,
            hits=self.counter,
            graph=compiled,
            graph_raised=graph_raised,
            state_holds=captured.make_state_check(),
        )
        if isinstance(compiled, AtOnce):
            captured.code.names["held_by"] = held_by
        given = ", ".join(f"L_{name}" for name in parameters)
        self.begin: Callable[..., Any] = generate(
            f"run_entry({given})", self.lines(), captured.code.names
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

    def lines(self) -> list[str]:
        """Check the guards, run the graph, rebuild the result."""
        captured, code = self.captured, self.captured.code.part()
        guards = [
            guard
            for guard in self.capture.guards
            if guard.kind not in WHOLE and guard.kind in guard_rules
        ]
        tensors = [given.source for given in self.capture.inputs if is_tensor(given)]
        numbers = [given.source for given in self.capture.inputs if not is_tensor(given)]
        live = [guard for guard in guards if is_live(guard, code)]
        held = [guard for guard in guards if not is_live(guard, code)]
        for guard in sorted(live, key=lambda guard: not on_argument(guard)):
            code.require(guard)
        fetched = [source for source in tensors if code.holds(source)]
        own = tensors[: len(tensors) - len(fetched)]  # these come first
        if held or fetched:
            code.names["held"] = HeldCheck(captured.code, held, fetched, self.counter)
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

    def failure(self, values: dict[str, Any]) -> GuardFailure | None:
        """The first guard that a call's arguments fail."""
        return self.misfit(values)[0]

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


def is_tensor(given: GraphInput) -> bool:
    return isinstance(given.fake, torch.Tensor)
