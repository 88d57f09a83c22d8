"""The trace that most views are tested on, of `model.block`, and parts to make small graphs of."""

from __future__ import annotations

from pathlib import Path

import torch

import minicompile as mc
from minicompile.pipeline_result import Trace
from tests.show.model import block

FILE = str(Path(__file__).with_name("model.py"))


def trace(training: bool = True) -> Trace:
    """Return a new trace, which a test may change; without training it is short."""
    mc.reset()
    return mc.trace(block, torch.ones(512, 64), torch.ones(64, 128, requires_grad=training))
