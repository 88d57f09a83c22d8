"""The named patterns and their comparison with torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import minicompile
from minicompile.bench.patterns import PATTERNS

pytestmark = pytest.mark.long

NAMES = sorted(PATTERNS)


def both(name: str, **how: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Eager's results and those of the compiled pattern, at small sizes."""
    pattern = PATTERNS[name]
    compiled = minicompile.compile(pattern.fn, fullgraph=True, **how)
    fns = (pattern.fn, compiled)
    eager, ours = (pattern.run(f, pattern.make_inputs("cpu", torch.float32, "small")) for f in fns)
    return eager, ours


@pytest.mark.parametrize("name", NAMES)
def test_a_pattern_gives_eager_s_numbers(name: str) -> None:
    torch.testing.assert_close(*both(name), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_pattern_gives_eager_s_numbers_in_triton_at_any_size(name: str) -> None:
    options = {"device_codegen": "triton"}
    eager, ours = both(name, options=options, dynamic=True)
    torch.testing.assert_close(ours, eager, rtol=2e-5, atol=2e-5)
