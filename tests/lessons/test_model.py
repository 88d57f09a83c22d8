"""The lesson model is a plain, correct GPT, whatever its switches."""

from __future__ import annotations

import torch

from minicompile.lessons.data import batches
from minicompile.lessons.model import GPT, GPTConfig, generate
from minicompile.lessons.train import train

SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 12}


def model_with(**switches: object) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**SMALL, **switches}))


def gradients(model: GPT) -> dict[str, torch.Tensor]:
    inputs, targets = next(batches(3, model.config.block_size))
    _, loss = model(inputs, targets)
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_it_learns():
    result = train(GPT(GPTConfig(n_layer=1, block_size=32)), steps=60)
    assert result.losses[-1] < 0.8 * result.losses[0]
    assert len(result.losses) == len(result.step_seconds) == 60


def test_attention_written_out_equals_the_library():
    written, library = model_with(), model_with(attention="library")
    library.load_state_dict(written.state_dict())
    idx = torch.randint(96, (2, 12))
    torch.testing.assert_close(written(idx), library(idx))
    ours, theirs = gradients(written), gradients(library)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], msg=name)


def test_no_token_sees_a_later_one():
    model = model_with()
    idx = torch.randint(96, (1, 12))
    changed = idx.clone()
    changed[0, 7:] = (idx[0, 7:] + 1) % 96
    torch.testing.assert_close(model(idx)[:, :7], model(changed)[:, :7])
    assert not torch.allclose(model(idx)[:, 7:], model(changed)[:, 7:])


def test_generation_with_and_without_cache_agrees():
    model = model_with()
    prompt = torch.randint(96, (2, 3))
    whole, cached = generate(model, prompt, 9), generate(model, prompt, 9, cache=True)
    assert torch.equal(whole, cached)
    assert whole.shape == (2, 12)
    assert torch.equal(whole[:, :3], prompt)
    assert model.training
