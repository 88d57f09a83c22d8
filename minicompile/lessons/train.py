"""Training the lesson model, with or without a compiler, one measured step at a time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from minicompile.lessons.data import batches
from minicompile.lessons.model import GPT
from minicompile.ops.display import Shown

CompileFn = Callable[[GPT], Callable[..., Any]]
"""Takes the model, gives what is called in its place: `minicompile.compile`, `torch.compile`, or itself."""

BATCH_SIZE = 12
LEARNING_RATE = 1e-3


def run_eager(model: GPT) -> Callable[..., Any]:
    """The compile function that compiles nothing."""
    return model


@dataclass
class TrainResult(Shown):
    """What a training run measured. Losses are those before each step's update; times are wall clock."""

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    """Whole steps: forward, backward, optimizer."""
    gradient_seconds: list[float] = field(default_factory=list)
    """Forward and backward alone; the first includes compiling both."""

    @property
    def fall(self) -> float:
        """How far the loss fell, as a part of where it began: mean of the last 20 steps against the first."""
        return 1.0 - statistics.fmean(self.losses[-20:]) / self.losses[0]

    @property
    def step_ms(self) -> float:
        """Median milliseconds of a step, without the first."""
        return 1000.0 * statistics.median(self.step_seconds[1:] or self.step_seconds)

    @property
    def compile_seconds(self) -> float:
        """The first forward and backward, less what they usually take.."""
        usual = (
            statistics.median(self.gradient_seconds[1:]) if len(self.gradient_seconds) > 1 else 0.0
        )
        return max(0.0, self.gradient_seconds[0] - usual)

    def __str__(self) -> str:
        return (
            f"{len(self.losses)} steps: loss {self.losses[0]:.4f} -> {self.losses[-1]:.4f} "
            f"(fell {self.fall:.0%}), compile {self.compile_seconds:.1f} s, {self.step_ms:.1f} ms a step"
        )


class Trainer:
    """AdamW on batches of the standard library's text, one `step()` at a time.

    Two trainers with equal models and equal seeds see the same batches, so their losses can be compared.
    """

    def __init__(
        self,
        model: GPT,
        compile_fn: CompileFn = run_eager,
        *,
        batch_size: int = BATCH_SIZE,
        learning_rate: float = LEARNING_RATE,
        seed: int = 0,
        text: Tensor | None = None,
    ) -> None:
        self.model = model
        self.device = model.tokens.weight.device
        self.call = compile_fn(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        self.batches = batches(batch_size, model.config.block_size, seed, text)
        self.result = TrainResult()

    def now(self) -> float:
        """The clock, after everything queued on a GPU has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """The next inputs and targets, on the model's device."""
        inputs, targets = next(self.batches)
        return inputs.to(self.device), targets.to(self.device)

    def step(self) -> float:
        """One update; gives the loss before it."""
        inputs, targets = self.next_batch()
        start = self.now()
        self.optimizer.zero_grad()
        _, loss = self.call(inputs, targets)
        loss.backward()
        gradients = self.now()
        self.optimizer.step()
        end = self.now()
        self.result.losses.append(loss.item())
        self.result.gradient_seconds.append(gradients - start)
        self.result.step_seconds.append(end - start)
        return self.result.losses[-1]


def train(
    model: GPT,
    steps: int = 300,
    compile_fn: CompileFn = run_eager,
    *,
    on_step: Callable[[int, float], None] | None = None,
    **choices: Any,
) -> TrainResult:
    """Train for `steps` updates. `choices` are the Trainer's; `on_step(number, loss)` follows each."""
    trainer = Trainer(model, compile_fn, **choices)
    for number in range(steps):
        loss = trainer.step()
        if on_step is not None:
            on_step(number, loss)
    return trainer.result
