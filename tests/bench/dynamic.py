"""`python -m tests.bench.dynamic`: what kernels for every size cost beside those for one, in one process.

The same functions compiled three times: for their sizes alone, with all dimensions symbolic, and with a
marked batch dimension. Whole calls, timed in turn; medians. With `--gpu`: the device time of the
memory-bound patterns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

import minicompile
from minicompile.bench.cases import Case, find_cases
from minicompile.bench.machine import table_text
from minicompile.bench.speed import Row, error_of, in_float64, measure_device
from minicompile.bench.timing import geometric_mean, time_in_turns, time_text

ALLOWED = 1.15
"""Times as long as the static kernels."""
SECONDS = 1.0
"""To time a program for."""
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
    calls = {
        "one size": lambda: static(x), "every size": lambda: dynamic(x), "batch": lambda: batch(marked),
    }  # fmt: skip
    for call in calls.values():
        call()
    timings = time_in_turns(calls, SECONDS, "cpu")
    return [timings.median(name) for name in calls]


def measure_on_gpu(case: Case, dtype: torch.dtype, seconds: float) -> tuple[Row, float]:
    """Seconds of device time for one size and with all dimensions symbolic, and by how much the latter's
    error exceeds eager's."""
    minicompile.reset()
    inputs = case.inputs("cuda", dtype)
    exact = case.results(case.subject.fn, in_float64(inputs))
    eager = error_of(case.results(case.subject.fn, inputs), exact)
    row, compiled = Row(case.name, case.kind), {}
    for name, dynamic in (("one size", False), ("every size", True)):
        compiled[name] = minicompile.compile(case.subject.fn, dynamic=dynamic)
        found = case.results(compiled[name], case.inputs("cuda", dtype))
    off = error_of(found, exact) / max(eager, torch.finfo(dtype).eps)
    del inputs, exact, found
    measure_device(row, case, compiled, "cuda", dtype, seconds, 1.0)
    return row, off


def run_on_gpu(names: list[str], dtypes: list[str], seconds: float) -> int:
    """The patterns, or those named; 1 if one takes too long or failed."""
    missed = False
    for dtype in dtypes:
        rows, ratios = [], []
        for case in find_cases(names, ["pattern"], ["gpu"]):
            row, off = measure_on_gpu(case, getattr(torch, dtype), seconds)
            times = list(row.device_seconds.values())
            why = "".join(row.failures.values())
            ratios.append(times[1] / times[0] if len(times) == 2 else float("inf"))
            rows.append([case.name, *map(time_text, times), f"{ratios[-1]:.2f}", f"{off:.1f}", why])
        print(f"{dtype}: device time, at most {ALLOWED} times as long; error by eager's")
        print(table_text(("", "one size", "every size", "ratio", "error", ""), rows))
        print(f"geometric mean {geometric_mean(ratios):.2f}")
        missed |= max(ratios) > ALLOWED
    return int(missed)


def run(threads: int) -> int:
    """Measure and print; 1 if a ratio is above what is allowed."""
    if threads:
        torch.set_num_threads(threads)
    times = {
        f"{name} {rows} x {columns}": measure(function, rows, columns)
        for rows, columns in SIZES
        for name, function in programs(columns).items()
    }
    rows = [
        [name, time_text(t[0]), *(f"{s / t[0]:.2f}" for s in t[1:])] for name, t in times.items()
    ]
    print(f"kernels for every size beside those for one: at most {ALLOWED} times as long")
    print(table_text(("median of a call", "one size", "dynamic=True", "batch marked"), rows))
    return int(any(max(found) > ALLOWED * found[0] for found in times.values()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.bench.dynamic", description=__doc__)
    parser.add_argument("--threads", type=int, default=0, help="threads of PyTorch's kernels")
    parser.add_argument("--gpu", nargs="*", metavar="NAME", help="patterns on a GPU (default: all)")
    parser.add_argument("--dtype", default="bfloat16,float32", help="of the patterns")
    parser.add_argument("--seconds", type=float, default=0.1, help="to time a pattern for")
    chosen = parser.parse_args()
    if chosen.gpu is not None:
        dtypes = chosen.dtype.split(",")
        sys.exit(run_on_gpu(chosen.gpu, dtypes, chosen.seconds))
    sys.exit(run(chosen.threads))
