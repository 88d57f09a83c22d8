"""`python -m minicompile bench`: eager, torch.compile and minicompile in turns, in one process.

For each case all compilers' results are compared with float64 first; then calls are timed in turns, and
ratios of times that were measured side by side are what counts. The targets on the CPU, by kind of case:

    pattern   geometric mean at most 0.75 of torch.compile's time, none above 1.05, none above eager's
    model     at most torch.compile's time
    call      a function of one small kernel: at most 1/5 of torch.compile's time

`--first` adds first calls in fresh processes (bench/first_calls.py). With several numbers of threads each has
a process of its own: generated code knows its number of threads. No targets are set for GPUs yet.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

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
from minicompile.bench.first_calls import FirstCall, measure_first_calls
from minicompile.bench.patterns import Scale
from minicompile.bench.screen import Screen
from minicompile.bench.timing import Ratio, geometric_mean, peak_bytes, time_in_turns, time_text
from minicompile.compat.torch_compiler import torch_kernel_count
from minicompile.errors import MinicompileError
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
    """At most these ratios: each case to torch.compile, to eager, and the geometric mean to torch.compile."""

    theirs: float
    eager: float | None = None
    mean: float | None = None


TARGETS = {"pattern": Target(1.05, 1.0, 0.75), "model": Target(1.0), "call": Target(0.2)}


@dataclass
class Row:
    """What was measured for one case: per compiler, seconds a call, kernels and peak bytes."""

    case: str
    kind: str
    threads: int
    seconds: dict[str, float] = field(default_factory=dict)
    to_theirs: Ratio | None = None
    to_eager: Ratio | None = None
    errors: dict[str, float] = field(default_factory=dict)
    """Largest difference to float64, by the largest number of a result."""
    kernels: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def error_of(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest difference, by the largest number of each tensor; infinite where NaNs differ."""
    worst = 0.0
    for mine, right in zip(found, exact, strict=True):
        with torch.no_grad():
            one, other = mine.double(), right.double()
            if one.shape != other.shape:
                return float("inf")
            if not one.numel():
                continue
            off = torch.where(
                (one == other) | (one.isnan() & other.isnan()), 0, (one - other).abs()
            )
            size = other[other.isfinite()].abs().max().item() if other.isfinite().any() else 1.0
            largest = off.max().item() / (size or 1.0)
        worst = max(worst, largest if largest == largest else float("inf"))
    return worst


def measure(
    case: Case, compilers: Sequence[str], device: str, dtype: torch.dtype, seconds: float
) -> Row:
    """One case by all compilers: right first, then fast. What a compiler raises is its result."""
    row = Row(case.name, case.kind, torch.get_num_threads())
    torch.compiler.reset()
    minicompile.reset()
    inputs = case.inputs(device, dtype)
    exact = case.results(case.subject.fn, in_float64(inputs))
    eager_error = error_of(case.results(case.subject.fn, inputs), exact)
    steps: dict[str, Callable[[], object]] = {}
    for name in compilers:
        try:
            with scoped():
                count = kernel_counter(name)
                compiled = COMPILERS[name](case.subject.fn)
                found = case.results(compiled, case.inputs(device, dtype))
                row.kernels[name] = count()
            row.errors[name] = error_of(found, exact)
            del found
            step = case.step(compiled, case.inputs(device, dtype))
            for _ in range(WARM_CALLS):
                step()
            row.peaks[name] = peak_bytes(step, device)
            steps[name] = step
        except Exception as failure:  # whatever a compiler raises is the result
            row.failures[name] = f"{type(failure).__name__}: {failure}".splitlines()[0]
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
    return row


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


def missed_targets(rows: Iterable[Row]) -> list[str]:
    """One sentence for every target that was missed."""
    missed: list[str] = []
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        where = f"{row.case}, {row.threads} threads"
        missed += [f"{where}: {name}: {why}" for name, why in row.failures.items() if name == OURS]
        groups.setdefault((row.kind, row.threads), []).append(row)
        target = TARGETS[row.kind]
        for ratio, limit, rival in (
            (row.to_theirs, target.theirs, TORCH),
            (row.to_eager, target.eager, EAGER),
        ):
            if ratio is not None and limit is not None and ratio.median > limit:
                missed.append(f"{where}: {ratio} of {rival}'s time, allowed {limit}")
    for (kind, threads), found in groups.items():
        mean, limit = mean_ratio(found), TARGETS[kind].mean
        if limit is not None and mean > limit:
            missed.append(f"{kind}s, {threads} threads: geometric mean {mean:.2f}, allowed {limit}")
    return missed


