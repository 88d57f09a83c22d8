"""Real models through Triton kernels: interpreted on the CPU, compiled where there is a GPU."""

from __future__ import annotations

import copy

import pytest
import torch

import minicompile as mc
from minicompile.lessons.model import GPT, GPTConfig
from tests.corridor.zoo import ZOO

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
TRITON = {"device_codegen": "triton"}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_trains_alike(device: str, name: str) -> None:
    """One training step: the same loss and gradients as eager, from one graph."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, inputs = ZOO[name]()
    model.train().to(device)
    inputs = {key: value.to(device) for key, value in inputs.items()}
    reference = copy.deepcopy(model)
    compiled = mc.compile(model, fullgraph=True, options=TRITON)
    losses = [call(**inputs).loss for call in (compiled, reference)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-4)
    found, expected = gradients(model), gradients(reference)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-4, msg=key)


@pytest.mark.long
def test_gpt2_trains_through_interpreted_kernels():
    assert_trains_alike("cpu", "gpt2")


@pytest.mark.parametrize("name", [pytest.param(name, marks=gpu) for name in ZOO])
def test_models_train_on_a_gpu_as_in_eager(name):
    assert_trains_alike("cuda", name)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_the_lesson_model_learns_on_a_gpu_as_in_eager(device):
    torch.manual_seed(0)
    model = GPT(GPTConfig()).to(device)
    reference = copy.deepcopy(model)
    tokens = torch.randint(0, GPTConfig().vocab_size, (20, 8, 65), device=device)
    losses = []
    for one, call in ((model, mc.compile(model, fullgraph=True)), (reference, reference)):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-3)
        losses.append([])
        for batch in tokens:
            _, loss = call(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    torch.testing.assert_close(losses[0][:5], losses[1][:5], rtol=0, atol=1e-5)
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-2)


def test_a_graph_of_unknown_batch_size_runs_through_interpreted_kernels():
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.nn.functional.layer_norm(x, (24,)) * w, 1).sum(0) + x.shape[0]

    compiled = mc.compile(fn, fullgraph=True, dynamic=True, options=TRITON)
    w = torch.randn(24)
    for n in (5, 6, 17):
        x = torch.randn(n, 24)
        torch.testing.assert_close(compiled(x, w), fn(x, w))


def test_an_index_out_of_range_names_the_users_line():
    def lookup(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(index, table) * 2  # this line

    compiled = mc.compile(lookup, fullgraph=True, options=TRITON)
    with pytest.raises(IndexError, match="# this line"):
        compiled(torch.randn(4, 3), torch.tensor([1, 9]))


def test_the_gradient_of_one_embedded_token() -> None:
    """One row with a mask for all its columns, added atomically."""

    def loss(table: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = torch.nn.functional.embedding(ids, table)
        return (torch.nn.functional.layer_norm(rows, (8,)) * weight).sum()

    table, weight = torch.randn(6, 8, requires_grad=True), torch.randn(8)
    compiled = mc.compile(loss, options={"device_codegen": "triton"})
    for ids in (torch.tensor([[3]]), torch.tensor([[3, 1, 3]])):
        [want] = torch.autograd.grad(loss(table, ids, weight), table)
        [got] = torch.autograd.grad(compiled(table, ids, weight), table)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
