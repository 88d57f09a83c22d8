"""`python -m minicompile bench`: eager, torch.compile and minicompile in turns, in one process.

For each case all compilers' results are compared with float64 first; then calls are timed in turns, and
ratios of times that were measured side by side are what counts. The targets on the CPU, by kind of case:

    pattern   geometric mean at most 0.75 of torch.compile's time, none above 1.05, none above eager's
    model     at most torch.compile's time
    call      a function of one small kernel: at most 1/5 of torch.compile's time

`--first` adds first calls in fresh processes (bench/first_calls.py). With several numbers of threads each has
a process of its own: generated code knows its number of threads.

With `--gpu` patterns are judged by device time, and by what they reach of the bandwidth of a copy: the bytes
that they have to move by their device time. The targets there:

    pattern   geometric mean at most 0.95 of the faster of eager and torch.compile, none above 1.10;
              85% of a copy's bandwidth on 14 of 20
    model     geometric mean at most torch.compile's wall time
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
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
from minicompile.bench.first_calls import FIRST_CALLS, FirstCall, measure_first_calls
from minicompile.bench.machine import circumstances
from minicompile.bench.patterns import SCALES, Pattern
from minicompile.bench.screen import Screen
from minicompile.bench.timing import (
    CACHES,
    Ratio,
    copy_bandwidth,
    device_timer,
    geometric_mean,
    l2_bytes,
    peak_bytes,
    run_in_turns,
    time_in_turns,
    time_text,
)
from minicompile.compat.torch_compiler import torch_kernel_count
from minicompile.debug.variant import described, distance, plain
from minicompile.errors import MinicompileError, unknown
from minicompile.ops.display import bytes_text
from minicompile.ops.events import Event, observer
from minicompile.ops.registry import scoped
from minicompile.options import environment

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WARM_CALLS = 3
WORSE_THAN_EAGER = 4
"""A result may be so many times as far from float64 as eager's ..."""
ROUNDINGS = 8
"""... or by this many roundings of the dtype, relative to the largest number of a tensor."""


@dataclass(frozen=True)
class Target:
    """At most these ratios: each case to torch.compile, to eager, and the geometric mean to torch.compile (of
    device times to the faster of both, where they were taken)."""

    theirs: float | None = None
    eager: float | None = None
    mean: float | None = None
    best: float | None = None
    """Each case's device time to the faster of both."""
    near_copy: tuple[float, float] | None = None
    """A share of the bandwidth of a copy, and the share of the cases that must reach it."""


TARGETS = {"pattern": Target(1.05, 1.0, 0.75), "model": Target(1.0), "call": Target(0.2)}
GPU_TARGETS = {
    "pattern": Target(best=1.10, mean=0.95, near_copy=(0.85, 14 / 20)),
    "model": Target(mean=1.0),
    "call": Target(),
}


@dataclass
class Row:
    """What was measured for one case: per compiler, seconds a call, kernels and peak bytes."""

    case: str
    kind: str
    threads: int
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time."""
    to_theirs: Ratio | None = None
    to_eager: Ratio | None = None
    device_seconds: dict[str, float] = field(default_factory=dict)
    to_best: Ratio | None = None
    """Our device time by that of the faster of the others."""
    bytes_moved: int = 0
    """What every implementation has to move."""
    near_copy: float | None = None
    """The bandwidth that we reach, by that of a copy."""
    errors: dict[str, float] = field(default_factory=dict)
    """Largest difference to float64, by the largest number of a result."""
    kernels: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def error_of(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest difference, by the largest number of each tensor; infinite where NaNs differ."""
    worst = 0.0
    for mine, right in zip(found, exact, strict=True):
        finite = right[right.isfinite()].detach().double().abs()
        largest = finite.max().item() if finite.numel() else 0.0
        worst = max(worst, distance(plain(mine), plain(right)) / (largest or 1.0))
    return worst


