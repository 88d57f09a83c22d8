"""`mc.bisect(fn, args)`, `minicompile bisect SCRIPT`: which part of the compiler breaks a program?

    Bisection := name, verdict, ladder and other tries: [Try], backend, subsystem, application: Found
    Try       := Setting, how it failed ("" if it didn't), Report

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
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from minicompile import api
from minicompile.debug.accuracy import (
    EAGER,
    REFERENCE,
    Measured,
    accuracy_stage,
    described,
    judgements,
    name_of,
)
from minicompile.debug.gates import Counting, Found, Report, Setting
from minicompile.debug.script import add_script, script_of
from minicompile.dynamo.module import original_of
from minicompile.ops.display import Shown, aligned, count_text
from minicompile.ops.events import observer
from minicompile.ops.gates import gate
from minicompile.ops.registry import scoped
from minicompile.options import child_environment

R = TypeVar("R")

SUBSYSTEMS: dict[str, tuple[str, ...]] = {
    "eager": ("capture",),
    "aot_eager": (
        *("post_grad pass", "partitioner", "prims pass", "decomposition", "joint pass", "vjp"),
        "pre_grad pass",
    ),
    "inductor": ("plan rule", "memory", "fusion", "code generator", "lowering"),
}
"""Of each backend those that the one before doesn't have, in the order in which they are suspected."""

PLAIN = Setting("eager", "capture", "<", 0)
"""Nothing is compiled."""

BROKEN = Setting()
"""All is compiled."""

MOST_LINES = 24
"""Of a text before and after, how many are shown."""


