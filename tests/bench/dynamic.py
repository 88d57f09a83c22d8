"""`python -m tests.bench.dynamic`: what kernels for every size cost beside those for one, in one process.

The same functions compiled three times: for their sizes alone, with all dimensions symbolic, and with a
marked batch dimension. Whole calls, timed in turn; medians.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

import minicompile
from minicompile.bench.screen import Screen
from tests.bench.calls import in_turn, time_text

ALLOWED = 1.15
"""Times as long as the static kernels."""
SAMPLES, SECONDS = 200, 0.0003
SIZES = ((64, 256), (512, 256), (2048, 256), (1000, 250), (16, 4096))
HIDDEN = 1024
"""Columns in the middle of the MLP."""


Function = Callable[[torch.Tensor], torch.Tensor]


def programs(columns: int) -> dict[str, Function]:
    into, out = (torch.randn(shape) / 20 for shape in ((columns, HIDDEN), (HIDDEN, columns)))
    return {
        "softmax": lambda x: torch.softmax(x, -1),
        "layer_norm": lambda x: F.layer_norm(x, (x.shape[-1],)),
        "GELU MLP": lambda x: F.gelu(x @ into) @ out,
    }


def measure(function: Function, rows: int, columns: int) -> list[float]:
    """Seconds of a call: for one size, with all dimensions symbolic, with a marked batch."""
    x, marked = torch.randn(rows, columns), torch.randn(rows, columns)
    minicompile.mark_dynamic(marked, 0)
    static, dynamic = (minicompile.compile(function, dynamic=choice) for choice in (False, True))
    batch = minicompile.compile(function)
    calls = [lambda: static(x), lambda: dynamic(x), lambda: batch(marked)]
    for call in calls:
        call()
    return in_turn(calls, SAMPLES, max(1, int(SECONDS / max(in_turn(calls, 3, 1)))))


def run(threads: int, plain: bool) -> int:
    """Measure and print; 1 if a ratio is above what is allowed."""
    if threads:
        torch.set_num_threads(threads)
    times = {
        f"{name} {rows} x {columns}": measure(function, rows, columns)
        for rows, columns in SIZES
        for name, function in programs(columns).items()
    }
    Screen(plain).table(
        f"kernels for every size beside those for one: at most {ALLOWED} times as long",
        ("median of a call", "one size", "dynamic=True", "batch marked"),
        [[name, time_text(t[0]), *(f"{s / t[0]:.2f}" for s in t[1:])] for name, t in times.items()],
    )
    return int(any(max(found) > ALLOWED * found[0] for found in times.values()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.bench.dynamic", description=__doc__)
    parser.add_argument("--threads", type=int, default=0, help="threads of PyTorch's kernels")
    parser.add_argument("--plain", action="store_true", help="no rich, even where it is installed")
    chosen = parser.parse_args()
    sys.exit(run(chosen.threads, chosen.plain))
