"""Special functions by formulas: as near to the exact value as eager's, over all exponents."""

from __future__ import annotations

import math

import pytest
import torch

from minicompile.aot.decompositions import rule_for
from minicompile.plugins.special_functions.formulas import RULES

aten = torch.ops.aten
EPS = 2.0**-23
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1, -1, -2, 0.5, 2, -0.5, 8, 100, -100)
ALONE = [name for name in RULES if name != "logit_backward"]
"""With one argument; the other is done by tests/aot/test_decomposition_samples.py."""


def every_exponent() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    high = torch.arange(512).repeat_interleave(40) << 23
    bits = high | torch.randint(0, 1 << 23, high.shape, generator=generator)
    x = (bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32)
    x = x[x.isfinite() & (x.abs() > 2.0**-126)]
    return torch.cat([torch.tensor(SPECIAL), x, torch.linspace(-30, 30, 6001)])


@pytest.mark.parametrize("name", ALONE)
def test_error_is_a_few_ulp_beyond_eagers(name: str) -> None:
    op, x = getattr(aten, name).default, every_exponent()
    rule = rule_for(op, "core")
    assert rule is not None
    found, eager, exact = rule(x), op(x), op(x.double())
    assert torch.equal(found.isnan(), eager.isnan())
    infinite = found.isinf() | eager.isinf()
    assert torch.equal(found[infinite], eager[infinite])
    finite = found.isfinite() & exact.isfinite()
    scale = exact.abs().clamp(min=2.0**-126)
    errors = [((y.double() - exact).abs() / scale / EPS)[finite] for y in (found, eager)]
    excess = errors[0] - 3 * errors[1]
    assert excess.max() < 8, (x[finite][excess.argmax()], found[finite][excess.argmax()])
