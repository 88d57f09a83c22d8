"""How long compiling takes from cold: a fresh process, an empty cache folder, nothing compiled before.

Imports are not compiling: a compiler's modules are imported beforehand, and their seconds are reported apart.
A few eager steps come first and pay for PyTorch's own start-up. Then the clock runs over the first compiled
forward and backward, less what they usually take.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time

import torch

from minicompile.bench.contest import Contestant
from minicompile.errors import BackendError
from minicompile.lessons.model import GPT
from minicompile.lessons.train import train

WARM_STEPS = 3
MEASURED_STEPS = 5
TIMEOUT_SECONDS = 1200


def measure(contestant: Contestant, device: str) -> dict[str, float]:
    """In this process: seconds of importing and of compiling the lesson model."""
    torch.manual_seed(0)
    model = GPT().to(device)
    train(model, WARM_STEPS)
    start = time.perf_counter()
    for module in contestant.modules:
        importlib.import_module(module)
    imported = time.perf_counter()
    result = train(model, MEASURED_STEPS, contestant.compile_fn)
    return {"import_seconds": imported - start, "compile_seconds": result.compile_seconds}


def measure_in_fresh_process(name: str, device: str, threads: int) -> dict[str, float]:
    """`measure` in a new Python with this environment. Raises BackendError with what it printed last."""
    run = f"import sys; from {__name__} import report; report(*sys.argv[1:])"
    command = [sys.executable, "-c", run, name, device, str(threads)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise BackendError(f"{name} did not finish compiling within {TIMEOUT_SECONDS} s") from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise BackendError(f"{name} failed while compiling in a fresh process: {last}")
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def report(name: str, device: str, threads: str) -> None:
    """What a fresh process runs: `measure`, printed as JSON."""
    from minicompile.bench.demo import CONTESTANTS

    torch.set_num_threads(int(threads))
    contestant = next(c for c in CONTESTANTS if c.name == name)
    print(json.dumps(measure(contestant, device)))
