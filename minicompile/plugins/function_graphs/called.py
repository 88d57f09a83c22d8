"""Functions that torch calls later or with other tensors: each becomes a graph inside the graph.

    Called           the target of the node that stands for the call of such a function
    without_effects  refuses what such a function may not do while it is captured

A target is called with the tensors that the function took from around itself (a tuple), and with the tensors
that it was given.
The real compiler: torch/_dynamo/variables/higher_order_ops.py, torch/_functorch/autograd_function.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from minicompile.dynamo.world import World
from minicompile.ops.graph import Graph
from minicompile.plugins.function_graphs.subgraph import Subgraph


class Called:
    """What a node calls in place of a Python function: a subgraph, fed from the call's arguments."""

    def __init__(self, name: str, inner: Subgraph, graph: Graph, given: list[Any]) -> None:
        self.__name__, self.__qualname__, self.__module__ = graph.name, name, ""
        self.graph = graph
        self.closure = [v for v in inner.values if not any(v is other for other in given)]
        """Fakes that the function took from around itself."""
        everything = [*self.closure, *given]
        self.feeds = [
            next(i for i, other in enumerate(everything) if other is node.meta["val"])
            for node in inner.placeholders
        ]
        """Which of the tensors that it took and was given each placeholder of the graph is."""

    @property
    def graphs(self) -> list[Graph]:
        return [self.graph]


@contextlib.contextmanager
def without_effects(world: World, what: str) -> Iterator[None]:
    """Refuses writes to the outside: they would be replayed at the wrong time."""
    before, world.writes.called_later = world.writes.called_later, what
    try:
        yield
    finally:
        world.writes.called_later = before
