"""Symbolic sizes: lowered once, right for every size of the batch."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from minicompile.lowering.ir import LoopGraph
from minicompile.lowering.lower import lower
from minicompile.ops.graph import Graph
from minicompile.options import Options
from minicompile.shapes.env import ShapeEnv
from minicompile.shapes.expr import size_symbol
from tests.aot.helpers import compile_aot
from tests.comparing import assert_same
from tests.lowering.conftest import flat, record_all, run

aten = torch.ops.aten


def symbolic(fn, *args: torch.Tensor) -> LoopGraph:
    """Lower with a symbolic first dimension."""
    dynamic = {(position, 0): f"n{x.shape[0]}" for position, x in enumerate(args)}
    _, found = compile_aot(fn, list(args), training=False, dynamic=dynamic)
    return lower(found.forward, Options(verify=True))


PROGRAMS = {
    "pointwise": lambda x, i: (x + 1).relu() * x.shape[0],
    "sum over it": lambda x, i: x.sum(0),
    "sum beside it": lambda x, i: x.sum(-1, keepdim=True) + x,
    "mean over it": lambda x, i: [x.mean(0), x.mean()],
    "variance": lambda x, i: torch.var_mean(x, [0, 1]),
    "split heads": lambda x, i: x.view(x.shape[0], 6, 2, 4).transpose(1, 2) * 2,
    "merge heads": lambda x, i: x.transpose(1, 2).reshape(x.shape[0], 48) + 1,
    "merge batch": lambda x, i: x.view(-1, 8).sin(),
    "split batch": lambda x, i: x.view(-1, 8).exp().view(x.shape[0], 6, 8).sum(1),
    "flat": lambda x, i: x.reshape(-1) * 2,
    "matrix product": lambda x, i: torch.mm(x.view(-1, 8), x[0].t()).view(x.shape[0], 6, 6),
    "slice": lambda x, i: [x[1:] + 1, x[:, 2:4] * 1, x[-1] * 1, x[: x.shape[0] - 1].cos()],
    "expand": lambda x, i: x.sum(0).expand(x.shape[0], 6, 8) - x,
    "cat": lambda x, i: torch.cat([x, x.sin(), x[:1]]),
    "index": lambda x, i: [x[i], x[:, i % 6]],
    "embedding": lambda x, i: torch.nn.functional.embedding(i, x[:, 0]),
    "arange": lambda x, i: torch.arange(x.shape[0]) * 3 + i,
    "rounded sequences": lambda x, i: [torch.linspace(0, x.shape[0], 5), torch.logspace(0, 1, 4)],
    "full": lambda x, i: [torch.full((x.shape[0], 2), 1.5), torch.zeros(x.shape[0] * 2)],
    "causal mask": lambda x, i: torch.ones(x.shape[0], x.shape[0]).tril(),
    "scatter": lambda x, i: aten.index_put(x, [i], x, True),
    "flip": lambda x, i: x.flip(0) + x,
    "nothing": lambda x, i: x[:, :0].roll(3),
    "slice_scatter": lambda x, i: aten.slice_scatter(x, x[1:] * 2, 0, 1),
    "size as output": lambda x, i: [x.shape[0] * 3 + 1, x.numel()],
    "argmax": lambda x, i: [x.argmax(0), *x.max(0)],
    "scan along it": lambda x, i: [x.cumsum(0), i.cumprod(0)],
    "scan beside it": lambda x, i: [x.softmax(-1).cumsum(-1), x.view(-1, 8).cumprod(1)],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_lowering_serves_every_batch_size(name: str) -> None:
    fn = PROGRAMS[name]

    def inputs(n: int) -> list[torch.Tensor]:
        return [torch.randn(n, 6, 8), torch.arange(n).flip(0)]

    graph = symbolic(fn, *inputs(5))
    graph.verify()
    record_all(graph)
    for n in (5, 3, 11):
        args = inputs(n)
        for got, want in zip(run(graph, *args), flat(fn(*args)), strict=True):
            assert_same(got, want, rtol=1e-5, atol=1e-5)


def test_a_size_may_be_an_input_of_its_own() -> None:
    s0, env = size_symbol("s0"), ShapeEnv()
    graph = fx.Graph()
    n, x = graph.placeholder("n"), graph.placeholder("x")
    doubled = graph.call_function(operator.mul, (n, 2))
    half = graph.call_function(operator.floordiv, (doubled, 2))
    shifted = graph.call_function(operator.add, (half, -1))
    scaled = graph.call_function(aten.mul.Tensor, (x, shifted))
    graph.output((scaled, doubled))
    size = env.create_symbol(4, None)
    n.meta["val"], doubled.meta["val"] = size, 2 * size
    half.meta["val"], shifted.meta["val"] = size, size - 1
    for node in (x, scaled):
        node.meta["val"] = torch.randn(3)
    found = lower(Graph(fx.GraphModule({}, graph), "f", "hand"), Options(verify=True))
    assert found.inputs[0] == s0
    values = torch.randn(3)
    for n_now in (4, 9):
        scaled_now, doubled_now = run(found, n_now, values)
        assert doubled_now == 2 * n_now
        assert_same(scaled_now, values * (n_now - 1))
