"""How long the first call takes: in fresh processes, from two states of the caches.

    fresh        empty cache folders
    warm start   a new process with the cache folders that "fresh" left

In each process the compilers are imported and eager has run a few times before the clock starts;
then it runs over one call, in training with its backward, until the GPU is done where there is one.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

from minicompile.bench.cases import COMPILERS, OURS, TORCH, BenchCase, find_cases
from minicompile.debug.variant import now
from minicompile.errors import BackendError
from minicompile.options import child_environment

STATES = ("fresh", "warm start")
EAGER_CALLS = 3
MODULES = ("torch._inductor.compile_fx", "minicompile.pipeline")
"""Imported before the clock starts, since importing isn't compiling."""


def seconds_of(compiler: str, case_name: str, device: str, threads: str, dtype: str) -> float:
    """The seconds of a first call, in this process, which should be fresh."""
    torch.set_num_threads(int(threads))
    name, *scales = case_name.removesuffix(", training").split(", ")
    cases = find_cases([name], [], scales or ["large"])  # type: ignore[arg-type]
    (case,) = (c for c in cases if c.name == case_name)
    subject, way = case.subject, COMPILERS[compiler]
    for module in MODULES:
        importlib.import_module(module)
    inputs = case.inputs(device, getattr(torch, dtype))
    for _ in range(EAGER_CALLS):
        subject.run(subject.fn, inputs)
    start = now()
    subject.run(way.compile(subject.fn, mode=subject.mode), inputs)
    return now() - start


RUN = f"import sys; from {__name__} import seconds_of; print(seconds_of(*sys.argv[1:]))"


def in_fresh_process(
    compiler: str, case: str, device: str, threads: int, cache: str, dtype: str, **more: str
) -> float:
    """Seconds of a first call; `more` is added to the environment. Raises BackendError with what the process
    printed last."""
    folders = {COMPILERS[compiler].cache_variable: cache, "TRITON_CACHE_DIR": f"{cache}/triton/0"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, compiler, case, device, str(threads), dtype],
        capture_output=True,
        text=True,
        env=child_environment(**folders, **more),
    )
    if done.returncode:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise BackendError(f"{compiler} at {case} failed in a fresh process: {last}")
    return float(done.stdout.split()[-1])


def measure_first_calls(
    cases: Sequence[BenchCase], device: str, threads: int, dtype: str
) -> list[dict[str, Any]]:
    """Measure and print cases from both states, one compiler after the other."""
    calls = []
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="minicompile-bench-") as folder:
            for state in STATES:
                theirs, ours = (
                    in_fresh_process(name, case.name, device, threads, f"{folder}/{name}", dtype)
                    for name in (TORCH, OURS)
                )
                print(f"first call of {case.name}, {state}: {ours:.2f} s, {TORCH} {theirs:.2f} s")
                calls.append({"case": case.name, "state": state, "ours": ours, "theirs": theirs})
    return calls
