"""Several ways to run one training, from one start, in turns; and what must hold between them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minicompile.lessons.model import GPT
from minicompile.lessons.train import CompileFn, Trainer, TrainResult, run_eager

FIRST_STEPS = 5
FIRST_DIFFERENCE = 1e-5
"""Loss may differ from eager's by this much over the first steps (fp32)."""
ALL_DIFFERENCE = 1e-2
"""... and by this much over all steps: rounding grows through AdamW."""
LEAST_FALL = 0.40
FULL_LENGTH = 300
"""Steps after which the loss must have fallen."""
COMPILE_RATIO = 1 / 3
STEP_RATIO = 1.1

MATRIX_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
LISTED_EXTERNS = (*MATRIX_PRODUCTS, "aten.embedding_dense_backward")
"""Operators that may stay calls of PyTorch's own kernels; the last adds rows at positions known only at
run time."""


@dataclass(frozen=True)
class ExternCall:
    """An operator that runs PyTorch's own kernel: its name, calls in one step and the reason."""

    name: str
    calls: int
    reason: str


@dataclass(frozen=True)
class CompilerReport:
    """What a compiler says about itself after compiling the model."""

    eager_frames: tuple[str, ...] = ()
    """One line for every frame that ran in eager: why, and where."""
    externs: tuple[ExternCall, ...] = ()
    kernels: int = 0


Inspect = Callable[[GPT, Sequence[Any]], CompilerReport]
"""Takes the model and one batch (inputs, targets)."""


@dataclass(frozen=True)
class Contestant:
    """One way to run the training. The first contestant of a contest is what the others are compared with.

    `modules` are imported before its compile time is measured; `cache_variable` names the environment
    variable that moves its cache on disk.
    """

    name: str
    compile_fn: CompileFn = run_eager
    modules: tuple[str, ...] = ()
    cache_variable: str = ""
    inspect: Inspect | None = None

    @property
    def compiles(self) -> bool:
        return self.compile_fn is not run_eager


@dataclass
class Standing:
    """How one contestant did."""

    name: str
    result: TrainResult
    compile_seconds: float | None = None
    import_seconds: float | None = None
    report: CompilerReport | None = None
    error: str = ""
    first_difference: float = 0.0
    all_difference: float = 0.0


@dataclass
class Contest:
    """The standings, in the contestants' order."""

    steps: int
    standings: list[Standing]

    def __getitem__(self, name: str) -> Standing:
        return next(standing for standing in self.standings if standing.name == name)


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Largest |a - b| of two loss curves; infinite where one is NaN or shorter."""
    if len(ours) != len(theirs):
        return float("inf")
    differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return max((d if d == d else float("inf") for d in differences), default=0.0)


def run_contest(
    start: GPT,
    contestants: Sequence[Contestant],
    steps: int,
    *,
    steps_a_turn: int = 10,
    progress: Callable[[int], None] = lambda done: None,
) -> Contest:
    """Train a copy of `start` with every contestant, a few steps each in turn: all meet the same machine.

    Who begins rotates. A contestant that raises is out, with its error; the others go on.
    """
    trainers = [Trainer(copy.deepcopy(start), c.compile_fn) for c in contestants]
    standings = [Standing(c.name, t.result) for c, t in zip(contestants, trainers, strict=True)]
    done = 0
    for turn, begin in enumerate(range(0, steps, steps_a_turn)):
        for place in range(len(standings)):
            number = (turn + place) % len(standings)
            for _ in range(begin, min(begin + steps_a_turn, steps)):
                if standings[number].error:
                    break
                try:
                    trainers[number].step()
                except Exception as error:  # whatever a compiler raises is the result
                    standings[number].error = f"{type(error).__name__}: {error}"
                else:
                    progress(done := done + 1)
    reference = standings[0].result.losses
    for standing, contestant, trainer in zip(standings, contestants, trainers, strict=True):
        losses = standing.result.losses
        standing.first_difference = largest_difference(
            losses[:FIRST_STEPS], reference[:FIRST_STEPS]
        )
        standing.all_difference = largest_difference(losses, reference)
        if contestant.inspect is not None and not standing.error:
            standing.report = contestant.inspect(trainer.model, trainer.next_batch())
    return Contest(steps, standings)


def missed_targets(contest: Contest, ours: str, theirs: str) -> list[str]:
    """One sentence for every target that `ours` missed; `theirs` is the compiler it is compared with."""
    standing = contest[ours]
    if standing.error:
        return [f"{ours} failed: {standing.error}"]
    first, whole, fall = standing.first_difference, standing.all_difference, standing.result.fall
    targets = [
        (
            first <= FIRST_DIFFERENCE,
            f"losses differ from eager's by {first:.1e} over the first {FIRST_STEPS} steps, "
            f"allowed {FIRST_DIFFERENCE:.0e}",
        ),
        (
            whole <= ALL_DIFFERENCE,
            f"losses differ from eager's by {whole:.1e} over all steps, allowed {ALL_DIFFERENCE:.0e}",
        ),
        (
            contest.steps < FULL_LENGTH or fall > LEAST_FALL,
            f"the loss fell by {fall:.0%}, more than {LEAST_FALL:.0%} wanted",
        ),
    ]
    missed = [sentence for met, sentence in targets if not met]
    return missed + compare_times(standing, contest[theirs]) + judge_report(ours, standing.report)


def compare_times(standing: Standing, rival: Standing) -> list[str]:
    """The two targets that compare clocks."""
    if rival.error:
        return [f"{rival.name} failed, so nothing could be compared with it: {rival.error}"]
    missed = []
    ours, theirs = standing.compile_seconds, rival.compile_seconds
    if ours is None or theirs is None:
        missed.append("compile times were not measured")
    elif ours > COMPILE_RATIO * theirs:
        allowed = f"allowed {COMPILE_RATIO:.2f} of {rival.name}'s {theirs:.1f} s"
        missed.append(f"compiling took {ours:.1f} s, {allowed}")
    ratio = standing.result.step_ms / rival.result.step_ms
    if ratio > STEP_RATIO:
        missed.append(f"a step took {ratio:.2f} times {rival.name}'s, allowed {STEP_RATIO}")
    return missed


def judge_report(name: str, report: CompilerReport | None) -> list[str]:
    """Nothing ran in eager, and PyTorch's own kernels ran only where that is listed."""
    if report is None:
        return [f"{name} gave no report on eager frames and extern calls"]
    missed = [f"a frame ran in eager: {line}" for line in report.eager_frames]
    for call in report.externs:
        ran = f"{call.name} ran PyTorch's own kernel"
        if call.name.rpartition(".")[0] not in LISTED_EXTERNS:
            missed.append(f"{ran} ({call.reason}) and is not on the list")
        elif not call.reason:
            missed.append(f"{ran} without a reason")
    return missed
