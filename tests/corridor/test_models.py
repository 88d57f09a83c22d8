"""Real models through the whole corridor: eager's losses and gradients, and one graph for many sizes."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import minicompile as mc
from minicompile.api import dispatcher_of
from minicompile.lessons.model import GPT, GPTConfig
from tests.comparing import assert_as_eager
from tests.corridor.zoo import MODELS, ZOO, Size, inputs_of, outputs

pytest.importorskip("transformers")


def losses(call: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Everything a model gives, of which the loss alone is differentiated."""
    result = call(**inputs)
    named = dict(zip(("logits", "loss"), result)) if isinstance(result, tuple) else outputs(result)
    return {name: x if name == "loss" else x.detach() for name, x in named.items()}


UNEQUAL = [(2, 3), (8, 64), (7, 7), (3, 2)]
ONES = [(2, 3), (1, 7), (7, 1), (1, 1), (1, 9)]
Row = tuple[str, bool, list[Size], str, int]
TABLE: dict[str, Row] = {
    **{name: (name, True, [(2, 8)[: 1 + (name != "vit")]], "cpp", 1) for name in ZOO},
    "gpt2, Triton": ("gpt2", True, [(2, 8)], "triton", 1),
    "gpt2, first sizes unequal": ("gpt2", True, UNEQUAL, "cpp", 1),
    "gpt2, first sizes equal": ("gpt2", False, [(3, 3), (7, 7), (2, 8), (8, 8)], "cpp", 2),
    "llama, any size": ("llama", True, [(2, 3), (64, 7), (8, 8)], "cpp", 1),
    "vit, any size": ("vit", True, [(2,), (3,), (64,), (1,), (8,)], "cpp", 2),
    "conv, any size": ("conv", True, [(2, 8, 10), (3, 12, 8), (4, 16, 16)], "cpp", 1),
    "lesson, any size": ("lesson", True, [(3, 8), (2, 8), (5, 8)], "triton", 1),
    "ones apart": ("gpt2", False, ONES, "cpp", 4),
    "gpt2, Triton, any size": ("gpt2", False, [(2, 3), (3, 2), (3, 3)], "triton", 1),
}
"""Model, whether it trains, the sizes of its calls, language, and how often it is to be compiled."""


def check(row: Row, device: str = "cpu") -> None:
    name, training, sizes, language, captures = row
    torch.manual_seed(0)
    model = MODELS[name]().train(training).to(device)
    compiled = mc.compile(
        model,
        options={"device_codegen": language if device == "cpu" else "auto", "recompile_limit": 16},
    )
    for size in sizes:
        inputs, symbolic = inputs_of(name, size)
        inputs = {key: value.to(device) for key, value in inputs.items()}
        if len(sizes) > 1:
            for tensor in inputs.values():
                mc.mark_dynamic(tensor, symbolic)
        with torch.set_grad_enabled(training):
            calls = [partial(losses, run, inputs) for run in (compiled, model)]
            assert_as_eager(*calls, module=model, rtol=1e-4, atol=1e-4)
    story = dispatcher_of(compiled).explanation()
    assert (len(story.captures), len(story.breaks), story.eager_calls) == (captures, 0, 0)


@pytest.mark.long
@pytest.mark.parametrize("name", TABLE)
def test_a_model_is_as_eager_and_compiled_as_often_as_its_sizes_need(name: str) -> None:
    check(TABLE[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ZOO)
def test_models_train_on_a_gpu_as_in_eager(name: str) -> None:
    check(TABLE[name], "cuda")


@pytest.mark.gpu
def test_the_lesson_model_learns_on_a_gpu_as_in_eager() -> None:
    model = GPT(GPTConfig()).to("cuda")
    reference = copy.deepcopy(model)
    tokens = torch.randint(0, GPTConfig().vocab_size, (20, 8, 65), device="cuda")
    losses = list[list[float]]()
    for module, call in ((model, mc.compile(model, fullgraph=True)), (reference, reference)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        losses.append([])
        for batch in tokens:
            _, loss = call(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    torch.testing.assert_close(losses[0][:5], losses[1][:5], rtol=0, atol=1e-5)
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-2)
