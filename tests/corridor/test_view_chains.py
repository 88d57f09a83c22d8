"""Views between two computations: one loop nest, with no buffer for what lies between."""

from __future__ import annotations

import pytest
import torch

import minicompile as mc
from tests.comparing import assert_as_eager

CHAINS = {
    "reshape": lambda x: x.reshape(6, 20),
    "expand": lambda x: x[:, :1].expand(4, 7, 5),
    "slice": lambda x: x[1:3, ::2, 1:],
    "flip": lambda x: x.flip(0, 2),
    "select": lambda x: x[1, :, -2],
    "unsqueeze": lambda x: x[:, None],
    "repeat": lambda x: x.repeat(2, 1, 3),
    "roll": lambda x: x.roll(2, 1),
    "cat": lambda x: torch.cat([x, 2 * x, x[:1]]),
    "pad": lambda x: torch.nn.functional.pad(x, (1, 2, 0, 1)),
    "tril": lambda x: x.tril(1),
    "diag_embed": lambda x: x.diag_embed(1),
    "pixel_shuffle": lambda x: torch.nn.functional.pixel_shuffle(x.repeat(1, 2, 1), 2),
    "eye": lambda x: x + torch.eye(6, 5),
}


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_between_two_computations_a_view_has_no_buffer_of_its_own(name: str, dynamic: bool) -> None:
    """One loop nest computes, moves and computes again."""
    fn = CHAINS[name]
    x = torch.randn(4, 6, 5)
    compiled = mc.compile(lambda x: fn(x.abs() + 1) * 2, dynamic=dynamic)
    (stages,) = mc.trace(compiled, x).graphs.values()
    assert [op for op in stages.loops.operations if op.name not in stages.loops.returned] == []
    assert_as_eager(compiled, lambda x: fn(x.abs() + 1) * 2, x)
