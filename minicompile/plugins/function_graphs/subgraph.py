"""A graph inside the graph: what a function does that is called later, or more than once.

    with subgraph(world) as inner    torch calls inside are recorded in a graph of their own
    inner.argument(value, name)      a placeholder for a value that the graph will be called with
    inner.completed(outputs, name)   the finished graph

Tensors of the graph around it become its inputs when its nodes first use them.
The real compiler: torch/_dynamo/output_graph.py (SubgraphTracer).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import sympy
import torch
from torch import fx

from minicompile import compat
from minicompile.dynamo.recorder import GraphRecorder, finished
from minicompile.dynamo.world import World
from minicompile.ops.graph import Graph


class Subgraph(GraphRecorder):
    """The recorder of a graph inside another recorder's graph, with which it shares all that both know."""

    def __init__(self, outer: GraphRecorder) -> None:
        vars(self).update(vars(outer))
        self.outer, self.graph = outer, fx.Graph()
        self.placeholders: list[fx.Node] = []
        self.outer_inputs: dict[fx.Node, tuple[torch.Tensor, fx.Node]] = {}
        """By node of the graph around: the value, and the placeholder here."""
        self.written = {}

    @property
    def values(self) -> list[torch.Tensor]:
        """Tensors of the graph around, in the order of their placeholders."""
        return [value for value, _ in self.outer_inputs.values()]

    def placeholder(self, value: torch.Tensor, name: str) -> fx.Node:
        node = self.graph.placeholder(name)
        node.target = node.name  # which is unique
        node.meta["val"] = value
        self.placeholders.append(node)
        return node

    def argument(self, value: torch.Tensor, name: str) -> None:
        """Add a placeholder for a value that the graph will be called with."""
        node = self.placeholder(value, name)
        self.describe(node, "placeholder", value)
        self.own(value, node)

    def node_of(self, value: torch.Tensor) -> fx.Node:
        node = self.nodes[id(value)]
        if node.graph is self.graph:
            return node
        around = self.outer.node_of(value)
        if around not in self.outer_inputs:
            node = self.placeholder(value, around.name)
            node.meta["origins"] = around.meta["origins"]
            self.outer_inputs[around] = value, node
        return self.outer_inputs[around][1]

    def note_writes(self, tensors: Iterable[torch.Tensor]) -> None:
        super().note_writes(tensors)
        self.outer.note_writes(tensors)

    def require(self, condition: torch.Tensor, holds: bool) -> None:
        """Refuse a check: the frame can't run in eager from inside of this graph."""
        self.refuse("branch-on-tensor", "Python branches on a tensor's data")

    def size_node(self, expr: sympy.Basic) -> Any:
        """The node of a size. Graphs inside take tensors alone, so other symbolic numbers become plain."""
        for symbol in expr.free_symbols:
            assert self.sizes is not None
            if self.sizes.env.symbols[symbol].kind != "size":
                self.sizes.env.evaluate(symbol)
                return self.size_node(self.sizes.env.simplified(expr))
        return super().size_node(expr)

    def completed(self, outputs: Iterable[Any], name: str) -> Graph:
        """The finished graph. Raises Unsupported if it changes what it was given."""
        if not self.written.keys().isdisjoint(map(compat.storage_id, self.values)):
            what = f"{name}, a function that torch calls, changes a tensor of the frame in place"
            self.refuse("shared-memory", what)
        return finished(self.graph, self.placeholders, outputs, name)


@contextlib.contextmanager
def subgraph(world: World) -> Iterator[Subgraph]:
    """Record the calls inside in a graph of their own."""
    outer = world.recorder
    world.recorder = inner = Subgraph(outer)
    try:
        yield inner
    finally:
        world.recorder = outer
        outer.changes_state |= inner.changes_state
