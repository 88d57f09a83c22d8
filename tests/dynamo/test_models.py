"""Layers of torch that run Python of their own are one graph each and give what eager gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.dynamo.helpers import compiled, equal, graphs


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.lstm = nn.GRUCell(8, 8), nn.LSTMCell(8, 8)

    def forward(self, steps: torch.Tensor) -> torch.Tensor:
        hidden, state, outs = steps.new_zeros(steps.shape[0], 8), None, []
        for t in range(steps.shape[1]):
            hidden = self.gru(steps[:, t], hidden)
            state = self.lstm(hidden, state)
            outs.append(state[0])
        return torch.stack(outs, 1)


STEPS = torch.randn(2, 5, 8)
SMALL: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "cells": (Cells, (STEPS,)),
    "lstm": (lambda: nn.LSTM(8, 8, 2, batch_first=True), (STEPS,)),
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), (STEPS, STEPS, STEPS)),
    "transformer": (lambda: nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True), (STEPS, STEPS)),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), (STEPS,)),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("training", [True, False])
def test_small_module_is_one_graph(name: str, training: bool) -> None:
    maker, args = SMALL[name]
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(maker().train(training))
    ours, theirs = models
    run = compiled(ours)
    for _ in range(2):
        assert equal(run(*args), theirs(*args))
    assert equal(dict(ours.named_buffers()), dict(theirs.named_buffers()))
    assert graphs(run) == 1
