"""`mc.bisect(fn, args)`, `minicompile bisect SCRIPT`: which part of the compiler breaks a program?

    Bisection := name, verdict, ladder and other tries: [Try], backend, subsystem, application: Applied
    Try       := Limit, how it failed ("" if it didn't), Report

First the backend: the first one of eager, aot_eager, inductor that fails. Then the subsystem: what cures it
if none of its applications is allowed, the latest in the corridor first, since what is refused early takes
work from all that follows. Then the application: with none of them it is right, with all it is wrong, and
halving finds the first number that makes it wrong. That one is refused alone at last, to see whether it is
needed at all. What is found wakes the fault; mostly it is the fault.

A script is run in a process for each try; it fails by its exit code, or where the compiler raises inside.
The real compiler: torch/_inductor/compiler_bisector.py. Zeller, "Why Programs Fail" (2009), chapter 13.
"""

from __future__ import annotations

import argparse
import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from minicompile.debug.limit import Applied, Limit, Report
from minicompile.debug.script import add_script, run_limited, script_of
from minicompile.debug.variant import EAGER, Case, VariantRun, described
from minicompile.ops.display import Shown, aligned

SUBSYSTEMS: dict[str, tuple[str, ...]] = {
    "eager": ("capture",),
    "aot_eager": (
        *("post_grad pass", "partitioner", "prims pass", "decomposition", "joint pass", "vjp"),
        "pre_grad pass",
    ),
    "inductor": ("plan rule", "memory", "fusion", "code generator", "lowering"),
}
"""Of each backend those that the one before doesn't have, in the order in which they are suspected."""

NOTHING = Limit("eager", "capture", "<", 0)
"""Nothing is compiled."""

EVERYTHING = Limit()
"""All is compiled."""

MOST_LINES = 24
"""Of a text before and after, how many are shown."""


@dataclass(frozen=True)
class Try:
    """The program run once under a limit."""

    limit: Limit
    failure: str
    report: Report

    @property
    def cells(self) -> tuple[str, str]:
        name = "not compiled" if self.limit == NOTHING else str(self.limit)
        return name, self.failure or "right"


class Flaky(Exception):
    """Two runs under one limit gave different answers."""


