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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from minicompile.ops.graph import output_node, placeholders
from minicompile.ops.registry import Registry

aten = torch.ops.aten

COMMUTATIVE = {
    aten.add.Tensor,
    aten.mul.Tensor,
    aten.maximum.default,
    aten.minimum.default,
    aten.eq.Tensor,
    aten.ne.Tensor,
    aten.bitwise_and.Tensor,
    aten.bitwise_or.Tensor,
    aten.logical_and.default,
    aten.logical_or.default,
}


@dataclass(frozen=True)
class Match:
    """One occurrence: the node that gives the result, the values of the pattern's arguments, the
    nodes replaced.
    """

    anchor: fx.Node
    arguments: tuple[Any, ...]
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Pattern:
    """`replace(*arguments)` computes what `search(*arguments)` does. `when(match)` may refuse an
    occurrence.
    """

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
    """Decorator: the function replaces what `search` matches. `examples` are tensors and numbers
    to trace it with.
    """

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
        for found in self._node(self.result, anchor, {}):
            inside = [
                n for p, n in found.items() if isinstance(p, fx.Node) and p.op == "call_function"
            ]
            if self._closed(anchor, inside):
                match = Match(
                    anchor, tuple(found.get(p, p) for p in self.parameters), tuple(inside)
                )
                if self.entry.when(match):
                    return match
        return None

    def _closed(self, anchor: fx.Node, inside: list[fx.Node]) -> bool:
        phases = {node.meta.get("phase") for node in inside}
        private = all(
            user in inside for node in inside if node is not anchor for user in node.users
        )
        random = any(
            torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in inside
        )
        return private and len(phases) == 1 and not random

    def _node(self, wanted: fx.Node, node: Any, bound: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
        """Every way to extend `bound` (pattern -> graph) so that `wanted` is `node`."""
        if wanted in bound:
            if bound[wanted] is node:
                yield bound
        elif not isinstance(node, fx.Node):
            return
        elif wanted.op == "placeholder":
            yield {**bound, wanted: node}
        elif wanted.op != "call_function" or wanted.target is not node.target:
            return  # another call; a pattern's own tensors match nothing
        elif wanted.kwargs.keys() == node.kwargs.keys():
            orders = [tuple(node.args)]
            if node.target in COMMUTATIVE and len(node.args) == 2:
                orders.append((node.args[1], node.args[0]))
            for args in orders:
                given = [*args, *node.kwargs.values()]
                asked = [*wanted.args, *(wanted.kwargs[key] for key in node.kwargs)]
                yield from self._all(asked, given, {**bound, wanted: node})

    def _all(
        self, wanted: Sequence[Any], given: Sequence[Any], bound: dict[Any, Any]
    ) -> Iterator[dict[Any, Any]]:
        if len(wanted) != len(given):
            return
        if not wanted:
            yield bound
            return
        for extended in self._value(wanted[0], given[0], bound):
            yield from self._all(wanted[1:], given[1:], extended)

    def _value(self, wanted: Any, given: Any, bound: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
        if isinstance(wanted, fx.Node):
            yield from self._node(wanted, given, bound)
        elif isinstance(wanted, list | tuple) and isinstance(given, list | tuple):
            yield from self._all(wanted, given, bound)
        elif isinstance(wanted, float) and wanted in self.numbers:
            if isinstance(given, int | float) and bound.get(wanted, given) == given:
                yield {**bound, wanted: given}
        elif type(wanted) is type(given) and wanted == given:
            yield bound
