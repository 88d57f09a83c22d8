"""Checks of lesson 00."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import minicompile as mc
from minicompile.lessons.exercise import Lesson, Run

lesson = Lesson("00")


def relu_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.relu(x), -1)


def two_sums(x: torch.Tensor) -> torch.Tensor:
    return x.exp().sum(-1) + x.sum(-1)


@lesson.exercise(
    "ex1",
    points=1,
    level="read",
    visible=[relu_softmax],
    hidden=[two_sums, torch.relu],
    forbidden=["steps", "what_if"],
)
def fusion_saves_kernels(run: Run, kernels_saved: Callable[..., Any]) -> str:
    """Counts kernels in two traces."""
    apart = {"inline": "never", "fusion": False}
    saved = 0
    for function in run.cases:
        x = torch.randn(8, 16)
        fused, unfused = mc.trace(function, x), mc.trace(mc.compile(function, options=apart), x)
        saved = len(unfused.kernels) - len(fused.kernels)
        run.expect(kernels_saved(fused, unfused), saved, f"kernels_saved for {function.__name__}")
    return f"{saved} kernels saved"