@dataclass
class Bisection(Shown):
    """A bisection and what it found. `verdict` says it in a sentence."""

    name: str
    attempt: Callable[[Limit], Try] = field(repr=False)
    verdict: str = ""
    tries: list[Try] = field(default_factory=list)
    backend: str = ""
    subsystem: str = ""
    cures: tuple[str, ...] = ()
    """The subsystems without which it doesn't fail; the first is the one that was searched."""
    number: int = 0
    culprit: Applied | None = None

    @property
    def changes(self) -> list[str]:
        """What the application changed: the first lines of a diff."""
        if self.culprit is None:
            return []
        before, after = self.culprit.before.splitlines(), self.culprit.after.splitlines()
        return list(difflib.unified_diff(before, after, lineterm="", n=1))[2:][:MOST_LINES]

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What is known, by name."""
        rows = [
            ("fails", next((t.failure for t in self.tries if t.failure), "")),
            ("backend", self.backend),
            ("cured without", ", ".join(self.cures)),
        ]
        if self.culprit is not None:
            rows.append(("application", f"number {self.number}: {self.culprit.name}"))
            rows.append(("source", "\n".join(self.culprit.lines)))
        return [(name, fact) for name, fact in rows if fact]

    def __str__(self) -> str:
        lines = [f"bisection of {self.name}: {self.verdict}"]
        lines += [f"  {name}: {line}" for name, fact in self.facts for line in fact.splitlines()]
        lines += [f"    {line}" for line in self.changes]
        lines.append(f"  {len(self.tries)} tries:")
        lines += [f"    {line}" for line in aligned([t.cells for t in self.tries], left=2)]
        return "\n".join(lines)

    # -- the search

    def fails(self, *limit: Any, again: bool = False) -> bool:
        """Does it fail under a limit? Raises Flaky where two answers differ."""
        asked = Limit(*limit)
        known = [answer for answer in self.tries if answer.limit == asked]
        if not known or again:
            known.append(self.attempt(asked))
            self.tries.append(known[-1])
            if bool(known[0].failure) != bool(known[-1].failure):
                raise Flaky(str(asked))
        return bool(known[0].failure)

    def report(self, *limit: Any) -> Report:
        return next(answer.report for answer in self.tries if answer.limit == Limit(*limit))

    def run(self) -> Bisection:
        try:
            self.verdict = self.searched()
        except Flaky as limit:
            self.verdict = f"two runs of the same setting differ ({limit}): it is flaky"
        return self

    def searched(self) -> str:
        if self.fails(*astuple(NOTHING)):
            return "it fails in eager already: the compiler has no part in it"
        if not self.fails():
            return "it never fails"
        self.fails(again=True)
        backend = self.backend = next(name for name in SUBSYSTEMS if self.fails(name))
        counts = self.report(backend).counts
        stages = [*SUBSYSTEMS][: [*SUBSYSTEMS].index(backend) + 1]
        for stage in reversed(stages[1:] or stages):  # without any capture nothing is compiled
            used = [name for name in SUBSYSTEMS[stage] if counts.get(name)]
            self.cures = tuple(n for n in used if not self.fails(backend, n, "<", 0))
            if self.cures:
                return self.application(backend, self.cures[0], counts[self.cures[0]])
        return f"the fault is in {backend}, but no subsystem cures it if left out alone"

    def application(self, backend: str, subsystem: str, count: int) -> str:
        """Halve the applications of the guilty subsystem: the first `right` are right."""
        right, wrong = 0, count
        if not self.fails(backend, subsystem, "<", wrong):
            raise Flaky(str(Limit(backend, subsystem, "<", wrong)))
        while wrong - right > 1:
            middle = (right + wrong) // 2
            if self.fails(backend, subsystem, "<", middle):
                wrong = middle
            else:
                right = middle
        self.subsystem, self.number = subsystem, right
        self.culprit = self.report(backend, subsystem, "<", wrong).last
        name = self.culprit.name if self.culprit is not None else "?"
        verdict = f"{subsystem}, {name}"
        if not self.fails(backend, subsystem, "!=", right):
            return verdict
        if not self.fails(backend, subsystem, "without", name):
            return f"{verdict}, in several places: this is the first"
        return f"{verdict}, but not it alone: several applications break it, each for itself or together"


def bisect(
    target: Any,
    args: Sequence[Any] = (),
    check: Callable[[Any], object] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    more: Sequence[Sequence[Any]] = (),
) -> Bisection:
    """Find what in the compiler makes `target(*args)` wrong; with `more`, that and then `target(*more[0])`...

    It fails where results, arguments or gradients are further from float64 than `mc.accuracy` allows, or
    where `check(result)` is false or raises; and always where the compiler raises. What `mc.compile`
    returned keeps its options. Neither the target, nor the arguments, nor the random state change.
    """
    case = Case.of(target, [args, *more], kwargs, check)
    return Bisection(case.name, functools.partial(attempt, case)).run()


def attempt(case: Case, limit: Limit = EVERYTHING) -> Try:
    """Try a case under a limit."""
    if limit == NOTHING:
        return Try(limit, described(case.baseline[EAGER].error), Report())
    run = VariantRun(case, case.compiled(limit))
    return Try(limit, case.failure(run), run.report)


def bisect_script(command: Sequence[str], timeout: float | None = None) -> Bisection:
    """Run a script in a process of its own for each try: it is right where its exit code is 0."""

    def attempt(limit: Limit) -> Try:
        failure, report = run_limited(command, limit, timeout)
        return Try(limit, failure or report.error, report)

    return Bisection(Path(command[0]).name, attempt).run()


def add_arguments(to: argparse.ArgumentParser) -> None:
    limit = "a try that takes longer has failed"
    to.add_argument("--timeout", metavar="SECONDS", type=float, help=limit)
    add_script(to, "a Python file that exits with 0 where all is well")


def run(chosen: argparse.Namespace) -> int:
    """The command: 0 if a culprit was found, 1 if not."""
    bisection = bisect_script([str(script_of(chosen)), *chosen.arguments], chosen.timeout)
    print(bisection)
    return int(bisection.culprit is None)
