"""The work of compiling grows like the program."""

from __future__ import annotations

import cProfile
import pstats
from typing import Any

import pytest
import torch
from torch import Tensor

import minicompile as mc

MOST = 2.9
"""How many times as often a function may be called for twice the steps."""


def calls(steps: int) -> dict[Any, int]:
    """How often each function of minicompile is called to compile a recurrent layer, forward and backward."""
    w, u = (torch.randn(4, 4, requires_grad=True) for _ in range(2))

    def layer(x: Tensor) -> Tensor:
        h = torch.zeros(2, 4)
        for step in range(steps):
            h = torch.tanh(x[step] @ w + h @ u)
        return h.sum()

    profile = cProfile.Profile()
    with mc.fresh_cache(), profile:
        mc.compile(layer)(torch.randn(steps, 2, 4))
    stats: Any = pstats.Stats(profile)
    return {where: row[1] for where, row in stats.stats.items() if "minicompile" in where[0]}


@pytest.mark.long
def test_twice_the_steps_are_no_more_than_twice_the_work_of_each_function() -> None:
    once, twice = calls(16), calls(32)
    grown = {
        f"{w[0]}:{w[1]} {w[2]}": (once[w], n) for w, n in twice.items() if n > 1000 and w in once
    }
    faster = {name: pair for name, pair in grown.items() if pair[1] > MOST * pair[0]}
    assert not faster
