"""Real models, unmodified, are one graph each and give what eager gives: values, gradients, inference."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.dynamo.helpers import compiled, equal, explained, graphs

os.environ.setdefault("HF_HUB_OFFLINE", "1")
TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
}


def make(name: str) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    """A model with random weights, inputs for training (with labels) and for inference."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ids = torch.randint(1, 64, (2, 8))
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if name == "GPT2LMHeadModel":
        sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32}
        config = transformers.GPT2Config(
            **sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **TOKENS
        )
    elif name == "LlamaForCausalLM":
        config = transformers.LlamaConfig(**TINY, num_key_value_heads=1, vocab_size=64, **TOKENS)
    elif name in ("BertModel", "BertForMaskedLM"):
        config = transformers.BertConfig(**TINY, vocab_size=64, **no_dropout, **TOKENS)
    elif name == "T5ForConditionalGeneration":
        sizes = {
            "num_layers": 2,
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 64,
            "num_heads": 2,
            "vocab_size": 64,
        }
        config = transformers.T5Config(**sizes, dropout_rate=0, decoder_start_token_id=0, **TOKENS)
    else:
        config = transformers.ViTConfig(
            **TINY, image_size=16, patch_size=8, num_labels=3, **no_dropout
        )
        images = {"pixel_values": torch.randn(2, 3, 16, 16)}
        return (
            transformers.ViTForImageClassification(config),
            {**images, "labels": torch.tensor([0, 2])},
            images,
        )
    model = getattr(transformers, name)(config)
    if name == "BertModel":
        return model, text, text
    inference = {**text, "decoder_input_ids": ids} if name.startswith("T5") else text
    return model, {**text, "labels": ids}, inference


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors of a model's output, caches included."""
    if isinstance(value, torch.Tensor):
        return [value]
    if hasattr(value, "to_tuple"):
        value = value.to_tuple()
    if isinstance(value, list | tuple):
        return [found for item in value for found in tensors(item)]
    return (
        tensors(list(vars(value).values()))
        if hasattr(value, "__dict__") and not isinstance(value, type)
        else []
    )


MODELS = [
    *("GPT2LMHeadModel", "LlamaForCausalLM", "BertModel", "BertForMaskedLM"),
    *("T5ForConditionalGeneration", "ViTForImageClassification"),
]


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_transformers_model_is_one_graph(name: str) -> None:
    model, training, inference = make(name)
    run = compiled(model)

    def gradients(call: Any) -> tuple[Any, list[Any]]:
        model.zero_grad()
        out = call(**training)
        loss = out.loss if "labels" in training else out.last_hidden_state.pow(2).mean()
        loss.backward()
        return out, [parameter.grad for parameter in model.parameters()]

    model.train()
    want, want_gradients = gradients(model)
    for _ in range(2):
        got, got_gradients = gradients(run)
        assert type(got) is type(want) and list(got) == list(want)
        assert equal(tensors(got), tensors(want)) and equal(got_gradients, want_gradients)
    assert graphs(run) == 1
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            assert equal(tensors(run(**inference)), tensors(model(**inference)))
    assert graphs(run) == 2 and explained(run).eager_calls == 0


class UNet(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.SiLU())
            for a, b in [(3, width), (width, 2 * width)]
        )
        self.up = nn.ModuleDict({"last": nn.ConvTranspose2d(2 * width, width, 2, 2)})
        self.out = nn.Conv2d(2 * width, 1, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            image = block(image)
            skips.append(image)
            image = functional.max_pool2d(image, 2)
        for _, layer in self.up.items():
            image = layer(image)
        return self.out(
            torch.cat([image, functional.adaptive_avg_pool2d(skips[0], image.shape[-2:])], 1)
        )


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.lstm = nn.GRUCell(8, 8), nn.LSTMCell(8, 8)

    def forward(self, steps: torch.Tensor) -> torch.Tensor:
        hidden, state, outs = steps.new_zeros(steps.shape[0], 8), None, []
        for t in range(steps.shape[1]):
            hidden = self.gru(steps[:, t], hidden)
            state = self.lstm(hidden, state)
            outs.append(state[0])
        return torch.stack(outs, 1)


STEPS = torch.randn(2, 5, 8)
SMALL: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "unet": (UNet, (torch.randn(2, 3, 16, 16),)),
    "cells": (Cells, (STEPS,)),
    "lstm": (lambda: nn.LSTM(8, 8, 2, batch_first=True), (STEPS,)),
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), (STEPS, STEPS, STEPS)),
    "transformer": (lambda: nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True), (STEPS, STEPS)),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), (STEPS,)),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("training", [True, False])
def test_small_module_is_one_graph(name: str, training: bool) -> None:
    maker, args = SMALL[name]
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(maker().train(training))
    ours, theirs = models
    run = compiled(ours)
    for _ in range(2):
        assert equal(run(*args), theirs(*args))
    assert equal(dict(ours.named_buffers()), dict(theirs.named_buffers()))
    assert graphs(run) == 1


@pytest.mark.parametrize("grad", [True, False])
def test_attention_of_torch_in_eval_mode(grad: bool) -> None:
    """It asks for active dispatch modes before it takes its fast path."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True).eval()
    a = torch.randn(2, 3, 8)
    with torch.set_grad_enabled(grad):
        run = compiled(layer)
        assert torch.allclose(run(a), layer(a), atol=1e-6)
        attention = compiled(nn.MultiheadAttention(8, 2, batch_first=True).eval())
        assert attention(a, a, a)[0].shape == a.shape
    assert explained(run).graph_count == 1


def test_the_number_of_active_modes_is_known() -> None:
    count_dispatch, count_function = (
        torch._C._len_torch_dispatch_stack,
        torch._C._len_torch_function_stack,
    )
    run = compiled(lambda a: a + count_dispatch() + count_function())
    assert torch.equal(run(torch.ones(2)), torch.ones(2))
