"""`python -m minicompile bench`: eager, torch.compile and minicompile in turns, in one process.

For each case all compilers' results are compared with float64 first; then calls are timed in turns, and the
ratios of times that were measured side by side are what counts. `--first` adds first calls in fresh processes
(bench/first_calls.py). With `--gpu` patterns are also timed on the device alone. The exit code is 1 if a
result of ours is wrong, or if we fail.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
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
    Case,
    find_cases,
    in_float64,
)
from minicompile.bench.first_calls import FIRST_CALLS, measure_first_calls
from minicompile.bench.machine import circumstances, table_text
from minicompile.bench.patterns import SCALES, Pattern
from minicompile.bench.timing import (
    CACHES,
    Ratio,
    device_timer,
    geometric_mean,
    l2_bytes,
    peak_bytes,
    run_in_turns,
    time_in_turns,
    time_text,
)
from minicompile.errors import MinicompileError, unknown
from minicompile.extension import scoped
from minicompile.ops.display import bytes_text
from minicompile.options import environment

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INF = float("inf")
WARM_CALLS = 3
WORSE_THAN_EAGER = 4
"""A result may be so many times as far from float64 as eager's ..."""
ROUNDINGS = 8
"""... or by this many roundings of the dtype, relative to the largest number of a tensor."""


@dataclass
class Row:
    """Measurements of one case: by compiler, seconds a call and peak bytes."""

    case: str
    kind: str
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time."""
    to_theirs: Ratio | None = None
    to_eager: Ratio | None = None
    device_seconds: dict[str, float] = field(default_factory=dict)
    to_best: Ratio | None = None
    """Our device time by that of the faster of the others."""
    errors: dict[str, float] = field(default_factory=dict)
    """Largest difference to float64, by the largest number of a result."""
    peaks: dict[str, int] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def error_of(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest difference, by the largest number of each tensor; infinite where NaNs differ."""
    worst = 0.0
    for found, right in zip(results, exact, strict=True):
        if found.shape != right.shape:
            return INF
        found, right = found.detach().double(), right.detach().double()
        equal = (found == right) | (found.isnan() & right.isnan())
        off = torch.where(equal, 0.0, found - right).abs().nan_to_num(INF, INF)
        largest = right[right.isfinite()].abs().amax().item() if right.isfinite().any() else 0.0
        worst = max(worst, off.amax().item() / (largest or 1.0) if off.numel() else 0.0)
    return worst


def measure(
    case: Case,
    compilers: Sequence[str],
    device: str,
    dtype: torch.dtype,
    seconds: float,
    on_device: bool = False,
) -> Row:
    """Measure one case by all compilers: right first, then fast. An exception of a compiler is its result.

    `on_device`: a pattern's device time is taken too.
    """
    row = Row(case.name, case.kind)
    torch.compiler.reset()
    minicompile.reset()
    try:
        inputs = case.inputs(device, dtype)
    except ImportError as missing:
        row.failures = dict.fromkeys(compilers, f"not measured: {missing}")
        return row
    exact = case.results(case.subject.fn, in_float64(inputs))
    eager_error = error_of(case.results(case.subject.fn, inputs), exact)
    compiled: dict[str, Any] = {}
    steps: dict[str, Callable[[], object]] = {}
    for name in compilers:
        try:
            with scoped():
                compiled[name] = COMPILERS[name].compile(case.subject.fn, case.mode)
                inputs = case.inputs(device, dtype)
                for _ in range(WARM_CALLS + 1 if case.mode else 1):  # a CUDA graph's replay, too
                    results = case.results(compiled[name], inputs)
            row.errors[name] = error_of(results, exact)
            del results
            if isinstance(case.subject, Pattern):  # another module would be compiled anew
                inputs = case.inputs(device, dtype)
            step = case.step(compiled[name], inputs)
            for _ in range(WARM_CALLS):
                step()
            row.peaks[name] = peak_bytes(step, device)
            steps[name] = step
        except Exception as failure:
            row.failures[name] = failure_text(failure)
            continue
        allowed = max(WORSE_THAN_EAGER * eager_error, ROUNDINGS * torch.finfo(dtype).eps)
        if row.errors[name] > allowed:
            row.failures[name] = f"off by {row.errors[name]:.1e}, allowed {allowed:.1e}"
    del exact, inputs
    timings = time_in_turns(steps, seconds, device)
    row.seconds = {name: timings.median(name) for name in steps}
    if OURS in steps:
        row.to_theirs = timings.ratio(OURS, TORCH) if TORCH in steps else None
        row.to_eager = timings.ratio(OURS, EAGER) if EAGER in steps else None
    if on_device and isinstance(case.subject, Pattern):
        fns = {name: compiled[name] for name in steps}
        measure_device(row, case, fns, device, dtype, seconds)
    return row


