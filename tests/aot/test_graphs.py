"""What the room's graphs promise: origins, phases, partition, passes, patterns."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minicompile.aot.maxflow import FlowNetwork
from minicompile.aot.partition import is_heavy
from minicompile.ops.nodes import is_random, is_view
from tests.aot.helpers import compile_aot, module_function
from tests.aot.peak_memory import Layer

aten = torch.ops.aten


def leaf(*size):
    return torch.randn(*size, requires_grad=True)


# Origins and phases


# Partition


def test_random_and_heavy_operators_are_not_recomputed():
    def fn(x, w):
        h = F.dropout(F.gelu(x @ w), 0.5, True)
        return F.dropout((h @ w).softmax(-1), 0.5, True).sum()

    _, result = compile_aot(fn, [torch.randn(8, 8), leaf(8, 8)])
    by_name = {n.name: n for n in result.joint.nodes}
    for node in (by_name[value.name] for value in result.partition.recomputed):
        assert not is_random(node) and not is_heavy(node)
    assert not [n for n in result.backward.nodes if is_random(n)]
    assert any("random" in value.reason for value in result.partition.saved)


def test_views_are_not_saved():
    fn, state = module_function(Layer(16, 2))
    result = compile_aot(fn, [*state, torch.randn(2, 8, 16)])[1]
    by_name = {n.name: n for n in result.joint.nodes}
    assert not [v.name for v in result.partition.saved if is_view(by_name[v.name])]


def test_minimum_cut_equals_networkx():
    networkx = pytest.importorskip("networkx")
    import random

    for seed in range(30):
        rng = random.Random(seed)
        ours, theirs = FlowNetwork(), networkx.DiGraph()
        for _ in range(40):
            a, b, c = rng.randrange(10), rng.randrange(10), rng.randrange(1, 20)
            if a != b and not theirs.has_edge(a, b):
                ours.add_edge(a, b, c)
                theirs.add_edge(a, b, capacity=c)
        theirs.add_nodes_from([0, 9])
        flow, side = ours.minimum_cut(0, 9)
        assert flow == networkx.maximum_flow_value(theirs, 0, 9)
        assert flow == sum(
            d["capacity"] for a, b, d in theirs.edges(data=True) if a in side and b not in side
        )


# Passes


def test_equal_numbers_of_different_type_are_told_apart():
    call, _ = compile_aot(lambda i: (i * 2, i * 2.0, i * True), [torch.arange(3)])
    assert [o.dtype for o in call([torch.arange(3)])] == [torch.int64, torch.float32, torch.int64]
