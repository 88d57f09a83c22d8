"""`python -m minicompile bench`: eager, torch.compile and minicompile in turns, in one process.

For each case all compilers' results are compared with float64 first; then calls are timed in turns, and the
ratios of times that were measured side by side are what counts. `--first` adds first calls in fresh processes
(bench/first_calls.py). The exit code is 1 if a result of ours is wrong, or if we fail.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

import minicompile
from minicompile.bench.cases import (
    COMPILERS,
    EAGER,
    KINDS,
    OURS,
    TORCH,
    BenchCase,
    ComparedCompiler,
    find_cases,
    in_float64,
)
from minicompile.bench.first_calls import measure_first_calls
from minicompile.bench.machine import circumstances, table_text
from minicompile.bench.patterns import SCALES
from minicompile.bench.timing import (
    Ratio,
    peak_bytes,
    ratio_of,
    time_in_turns,
    time_text,
)
from minicompile.debug.variant import distance, plain
from minicompile.errors import MinicompileError, unknown
from minicompile.extension import scoped
from minicompile.ops.display import bytes_text
from minicompile.options import environment

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WARM_CALLS = 3
WORSE_THAN_EAGER = 4
"""A result may be so many times as far from float64 as eager's ..."""
ROUNDINGS = 8
"""... or by this many roundings of the dtype, relative to the largest number of a tensor."""


@dataclass
class Measurement:
    """Measurements of one case: by compiler, seconds a call and peak bytes."""

    case: str
    kind: str
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time."""
    to_theirs: Ratio | None = None
    to_eager: Ratio | None = None
    errors: dict[str, float] = field(default_factory=dict)
    """Largest difference to float64, by the largest number of a result."""
    peaks: dict[str, int] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def error_of(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest difference, by the largest number of each tensor; infinite where NaNs differ."""
    errors = [0.0]
    for result, right in zip(results, exact, strict=True):
        largest = float(right.detach().abs().nan_to_num(0, 0, 0).max()) if right.numel() else 0.0
        errors.append(distance(plain(result), plain(right)) / (largest or 1.0))
    return max(errors)


def measure(
    case: BenchCase,
    device: str,
    dtype: torch.dtype,
    seconds: float,
    compilers: Mapping[str, ComparedCompiler] = COMPILERS,
) -> Measurement:
    """Measure one case by several compilers: right first, then fast. What a compiler raises is its result."""
    row, subject = Measurement(case.name, case.kind), case.subject
    torch.compiler.reset()
    minicompile.reset()
    try:
        inputs = case.inputs(device, dtype)
    except ImportError as missing:
        row.failures = dict.fromkeys(compilers, f"not measured: {missing}")
        return row
    exact = subject.run(subject.fn, in_float64(inputs))
    eager_error = error_of(subject.run(subject.fn, inputs), exact)
    allowed = max(WORSE_THAN_EAGER * eager_error, ROUNDINGS * torch.finfo(dtype).eps)
    steps: dict[str, Callable[[], object]] = {}
    for name, compiler in compilers.items():
        try:
            with scoped():
                fn = compiler.compile(subject.fn, mode=subject.mode)
                inputs = case.inputs(device, dtype)
                for _ in range(WARM_CALLS + 1 if subject.mode else 1):  # a CUDA graph's replay, too
                    results = subject.run(fn, inputs)
            row.errors[name] = error_of(results, exact)
            del results
            step = subject.step(fn, inputs)
            for _ in range(WARM_CALLS):
                step()
            row.peaks[name] = peak_bytes(step, device)
            steps[name] = step
        except Exception as failure:
            row.failures[name] = f"{type(failure).__name__}: {failure}".splitlines()[0]
            continue
        if row.errors[name] > allowed:
            row.failures[name] = f"off by {row.errors[name]:.1e}, allowed {allowed:.1e}"
    del exact, inputs
    samples = time_in_turns(steps, seconds)
    row.seconds = {name: statistics.median(times) for name, times in samples.items()}
    if OURS in samples:
        row.to_theirs = ratio_of(samples[OURS], samples[TORCH]) if TORCH in samples else None
        row.to_eager = ratio_of(samples[OURS], samples[EAGER]) if EAGER in samples else None
    return row


