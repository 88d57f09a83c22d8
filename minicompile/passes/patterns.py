"""Rewriting by patterns: a search function and a replacement function, both plain Python over
torch operators.

    def twice_negated(x): return torch.neg(torch.neg(x))

    @pattern("double_negation", search=twice_negated, examples=[torch.empty(2, 2)])
    def simply(x): return x

Both are traced to operators (on fakes like the examples); the search graph is then looked for from its result
backwards. A float among the examples stands for any number. Operands of commutative operators
match either way round. Everything inside a match must be read inside it alone, belong to one
phase, and not be random.

The real compiler: torch/_inductor/pattern_matcher.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from minicompile.ops.graph import output_node, placeholders
from minicompile.ops.registry import Registry

aten = torch.ops.aten

COMMUTATIVE = {aten.add, aten.mul, aten.maximum, aten.minimum, aten.eq, aten.ne} | {
    *(aten.bitwise_and, aten.bitwise_or, aten.logical_and, aten.logical_or)
}

Bound = dict[Any, Any]
"""Values of the pattern (nodes, numbers) -> what they are in the graph."""


@dataclass(frozen=True)
class Match:
    """One occurrence: the node that gives the result, the pattern's arguments, the nodes replaced."""

    anchor: fx.Node
    arguments: tuple[Any, ...]
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Pattern:
    """`replace(*arguments)` computes what `search` does. `when(match)` may refuse an occurrence."""

    name: str
    search: Callable[..., Any]
    replace: Callable[..., Any]
    examples: tuple[Any, ...]
    stage: str
    when: Callable[[Match], bool]


patterns: Registry[Pattern] = Registry("pattern", "name -> rewrite of a subgraph")


def pattern(
    name: str,
    *,
    search: Callable[..., Any],
    examples: Sequence[Any],
    stage: str = "full",
    when: Callable[[Match], bool] = lambda match: True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function replaces what `search` matches, traced with the examples."""

    def add(replace: Callable[..., Any]) -> Callable[..., Any]:
        patterns(name)(Pattern(name, search, replace, tuple(examples), stage, when))
        return replace

    return add


class Matcher:
    """Looks for one traced pattern. `graph` takes the tensor examples in order and returns one value."""

    def __init__(self, entry: Pattern, graph: fx.Graph) -> None:
        self.entry = entry
        tensors = iter(placeholders(graph))
        self.parameters = [
            next(tensors) if isinstance(e, torch.Tensor) else e for e in entry.examples
        ]
        self.numbers = {e for e in entry.examples if isinstance(e, float)}
        (self.result,) = output_node(graph).all_input_nodes

    def match(self, anchor: fx.Node) -> Match | None:
        """The occurrence that gives `anchor`, if there is one."""
        for bound in self.unify(self.result, anchor, {}):
            calls = [p for p in bound if isinstance(p, fx.Node) and p.op == "call_function"]
            nodes = tuple(bound[call] for call in calls)
            arguments = tuple(bound.get(parameter, parameter) for parameter in self.parameters)
            match = Match(anchor, arguments, nodes)
            if self.closed(match) and self.entry.when(match):
                return match
        return None

    def closed(self, match: Match) -> bool:
        """Can the nodes go when the result is computed in another way?"""
        inner = [node for node in match.nodes if node is not match.anchor]
        return (
            all(user in match.nodes for node in inner for user in node.users)
            and len({node.meta.get("phase") for node in match.nodes}) == 1
            and not any(
                torch.Tag.nondeterministic_seeded in node.target.tags  # type: ignore[union-attr]
                for node in match.nodes
            )
        )

    def unify(self, wanted: Any, given: Any, bound: Bound) -> list[Bound]:
        """Every way to extend `bound` so that `wanted` is `given`."""
        if isinstance(wanted, list | tuple):
            if not isinstance(given, list | tuple) or len(wanted) != len(given):
                return []
            ways = [bound]
            for part, other in zip(wanted, given):
                ways = [longer for way in ways for longer in self.unify(part, other, way)]
            return ways
        if isinstance(wanted, float) and wanted in self.numbers:
            fits = isinstance(given, int | float) and bound.get(wanted, given) == given
            return [{**bound, wanted: given}] if fits else []
        if not isinstance(wanted, fx.Node):
            return [bound] if type(wanted) is type(given) and wanted == given else []
        if wanted in bound:
            return [bound] if bound[wanted] is given else []
        return self.unify_nodes(wanted, given, bound) if isinstance(given, fx.Node) else []

    def unify_nodes(self, wanted: fx.Node, given: fx.Node, bound: Bound) -> list[Bound]:
        bound = {**bound, wanted: given}
        if wanted.op == "placeholder":
            return [bound]
        target = wanted.target
        if not isinstance(target, OpOverload) or target is not given.target:
            return []  # another call; a pattern's own tensors match nothing
        if wanted.kwargs.keys() != given.kwargs.keys():
            return []
        orders = [given.args]
        if target.overloadpacket in COMMUTATIVE and not given.kwargs:
            orders.append(given.args[::-1])
        keys = list(wanted.kwargs)
        asked = [*wanted.args, *(wanted.kwargs[key] for key in keys)]
        options = [[*args, *(given.kwargs[key] for key in keys)] for args in orders]
        return [way for values in options for way in self.unify(asked, values, bound)]
