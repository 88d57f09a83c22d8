"""Checks of guards that first ask in C whether anything that they read has changed (facts.py).

    HeldCheck       guards on what a cache entry holds: they are evaluated only if a fact changed
    settings_hold   the settings of torch

A fact that fails is no failed guard: the guards themselves are then evaluated, and new facts noted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minicompile.compat import settings
from minicompile.dynamo.entry import MISS
from minicompile.dynamo.guards import (
    FETCH_ERRORS,
    SourceCode,
    compare_settings,
    generate,
    quick_checks,
)
from minicompile.dynamo.result import Guard, Source
from minicompile.ops.build import start_extension
from minicompile.plugins.guard_snapshot.facts import EXTENSION, Facts, NotCoveredError, extension

start_extension(EXTENSION)  # a first capture takes about as long as the C compiler


@quick_checks("held")
class HeldCheck:
    """Guards on what the entry holds, and the tensors found there.

    `unchanged()`: everything is as when `tensors` were found; else `check()` evaluates the guards.
    """

    __slots__ = ("code", "evaluate", "fetched", "guards", "tensors", "unchanged")

    def __init__(
        self, code: SourceCode, guards: list[Guard], fetched: list[Source], hits: list[int]
    ) -> None:
        self.code, self.guards, self.fetched = code.part(), guards, fetched
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
        self.renew()
        return True

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


def unknown() -> bool:
    return False


@quick_checks("global_state")
def settings_hold(facts: dict[str, Any]) -> Callable[[], bool]:
    """Return a check whether the settings of torch are these, which are those of now."""
    reads, level = settings.global_state_reads() if settings.GlobalStateGuard else ((), None)
    if level is None or (compiled := extension()) is None:
        return compare_settings(facts)
    unchanged: Callable[[], bool] = compiled.Snapshot((level,), (), (), (), (), reads).unchanged
    return unchanged
