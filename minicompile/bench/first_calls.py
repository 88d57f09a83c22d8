"""How long the first call takes: in fresh processes, from three states of the caches.

    fresh            empty cache folders, nothing compiled before
    warm toolchain   empty cache folders, but another small function was compiled before in the process
    warm start       a new process with the cache folders that "fresh" left

In each process the compiler's modules are imported and eager has run a few times before the clock starts;
then it runs over one call, in training with its backward, until the GPU is done where there is one.
"""

from __future__ import annotations

import importlib
import statistics
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from minicompile.bench.cases import COMPILERS, OURS, TORCH, find_cases
from minicompile.bench.machine import in_new_python, table_text
from minicompile.bench.patterns import Scale

FRESH, WARM_TOOLCHAIN, WARM_START = "fresh", "warm toolchain", "warm start"
STATES = (FRESH, WARM_TOOLCHAIN, WARM_START)
EAGER_CALLS = 3
TIMEOUT_SECONDS = 1200

CASES = {
    "cpu": {"gelu_bias, cache": 3, "softmax, cache": 3, "layer_norm, cache": 3, "gpt2_block_training": 3},
    "cuda": {
        "softmax_4k, gpu": 2, "layer_norm, gpu, training": 2,
        "gpt2": 1, "gpt2_training": 1, "resnet50": 1,
    },
}  # fmt: skip
"""By device: cases, and how often each is measured."""
FIRST_CALLS = sorted({name.partition(",")[0] for cases in CASES.values() for name in cases})


@dataclass(frozen=True)
class FirstCall:
    """Median seconds of the first call of a case from one state of the caches."""

    case: str
    state: str
    ours: float
    theirs: float


def seconds_of(
    compiler: str, case_name: str, state: str, device: str, threads: str, dtype: str
) -> float:
    """The seconds of a first call, in this process, which should be fresh."""
    torch.set_num_threads(int(threads))
    scale: Scale = "gpu" if device == "cuda" else "cache"
    cases = find_cases([case_name.partition(",")[0]], [], [scale])
    (case,) = (c for c in cases if c.name == case_name)
    (other,) = find_cases([], ["call"], [])
    way = COMPILERS[compiler]
    for module in way.modules:
        importlib.import_module(module)
    inputs = case.inputs(device, getattr(torch, dtype))
    for _ in range(EAGER_CALLS):
        case.results(case.subject.fn, inputs)
    if state == WARM_TOOLCHAIN:
        other.results(way.compile(other.subject.fn), other.inputs(device, torch.float32))
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    case.results(way.compile(case.subject.fn, case.mode), inputs)
    wait()
    return time.perf_counter() - start


def in_fresh_process(
    compiler: str,
    case: str,
    state: str,
    device: str,
    threads: int,
    cache: str,
    dtype: str,
    **more: str,
) -> float:
    """Seconds of a first call; `more` is added to the environment. Raises BackendError with what the process
    printed last."""
    what, given = f"{compiler} at {case}, {state},", (compiler, case, state, device, threads, dtype)
    folders = {
        COMPILERS[compiler].cache_variable: cache,
        "TRITON_CACHE_DIR": f"{cache}/triton/0",
        **more,
    }
    return float(in_new_python(what, TIMEOUT_SECONDS, seconds_of, *given, **folders))


def measure_first_calls(
    device: str, threads: int, dtype: str = "float32", chosen: Collection[str] = FIRST_CALLS
) -> list[FirstCall]:
    """Measure and print the chosen cases from every state, both compilers in turns."""
    calls = []
    for case, repeats in CASES[device].items():
        if case.partition(",")[0] not in chosen:
            continue
        seconds: dict[tuple[str, str], list[float]] = {}
        for _ in range(repeats):
            with tempfile.TemporaryDirectory(prefix="minicompile-bench-") as folder:
                for state in STATES:
                    for compiler in (TORCH, OURS):
                        empty = "other" if state == WARM_TOOLCHAIN else "cache"
                        cache = str(Path(folder, compiler, empty))
                        took = in_fresh_process(
                            compiler, case, state, device, threads, cache, dtype
                        )
                        seconds.setdefault((compiler, state), []).append(took)
                        print(f"{case}, {state}: {compiler} {took:.2f} s", flush=True)
        for state in STATES:
            ours, theirs = (statistics.median(seconds[c, state]) for c in (OURS, TORCH))
            calls.append(FirstCall(case, state, ours, theirs))
    rows = [
        [f"{c.case}, {c.state}", f"{c.theirs:.2f} s", f"{c.ours:.2f} s", f"{c.ours / c.theirs:.2f}"]
        for c in calls
    ]
    print(f"\n{table_text(['first calls', TORCH, OURS, 'ratio'], rows)}\n")
    return calls
