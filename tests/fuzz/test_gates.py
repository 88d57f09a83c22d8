"""Whatever gates refuse, results stay right: rooms must not rely on what earlier ones like to do."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import minicompile as mc
from minicompile.debug.bisect import SUBSYSTEMS
from minicompile.extension import gate
from minicompile.ops.gates import Application
from tests.comparing import assert_as_eager
from tests.corridor.zoo import MODELS, inputs_of
from tests.fuzz.compare import difference
from tests.fuzz.generator import generate


class Steps(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.seen.add_(x.detach().sum(0))
        x = torch.cat([x, x.t().contiguous().view(6, 5).flip(0)])
        best = x.argmax(0)
        y = torch.zeros(12, 5).scatter_add(0, best.expand(3, 5), x[:3])
        y[1:3, ::2] = 2.5
        return (
            y.bfloat16() * 3,
            x.index_select(0, best).sort(0).values,
            (x > 0).any(1),
            x.detach() // 0.3,
            F.gelu(x).cumsum(-1) / (x.std(0) + 0.1),
        )


def case_of(name: str) -> tuple[Callable[..., Any], torch.nn.Module, list[torch.Tensor]]:
    """A function, the module whose parameters it has, and its arguments."""
    torch.manual_seed(0)
    if name == "steps":
        module = Steps()
        return module, module, [torch.randn(6, 5, requires_grad=True)]
    module = MODELS[name]()
    inputs, _ = inputs_of(name, (2, 8) if name == "lesson" else (3, 8, 8))
    return lambda *values: module(**dict(zip(inputs, values))), module, [*inputs.values()]


def compiled_alike(case: str, allow: Callable[[Application], bool]) -> Counter[str]:
    """Compare with eager under a gate; gives how many applications of each subsystem were refused."""
    fn, module, inputs = case_of(case)
    refused = Counter[str]()
    with mc.scoped():

        @gate("fuzz")
        def fuzz(what: Application) -> bool:
            may = what.subsystem == "capture" or allow(what)
            refused[what.subsystem] += not may
            return may

        compiled = mc.compile(fn, fullgraph=True, options={"verify": True})
        for _ in range(2):
            assert_as_eager(compiled, fn, *inputs, module=module, rtol=2e-4, atol=2e-4)
    return refused


CASES = ["lesson", "conv", "steps"]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("subsystem", [n for names in SUBSYSTEMS.values() for n in names[::-1]])
def test_a_subsystem_can_be_left_out(case: str, subsystem: str) -> None:
    refused = compiled_alike(case, lambda what: what.subsystem != subsystem)
    assert set(+refused) <= {subsystem}
    assert +refused or subsystem in ("capture", "vjp", "joint pass", "memory", "fusion")


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_any_applications_can_be_left_out(case: str, seed: int) -> None:
    draw = random.Random(seed)
    assert len(+compiled_alike(case, lambda what: draw.random() < 0.5)) > 5


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_a_random_program_under_random_gates(seed: int) -> None:
    """Equal applications are refused alike: two sums of one tensor must be rounded alike, as programs ask."""
    draw = random.Random(seed)
    draws: dict[tuple[str, str], bool] = {}

    def draw_once(what: Application) -> bool:
        return draws.setdefault((what.subsystem, what.name), draw.random() < 0.5)

    with mc.scoped():
        gate("fuzz")(lambda what: what.subsystem == "capture" or draw_once(what))
        assert difference(str(generate(seed, size=5)), "inductor") == ""


def test_a_gate_that_allows_all_changes_nothing() -> None:
    assert not +compiled_alike("steps", lambda what: True)
