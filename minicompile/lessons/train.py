"""Training the lesson model, with or without a compiler, one measured step at a time."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from minicompile.debug.variant import now
from minicompile.lessons.data import batches
from minicompile.lessons.model import GPT
from minicompile.ops.display import Shown

CompileFn = Callable[[GPT], Callable[..., Any]]
"""Takes the model, gives what is called in its place: `minicompile.compile`, `torch.compile`, or itself."""

BATCH_SIZE = 12
LEARNING_RATE = 1e-3


@dataclass
class TrainResult(Shown):
    """What a training run measured. Losses are those before each step's update; times are wall clock."""

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    """Whole steps: forward, backward, optimizer; the first includes compiling."""

    @property
    def fall(self) -> float:
        """How far the loss fell, as a part of where it began: mean of the last 20 steps against the first."""
        return 1.0 - statistics.fmean(self.losses[-20:]) / self.losses[0]

    @property
    def step_ms(self) -> float:
        """Median milliseconds of a step, without the first."""
        return 1000.0 * statistics.median(self.step_seconds[1:] or self.step_seconds)

    def __str__(self) -> str:
        return (
            f"{len(self.losses)} steps: loss {self.losses[0]:.4f} -> {self.losses[-1]:.4f} "
            f"(fell {self.fall:.0%}), {self.step_seconds[0]:.1f} s the first, {self.step_ms:.1f} ms others"
        )


class Trainer:
    """AdamW on batches of the standard library's text, one `step()` at a time.

    Two trainers with equal models see the same batches, so their losses can be compared.
    """

    def __init__(self, model: GPT, compile_fn: CompileFn = lambda model: model) -> None:
        self.model = model
        self.device = model.tokens.weight.device
        self.call = compile_fn(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self.batches = batches(BATCH_SIZE, model.config.block_size)
        self.result = TrainResult()

    def step(self) -> None:
        """One update, measured."""
        inputs, targets = (part.to(self.device) for part in next(self.batches))
        start = now()
        self.optimizer.zero_grad()
        _, loss = self.call(inputs, targets)
        loss.backward()
        self.optimizer.step()
        end = now()
        self.result.losses.append(loss.item())
        self.result.step_seconds.append(end - start)


def train(model: GPT, steps: int = 300, compile_fn: CompileFn = lambda model: model) -> TrainResult:
    """Train for `steps` updates."""
    trainer = Trainer(model, compile_fn)
    for _ in range(steps):
        trainer.step()
    return trainer.result
