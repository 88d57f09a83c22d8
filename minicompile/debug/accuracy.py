"""`accuracy(fn, *args)`: every stage's results against float64, next to eager's own rounding errors.

    Accuracy := name, stages: [StageAccuracy]

A stage is a way to run the function: `accuracy_stage` registers one more. Float64 is the measure, because
eager itself is only one way to round.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from minicompile import api
from minicompile.debug.variant import BAD, Case, Preparation, StageAccuracy, Variant, VariantRun
from minicompile.dynamo.module import original_of
from minicompile.ops.display import Shown, aligned
from minicompile.ops.registry import Registry

accuracy_stage: Registry[Preparation] = Registry(
    "accuracy_stage", "name, in order -> function from a copied target to what to call"
)
accuracy_stage("captured")(partial(api.compile, backend="eager"))
accuracy_stage("aot")(partial(api.compile, backend="aot_eager"))
accuracy_stage("compiled")(partial(api.compile, backend="inductor"))


@dataclass(frozen=True)
class Accuracy(Shown):
    """The stages of one function in order."""

    name: str
    stages: tuple[StageAccuracy, ...]

    HEAD = ("stage", "outputs", "gradients", "state", "x eager", "verdict", "note")

    @property
    def ok(self) -> bool:
        return not any(row.verdict in BAD for row in self.stages)

    def __getitem__(self, stage: str) -> StageAccuracy:
        return next(row for row in self.stages if row.stage == stage)

    def __str__(self) -> str:
        rows = [self.HEAD, *(row.cells() for row in self.stages)]
        title = f"accuracy of {self.name}: largest errors against float64"
        return "\n".join([title, *aligned(rows, left=len(self.HEAD))])


def accuracy(target: Any, /, *args: Any, **kwargs: Any) -> Accuracy:
    """Run a function or module on these arguments in each stage and compare.

    Neither the target, nor the arguments, nor the random state change; what the function prints is printed
    by each stage. Other threads see the default dtype float64 while that stage runs.

    Raises what eager raises.
    """
    case = Case(original_of(target), [args], kwargs)
    runs = {name: VariantRun(case, Variant(prepare)) for name, prepare in accuracy_stage.items()}
    return Accuracy(case.name, tuple(case.compare(runs)))
