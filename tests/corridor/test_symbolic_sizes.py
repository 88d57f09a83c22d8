"""One symbolic dimension runs from capture to kernels in both languages: one compilation, many sizes."""

from __future__ import annotations

import copy

import pytest
import torch

import minicompile as mc
from minicompile.lessons.model import GPT, GPTConfig

LANGUAGES = ["cpp", "triton"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_lesson_model_trains_at_several_batch_sizes_from_one_compilation(language):
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_embd=16, n_head=2, block_size=8))
    reference = copy.deepcopy(model)
    compiled = mc.compile(
        model, fullgraph=True, options={"device_codegen": language, "recompile_limit": 1}
    )
    for size in (3, 2, 5):
        tokens = torch.randint(0, 90, (size, 9))
        idx, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        for tensor in (idx, targets):
            mc.mark_dynamic(tensor, 0)
        model.zero_grad(set_to_none=True)
        reference.zero_grad(set_to_none=True)
        losses = [compiled(idx, targets)[1], reference(idx, targets)[1]]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[0], losses[1], atol=1e-5, rtol=1e-5)
        for got, want in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(got.grad, want.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("language", LANGUAGES)
def test_kernels_take_the_size_as_an_argument(language):
    def f(x):
        return torch.softmax(x * 2, -1).sum(0)

    x = torch.randn(6, 10)
    mc.mark_dynamic(x, 0)
    trace = mc.trace(mc.compile(f, options={"device_codegen": language}), x)
    [symbol] = {symbol for plan in trace.plans for symbol in plan.sizes}
    assert any(
        str(symbol) in kernel.lines[0].text or str(symbol) in kernel.text
        for kernel in trace.kernels
    )


def test_size_one_gets_its_own_version():
    def f(x):
        return x + x.shape[0]

    compiled = mc.compile(f, fullgraph=True)
    for size in (4, 7, 1):
        x = torch.randn(size, 3)
        mc.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), f(x))
