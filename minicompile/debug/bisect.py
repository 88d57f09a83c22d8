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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minicompile.debug.limit import Applied, Limit, Report
from minicompile.debug.script import add_script, run_limited, script_of
from minicompile.debug.variant import EAGER, Case, Run, described
from minicompile.ops.display import Shown, aligned, count_text

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


@dataclass
class Bisection(Shown):
    """What a bisection found. `verdict` says it in a sentence."""

    name: str
    verdict: str = ""
    tries: list[Try] = field(default_factory=list)
    backend: str = ""
    subsystem: str = ""
    cures: tuple[str, ...] = ()
    """The subsystems without which it doesn't fail; the first is the one that was searched."""
    number: int = 0
    culprit: Applied | None = None
    remedy: str = ""

    @property
    def changes(self) -> list[str]:
        """What the application changed, as lines of a diff."""
        if self.culprit is None:
            return []
        before, after = self.culprit.before.splitlines(), self.culprit.after.splitlines()
        lines = list(difflib.unified_diff(before, after, lineterm="", n=1))[2:]
        more = len(lines) - MOST_LINES
        return [
            *lines[:MOST_LINES],
            *([f"... {count_text(more, 'more line')}"] if more > 0 else []),
        ]

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What is known, by name."""
        culprit = self.culprit
        others = ", ".join(self.cures[1:])
        rows = [
            ("fails", next((t.failure for t in self.tries if t.failure), "")),
            ("backend", self.backend),
            ("subsystem", self.subsystem + f" (also cured without: {others})" * bool(others)),
            ("application", f"number {self.number}: {culprit.name}" if culprit else ""),
            ("source", "\n".join(culprit.lines) if culprit else ""),
            ("for now", self.remedy),
        ]
        return [(name, fact) for name, fact in rows if fact]

    def __str__(self) -> str:
        lines = [f"bisection of {self.name}: {self.verdict}"]
        lines += [f"  {name}: {line}" for name, fact in self.facts for line in fact.splitlines()]
        lines += [f"    {line}" for line in self.changes]
        lines.append(f"  {len(self.tries)} tries:")
        lines += [f"    {line}" for line in aligned([t.cells for t in self.tries], left=2)]
        return "\n".join(lines)


class Flaky(Exception):
    """Two runs under one limit gave different answers."""


class Search:
    """The questions, asked of `attempt`; answers are kept."""

    def __init__(self, name: str, attempt: Callable[[Limit], Try]) -> None:
        self.attempt, self.result = attempt, Bisection(name)
        self.answers: dict[Limit, Try] = {}

    def ask(self, limit: Limit, again: bool = False) -> Try:
        if limit not in self.answers or again:
            answer = self.attempt(limit)
            self.result.tries.append(answer)
            before = self.answers.setdefault(limit, answer)
            if bool(before.failure) != bool(answer.failure):
                raise Flaky(str(limit))
        return self.answers[limit]

    def fails(self, limit: Limit) -> bool:
        return bool(self.ask(limit).failure)

    def run(self) -> Bisection:
        try:
            self.result.verdict = self.verdict()
        except Flaky as limit:
            self.result.verdict = f"two runs of the same setting differ ({limit}): it is flaky"
        return self.result

    def verdict(self) -> str:
        result = self.result
        if self.fails(NOTHING):
            return "it fails in eager already: the compiler has no part in it"
        if not self.fails(EVERYTHING):
            return "it never fails"
        self.ask(EVERYTHING, again=True)
        backend = next(name for name in SUBSYSTEMS if self.fails(Limit(name)))
        result.backend, stages = backend, [*SUBSYSTEMS]
        counts = self.ask(Limit(backend)).report.counts
        for stage in reversed(stages[: stages.index(backend) + 1]):
            if stage == "eager" != backend:
                continue  # without any capture nothing is compiled
            used = [name for name in SUBSYSTEMS[stage] if counts.get(name)]
            result.cures = tuple(n for n in used if not self.fails(Limit(backend, n, "<", 0)))
            if result.cures:
                break
        else:
            return f"the fault is in {backend}, but no subsystem cures it if left out alone"
        return self.application(backend, result.cures[0], counts[result.cures[0]])

    def application(self, backend: str, subsystem: str, count: int) -> str:
        """Halve the applications of the guilty subsystem."""
        result, wrong = self.result, count
        upto = functools.partial(Limit, backend, subsystem, "<")
        if not self.fails(upto(wrong)):
            raise Flaky(str(upto(wrong)))
        wrong = least(0, wrong, lambda number: self.fails(upto(number)))
        result.subsystem, result.number = subsystem, wrong - 1
        result.culprit = culprit = self.ask(upto(wrong)).report.last
        name = culprit.name if culprit is not None else "?"
        result.remedy = remedy(subsystem, name)
        verdict = f"{subsystem}, {name}"
        if not self.fails(Limit(backend, subsystem, "!=", wrong - 1)):
            return verdict
        if not self.fails(Limit(backend, subsystem, "without", name)):
            return f"{verdict}, in several places: this is the first"
        return f"{verdict}, but not it alone: several applications break it, each for itself or together"


def least(right: int, wrong: int, fails: Callable[[int], bool]) -> int:
    """The least number that fails, between one that doesn't and one that does."""
    while wrong - right > 1:
        middle = (right + wrong) // 2
        right, wrong = (right, middle) if fails(middle) else (middle, wrong)
    return wrong


def remedy(subsystem: str, name: str) -> str:
    """How to do without an application until it is mended."""
    if subsystem.endswith(" pass"):
        from minicompile.aot.passes import known_passes

        known, names = known_passes(), (name, name.removeprefix("pattern:"))
        name = next((n for n in names if any(p.is_called(n) for p in known)), name)
        return f'mc.compile(..., options={{"disable_passes": ("{name}",)}})'
    options: Mapping[str, object] = {
        "fusion": {"fusion": False},
        "partitioner": {"partitioner": "default"},
    }
    if options.get(subsystem):
        return f"mc.compile(..., options={options[subsystem]})"
    if subsystem in ("vjp", "decomposition", "lowering", "plan rule"):
        registry = subsystem.removesuffix(" rule")
        return f'with mc.without("{registry}:{name}"): around the first call'
    return (
        f"mc.disable({name})" if subsystem == "capture" else 'mc.compile(..., backend="aot_eager")'
    )


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
    return Search(case.name, functools.partial(attempt, case)).run()


def attempt(case: Case, limit: Limit = EVERYTHING) -> Try:
    """Try a case under a limit."""
    if limit == NOTHING:
        return Try(limit, described(case.baseline[EAGER].error), Report())
    run = Run(case, case.compiled(limit))
    return Try(limit, case.failure(run), run.report)


def bisect_script(command: Sequence[str], timeout: float | None = None) -> Bisection:
    """Run a script in a process of its own for each try: it is right where its exit code is 0."""

    def attempt(limit: Limit) -> Try:
        failure, report = run_limited(command, limit, timeout)
        return Try(limit, failure or report.error, report)

    return Search(Path(command[0]).name, attempt).run()


def add_arguments(to: argparse.ArgumentParser) -> None:
    limit = "a try that takes longer has failed"
    to.add_argument("--timeout", metavar="SECONDS", type=float, help=limit)
    add_script(to, "a Python file that exits with 0 where all is well")


def run(chosen: argparse.Namespace) -> int:
    """The command: 0 if a culprit was found, 1 if not."""
    bisection = bisect_script([str(script_of(chosen)), *chosen.arguments], chosen.timeout)
    print(bisection)
    return int(bisection.culprit is None)
