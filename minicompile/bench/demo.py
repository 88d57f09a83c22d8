"""`python -m minicompile demo`: one training run by eager, torch.compile and minicompile, side by side.

Three models with the same weights see the same batches of real text, a few steps of each in turn, so that all
meet the same machine. Losses must agree with eager's; the time of a step is compared, and the time of the
first forward and backward, which is from cold: in fresh processes with empty cache folders.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from minicompile.bench import first_calls
from minicompile.bench.cases import COMPILERS, EAGER, OURS, TORCH
from minicompile.bench.machine import table_text
from minicompile.errors import MinicompileError
from minicompile.lessons.model import GPT
from minicompile.lessons.train import Trainer, TrainResult
from minicompile.options import environment

CASE = "lesson_model_training"
STEPS, STEPS_A_TURN = 300, 10
FIRST_STEPS = 5
ALLOWED = 1e-5
"""By so much losses may differ from eager's over the first steps; later AdamW makes rounding grow."""


@dataclass
class Standing:
    """How one way to train did."""

    name: str
    result: TrainResult
    cold_seconds: float | None = None
    error: str = ""

    def row(self, eager: Sequence[float]) -> list[str]:
        """The cells of the table."""
        losses = self.result.losses
        if self.error:
            return [self.name, "failed", "", "", "", ""]
        cold = "" if self.cold_seconds is None else f"{self.cold_seconds:.1f} s"
        ends = f"{losses[0]:.4f}", f"{losses[-1]:.4f}"
        off = f"{largest_difference(losses, eager):.1e}"
        return [self.name, *ends, off, cold, f"{self.result.step_ms:.2f} ms"]


HEAD = ("", "first loss", "last loss", "largest difference", "first call", "a step")


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest |a - b| of two loss curves; infinite where one is NaN."""
    return max((d if (d := abs(a - b)) == d else float("inf")) for a, b in zip(ours, theirs))


def train_in_turns(start: GPT, names: Sequence[str], steps: int) -> list[Standing]:
    """Train a copy of `start` by each compiler. One that raises is out, with its error; the others go on."""
    trainers = {n: Trainer(copy.deepcopy(start), COMPILERS[n].compile) for n in names}
    standings = [Standing(name, trainer.result) for name, trainer in trainers.items()]
    for turn, begin in enumerate(range(0, steps, STEPS_A_TURN)):
        for place in range(len(standings)):
            standing = standings[(turn + place) % len(standings)]
            try:
                for _ in range(begin, min(begin + STEPS_A_TURN, steps)):
                    if not standing.error:
                        trainers[standing.name].step()
            except Exception as error:  # whatever a compiler raises is its result
                standing.error = f"{type(error).__name__}: {error}"
        if turn % 5 == 4:
            print(f"trained {begin + STEPS_A_TURN} of {steps} steps", flush=True)
    return standings


def cold_seconds(name: str, device: str, threads: int, cache: str) -> float:
    """Seconds of the first forward and backward in a fresh process with an empty cache folder."""
    how = CASE, first_calls.FRESH, device, threads, cache, "float32"
    return first_calls.in_fresh_process(name, *how)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `minicompile demo`."""
    add, threads = parser.add_argument, torch.get_num_threads()
    add("--device", default="cpu", help='"cpu" (default) or "cuda"')
    add("--steps", type=int, default=STEPS, help=f"AdamW steps (default {STEPS})")
    add("--threads", type=int, default=threads, help="CPU threads of each")


def run(
    chosen: argparse.Namespace, cold: Callable[[str, str, int, str], float] = cold_seconds
) -> int:
    """The command: 1 if a compiler of ours failed, or its losses are not eager's."""
    device = check_device(chosen.device)
    if chosen.steps < 1 or chosen.threads < 1:
        raise MinicompileError("--steps and --threads must be at least 1")
    torch.set_num_threads(chosen.threads)
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory("", "minicompile-demo-", ignore_cleanup_errors=True) as folder:
        caches = {name: str(Path(folder, name)) for name in (TORCH, OURS)}
        for name, cache in caches.items():
            print(f"{name}: compiling the lesson model from cold ...", flush=True)
            try:
                seconds[name] = cold(name, device, chosen.threads, cache)
            except MinicompileError as error:  # without a C++ compiler torch.compile can do nothing
                print(error)
        torch.manual_seed(0)
        start = GPT().to(device)
        with environment(**{COMPILERS[n].cache_variable: cache for n, cache in caches.items()}):
            standings = train_in_turns(start, (EAGER, TORCH, OURS), chosen.steps)
    for standing in standings:
        standing.cold_seconds = seconds.get(standing.name)
    eager, *_, ours = standings
    title = f"{chosen.steps} AdamW steps of the lesson model on {device}, float32"
    rows = [standing.row(eager.result.losses) for standing in standings]
    print(f"\n{title}\n{table_text(HEAD, rows)}\n")
    for standing in standings:
        if standing.error:
            print(f"{standing.name}: {standing.error}")
    first = [standing.result.losses[:FIRST_STEPS] for standing in (ours, eager)]
    wrong = bool(ours.error) or largest_difference(*first) > ALLOWED
    if wrong and not ours.error:
        print(f"WRONG: losses of the first {FIRST_STEPS} steps differ by more than {ALLOWED:.0e}")
    return int(wrong)


def check_device(name: str) -> str:
    """The device, if this machine has it. Raises MinicompileError otherwise."""
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise MinicompileError(f"no device {name!r}: --device takes cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise MinicompileError("--device cuda needs a CUDA GPU and a CUDA build of torch")
    return name