def measure(
    case: Case,
    compilers: Sequence[str],
    device: str,
    dtype: torch.dtype,
    seconds: float,
    bandwidth: float | None = None,
) -> Row:
    """One case by all compilers: right first, then fast. What a compiler raises is its result.

    With the `bandwidth` of a copy, in bytes a second, a pattern's device time is taken too.
    """
    row = Row(case.name, case.kind, torch.get_num_threads() if device == "cpu" else 0)
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
                count = kernel_counter(name)
                compiled[name] = COMPILERS[name](case.subject.fn, case.mode)
                given = case.inputs(device, dtype)
                for _ in range(
                    WARM_CALLS + 1 if case.mode else 1
                ):  # a graph's replay has to be right
                    found = case.results(compiled[name], given)
                row.kernels[name] = count()
            row.errors[name] = error_of(found, exact)
            del found
            if isinstance(case.subject, Pattern):  # another module would be compiled anew
                given = case.inputs(device, dtype)
            step = case.step(compiled[name], given)
            del given
            for _ in range(WARM_CALLS):
                step()
            row.peaks[name] = peak_bytes(step, device)
            steps[name] = step
        except Exception as failure:  # whatever a compiler raises is the result
            row.failures[name] = described(failure)
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
    if bandwidth is not None and isinstance(case.subject, Pattern):
        fns = {name: compiled[name] for name in steps}
        measure_device(row, case, fns, device, dtype, seconds, bandwidth)
    return row


def measure_device(
    row: Row,
    case: Case,
    compiled: Mapping[str, Any],
    device: str,
    dtype: torch.dtype,
    seconds: float,
    bandwidth: float,
) -> None:
    """Device times of a pattern. As many copies of its inputs take turns as fill the L2 CACHES times over."""
    assert isinstance(case.subject, Pattern)
    inputs = case.inputs(device, dtype)
    copies = 1 + CACHES * l2_bytes(device) // case.subject.bytes_read(inputs, case.scale)
    row.bytes_moved = case.subject.bytes_moved(inputs, case.scale)
    timers = {}
    for name, fn in compiled.items():
        try:
            steps = [case.step(fn, case.inputs(device, dtype)) for _ in range(copies)]
            timers[name] = device_timer(steps, device)
        except Exception as failure:  # what can't be captured has no device time
            row.failures[name] = described(failure)
    timings = run_in_turns(timers, seconds)
    row.device_seconds = {name: timings.median(name) for name in timers}
    if OURS in timers:
        row.near_copy = row.bytes_moved / row.device_seconds[OURS] / bandwidth
        if rivals := [name for name in timers if name != OURS]:
            row.to_best = timings.ratio(OURS, min(rivals, key=timings.median))


def kernel_counter(compiler: str) -> Callable[[], int]:
    """Starts counting the kernels that a compiler makes; inside of `scoped()`."""
    if compiler == OURS:
        kernels: list[int] = []

        @observer("bench")
        def count(event: Event) -> None:
            if event.kind == "kernels":
                kernels.append(len(event.subject))

        return lambda: sum(kernels)
    before = torch_kernel_count()
    return lambda: torch_kernel_count() - before


def missed_targets(rows: Iterable[Row], targets: Mapping[str, Target] = TARGETS) -> list[str]:
    """One sentence for every target that was missed."""
    missed: list[str] = []
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        where = row.case + f", {row.threads} threads" * bool(row.threads)
        missed += [f"{where}: {name}: {why}" for name, why in row.failures.items() if name == OURS]
        groups.setdefault((row.kind, row.threads), []).append(row)
        target = targets[row.kind]
        for ratio, limit, rival in (
            (row.to_theirs, target.theirs, f"{TORCH}'s time"),
            (row.to_eager, target.eager, f"{EAGER}'s time"),
            (row.to_best, target.best, "the best device time"),
        ):
            if ratio is not None and limit is not None and ratio.median > limit:
                missed.append(f"{where}: {ratio} of {rival}, allowed {limit}")
    for (kind, threads), found in groups.items():
        target, where = targets[kind], f"{kind}s" + f", {threads} threads" * bool(threads)
        if target.mean is not None and mean_ratio(found) > target.mean:
            missed.append(f"{where}: geometric mean {mean_ratio(found):.2f}, allowed {target.mean}")
        shares = [row.near_copy for row in found if row.near_copy is not None]
        if target.near_copy is not None and shares:
            share, part = target.near_copy
            reached = sum(s >= share for s in shares)
            if reached < part * len(shares):
                wanted = f"{share:.0%} of a copy's bandwidth, needed {part:.0%}"
                missed.append(f"{where}: {reached} of {len(shares)} reach {wanted}")
    return missed


