"""Errors of the named models against float64, beside eager's:

    python -m tests.opinfo.models --dtypes float32 bfloat16

Small configurations; outputs, gradients and what the module keeps, each tensor by `compare.beyond`, with the
longest sum of the model's loop graphs. Of a thousand tensors that round as eager's some are beyond it by
chance: a tensor's ratio is the median over several draws of weights and inputs. Prints the worst tensor of
each model, the worst if eager is judged by ours, and the worst of the first draw alone; ends with 1 if a
median is above 1.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import functools
import sys
from dataclasses import dataclass, field
from typing import Any

import torch

import minicompile as mc
from minicompile.bench import networks as _networks  # noqa: F401  registers its models
from minicompile.bench.models import MODELS, Model
from minicompile.ops.events import Event, observer
from minicompile.ops.registry import scoped
from tests.opinfo.compare import beyond, length_of, medians


def in_double(model: Model, given: list[Any]) -> list[torch.Tensor]:
    """The model's results from the same numbers in double precision."""
    module, *rest = copy.deepcopy(given)
    for value in [*module.parameters(), *module.buffers(), *rest]:
        if value.is_floating_point():
            value.data = value.data.double()
    return model.run(model.fn, [module, *rest])


@dataclass
class Errors:
    """Of each result tensor the ratio of `beyond`, one list a draw; the same with eager judged by ours."""

    ours: list[list[float]] = field(default_factory=list)
    eagers: list[list[float]] = field(default_factory=list)
    length: int = 1

    def __str__(self) -> str:
        typical, eagers = medians(self.ours), medians(self.eagers)
        return (
            f"{max(typical):.3f} (eager by ours {max(eagers):.3f}, the first draw alone "
            f"{max(self.ours[0]):.3f}): result {typical.index(max(typical))}, length {self.length}"
        )


def errors(model: Model, dtype: torch.dtype, draws: int) -> Errors:
    """All results of `draws` different modules and inputs."""
    mc.reset()
    compiled = mc.compile(model.fn, options={"verify": True})
    module, *_ = model.make_inputs("cpu", dtype, "small")
    found, lengths = Errors(), [1]

    def listen(event: Event) -> None:
        if event.kind == "loops":
            lengths.extend(map(length_of, event.subject.operations))

    with scoped():
        observer("lengths")(listen)
        for seed in range(draws):
            make = functools.partial(model.make_inputs, "cpu", dtype, "small", seed=seed)
            double, eager = in_double(model, make()), model.run(model.fn, make())
            module.load_state_dict(make()[0].state_dict())  # compiled once
            ours = model.run(compiled, [module, *make()[1:]])
            found.length = max(lengths)
            for ratios, (a, b) in ((found.ours, (eager, ours)), (found.eagers, (ours, eager))):
                ratios.append([ratio(*ts, found.length) for ts in zip(a, b, double, strict=True)])
    return found


def ratio(eager: torch.Tensor, ours: torch.Tensor, double: torch.Tensor, length: int) -> float:
    if not eager.is_floating_point():
        return 0.0
    return beyond(eager.detach(), ours.detach(), double.detach(), length)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", nargs="*", default=["float32"])
    parser.add_argument("--models", nargs="*", default=["*"], help="`fnmatch` patterns")
    parser.add_argument("--draws", type=int, default=9)
    chosen = parser.parse_args()
    worst = 0.0
    for name, model in MODELS.items():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in chosen.models):
            continue
        for dtype in chosen.dtypes:
            found = errors(model, getattr(torch, dtype), chosen.draws)
            worst = max(worst, *medians(found.ours))
            print(f"{name} {dtype}: {found}", flush=True)
    return 1 if worst > 1 else 0


if __name__ == "__main__":
    sys.exit(main())
