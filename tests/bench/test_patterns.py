"""The named patterns and their comparison with torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import minicompile
from minicompile.bench.patterns import PATTERNS

NAMES = sorted(PATTERNS)


def both(name: str, **how: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Eager's results and those of the compiled pattern, at small sizes."""
    pattern = PATTERNS[name]
    compiled = minicompile.compile(pattern.fn, fullgraph=True, **how)
    fns = (pattern.fn, compiled)
    eager, ours = (pattern.run(f, pattern.make_inputs("cpu", torch.float32, "small")) for f in fns)
    return eager, ours


def test_every_pattern_gives_results() -> None:
    assert all(pattern.run(pattern.fn, pattern.make_inputs("cpu", torch.float32, "small"))
               for pattern in PATTERNS.values())  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_pattern_gives_eager_s_numbers(name: str) -> None:
    torch.testing.assert_close(*both(name), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_pattern_gives_eager_s_numbers_in_triton_at_any_size(name: str) -> None:
    options = {"device_codegen": "triton"}
    eager, ours = both(name, options=options, dynamic=True)
    torch.testing.assert_close(ours, eager, rtol=2e-5, atol=2e-5)


BYTES = 4 * 2 * 16 * 24
"""A tensor of "B T D" for tests; a row of it is D numbers."""
ROW = 4 * 24


@pytest.mark.parametrize(
    ("name", "training", "moved"),
    [
        ("softmax_4k", False, 2 * BYTES),
        ("layer_norm", False, 2 * BYTES + 2 * ROW),
        # forward: x, weight, bias, out; backward: x, weight, bias, out's gradient, and those of all three
        ("layer_norm", True, 2 * BYTES + 2 * ROW + 3 * BYTES + 4 * ROW),
        # the sum is an output, and the backward needs no more than that; both summands' gradients are one
        ("rms_norm", True, 4 * BYTES + ROW + 4 * BYTES + 2 * ROW),
        # forward: logits, labels of 8 bytes, loss; backward: as much as the logits, loss's gradient, logits'
        ("bce_loss", True, BYTES + 2 * BYTES + 4 + BYTES + 4 + BYTES),
        ("square_sum", False, 4 * 2 * 16 * 40 + 4),
        # of the table no more than a row for each token; places, weight, bias
        ("embedding_sum", False, 8 * 2 * 16 + 2 * BYTES + BYTES // 2 + 2 * ROW),
        # parameters and both averages change, gradients don't
        ("adamw_step", False, 7 * 4 * (40 * 40 + 40)),
    ],
)
def test_bytes_that_have_to_be_moved(name: str, training: bool, moved: int) -> None:
    pattern = PATTERNS[name]
    inputs = pattern.make_inputs("cpu", torch.float32, "small")
    if not training:
        inputs = [tensor.detach() for tensor in inputs]
    assert pattern.bytes_moved(inputs, "small") == moved