def mean_ratio(rows: Iterable[Row]) -> float:
    """The geometric mean of the ratios to torch.compile; of those to the best, where there are any."""
    ratios = (row.to_best or row.to_theirs for row in rows)
    return geometric_mean(ratio.median for ratio in ratios if ratio is not None)


# -- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `minicompile bench`."""
    add = parser.add_argument
    add(
        "names",
        nargs="*",
        metavar="NAME",
        help="patterns and models by name (default: those of --kinds)",
    )
    add("--gpu", action="store_true", help="run on the GPU")
    add("--threads", default=str(torch.get_num_threads()), help='CPU threads, such as "1,2"')
    add("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)} (default: all)")
    add("--scales", help=f"sizes of patterns: {', '.join(SCALES)} (default: cache,dram, or gpu)")
    add("--dtype", default="float32", help=f"of {', '.join(DTYPES)}")
    add("--compilers", help=f"of {', '.join(COMPILERS)} (default: all, on a GPU no max-autotune)")
    add("--seconds", type=float, default=3.0, help="to time a case for (default 3)")
    cases = (
        f"first calls of cases, in fresh processes (minutes): {', '.join(FIRST_CALLS)}; default all"
    )
    add("--first", nargs="?", const=",".join(FIRST_CALLS), default="", metavar="CASES", help=cases)
    add("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    add("--plain", action="store_true", help="no colours and bars, even where rich is installed")


def parts(text: str, known: Iterable[str], what: str) -> list[str]:
    """A list with commas. Raises MinicompileError for what isn't known."""
    found, names = [part.strip() for part in text.split(",") if part.strip()], list(known)
    for part in found:
        if part not in names:
            raise unknown(what, part, names)
    return found


def run(chosen: argparse.Namespace) -> int:
    """The command: 1 if a target was missed or a result of ours is wrong."""
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
    usual = [name for name in COMPILERS if not chosen.gpu or name != "max-autotune"]
    chosen.compilers = chosen.compilers or ",".join(usual)
    chosen.scales = chosen.scales or ("gpu" if chosen.gpu else "cache,dram")
    compilers = parts(chosen.compilers, COMPILERS, "compiler")
    scales: Any = parts(chosen.scales, SCALES, "scale")
    dtypes = parts(chosen.dtype, DTYPES, "dtype")
    cases = find_cases(chosen.names, parts(chosen.kinds, KINDS, "kind"), scales)
    screen = Screen(chosen.plain)
    facts: list[dict[str, Any]] = []
    if len(threads) > 1:
        code = 0
        for count in threads:
            code = max(code, abs(run_child(chosen, count, facts)))  # negative: ended by a signal
    else:
        torch.set_num_threads(threads[0])
        code = 0
        for dtype in dtypes:
            with environment(KINETO_LOG_LEVEL="6"):  # torch.profiler tells when it starts and stops
                done = run_here(chosen, screen, cases, compilers, device, dtype, facts)
            code = max(code, done)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(facts, indent=2) + "\n")
    return code


def run_child(chosen: argparse.Namespace, threads: int, facts: list[dict[str, Any]]) -> int:
    """The same command for one number of threads."""
    with tempfile.TemporaryDirectory(prefix="minicompile-bench-") as folder:
        file = Path(folder) / "facts.json"
        command = [sys.executable, "-m", "minicompile", "bench", *chosen.names]
        for name in ("kinds", "scales", "dtype", "compilers", "seconds", "first"):
            command += [f"--{name}", str(getattr(chosen, name))]
        command += [f"--{name}" for name in ("gpu", "plain") if getattr(chosen, name)]
        done = subprocess.run(
            [*command, "--threads", str(threads), "--json", str(file)], check=False
        )
        if file.exists():
            facts += json.loads(file.read_text())
    return done.returncode


