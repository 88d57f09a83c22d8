"""Training programs, compiled and plain: `python -m tests.corridor.training_table --torch inductor`

Prints for each program how far its losses are from eager's, graphs and breaks, and the time of a step after
warming up, in turns; geometric means at the end. `--programs vae,dcgan` chooses; `--timm resnet18` adds
networks of timm, 64 pixels wide. Exit code 1 if a loss differs.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributions import Distribution

import minicompile as mc
from minicompile.api import dispatcher_of
from minicompile.bench.timing import time_in_turns
from minicompile.dynamo.history import Explanation
from tests.corridor import control_programs, diffusion_programs, image_programs  # noqa: F401
from tests.corridor.programs import PROGRAMS, Compile, Step

TOLERANCE = 1e-3
"""Largest relative difference of a loss; differences grow as both go on training."""


def started(name: str, compile: Compile) -> Step:
    """A program's step, its weights and data the same each time."""
    torch.manual_seed(0)
    return PROGRAMS[name](compile)


def losses(step: Step, count: int) -> list[float]:
    torch.manual_seed(1)
    return [float(step()) for _ in range(count)]


def distance(found: list[float], expected: list[float]) -> float:
    """The largest relative difference; infinite where one is no number."""
    pairs = zip(found, expected, strict=True)
    return max(abs(a - b) / max(abs(b), 1e-3) if math.isfinite(a) else math.inf for a, b in pairs)


class Compiled:
    """`mc.compile`, and what became of all that it compiled."""

    def __init__(self, **settings: Any) -> None:
        self.settings, self.results = settings, list[Any]()

    def __call__(self, target: Any) -> Any:
        self.results.append(mc.compile(target, **self.settings))
        return self.results[-1]

    @property
    def explanations(self) -> list[Explanation]:
        dispatchers = map(dispatcher_of, self.results)
        return [d.explanation() for d in dispatchers if d is not None]


@dataclass
class Row:
    """One program's figures; counts are (graphs, breaks), times are seconds a step.

    What torch.compile raised stands among the reasons, and its figures are infinite and 0.
    """

    name: str
    difference: float
    counts: dict[str, tuple[int, int]]
    times: dict[str, float]
    reasons: list[str]

    def __str__(self) -> str:
        counts = "".join(f"{g:6}{b:4}" for g, b in self.counts.values())
        times = "".join(f"{1e3 * seconds:9.2f}" for seconds in self.times.values())
        eager = self.times["eager"]
        ratios = "".join(f"{t / eager:7.2f}" for n, t in self.times.items() if n != "eager")
        return f"{self.name:20}{self.difference:9.1e}{counts}{times}{ratios}"


def measure(name: str, steps: int, seconds: float, torch_backend: str | None) -> Row:
    """Run one program in each way."""
    expected = losses(started(name, lambda target: target), steps)
    compiled = Compiled()
    ours = started(name, compiled)
    difference = distance(losses(ours, steps), expected)
    told, failed = compiled.explanations, list[str]()
    graphs = [capture for e in told for capture in e.captures if capture.graph.op_count]
    counts = {"mc": (len(graphs), sum(len(e.breaks) for e in told))}
    calls: dict[str, Callable[[], object]] = {"eager": started(name, lambda t: t), "mc": ours}
    if torch_backend:
        from torch._dynamo.utils import counters

        torch._dynamo.reset()
        counters.clear()
        theirs = started(name, lambda t: torch.compile(t, backend=torch_backend))
        try:
            losses(theirs, steps)
        except Exception as error:
            failed, counts["torch"] = [f"torch.compile raised {type(error).__name__}"], (0, 0)
        else:
            calls["torch"], breaks = theirs, sum(counters["graph_break"].values())
            counts["torch"] = counters["stats"].get("unique_graphs", 0), breaks
        Distribution.set_default_validate_args(__debug__)  # torch.compile switches that off
    for call in calls.values():
        losses(call, 2)  # type: ignore[arg-type]
    timings = time_in_turns(calls, seconds, "cpu")
    reasons = [str(b) for e in told for b in e.breaks]
    reasons += ["LIMIT"] * sum(e.limit_reached for e in told)
    reasons += [f"{e.eager_calls} calls in eager" for e in told if e.eager_calls]
    times = {n: timings.median(n) if n in calls else math.inf for n in ["eager", *counts]}
    return Row(name, difference, counts, times, failed + reasons)


def add_timm(names: str) -> None:
    """Programs that train networks of timm, from random weights."""
    import timm

    for name in names.split(","):

        def make(name: str = name) -> torch.nn.Module:
            return timm.create_model(name, num_classes=10)

        make.__name__ = name
        image_programs.classifier(make, 224)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", help="their names, with commas; default: all")
    parser.add_argument("--steps", type=int, default=8, help="whose losses are compared")
    parser.add_argument("--seconds", type=float, default=3.0, help="of timing, for each program")
    parser.add_argument(
        "--torch", help="torch.compile too, by this backend: inductor (slow) or eager"
    )
    parser.add_argument("--timm", help="names of networks of timm, with commas")
    parser.add_argument("--reasons", action="store_true", help="print why graphs end")
    options = parser.parse_args()
    if options.timm:
        add_timm(options.timm)
    names = options.programs.split(",") if options.programs else list(PROGRAMS)
    ways = ["mc"] + ["torch"] * bool(options.torch)
    print(
        f"{'program':20}{'loss':>9}" + "".join(f"{w + ' graphs, breaks':>10.10}" for w in ways),
        end="",
    )
    print("".join(f"{w + ' ms':>9}" for w in ["eager", *ways]), "".join(f"{w}/e" for w in ways))
    rows = []
    for name in names:
        rows.append(measure(name, options.steps, options.seconds, options.torch))
        print(rows[-1], flush=True)
        for reason in rows[-1].reasons if options.reasons else ():
            print("    ", " ".join(reason.split())[:300])
        mc.reset()
    for way in ways:
        ratios = {row.name: row.times[way] / row.times["eager"] for row in rows}
        slower = [name for name, ratio in ratios.items() if ratio > 1]
        mean = statistics.geometric_mean(
            [ratio for ratio in ratios.values() if math.isfinite(ratio)]
        )
        print(f"{way}: {mean:.2f} of eager's time; slower: {', '.join(slower)}")
    return int(any(row.difference > TOLERANCE for row in rows))


if __name__ == "__main__":
    sys.exit(main())
