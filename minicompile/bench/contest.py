"""Several ways to run one training, from one start, in turns; and what must hold between them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
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

LISTED_EXTERNS = {
    "aten.mm": "matrix product",
    "aten.addmm": "matrix product",
    "aten.bmm": "matrix product",
    "aten.baddbmm": "matrix product",
    "aten.embedding_dense_backward": "adds rows at positions known only at run time",
}
"""Operators that may stay calls of PyTorch's own kernels, and why."""

Progress = Callable[[int], None]


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
    standings: list[Standing] = field(default_factory=list)

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
    progress: Progress = lambda done: None,
    **choices: Any,
) -> Contest:
    """Train a copy of `start` with every contestant, a few steps each in turn: all meet the same machine.

    Who begins rotates. A contestant that raises is out, with its error; the others go on.
    """
    contest = Contest(steps)
    trainers: dict[str, Trainer] = {}
    for contestant in contestants:
        standing = Standing(contestant.name, TrainResult())
        contest.standings.append(standing)
        trainers[contestant.name] = Trainer(copy.deepcopy(start), contestant.compile_fn, **choices)
        standing.result = trainers[contestant.name].result
    done = 0
    for turn, begin in enumerate(range(0, steps, steps_a_turn)):
        count = min(steps_a_turn, steps - begin)
        for standing in rotated(contest.standings, turn):
            for _ in range(count if not standing.error else 0):
                try:
                    trainers[standing.name].step()
                except Exception as error:  # whatever a compiler raises is the result
                    standing.error = f"{type(error).__name__}: {error}"
                    break
                progress(done := done + 1)
    reference = contest.standings[0].result.losses
    for standing, contestant in zip(contest.standings, contestants, strict=True):
        losses = standing.result.losses
        standing.first_difference = largest_difference(
            losses[:FIRST_STEPS], reference[:FIRST_STEPS]
        )
        standing.all_difference = largest_difference(losses, reference)
        if contestant.inspect is not None and not standing.error:
            trainer = trainers[contestant.name]
            standing.report = contestant.inspect(trainer.model, trainer.next_batch())
    return contest


def rotated(standings: list[Standing], turn: int) -> Iterable[Standing]:
    """The standings, beginning with another one each turn."""
    shift = turn % len(standings)
    return standings[shift:] + standings[:shift]


def missed_targets(contest: Contest, ours: str, theirs: str) -> list[str]:
    """One sentence for every target that `ours` missed; `theirs` is the compiler it is compared with."""
    standing, rival = contest[ours], contest[theirs]
    if standing.error:
        return [f"{ours} failed: {standing.error}"]
    missed = []
    result = standing.result
    if standing.first_difference > FIRST_DIFFERENCE:
        missed.append(
            f"losses differ from eager's by {standing.first_difference:.1e} over the first {FIRST_STEPS} "
            f"steps, allowed {FIRST_DIFFERENCE:.0e}"
        )
    if standing.all_difference > ALL_DIFFERENCE:
        missed.append(
            f"losses differ from eager's by {standing.all_difference:.1e} over all steps, "
            f"allowed {ALL_DIFFERENCE:.0e}"
        )
    if contest.steps >= FULL_LENGTH and not result.fall > LEAST_FALL:
        missed.append(f"the loss fell by {result.fall:.0%}, more than {LEAST_FALL:.0%} wanted")
    missed += compare_times(standing, rival)
    missed += judge_report(ours, standing.report)
    return missed


def compare_times(standing: Standing, rival: Standing) -> list[str]:
    """The two targets that compare clocks."""
    if rival.error:
        return [f"{rival.name} failed, so nothing could be compared with it: {rival.error}"]
    missed = []
    if standing.compile_seconds is None or rival.compile_seconds is None:
        missed.append("compile times were not measured")
    elif standing.compile_seconds > COMPILE_RATIO * rival.compile_seconds:
        missed.append(
            f"compiling took {standing.compile_seconds:.1f} s, allowed {COMPILE_RATIO:.2f} of {rival.name}'s "
            f"{rival.compile_seconds:.1f} s"
        )
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
        if base_name(call.name) not in LISTED_EXTERNS:
            missed.append(
                f"{call.name} ran PyTorch's own kernel ({call.reason}) and is not on the list"
            )
        elif not call.reason:
            missed.append(f"{call.name} ran PyTorch's own kernel without a reason")
    return missed


def base_name(operator: str) -> str:
    """`aten.mm` for `aten.mm.default` and `aten.mm.out`."""
    return ".".join(operator.split(".")[:2])