def run_here(
    chosen: argparse.Namespace,
    screen: Screen,
    cases: Sequence[Case],
    compilers: Sequence[str],
    device: str,
    dtype: str,
    facts: list[dict[str, Any]],
) -> int:
    """All cases in this process, for its number of threads."""
    rows: list[Row] = []
    threads = torch.get_num_threads()
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {threads} threads"
    bandwidth = copy_bandwidth(device) if chosen.gpu else None
    if bandwidth is not None:
        screen.say(f"{dtype} on {where}: a copy moves {bandwidth / 1e12:.2f} TB/s")
        screen.say(gpu_line(compilers))
    with screen.progress("cases", len(cases)) as progress:
        for case in cases:
            rows.append(measure(case, compilers, device, DTYPES[dtype], chosen.seconds, bandwidth))
            if bandwidth is not None:
                screen.say(gpu_line(compilers, rows[-1]))
            else:
                row = rows[-1]
                screen.say(f"{row.case}: {row.to_theirs} of {TORCH}, {row.to_eager} of {EAGER}")
            progress(len(rows))
            gc.collect()
    if bandwidth is None:
        head = ["", *compilers, "to torch", "to eager", "off by", "kernels", "peak"]
        screen.table(f"{dtype} on {where}: time a call", head, [cells(r, compilers) for r in rows])
        screen.say(
            f"to torch, to eager: {OURS}'s time by theirs, median (quartiles). Kernels, and most memory "
            f"above what was there: {TORCH}'s and {OURS}'s."
        )
    for row in rows:
        for name, why in row.failures.items():
            screen.say(f"{row.case}: {name}: {why}")
    for kind in KINDS:
        found = [row for row in rows if row.kind == kind and row.to_theirs is not None]
        if found:
            screen.say(f"{kind}: geometric mean {mean_ratio(found):.2f} of {len(found)} cases")
    first: list[FirstCall] = []
    if chosen.first:
        wanted = parts(chosen.first, FIRST_CALLS, "case of first calls")
        first = measure_first_calls(screen, device, threads, dtype, wanted)
    missed = missed_targets(rows, GPU_TARGETS if chosen.gpu else TARGETS)
    missed += [sentence for call in first for sentence in call.missed()]
    for sentence in missed:
        screen.say(f"MISSED: {sentence}")
    facts.append(
        {
            **circumstances(device),
            "device": where, "threads": threads, "dtype": dtype, "copy_bandwidth": bandwidth,
            "cases": [asdict(row) for row in rows], "first_calls": [asdict(call) for call in first],
            "missed": missed,
        }
    )  # fmt: skip
    return int(bool(missed) or any(OURS in row.failures for row in rows))


def gpu_line(compilers: Sequence[str], row: Row | None = None) -> str:
    """A line of the GPU's table, or its head: device times, our ratio to the best, terabytes a second and
    their share of a copy's, wall times, our ratio to torch.compile, kernels. Times are in microseconds."""
    if row is None:
        names = " ".join(f"{name[:8]:>8}" for name in compilers)
        ratio = f"{'of best':>16} {'TB/s':>5} share"
        return f"{'us: device, then wall':24} {names} {ratio} {names} {'of torch':>16} kernels"
    device, wall = (
        " ".join(f"{1e6 * found[n]:8.0f}" if n in found else f"{'-':>8}" for n in compilers)
        for found in (row.device_seconds, row.seconds)
    )
    best, theirs = (f"{ratio or ''!s:>16}" for ratio in (row.to_best, row.to_theirs))
    speed = f"{'':11}"
    if row.near_copy is not None:
        speed = f"{row.bytes_moved / row.device_seconds[OURS] / 1e12:5.2f} {row.near_copy:5.0%}"
    kernels = "/".join(str(row.kernels.get(name, "")) for name in (TORCH, OURS))
    name = row.case.replace(", gpu", "")
    return f"{name:24} {device} {best} {speed} {wall} {theirs} {kernels}"


def cells(row: Row, compilers: Sequence[str]) -> list[str]:
    """A row of the table."""
    both = [name for name in (TORCH, OURS) if name in row.seconds]
    return [
        row.case,
        *(time_text(row.seconds[n]) if n in row.seconds else "failed" for n in compilers),
        str(row.to_theirs or ""),
        str(row.to_eager or ""),
        f"{row.errors[OURS]:.0e}" if OURS in row.errors else "",
        "/".join(str(row.kernels[n]) for n in both),
        "/".join(bytes_text(row.peaks[n]) for n in both),
    ]
