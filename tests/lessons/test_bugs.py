"""Planted bugs: each changes an answer or a gradient of a small program, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import minicompile as mc
from minicompile.lessons.bugs import bugs, planted

PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "lost nan": torch.relu,
    "hot softmax": lambda x: torch.softmax(x * 90, -1),
    "hot sigmoid": lambda x: torch.sigmoid(x * 90),
    "ragged": torch.neg,
    "same sign": lambda x: x * -1 + 1,
    "wrong slope": torch.tanh,
    "half rotation": F.silu,
    "wrong base": lambda x: torch.softmax(x, -1),
    "no table": F.gelu,
}


def answers(function: Callable[[Tensor], Tensor], compiled: bool) -> list[Tensor]:
    x = torch.linspace(-3, 3, 18).reshape(2, 9).requires_grad_()
    given = x * 1.0
    if function is torch.relu:
        given = torch.where(given > 2.9, torch.nan, given)
    found = (mc.compile(function, fullgraph=True) if compiled else function)(given)
    found.square().sum().backward()
    assert x.grad is not None
    return [found.detach(), x.grad]


def test_every_bug_has_a_program_that_shows_it() -> None:
    assert set(PROGRAMS) == set(bugs)


@pytest.mark.parametrize("bug", PROGRAMS)
def test_planted_bug_is_seen_and_forgotten(bug: str) -> None:
    function = PROGRAMS[bug]
    expected = answers(function, compiled=False)
    with planted(bug):
        if bug == "no table":
            with pytest.raises(Exception, match="the table is empty"):
                answers(function, compiled=True)
        else:
            with pytest.raises(AssertionError):
                torch.testing.assert_close(answers(function, True), expected, equal_nan=True)
    torch.testing.assert_close(answers(function, True), expected, equal_nan=True)
