"""Models of transformers give what eager gives, to the bit: outputs, gradients, buffers, without breaks.

Each model runs twice in eval mode without gradients, and twice in training mode with a backward pass.
With the backend "eager" the same operators run, so every bit is compared. Other backends may round
differently: there the models run in float64, so that a difference is a mistake and not rounding (the gradient
of a key's bias in attention, for one, is zero but for rounding).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import minicompile as mc
from tests.comparing import equal
from tests.dynamo.architecture_zoo import ALL, Inputs
from tests.dynamo.helpers import explained

pytest.importorskip("transformers", minversion="5.24")

MODES = ("inference", "training")
TOLERANCE = 1e-5
"""How far a value may be from eager's where other operators run, relative to its tensor's largest."""
NOISE = 1e-12
"""What counts as zero there, in float64."""
AHEAD_OF_TIME = (
    *("Bert", "Llama", "Bloom", "T5", "Mixtral", "ConvNext", "Mamba", "RecurrentGemma", "Hubert"),
)
FUNCTION_GRAPHS = ("Bloom", "Mamba", "RecurrentGemma")
"""Architectures that are one graph with the plug-in function_graphs: without it they break."""


def leaves(value: Any) -> list[Any]:
    """Return tensors, constants, and types of containers that a model's output consists of."""
    kind = type(value)
    if isinstance(value, torch.Tensor | int | float | str | type | torch.dtype) or value is None:
        return [value]
    if isinstance(value, dict):
        return [kind, *value, *leaves(list(value.values()))]
    if isinstance(value, list | tuple):
        return [kind, *(leaf for item in value for leaf in leaves(item))]
    return [kind, *leaves(vars(value))] if hasattr(value, "__dict__") else [kind]


def run(call: Callable[..., Any], model: torch.nn.Module, inputs: Inputs, mode: str) -> list[Any]:
    """Return the output of one call, and in training every gradient and buffer.

    `call` is `model`, or compiled from it.
    """
    model.train(mode == "training")
    model.zero_grad()
    torch.manual_seed(1)
    if mode == "inference":
        with torch.no_grad():
            return leaves(call(**inputs))
    out = leaves(call(**inputs))
    parts = [part for part in out if isinstance(part, torch.Tensor) and part.requires_grad]
    assert parts, "nothing to differentiate"
    sum(part.pow(2).mean() for part in parts).backward()  # type: ignore[union-attr]
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return [*out, *leaves(gradients), *leaves(dict(model.named_buffers()))]


def alike(found: Any, expected: Any, tolerance: float) -> bool:
    """Compare two leaves; tolerance 0 asks for equal bits."""
    if not tolerance or not isinstance(found, torch.Tensor) or not found.is_floating_point():
        return equal(found, expected)
    facts = [(t.dtype, t.shape, t.requires_grad) for t in (found, expected)]
    found, expected = found.detach(), expected.detach()
    within = tolerance * float(expected.abs().max()) if expected.numel() else 0.0
    return facts[0] == facts[1] and torch.allclose(found, expected, 0, within + NOISE, True)


def differences(found: list[Any], expected: list[Any], tolerance: float) -> int:
    assert len(found) == len(expected)
    return sum(not alike(*pair, tolerance) for pair in zip(found, expected, strict=True))


def check(name: str, mode: str, backend: str = "eager") -> None:
    """Run a model compiled by minicompile and a copy of it in eager, and compare."""
    entry = ALL[name]
    tolerance = 0.0 if backend == "eager" and not entry.asks else TOLERANCE
    model, inputs = entry.make()
    if tolerance and entry.in_float64:
        model = model.double()
        inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    plain = copy.deepcopy(model)
    compiled = mc.compile(model, backend=backend)
    for _ in range(2):
        ours, theirs = run(compiled, model, inputs, mode), run(plain, plain, inputs, mode)
        assert differences(ours, theirs, tolerance) == 0
    report = explained(compiled)
    whole = name not in FUNCTION_GRAPHS or "function_graphs" in mc.Options().plugins
    assert report.eager_calls == 0 and not (whole and report.breaks)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ALL)
def test_architecture_gives_what_eager_gives_without_breaks(name: str, mode: str) -> None:
    check(name, mode)


@pytest.mark.parametrize("name", AHEAD_OF_TIME)
def test_architecture_ahead_of_time(name: str) -> None:
    check(name, "training", "aot_eager")


@pytest.mark.parametrize("tolerance", [0.0, 1e-5])
def test_a_mistake_would_be_noticed(tolerance: float) -> None:
    """One element of one gradient, by a thousandth."""
    model, inputs = ALL["Bert"].make()
    right, again = (run(model, model, inputs, "training") for _ in range(2))
    assert differences(again, right, tolerance) == 0
    gradient = next(model.parameters()).grad
    assert gradient is not None
    with torch.no_grad():
        gradient.view(-1)[gradient.abs().argmax()] *= 1.001
    assert differences(again, right, tolerance) == 1