# -- the table


HEAD = ["time a call", *COMPILERS, "of torch.compile", "of eager", "off by", "peak"]


def cells(row: Measurement) -> list[str]:
    """A row of the table. Ratios have quartiles; peak memory is torch.compile's and ours."""
    times = [time_text(row.seconds[name]) if name in row.seconds else "-" for name in COMPILERS]
    ratios = [str(row.to_theirs or ""), str(row.to_eager or "")]
    error = f"{row.errors[OURS]:.0e}" if OURS in row.errors else ""
    peaks = "/".join(bytes_text(row.peaks[n]) for n in (TORCH, OURS) if n in row.seconds)
    return [row.case, *times, *ratios, error, peaks]


# -- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `minicompile bench`."""
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="patterns and models (default: those of --kinds)")
    add("--gpu", action="store_true", help="run on the GPU")
    add("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    add("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)} (default: all)")
    add("--scales", help=f"sizes of patterns: {', '.join(SCALES)} (default: cache,dram, or gpu)")
    add("--dtype", default="float32", choices=DTYPES)
    add("--seconds", type=float, default=3.0, help="to time a case for (default 3)")
    add("--first", default="", metavar="NAMES", help="first calls of these, in fresh processes")
    add("--json", type=argparse.FileType("w"), metavar="FILE", help="write all figures to FILE")
    add("--plain", action="store_true", help=argparse.SUPPRESS)  # recorded commands have it


def parts(text: str, known: Sequence[str], what: str) -> list[str]:
    """Split a list with commas. Raises MinicompileError for an unknown name."""
    names = [name for name in text.split(",") if name]
    for name in set(names) - {*known}:
        raise unknown(what, name, known)
    return names


def run(chosen: argparse.Namespace) -> int:
    """The command: 1 if a result of ours is wrong, or missing."""
    if chosen.gpu and not torch.cuda.is_available():
        raise MinicompileError("--gpu needs a CUDA GPU and a CUDA build of torch: none was found")
    device = "cuda" if chosen.gpu else "cpu"
    scales: Any = parts(chosen.scales or ("gpu" if chosen.gpu else "cache,dram"), SCALES, "scale")
    cases = find_cases(chosen.names, parts(chosen.kinds, KINDS, "kind"), scales)
    first = find_cases([name for name in chosen.first.split(",") if name], (), scales)
    torch.set_num_threads(chosen.threads)
    where = torch.cuda.get_device_name() if chosen.gpu else f"CPU, {chosen.threads} threads"
    print(f"{chosen.dtype} on {where}", flush=True)
    rows = []
    with environment(KINETO_LOG_LEVEL="6"):  # torch.profiler tells when it starts and stops
        for case in cases:
            row = measure(case, device, DTYPES[chosen.dtype], chosen.seconds)
            print(f"{row.case}: {row.to_theirs} of {TORCH}, {row.to_eager} of {EAGER}", flush=True)
            for name, why in row.failures.items():
                print(f"{row.case}: {name}: {why}", flush=True)
            rows.append(row)
            gc.collect()
    print(f"\n{table_text(HEAD, list(map(cells, rows)))}\n")
    for kind in KINDS:
        ratios = [row.to_theirs for row in rows if row.kind == kind]
        if medians := [ratio.median for ratio in ratios if ratio is not None]:
            mean = statistics.geometric_mean(medians)
            print(f"{kind}: geometric mean {mean:.2f} of {len(medians)} cases")
    calls = measure_first_calls(first, device, chosen.threads, chosen.dtype)
    if chosen.json is not None:
        facts = {
            **circumstances(device), "device": where, "threads": chosen.threads, "dtype": chosen.dtype,
            "cases": [asdict(row) for row in rows], "first_calls": calls,
        }  # fmt: skip
        with chosen.json as file:
            file.write(json.dumps([facts], indent=2) + "\n")
    return int(any(OURS in row.failures for row in rows))
