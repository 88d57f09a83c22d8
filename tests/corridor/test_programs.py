"""Training programs of many kinds: losses as eager's, and no more graphs than there must be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile.api import dispatcher_of
from tests.corridor import image_programs  # noqa: F401  registers its programs
from tests.corridor.programs import PROGRAMS, Compile

BROKEN = {"word_transformer": 1, "actor_critic": 9, "ppo": 15}
"""Programs with graph breaks, and the most that they may have."""


def losses(name: str, compile: Compile) -> list[float]:
    """Of three steps; weights and data are the same each time."""
    torch.manual_seed(0)
    step = PROGRAMS[name](compile)
    torch.manual_seed(1)
    return [float(step()) for _ in range(3)]


QUICK = "mnist", "dcgan", "vae", "word_transformer"


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in PROGRAMS],
)
def test_a_program_trains_as_in_eager(name: str) -> None:
    compiled = list[Any]()

    def compile(target: Any) -> Any:
        compiled.append(mc.compile(target, backend="aot_eager"))
        return compiled[-1]

    expected = losses(name, lambda target: target)
    assert losses(name, compile) == pytest.approx(expected, rel=1e-4)
    told = [found.explanation() for found in map(dispatcher_of, compiled) if found is not None]
    assert told and not any(e.limit_reached for e in told)
    assert sum(len(e.breaks) for e in told) <= BROKEN.get(name, 0)
