"""Whole models: the lessons' GPT's forward and joint backward, lowered, equals eager."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

from minicompile.debug.reference import run_reference
from minicompile.lessons.model import GPT, GPTConfig
from minicompile.lowering.ir import LoopGraph
from minicompile.lowering.lower import lower
from minicompile.ops.graph import Graph
from minicompile.options import Options
from tests.comparing import assert_same
from tests.lowering.conftest import record_all, traced


def gpt(layers: int = 2) -> GPT:
    return GPT(GPTConfig(vocab_size=11, block_size=8, n_layer=layers, n_embd=16))


def sequences() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(11, (2, 8))
    return tokens, tokens.flip(1)


def joint(model: nn.Module):
    """Loss and gradients as one function of data and parameters."""
    names = [name for name, _ in model.named_parameters()]

    def fn(x: torch.Tensor, targets: torch.Tensor, *parameters: torch.Tensor):
        own = [p.detach().requires_grad_() for p in parameters]
        found = functional_call(model, dict(zip(names, own, strict=True)), (x, targets))
        loss = found[-1] if isinstance(found, tuple) else found
        return [loss.detach(), *torch.autograd.grad(loss, own)]

    return fn


def joint_graph(model: nn.Module, *data: torch.Tensor) -> tuple[Graph, list[torch.Tensor]]:
    args = [*data, *(p.detach() for p in model.parameters())]
    return traced(joint(model), args), args


def equals_eager(graph: LoopGraph, model: nn.Module, args: list[torch.Tensor]) -> None:
    graph.verify()
    record_all(graph)
    found = run_reference(graph, args)
    for got, want in zip(found, joint(model)(*args), strict=True):
        assert_same(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inline", ["auto", "never"])
def test_a_gpts_loss_and_every_gradient_equal_eager(inline) -> None:
    model = gpt()
    graph, args = joint_graph(model, *sequences())
    found = lower(graph, Options(inline=inline))
    equals_eager(found, model, args)
    libraries = {str(kernel.op) for kernel in found.externs}
    assert libraries == {"aten.mm.default", "aten.bmm.default"}


def test_every_buffer_of_a_model_has_origins() -> None:
    graph, _ = joint_graph(gpt(1), *sequences())
    found = lower(graph, Options())
    assert all(operation.origins for operation in found.operations)
    for body in record_all(found):
        assert all(value.origins for value in body.values)
