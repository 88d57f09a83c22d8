"""Looks for one graph in another, by unification from the results backwards.

The real compiler: torch/_inductor/pattern_matcher.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from minicompile.ops.graph import output_node, placeholders
from minicompile.passes.replacements import value_of

COMMUTATIVE = {"add", "mul", "maximum", "minimum", "bitwise_and", "bitwise_or", "and_", "or_"}

Bound = dict[Any, Any]
"""Nodes of the pattern -> what they are in the graph: nodes, for parameters also numbers."""


def is_number(argument: Any) -> bool:
    return isinstance(value_of(argument), int | float | torch.SymInt | torch.SymFloat)


class TracedPattern:
    """A function as a graph, one parameter for each example."""

    def __init__(self, graph: fx.Graph) -> None:
        self.parameters, self.results = placeholders(graph), list[fx.Node]()
        fx.map_arg(output_node(graph).args, self.results.append)
        self.calls = [node for node in graph.nodes if node.op.startswith("call")]
        self.targets = {node.target for node in self.calls}

    def nodes_in(self, bound: Bound) -> tuple[fx.Node, ...]:
        """The calls of the graph that the pattern's calls stand for, in the graph's order."""
        return tuple(sorted(bound[call] for call in self.calls if call in bound))


@dataclass(frozen=True)
class Matcher:
    """Finds what the nodes of a pattern may be. `same` compares what isn't a tensor; without it any number
    and any size will do. `numbers`: floats that stand for parameters.
    """

    same: Callable[[Any, Any], bool] | None = None
    numbers: Mapping[float, fx.Node] = field(default_factory=dict)

    def occurrences(
        self, wanted: Sequence[fx.Node], index: Mapping[Any, list[fx.Node]], bound: Bound
    ) -> Iterator[Bound]:
        """Every way to find all results. `index`: the graph's calls by target."""
        if not wanted:
            yield bound
            return
        for given in [bound[wanted[0]]] if wanted[0] in bound else index.get(wanted[0].target, ()):
            for way in self.unify(wanted[0], given, bound):
                yield from self.occurrences(wanted[1:], index, way)

    def unify(self, wanted: Any, given: Any, bound: Bound) -> Iterator[Bound]:
        """Every way to extend `bound` so that `wanted` is `given`."""
        wanted = self.numbers.get(wanted, wanted) if isinstance(wanted, float) else wanted
        if isinstance(wanted, list | tuple):
            if isinstance(given, list | tuple) and len(wanted) == len(given):
                yield from self.unify_all(list(zip(wanted, given)), bound)
        elif not isinstance(wanted, fx.Node) or (wanted.op != "placeholder" and is_number(wanted)):
            constant = not isinstance(given, fx.Node) or is_number(given)
            if constant and (self.same is None or self.same(wanted, given)):
                yield bound
        elif wanted in bound:
            if repr(bound[wanted]) == repr(given):  # tells 1, 1.0 and True apart, also 0.0 and -0.0
                yield bound
        elif wanted.op == "placeholder":
            tensor = isinstance(value_of(given), torch.Tensor)
            if is_number(given) if is_number(wanted) else tensor:
                yield {**bound, wanted: given}
        elif (
            isinstance(given, fx.Node)
            and (wanted.op, wanted.target) == (given.op, given.target)
            and wanted.op != "get_attr"  # a pattern's own tensors match nothing
            and given not in bound.values()
        ):
            yield from self.unify_calls(wanted, given, {**bound, wanted: given})

    def unify_calls(self, wanted: fx.Node, given: fx.Node, bound: Bound) -> Iterator[Bound]:
        if wanted.kwargs.keys() != given.kwargs.keys():
            return
        asked, found = ([*node.args, *node.kwargs.values()] for node in (wanted, given))
        name = str(getattr(wanted.target, "__name__", wanted.target)).partition(".")[0]
        orders = [found, found[::-1]] if name in COMMUTATIVE and not given.kwargs else [found]
        for order in orders:
            yield from self.unify_all(list(zip_longest(asked, order)), bound)

    def unify_all(self, pairs: list[tuple[Any, Any]], bound: Bound) -> Iterator[Bound]:
        if not pairs:
            yield bound
            return
        for way in self.unify(*pairs[0], bound):
            yield from self.unify_all(pairs[1:], way)