@dataclass(frozen=True)
class Try:
    """The program run once under a setting."""

    setting: Setting
    failure: str
    report: Report

    @property
    def cells(self) -> tuple[str, str]:
        name = "not compiled" if self.setting == PLAIN else str(self.setting)
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
    culprit: Found | None = None
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
        found = self.culprit
        others = ", ".join(self.cures[1:])
        rows = [
            ("fails", next((t.failure for t in self.tries if t.failure), "")),
            ("backend", self.backend),
            ("subsystem", self.subsystem + f" (also cured without: {others})" * bool(others)),
            ("application", f"number {self.number}: {found.name}" if found else ""),
            ("source", "\n".join(found.lines) if found else ""),
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
    """The same setting gave different answers."""


class Search:
    """The questions, asked of `attempt`; answers are kept."""

    def __init__(self, name: str, attempt: Callable[[Setting], Try]) -> None:
        self.attempt, self.result = attempt, Bisection(name)
        self.known: dict[Setting, Try] = {}

    def ask(self, setting: Setting, again: bool = False) -> Try:
        if setting not in self.known or again:
            answer = self.attempt(setting)
            self.result.tries.append(answer)
            before = self.known.setdefault(setting, answer)
            if bool(before.failure) != bool(answer.failure):
                raise Flaky(str(setting))
        return self.known[setting]

    def fails(self, setting: Setting) -> bool:
        return bool(self.ask(setting).failure)

    def run(self) -> Bisection:
        try:
            self.result.verdict = self.verdict()
        except Flaky as found:
            self.result.verdict = f"two runs of the same setting differ ({found}): it is flaky"
        return self.result

    def verdict(self) -> str:
        result = self.result
        if self.fails(PLAIN):
            return "it fails in eager already: the compiler has no part in it"
        if not self.fails(Setting()):
            return "it never fails"
        self.ask(Setting(), again=True)
        backend = next(name for name in SUBSYSTEMS if self.fails(Setting(name)))
        result.backend, stages = backend, [*SUBSYSTEMS]
        counts = self.ask(Setting(backend)).report.counts
        for stage in reversed(stages[: stages.index(backend) + 1]):
            if stage == "eager" != backend:
                continue  # without any capture nothing is compiled
            used = [name for name in SUBSYSTEMS[stage] if counts.get(name)]
            result.cures = tuple(n for n in used if not self.fails(Setting(backend, n, "<", 0)))
            if result.cures:
                break
        else:
            return f"the fault is in {backend}, but no subsystem cures it if left out alone"
        return self.application(backend, result.cures[0], counts[result.cures[0]])

    def application(self, backend: str, subsystem: str, count: int) -> str:
        """Halve the applications of the guilty subsystem."""
        result, wrong = self.result, count
        upto = functools.partial(Setting, backend, subsystem, "<")
        if not self.fails(upto(wrong)):
            raise Flaky(str(upto(wrong)))
        wrong = least(0, wrong, lambda number: self.fails(upto(number)))
        result.subsystem, result.number = subsystem, wrong - 1
        result.culprit = found = self.ask(upto(wrong)).report.found
        name = found.name if found is not None else "?"
        result.remedy = remedy(subsystem, name)
        told = f"{subsystem}, {name}"
        if not self.fails(Setting(backend, subsystem, "!=", wrong - 1)):
            return told
        if not self.fails(Setting(backend, subsystem, "without", name)):
            return f"{told}, in several places: this is the first"
        return (
            f"{told}, but not it alone: several applications break it, each for itself or together"
        )


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
    pool = "memory_pool" if name.startswith("a pool") else ""
    options: Mapping[str, object] = {
        "fusion": {"fusion": False},
        "partitioner": {"partitioner": "default"},
        "memory": {pool: False} if pool else None,
    }
    if options.get(subsystem):
        return f"mc.compile(..., options={options[subsystem]})"
    if subsystem in ("vjp", "decomposition", "lowering", "plan rule"):
        registry = subsystem.removesuffix(" rule")
        return f'with mc.without("{registry}:{name}"): around the first call'
    return (
        f"mc.disable({name})" if subsystem == "capture" else 'mc.compile(..., backend="aot_eager")'
    )


# -- a function


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
    return Search(name_of(original_of(target)), Trial(target, args, check, kwargs, more)).run()


class Trial:
    """A function's calls, tried under settings."""

    def __init__(
        self,
        target: Any,
        args: Sequence[Any] = (),
        check: Callable[[Any], object] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        more: Sequence[Sequence[Any]] = (),
    ) -> None:
        self.options, self.dynamic = api.settings_of(target)
        self.target, self.check, self.named = original_of(target), check, dict(kwargs or {})
        self.args = [[args, *more]] if more else args
        self.several = bool(more)
        self.runs = {name: self.measured(accuracy_stage[name], name) for name in (REFERENCE, EAGER)}

    def measured(self, prepare: Callable[[Any], Callable[..., Any]], name: str) -> Measured:
        """Run what is prepared, one call after the other."""

        def prepared(target: Any) -> Callable[..., Any]:
            call = checked(prepare, self.check)(target)

            def every(calls: Sequence[Sequence[Any]], **kwargs: Any) -> list[Any]:
                return [call(*args, **kwargs) for args in calls]

            return every if self.several else call

        return Measured(prepared, self.target, self.args, self.named, name)

    def __call__(self, setting: Setting = BROKEN) -> Try:
        counting = Counting(setting)

        def prepare(target: Any) -> Any:
            return api.compile(
                target, backend=setting.backend, options=self.options, dynamic=self.dynamic
            )

        if setting == PLAIN:
            return Try(setting, described(self.runs[EAGER].error), Report())
        with scoped(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            observer.rules.pop("dump", None)  # an error that is looked for needs no report
            gate("trial")(counting)
            observer("trial")(counting.listen)
            run = self.measured(prepare, "try")
        report = counting.report()
        return Try(setting, report.error or self.failure(run), report)

    def failure(self, run: Measured) -> str:
        """How a run failed."""
        if run.error is not None or self.check is not None:
            return described(run.error)
        *_, row = judgements({**self.runs, "try": run})
        if row.verdict not in ("wrong", "far from eager", "raised"):
            return ""
        shown = zip(("outputs", "gradients", "state"), row.cells()[1:4])
        far = (f"{what} off by {error}" for what, error in shown if error not in ("", "0"))
        return f"{row.verdict}: {', '.join(far) or row.note}"


class CheckFailed(Exception):
    """The user's check of a result."""


def checked(
    prepare: Callable[[Any], Callable[..., Any]], check: Callable[[Any], object] | None
) -> Callable[[Any], Callable[..., Any]]:
    """What is prepared, raising where its result doesn't pass the check."""
    if check is None:
        return prepare

    def prepared(target: Any) -> Callable[..., Any]:
        call = prepare(target)

        def run(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            if not check(result):
                raise CheckFailed("the check of the result failed")
            return result

        return run

    return prepared


# -- a script


def bisect_script(command: Sequence[str], timeout: float | None = None) -> Bisection:
    """Run a script in a process of its own for each try: it is right where its exit code is 0."""

    def attempt(setting: Setting) -> Try:
        failure, report = run_script(command, str(setting), Report.read, timeout)
        return Try(setting, failure or report.error, report)

    return Search(Path(command[0]).name, attempt).run()


def run_script(
    command: Sequence[str], told: str, read: Callable[[Path], R], timeout: float | None = None
) -> tuple[str, R]:
    """How a script failed under a setting, and what it reported, which `read` gets from a folder."""
    with tempfile.TemporaryDirectory(prefix="minicompile_bisect_") as folder:
        setting = {"MINICOMPILE_BISECT": told, "MINICOMPILE_BISECT_REPORT": folder}
        environment = child_environment(**setting, PYTHONHASHSEED="0")  # sets in the same order
        try:
            done = subprocess.run(
                [sys.executable, *command],
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"took over {timeout:g} s", read(Path(folder))
        report = read(Path(folder))
    last = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    failure = ": ".join([f"exit code {done.returncode}", *last]) if done.returncode else ""
    return failure, report


def add_arguments(to: argparse.ArgumentParser) -> None:
    limit = "a try that takes longer has failed"
    to.add_argument("--timeout", metavar="SECONDS", type=float, help=limit)
    add_script(to, "a Python file that exits with 0 where all is well")


def run(chosen: argparse.Namespace) -> int:
    """The command: 0 if a culprit was found, 1 if not."""
    found = bisect_script([str(script_of(chosen)), *chosen.arguments], chosen.timeout)
    print(found)
    return int(found.culprit is None)
