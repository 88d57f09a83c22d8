"""Applying patterns to ATen graphs, and the built-in patterns."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from minicompile.aot.layout import conform, empty_like_layout
from minicompile.aot.tracer import Tracer
from minicompile.aot.views import alias_root, has_effect, returned_nodes
from minicompile.ops.graph import origins_of
from minicompile.ops.origin import union
from minicompile.passes.manager import graph_pass
from minicompile.passes.patterns import Match, Matcher, Pattern, pattern, patterns


def trace_pattern(entry: Pattern, mode: Any) -> fx.Graph:
    """The search function as a graph of ATen operators on fakes like the examples."""
    tracer = Tracer(mode)
    arguments = [
        tracer.placeholder(f"x{index}", empty_like_layout(mode, example), {})
        if isinstance(example, torch.Tensor)
        else example
        for index, example in enumerate(entry.examples)
    ]
    with torch.no_grad(), tracer.active():
        result = entry.search(*arguments)
    return tracer.finish((result,)).graph


def replace_match(gm: fx.GraphModule, match: Match, entry: Pattern, mode: Any) -> None:
    """Compute the replacement before the match's result and use it instead.

    A returned value must have memory of its own, so it is copied if the replacement is something
    that existed before.
    """
    before = set(gm.graph.nodes)
    returned = match.anchor in returned_nodes(gm.graph)
    tracer = Tracer(mode, graph=gm.graph)
    tracer.origins = union(origins_of(node) for node in match.nodes)
    tracer.phase = match.anchor.meta.get("phase")
    values = []
    for argument in match.arguments:
        if isinstance(argument, fx.Node):
            tracer.bind(argument.meta["val"], argument)
            argument = argument.meta["val"]
        values.append(argument)
    with gm.graph.inserting_before(match.anchor), torch.no_grad(), tracer.active():
        result = conform(f"pattern {entry.name}", entry.replace(*values), match.anchor.meta["val"])
        replacement = tracer.argument(result)
        if returned and alias_root(replacement) in before:
            replacement = tracer.argument(result.clone())
    match.anchor.replace_all_uses_with(replacement)


def apply_patterns(gm: fx.GraphModule, mode: Any, stage: str) -> int:
    """Rewrite every occurrence of every pattern of the stage, once through the graph."""
    found = 0
    for name in patterns:
        entry = patterns[name]
        if entry.stage != stage:
            continue
        matcher = Matcher(entry, trace_pattern(entry, mode))
        for node in list(gm.graph.nodes):
            match = matcher.match(node) if node.op == "call_function" and node.users else None
            if match is not None:
                replace_match(gm, match, entry, mode)
                found += 1
    if found:
        gm.graph.eliminate_dead_code(has_effect)
    return found


@graph_pass("patterns", stage="full", order=50)
def full_patterns(gm: fx.GraphModule, mode: Any) -> int:
    return apply_patterns(gm, mode, "full")


@graph_pass("patterns", stage="prims", order=25)
def prims_patterns(gm: fx.GraphModule, mode: Any) -> int:
    return apply_patterns(gm, mode, "prims")


EXAMPLE = torch.empty(2, 2)


@pattern("relu_of_relu", search=lambda x: torch.relu(torch.relu(x)), examples=[EXAMPLE])
def _relu(x: torch.Tensor) -> torch.Tensor:
    """The second one changes nothing."""
    return torch.relu(x)


@pattern(
    "double_negation", search=lambda x: torch.neg(torch.neg(x)), examples=[EXAMPLE], stage="prims"
)
def _itself(x: torch.Tensor) -> torch.Tensor:
    return x
