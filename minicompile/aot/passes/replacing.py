"""Replaces a place in a graph by one call, with the origins of what it replaces; the next level expands that
call like an operator.

In training, what is replaced in a stage later than "pre_grad" can't have a value inside that the backward
reads; an early replacement is differentiated like the user's own code.

The real compiler: torch/_inductor/pattern_matcher.py (register_replacement, which also matches gradients).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any, NoReturn

import torch
from torch import fx
from torch._ops import OpOverload

from minicompile import compat
from minicompile.aot.layout import conform, empty_like_layout
from minicompile.aot.levels import lower_to
from minicompile.aot.tracer import Tracer
from minicompile.errors import OptionError
from minicompile.ops.gates import allowed
from minicompile.ops.graph import Graph, Rewrite, origins_of, statement
from minicompile.ops.nodes import ALIASES, alias_root, has_effect, returned_nodes
from minicompile.ops.origin import place_of as source_place
from minicompile.ops.origin import union
from minicompile.passes.replacements import Function, Match, Replacement, value_of

OTHERWISE_CALLED = ("getitem", "getattr", "invert", "truediv", "floordiv", "and_", "or_")
"""Python's operators that write nothing and have other names in ATen."""
TORCH = ("torch", "_operator", "None")
"""Whose functions do what their names say; built-in ones name no module."""


def call(function: Function, values: Sequence[Any]) -> list[Any]:
    """Return a function's results as a list, be it one or several."""
    results = function(*values)
    return list(results) if isinstance(results, tuple | list) else [results]


def fail(name: str, function: Function, why: str) -> NoReturn:
    """Raise OptionError about a user's function."""
    raise OptionError(f"pattern {name!r} ({source_place(function)}): {why}")


def trace_function(function: Function, values: Sequence[Any], mode: Any, stage: str) -> fx.Graph:
    """The function on values like these, in a stage's operators."""
    tracer = Tracer(mode)
    # each a fake of its own, since a fake stands for one node
    fakes = [empty_like_layout(mode, v) if isinstance(v, torch.Tensor) else v for v in values]
    for number, fake in enumerate(fakes):
        tracer.placeholder(f"x{number}", fake)
    with tracer.rewriting():
        results = call(function, fakes)
    gm = tracer.finish(tuple(results))
    for node in gm.graph.nodes:
        if node.target in ALIASES:
            node.replace_all_uses_with(node.args[0])
    if stage == "post_grad":
        gm = lower_to("prims", Graph(gm, "pattern", "tracing"), mode).gm
    gm.graph.eliminate_dead_code(has_effect)
    return gm.graph


def replace_nodes(
    name: str, gm: fx.GraphModule, mode: Any, match: Match, function: Function, stage: str
) -> Rewrite | None:
    """Let the function compute the match's results from its arguments; None where that can't go."""
    inside, place = set(match.nodes), place_of(match)
    read_outside = any(set(n.users) - inside for n in inside.difference(match.results))
    if read_outside or place is None or len(set(map(home, match.nodes))) > 1:
        return None
    fitting = laid_out(name, function, match.results, gm.graph, stage)
    try:
        new = trace_function(fitting, match.values, mode, stage)
    except OptionError:
        raise
    except Exception as error:
        why = f"the replacement can't be traced: {type(error).__name__}: {error}"
        fail(name, function, why)
    calls = (node for node in new.nodes if node.op.startswith("call"))
    before, after = ("\n".join(map(statement, nodes)) for nodes in (match.nodes, calls))
    rewrite = Rewrite(name, before, after, union(map(origins_of, match.nodes)))
    shown = (lambda: before, lambda: after, lambda: rewrite.origins)
    if not allowed(f"{stage} pass", f"pattern:{name}", *shown):
        return None
    put(gm.graph, match, place, Replacement(name, fitting))
    for node in reversed(match.nodes):
        if not node.users:
            gm.graph.erase_node(node)
    return rewrite


def laid_out(
    name: str, replace: Function, results: Sequence[fx.Node], graph: fx.Graph, stage: str
) -> Function:
    """The replacement, its results laid out as those it replaces; what is returned has memory of its own."""
    returned = returned_nodes(graph)
    alone = [stage == "pre_grad" or alias_root(node) in returned for node in results]
    expected = list(map(value_of, results))

    def function(*values: Any) -> list[Any]:
        made = call(replace, values)
        if len(made) != len(expected):
            fail(name, replace, f"{len(made)} results replace {len(expected)}")
        memory = {compat.storage_id(v) for v in values if isinstance(v, torch.Tensor)}
        for i, value in enumerate(expected):
            made[i] = conform(f"pattern {name}", made[i], value)
            if alone[i] and compat.storage_id(made[i]) in memory:
                made[i] = made[i].clone()
            memory.add(compat.storage_id(made[i]))
        return made

    return function


def home(node: fx.Node) -> tuple[Any, Any]:
    """Phase and checkpoint region."""
    return node.meta.get("phase"), node.meta.get("region")


def may_write(node: fx.Node) -> bool:
    """Might the call change a tensor or a mode? Sure not: functions that ATen has, in their plain form."""
    target: Any = node.target
    if isinstance(target, OpOverload):
        return target._schema.is_mutable
    if isinstance(target, Replacement) or not node.op.startswith("call"):
        return False
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    ours = str(getattr(target, "__module__", "torch")).partition(".")[0] in TORCH
    if ours and name in OTHERWISE_CALLED:
        return False
    plain = hasattr(torch.ops.aten, name)
    switches = any(argument is True for argument in (*node.args, *node.kwargs.values()))
    renorms = name.startswith("embedding") or "out" in node.kwargs
    return not (ours and plain) or switches or renorms or name.endswith("_")


def place_of(match: Match) -> fx.Node | None:
    """What reads the results first: the replacement goes before it. None if an argument isn't there yet, or
    something may have been written to since."""
    inside = set(match.nodes)
    users = (user for result in match.results for user in result.users if user not in inside)
    place: Any = min(users, default=None)
    if place is None or any(isinstance(a, fx.Node) and place <= a for a in match.arguments):
        return None
    node = match.nodes[0]
    while node is not place and (node in inside or not may_write(node)):
        node = node.next
    return node if node is place else None


def put(graph: fx.Graph, match: Match, place: fx.Node, replacement: Replacement) -> None:
    """A call of the replacement gives the results from now on."""
    results, values = match.results, tuple(map(value_of, match.results))
    phase, region = home(results[0])
    meta = {"origins": union(map(origins_of, match.nodes)), "phase": phase, "region": region}
    with graph.inserting_before(place):
        call = graph.call_function(replacement, match.arguments)
        news = [call]
        if len(results) > 1:
            news = [graph.call_function(getitem, (call, i)) for i in range(len(results))]
    for node, value in ((call, values), *zip(news, values)):
        node.meta.update(meta, val=value)
    for old, new in zip(results, news):
        old.replace_all_uses_with(new)
