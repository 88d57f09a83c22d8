"""Special functions by expansions: as near to the exact value as eager's, over all exponents."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from minicompile.aot.decompositions import rule_for
from minicompile.plugins.special_functions.expansions import EXPANSIONS, RULES, coefficients

aten = torch.ops.aten
EPS = 2.0**-23
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1, -1, -2, 0.5, 2, -0.5, 8, 100, -100)
TWICE = {"logit_backward"}
"""With a second argument: done by tests/aot/test_decomposition_samples.py."""
CALLS = [(name, ()) for name in RULES if name not in TWICE | {"polygamma"}]
CALLS += [("polygamma", (n,)) for n in range(4)]


def every_exponent() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    high = torch.arange(512).repeat_interleave(40) << 23
    bits = high | torch.randint(0, 1 << 23, high.shape, generator=generator)
    x = (bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32)
    x = x[x.isfinite() & (x.abs() > 2.0**-126)]
    return torch.cat([torch.tensor(SPECIAL), x, torch.linspace(-30, 30, 6001)])


@pytest.mark.parametrize(("name", "before"), CALLS, ids=str)
def test_error_is_a_few_ulp_beyond_eagers(name: str, before: tuple[Any, ...]) -> None:
    op, x = getattr(aten, name).default, every_exponent()
    if name == "polygamma" and before[0] > 1:
        x = x[x > -1e4]  # between poles that close together the result is rounding alone
    rule = rule_for(op, "core")
    assert rule is not None
    found, eager, exact = rule(*before, x), op(*before, x), op(*before, x.double())
    assert torch.equal(found.isnan(), eager.isnan())
    infinite = found.isinf() | eager.isinf()
    assert torch.equal(found[infinite], eager[infinite])
    finite = found.isfinite() & exact.isfinite()
    scale = exact.abs().clamp(min=2.0**-126)
    errors = [((y.double() - exact).abs() / scale / EPS)[finite] for y in (found, eager)]
    excess = errors[0] - 3 * errors[1]
    assert excess.max() < 8, (x[finite][excess.argmax()], found[finite][excess.argmax()])


@pytest.mark.parametrize("n", range(4))
def test_polygamma_is_within_a_rounding_between_poles_and_near_its_roots(n: int) -> None:
    x = torch.linspace(-30, 30, 100_001)
    x = x[x != x.round()]
    found, exact = RULES["polygamma"](n, x), aten.polygamma.default(n, x.double())
    assert ((found - exact).abs() <= 0.7 * EPS * exact.abs()).all()


@pytest.mark.parametrize("name", EXPANSIONS)
def test_fewer_terms_are_enough_for_fewer_digits(name: str) -> None:
    order = (1,) if name == "polygamma" else ()
    single, double = (len(coefficients(name, order, eps)) for eps in (EPS, 2.0**-52))
    assert 3 < single < double <= 64
