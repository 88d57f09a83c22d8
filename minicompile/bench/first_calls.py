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
from minicompile.bench.demo import OURS as OUR_CONTESTANT
from minicompile.bench.demo import TORCH as TORCH_CONTESTANT
from minicompile.bench.machine import in_new_python
from minicompile.bench.screen import Screen

CONTESTANTS = {TORCH: TORCH_CONTESTANT, OURS: OUR_CONTESTANT}
FRESH, WARM_TOOLCHAIN, WARM_START = "fresh", "warm toolchain", "warm start"
EAGER_CALLS = 3
TIMEOUT_SECONDS = 600

PATTERN_TARGETS = {FRESH: 1 / 20, WARM_TOOLCHAIN: 1 / 5, WARM_START: 1 / 3}
TRAINING_TARGETS = {FRESH: 1 / 5, WARM_START: 1 / 3}
GPU_TARGETS = {FRESH: 1 / 2, WARM_START: 1 / 3}
CASES = {
    "cpu": {
        "gelu_bias, cache": (PATTERN_TARGETS, 3),
        "softmax, cache": (PATTERN_TARGETS, 3),
        "layer_norm, cache": (PATTERN_TARGETS, 3),
        "gpt2_block_training": (TRAINING_TARGETS, 3),
    },
    "cuda": {
        "softmax_4k, gpu": (GPU_TARGETS, 2),
        "layer_norm, gpu, training": (GPU_TARGETS, 2),
        "gpt2": (GPU_TARGETS, 1),
        "gpt2_training": (GPU_TARGETS, 1),
        "resnet50": (GPU_TARGETS, 1),
    },
}
"""By device: which part of torch.compile's time is allowed in each state, and how often it is measured."""
FIRST_CALLS = sorted({name.partition(",")[0] for cases in CASES.values() for name in cases})
PATTERN_SECONDS = 0.3
"""A pattern's first call with a warm toolchain."""


@dataclass(frozen=True)
class FirstCall:
    """Median seconds of the first call of a case from one state of the caches."""

    case: str
    state: str
    ours: float
    theirs: float
    limit: float

    def missed(self) -> list[str]:
        """A sentence for each target that was missed."""
        found, what = [], f"{self.case}, {self.state}: the first call took {self.ours:.2f} s"
        if self.ours > self.limit * self.theirs:
            found.append(f"{what}, allowed 1/{1 / self.limit:.0f} of {TORCH}'s {self.theirs:.2f} s")
        if self.state == WARM_TOOLCHAIN and self.ours > PATTERN_SECONDS:
            found.append(f"{what}, allowed {PATTERN_SECONDS} s")
        return found


def seconds_of(
    compiler: str, case_name: str, state: str, device: str, threads: str, dtype: str
) -> float:
    """What a fresh process runs: the seconds of the first call."""
    torch.set_num_threads(int(threads))
    cases = find_cases([], ["pattern", "model"], ["gpu" if device == "cuda" else "cache"])
    (case,) = (c for c in cases if c.name == case_name)
    (other,) = find_cases([], ["call"], [])
    for module in CONTESTANTS[compiler].modules:
        importlib.import_module(module)
    inputs = case.inputs(device, getattr(torch, dtype))
    for _ in range(EAGER_CALLS):
        case.results(case.subject.fn, inputs)
    compile_with = COMPILERS[compiler]
    if state == WARM_TOOLCHAIN:
        other.results(compile_with(other.subject.fn), other.inputs(device, torch.float32))
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    case.results(compile_with(case.subject.fn, case.mode), inputs)
    wait()
    return time.perf_counter() - start


def in_fresh_process(
    compiler: str, case: str, state: str, device: str, threads: int, cache: str, dtype: str
) -> float:
    """Seconds of a first call. Raises BackendError with what the process printed last."""
    what, given = f"{compiler} at {case}, {state},", (compiler, case, state, device, threads, dtype)
    folders = {CONTESTANTS[compiler].cache_variable: cache, "TRITON_CACHE_DIR": f"{cache}/triton/0"}
    return float(in_new_python(what, TIMEOUT_SECONDS, seconds_of, *given, **folders))


def measure_first_calls(
    screen: Screen,
    device: str,
    threads: int,
    dtype: str = "float32",
    wanted: Collection[str] = FIRST_CALLS,
) -> list[FirstCall]:
    """The wanted cases from every state, both compilers in turns."""
    found = []
    cases = {name: c for name, c in CASES[device].items() if name.partition(",")[0] in wanted}
    total = sum(repeats * len(targets) for targets, repeats in cases.values())
    with screen.progress("first calls", total) as progress:
        done = 0
        for case, (targets, repeats) in cases.items():
            seconds: dict[tuple[str, str], list[float]] = {}
            for _ in range(repeats):
                with tempfile.TemporaryDirectory(prefix="minicompile-bench-") as folder:
                    for state in targets:
                        for compiler in CONTESTANTS:
                            empty = "other" if state == WARM_TOOLCHAIN else "cache"
                            cache = str(Path(folder, compiler, empty))
                            took = in_fresh_process(
                                compiler, case, state, device, threads, cache, dtype
                            )
                            seconds.setdefault((compiler, state), []).append(took)
                            screen.say(f"{case}, {state}: {compiler} {took:.2f} s")
                        progress(done := done + 1)
            for state, limit in targets.items():
                ours, theirs = (statistics.median(seconds[c, state]) for c in (OURS, TORCH))
                found.append(FirstCall(case, state, ours, theirs, limit))
    rows = []
    for call in found:
        times = f"{call.theirs:.2f} s", f"{call.ours:.2f} s", f"1/{call.theirs / call.ours:.1f}"
        rows.append([f"{call.case}, {call.state}", *times, f"1/{1 / call.limit:.0f}"])
    screen.table("first calls", ["", TORCH, OURS, "ratio", "allowed"], rows)
    return found
