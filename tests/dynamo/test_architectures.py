"""Models of transformers give what eager gives, to the bit: outputs, gradients, buffers, without breaks.

`python -m tests.dynamo.architectures` prints the table, with torch.compile's graphs beside ours.
"""

from __future__ import annotations

import pytest
import torch

from tests.dynamo.architecture_zoo import ALL
from tests.dynamo.architectures import MODES, check, differences, run

pytest.importorskip("transformers", minversion="5.24")

AHEAD_OF_TIME = [
    "Bert",
    "Llama",
    "Bloom",
    "T5",
    "Mixtral",
    "ConvNext",
    "Mamba",
    "RecurrentGemma",
    "Hubert",
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ALL)
def test_architecture(name: str, mode: str) -> None:
    found = check(ALL[name], mode)
    assert found.wrong == [] and found.frames == 0 and found.breaks == 0, found.reasons


@pytest.mark.parametrize("name", AHEAD_OF_TIME)
def test_architecture_ahead_of_time(name: str) -> None:
    found = check(ALL[name], "training", "aot_eager")
    assert found.wrong == [] and found.frames == 0 and found.breaks == 0, found.reasons


def test_there_are_enough_architectures() -> None:
    assert len(ALL) >= 30 and len({entry.family for entry in ALL.values()}) >= 7


@pytest.mark.parametrize("tolerance", [0.0, 1e-5])
def test_a_mistake_would_be_noticed(tolerance: float) -> None:
    """One element of one gradient, by a thousandth."""
    model, inputs = ALL["Bert"].make()
    right, again = (run(model, model, inputs, "training") for _ in range(2))
    assert differences(again, right, tolerance) == []
    gradient = next(model.parameters()).grad
    assert gradient is not None
    with torch.no_grad():
        gradient.view(-1)[gradient.abs().argmax()] *= 1.001
    assert len(differences(again, right, tolerance)) == 1
