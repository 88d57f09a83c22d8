"""The trace that most views are tested on, of `model.block`, and parts to make small graphs of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

import minicompile as mc
from minicompile.ops.graph import Graph
from minicompile.ops.origin import NO_ORIGINS, Origins, SourceLine
from minicompile.pipeline_result import Trace
from tests.show.model import block

FILE = str(Path(__file__).with_name("model.py"))
CALL = SourceLine(FILE, 11, "block")


def trace(training: bool = True) -> Trace:
    """Return a new trace, which a test may change; without training it is short."""
    mc.reset()
    return mc.trace(block, torch.ones(512, 64), torch.ones(64, 128, requires_grad=training))


class GraphMaker:
    """Builds an fx graph whose nodes carry values and origins."""

    def __init__(self) -> None:
        self.graph, self.named = fx.Graph(), {}

    def input(self, name: str, *size: int) -> fx.Node:
        return self._keep(self.graph.placeholder(name), name, size, NO_ORIGINS)

    def call(
        self,
        name: str,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        size: Sequence[int],
        origins: Origins,
    ) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=name)
        return self._keep(node, name, size, origins)

    def _keep(self, node: fx.Node, name: str, size: Sequence[int], origins: Origins) -> fx.Node:
        node.meta.update(val=torch.empty(tuple(size), device="meta"), origins=origins)
        self.named[name] = node
        return node

    def finish(self, name: str, made_by: str, *outputs: str) -> Graph:
        self.graph.output([self.named[o] for o in outputs])
        return Graph(fx.GraphModule(torch.nn.Module(), self.graph), name, made_by)
