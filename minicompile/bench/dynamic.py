"""`python -m minicompile dynamic`: what kernels for every size cost beside those for one, in one process.

The same functions compiled three times: for their sizes alone, with all dimensions symbolic, and with a
marked batch dimension. Whole calls, timed in turn; medians.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import minicompile
from minicompile.bench.calls import add_arguments, in_turn, time_text
from minicompile.bench.screen import Screen

__all__ = ["add_arguments", "run"]

ALLOWED = 1.15
"""Times as long as the static kernels."""
SAMPLES, SECONDS = 200, 0.0003
SIZES = ((64, 256), (512, 256), (2048, 256), (1000, 250), (16, 4096))
HIDDEN = 1024
"""Columns in the middle of the MLP."""


@dataclass(frozen=True)
class Cost:
    """Seconds of a call with fixed sizes, and how many times that it takes with symbolic ones."""

    name: str
    static: float
    dynamic: float
    batch: float

    @property
    def met(self) -> bool:
        return max(self.dynamic, self.batch) <= ALLOWED

    def row(self) -> list[str]:
        return [self.name, time_text(self.static), f"{self.dynamic:.2f}", f"{self.batch:.2f}"]


Function = Callable[[torch.Tensor], torch.Tensor]


def programs(columns: int) -> dict[str, Function]:
    into, out = (torch.randn(shape) / 20 for shape in ((columns, HIDDEN), (HIDDEN, columns)))
    return {
        "softmax": lambda x: torch.softmax(x, -1),
        "layer_norm": lambda x: F.layer_norm(x, (x.shape[-1],)),
        "GELU MLP": lambda x: F.gelu(x @ into) @ out,
    }


def measure(name: str, function: Function, rows: int, columns: int) -> Cost:
    """One program at one size, compiled in three ways."""
    x = torch.randn(rows, columns)
    marked = x.clone()
    minicompile.mark_dynamic(marked, 0)
    static, dynamic = (minicompile.compile(function, dynamic=choice) for choice in (False, True))
    batch = minicompile.compile(function)
    calls = [lambda: static(x), lambda: dynamic(x), lambda: batch(marked)]
    for call in calls:
        call()
    once = max(in_turn(calls, 3, 1))
    found, *others = in_turn(calls, SAMPLES, max(1, int(SECONDS / once)))
    return Cost(f"{name} {rows} x {columns}", found, *(seconds / found for seconds in others))


def run(chosen: argparse.Namespace) -> int:
    """Measure and print; 1 if a ratio is above what is allowed."""
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    costs = [measure(name, f, *size) for size in SIZES for name, f in programs(size[1]).items()]
    Screen(chosen.plain).table(
        f"kernels for every size beside those for one: at most {ALLOWED} times as long",
        ("median of a call", "one size", "dynamic=True", "batch marked"),
        [cost.row() for cost in costs],
    )
    return 0 if all(cost.met for cost in costs) else 1