def failure_text(failure: Exception) -> str:
    """The exception's type and the first line of its message."""
    return f"{type(failure).__name__}: {failure}".splitlines()[0]


def measure_device(
    row: Row,
    case: Case,
    compiled: Mapping[str, Any],
    device: str,
    dtype: torch.dtype,
    seconds: float,
) -> None:
    """Measure device times of a pattern, on copies of its inputs that fill the L2 cache CACHES times."""
    read = sum(tensor.nbytes for tensor in case.inputs(device, dtype))
    copies = 1 + CACHES * l2_bytes(device) // read
    timers = {}
    for name, fn in compiled.items():
        try:
            steps = [case.step(fn, case.inputs(device, dtype)) for _ in range(copies)]
            timers[name] = device_timer(steps)
        except Exception as failure:  # a call that can't be captured has no device time
            row.failures[name] = failure_text(failure)
    timings = run_in_turns(timers, seconds)
    row.device_seconds = {name: timings.median(name) for name in timers}
    if OURS in timers and (rivals := [name for name in timers if name != OURS]):
        row.to_best = timings.ratio(OURS, min(rivals, key=timings.median))


# -- the table


def mean_ratio(rows: Iterable[Row]) -> float:
    """The geometric mean of the ratios to torch.compile; of those to the best, where there are any."""
    ratios = (row.to_best or row.to_theirs for row in rows)
    return geometric_mean(ratio.median for ratio in ratios if ratio is not None)


def table(rows: Sequence[Row], compilers: Sequence[str], gpu: bool) -> str:
    """The rows as text. Ratios have quartiles; peak memory is torch.compile's and ours."""
    head = ["time a call", *compilers, "of torch.compile", "of eager", "off by", "peak"]
    head += [*(f"{name}, device" for name in compilers), "of best"] if gpu else []
    return table_text(head, [cells(row, compilers)[: len(head)] for row in rows])


def cells(row: Row, compilers: Sequence[str]) -> list[str]:
    """A row of the table."""

    def times(seconds: Mapping[str, float]) -> list[str]:
        return [time_text(seconds[name]) if name in seconds else "-" for name in compilers]

    both = [name for name in (TORCH, OURS) if name in row.seconds]
    return [
        row.case,
        *times(row.seconds),
        str(row.to_theirs or ""),
        str(row.to_eager or ""),
        f"{row.errors[OURS]:.0e}" if OURS in row.errors else "",
        "/".join(bytes_text(row.peaks[n]) for n in both),
        *times(row.device_seconds),
        str(row.to_best or ""),
    ]