def mean_ratio(rows: Iterable[Row]) -> float:
    """The geometric mean of the ratios to torch.compile."""
    return geometric_mean(row.to_theirs.median for row in rows if row.to_theirs is not None)


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
    add("--scales", default="cache,dram", help="sizes of patterns: small, cache, large, dram")
    add("--dtype", default="float32", choices=list(DTYPES))
    add("--compilers", default=",".join(COMPILERS), help=f"of {', '.join(COMPILERS)}")
    add("--seconds", type=float, default=3.0, help="to time a case for (default 3)")
    add("--first", action="store_true", help="first calls too, in fresh processes (minutes)")
    add("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    add("--plain", action="store_true", help="no colours and bars, even where rich is installed")


def parts(text: str, known: Iterable[str], what: str) -> list[str]:
    """A list with commas. Raises MinicompileError for what isn't known."""
    found, names = [part.strip() for part in text.split(",") if part.strip()], list(known)
    for part in found:
        if part not in names:
            raise MinicompileError(f"no {what} {part!r}; known: {', '.join(names)}")
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
    compilers = parts(chosen.compilers, COMPILERS, "compiler")
    scales: Any = parts(chosen.scales, get_args(Scale), "scale")
    cases = find_cases(chosen.names, parts(chosen.kinds, KINDS, "kind"), scales)
    screen = Screen(chosen.plain)
    facts: list[dict[str, Any]] = []
    if len(threads) > 1:
        code = 0
        for count in threads:
            code = max(code, abs(run_child(chosen, count, facts)))  # negative: ended by a signal
    else:
        torch.set_num_threads(threads[0])
        with environment(KINETO_LOG_LEVEL="6"):  # torch.profiler tells when it starts and stops
            code = run_here(chosen, screen, cases, compilers, device, facts)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(facts, indent=2) + "\n")
    return code


def run_child(chosen: argparse.Namespace, threads: int, facts: list[dict[str, Any]]) -> int:
    """The same command for one number of threads."""
    with tempfile.TemporaryDirectory(prefix="minicompile-bench-") as folder:
        file = Path(folder) / "facts.json"
        command = [sys.executable, "-m", "minicompile", "bench", *chosen.names]
        for name in ("kinds", "scales", "dtype", "compilers", "seconds"):
            command += [f"--{name}", str(getattr(chosen, name))]
        command += [f"--{name}" for name in ("gpu", "first", "plain") if getattr(chosen, name)]
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
    facts: list[dict[str, Any]],
) -> int:
    """All cases in this process, for its number of threads."""
    rows: list[Row] = []
    with screen.progress("cases", len(cases)) as progress:
        for case in cases:
            rows.append(measure(case, compilers, device, DTYPES[chosen.dtype], chosen.seconds))
            screen.say(
                f"{case.name}: {rows[-1].to_theirs} of {TORCH}, {rows[-1].to_eager} of {EAGER}"
            )
            progress(len(rows))
            gc.collect()
    threads = torch.get_num_threads()
    where = torch.cuda.get_device_name() if chosen.gpu else f"CPU, {threads} threads"
    head = ["", *compilers, "to torch", "to eager", "off by", "kernels", "peak"]
    screen.table(
        f"{chosen.dtype} on {where}: time a call", head, [cells(r, compilers) for r in rows]
    )
    screen.say(
        f"to torch, to eager: {OURS}'s time by theirs, median (quartiles). Kernels, and most memory above "
        f"what was there: {TORCH}'s and {OURS}'s."
    )
    for row in rows:
        for name, why in row.failures.items():
            screen.say(f"{row.case}: {name}: {why}")
    for kind in KINDS:
        found = [row for row in rows if row.kind == kind and row.to_theirs is not None]
        if found:
            screen.say(f"{kind}: geometric mean {mean_ratio(found):.2f} of {len(found)} cases")
    first: list[FirstCall] = measure_first_calls(screen, device, threads) if chosen.first else []
    missed = [] if chosen.gpu else missed_targets(rows)
    missed += [sentence for call in first for sentence in call.missed()]
    for sentence in missed:
        screen.say(f"MISSED: {sentence}")
    facts.append(
        {
            "device": where, "threads": threads, "dtype": chosen.dtype, "torch": torch.__version__,
            "python": platform.python_version(), "cases": [asdict(row) for row in rows],
            "first_calls": [asdict(call) for call in first], "missed": missed,
        }
    )  # fmt: skip
    return int(bool(missed) or any(OURS in row.failures for row in rows))


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
