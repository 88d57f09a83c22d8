"""`python -m minicompile demo`: one training run by eager, torch.compile and minicompile, side by side.

Three models with the same weights see the same batches of real text, a few steps of each in turn, so that all
meet the same machine. Losses must agree with eager's; the time of a step is compared, and the time of the
first forward and backward, with empty cache folders.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from minicompile.bench.cases import COMPILERS, EAGER, OURS
from minicompile.bench.machine import table_text
from minicompile.errors import MinicompileError
from minicompile.lessons.model import GPT
from minicompile.lessons.train import Trainer, TrainResult
from minicompile.options import environment

STEPS, STEPS_A_TURN = 300, 10
FIRST_STEPS = 5
ALLOWED = 1e-5
"""By so much losses may differ from eager's over the first steps; later AdamW makes rounding grow."""
HEAD = ("", "first loss", "last loss", "largest difference", "first call", "a step")


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest |a - b| of two loss curves; infinite where one is NaN."""
    return max((d if (d := abs(a - b)) == d else float("inf")) for a, b in zip(ours, theirs))


def train_in_turns(start: GPT, steps: int) -> tuple[dict[str, TrainResult], dict[str, str]]:
    """Train a copy of `start` by each compiler. One that raises is out, with its error; the others go on."""
    trainers = {n: Trainer(copy.deepcopy(start), c.compile) for n, c in COMPILERS.items()}
    errors: dict[str, str] = {}
    for begin in range(0, steps, STEPS_A_TURN):
        for name, trainer in trainers.items():
            try:
                for _ in range(begin, min(begin + STEPS_A_TURN, steps)):
                    if name not in errors:
                        trainer.step()
            except Exception as error:  # whatever a compiler raises is its result
                errors[name] = f"{type(error).__name__}: {error}"
        print(f"trained {min(begin + STEPS_A_TURN, steps)} of {steps} steps", flush=True)
    return {name: trainer.result for name, trainer in trainers.items()}, errors


def row(name: str, result: TrainResult, eager: Sequence[float]) -> list[str]:
    """The cells of the table."""
    ends = f"{result.losses[0]:.4f}", f"{result.losses[-1]:.4f}"
    off = f"{largest_difference(result.losses, eager):.1e}"
    return [name, *ends, off, f"{result.step_seconds[0]:.1f} s", f"{result.step_ms:.2f} ms"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `minicompile demo`."""
    add, threads = parser.add_argument, torch.get_num_threads()
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--steps", type=int, default=STEPS, help=f"AdamW steps (default {STEPS})")
    add("--threads", type=int, default=threads, help="CPU threads of each")


def run(chosen: argparse.Namespace) -> int:
    """The command: 1 if a compiler of ours failed, or its losses are not eager's."""
    device = chosen.device
    if device == "cuda" and not torch.cuda.is_available():
        raise MinicompileError("--device cuda needs a CUDA GPU and a CUDA build of torch")
    if chosen.steps < 1 or chosen.threads < 1:
        raise MinicompileError("--steps and --threads must be at least 1")
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    start = GPT().to(device)
    with tempfile.TemporaryDirectory("", "minicompile-demo-", ignore_cleanup_errors=True) as folder:
        caches = {
            c.cache_variable: str(Path(folder, n)) for n, c in COMPILERS.items() if n != EAGER
        }
        with environment(**caches):
            results, errors = train_in_turns(start, chosen.steps)
    losses = results[EAGER].losses
    rows = [row(name, result, losses) for name, result in results.items() if name not in errors]
    print(f"\n{chosen.steps} AdamW steps of the lesson model on {device}, float32")
    print(f"{table_text(HEAD, rows)}\n")
    for name, error in errors.items():
        print(f"{name}: {error}")
    if OURS in errors:
        return 1
    wrong = largest_difference(results[OURS].losses[:FIRST_STEPS], losses[:FIRST_STEPS]) > ALLOWED
    if wrong:
        print(f"WRONG: losses of the first {FIRST_STEPS} steps differ by more than {ALLOWED:.0e}")
    return int(wrong)
