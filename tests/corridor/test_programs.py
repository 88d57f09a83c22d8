"""Training programs of many kinds: losses as eager's, and no more graphs than there must be."""

from __future__ import annotations

import pytest

from tests.corridor.training_table import PROGRAMS, Compiled, distance, losses, started

BROKEN = {"word_transformer": 1, "actor_critic": 9, "ppo": 15, "gaussian_process": 2}
"""Programs with graph breaks, and the most that they may have."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_trains_as_in_eager(name: str) -> None:
    expected = losses(started(name, lambda target: target), 3)
    compiled = Compiled(backend="aot_eager")
    assert distance(losses(started(name, compiled), 3), expected) < 1e-4
    told = compiled.explanations
    assert told and not any(e.limit_reached for e in told)
    assert sum(len(e.breaks) for e in told) <= BROKEN.get(name, 0)