# -- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `minicompile bench`."""
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="patterns and models (default: those of --kinds)")
    add("--gpu", action="store_true", help="run on the GPU")
    add("--threads", default=str(torch.get_num_threads()), help='CPU threads, such as "1,2"')
    add("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)} (default: all)")
    add("--scales", help=f"sizes of patterns: {', '.join(SCALES)} (default: cache,dram, or gpu)")
    add("--dtype", default="float32", help=f"of {', '.join(DTYPES)}")
    every = ",".join(COMPILERS)
    add("--compilers", default=every, help=f"of {every} (default: all)")
    add("--seconds", type=float, default=3.0, help="to time a case for (default 3)")
    every = ",".join(FIRST_CALLS)
    cases = f"first calls of cases, in fresh processes (minutes): {every}; default all"
    add("--first", nargs="?", const=every, default="", metavar="CASES", help=cases)
    add("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    add("--plain", action="store_true", help=argparse.SUPPRESS)  # recorded commands have it


def parts(text: str, known: Iterable[str], what: str) -> list[str]:
    """Split a list with commas. Raises MinicompileError for an unknown name."""
    found, names = [part.strip() for part in text.split(",") if part.strip()], list(known)
    for part in found:
        if part not in names:
            raise unknown(what, part, names)
    return found


def run(chosen: argparse.Namespace) -> int:
    """The command: 1 if a result of ours is wrong, or missing."""
    if chosen.gpu and not torch.cuda.is_available():
        raise MinicompileError("--gpu needs a CUDA GPU and a CUDA build of torch: none was found")
    if chosen.json is not None and not chosen.json.absolute().parent.is_dir():
        raise MinicompileError(f"--json: there is no folder {chosen.json.absolute().parent}")
    device = "cuda" if chosen.gpu else "cpu"
    try:
        threads = [int(count) for count in chosen.threads.split(",")]
    except ValueError:
        threads = [0]
    if min(threads) < 1 or chosen.seconds <= 0:
        raise MinicompileError("--threads takes numbers from 1 on, --seconds a positive number")
    compilers = parts(chosen.compilers, COMPILERS, "compiler")
    scales: Any = parts(chosen.scales or ("gpu" if chosen.gpu else "cache,dram"), SCALES, "scale")
    dtypes = parts(chosen.dtype, DTYPES, "dtype")
    cases = find_cases(chosen.names, parts(chosen.kinds, KINDS, "kind"), scales)
    first = parts(chosen.first, FIRST_CALLS, "case of first calls")
    facts = []
    before = torch.get_num_threads()
    try:
        for count in threads:
            torch.set_num_threads(count)
            for dtype in dtypes:
                facts.append(run_cases(cases, compilers, device, dtype, chosen.seconds, first))
    finally:
        torch.set_num_threads(before)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(facts, indent=2) + "\n")
    return int(any(OURS in case["failures"] for run in facts for case in run["cases"]))


def run_cases(
    cases: Sequence[Case],
    compilers: Sequence[str],
    device: str,
    dtype: str,
    seconds: float,
    first: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure and print all cases for this process's number of threads; gives what `--json` writes."""
    rows: list[Row] = []
    threads, gpu = torch.get_num_threads(), device == "cuda"
    where = torch.cuda.get_device_name() if gpu else f"CPU, {threads} threads"
    print(f"{dtype} on {where}", flush=True)
    with environment(KINETO_LOG_LEVEL="6"):  # torch.profiler tells when it starts and stops
        for case in cases:
            row = measure(case, compilers, device, DTYPES[dtype], seconds, gpu)
            print(f"{row.case}: {row.to_theirs} of {TORCH}, {row.to_eager} of {EAGER}", flush=True)
            for name, why in row.failures.items():
                print(f"{row.case}: {name}: {why}", flush=True)
            rows.append(row)
            gc.collect()
    print(f"\n{table(rows, compilers, gpu)}\n")
    for kind in KINDS:
        compared = [row for row in rows if row.kind == kind and row.to_theirs is not None]
        if compared:
            print(f"{kind}: geometric mean {mean_ratio(compared):.2f} of {len(compared)} cases")
    calls = measure_first_calls(device, threads, dtype, first) if first else []
    return {
        **circumstances(device),
        "device": where, "threads": threads, "dtype": dtype,
        "cases": [asdict(row) for row in rows], "first_calls": [asdict(call) for call in calls],
    }  # fmt: skip
