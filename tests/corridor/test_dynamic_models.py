"""Models with symbolic batch and sequence: right at every size, and compiled as often as the sizes need."""

from __future__ import annotations

import pytest

from tests.corridor.dynamic_models import TOLERANCE, expected_captures, steps

pytest.importorskip("transformers")

TABLE = {
    "gpt2, first sizes unequal": ("gpt2", True, [(2, 3), (8, 64), (7, 7), (3, 2)], "cpp", 1),
    "gpt2, first sizes equal": ("gpt2", False, [(3, 3), (7, 7), (2, 8), (8, 8)], "cpp", 2),
    "llama": ("llama", True, [(2, 3), (64, 7), (8, 8)], "cpp", 1),
    "bert": ("bert", True, [(2, 3), (7, 64), (3, 3)], "cpp", 1),
    "vit": ("vit", True, [(2,), (3,), (64,), (1,), (8,)], "cpp", 2),
    "ones apart": ("gpt2", False, [(2, 3), (1, 7), (7, 1), (1, 1), (1, 64), (8, 1)], "cpp", 4),
    "gpt2, Triton": ("gpt2", False, [(2, 3), (3, 2), (3, 3)], "triton", 1),
    "vit, Triton": ("vit", True, [(2,), (3,)], "triton", 1),
}


@pytest.mark.long
@pytest.mark.parametrize("name", TABLE)
def test_a_model_is_compiled_as_often_as_its_sizes_need(name):
    model, training, sizes, language, captures = TABLE[name]
    assert expected_captures(sizes) == captures
    for step in steps(model, training, sizes, language):
        assert step.worst <= TOLERANCE, step
        assert (step.eager_calls, step.breaks) == (0, 0), step
    assert step.captures == captures
