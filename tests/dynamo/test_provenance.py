"""Every graph node leads to the user's line and module; every executed instruction is recorded."""

from __future__ import annotations

import torch
from torch import nn

from minicompile.dynamo.result import Capture
from minicompile.ops.graph import origins_of
from tests.dynamo.helpers import compiled, explained


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4)])

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            a = layer(a)
        return self.finish(a)

    def finish(self, a: torch.Tensor) -> torch.Tensor:
        return torch.relu(a)


def capture() -> Capture:
    run = compiled(Block())
    run(torch.randn(2, 4))
    return explained(run).captures[0]


def test_every_node_has_an_origin_with_the_users_stack_and_the_module() -> None:
    found = capture()
    for node in found.graph.nodes:
        if node.op == "output":
            continue
        (origin,) = origins_of(node)
        assert origin.node == node.name and origin.line is not None
        assert all(line.file == __file__ for line in origin.stack)
    by_name = {
        node.name: next(iter(origins_of(node)))
        for node in found.graph.nodes
        if node.op == "call_function"
    }
    assert by_name["linear"].module == "layers.0" and by_name["linear"].line.text == "a = layer(a)"
    assert by_name["layer_norm"].module == "layers.1"
    assert [line.function for line in by_name["relu"].stack] == ["Block.forward", "Block.finish"]
