"""Rewriting by patterns: trace the search, confirm what it matches, put the replacement there.

A rewrite puts one call of the replacement into the graph, with the origins of what it replaces; the next
level expands that call like an operator. In training, a pattern of a later stage than "pre_grad" doesn't
match where the backward reads a value inside it; an early one is differentiated like the user's own code.

The real compiler: torch/_inductor/pattern_matcher.py (register_replacement, which also matches gradients).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from minicompile import compat
from minicompile.aot.layout import conform, empty_like_layout, frozen
from minicompile.aot.levels import lower_to
from minicompile.aot.tracer import Tracer
from minicompile.errors import OptionError
from minicompile.ops.gates import allowed
from minicompile.ops.graph import Graph, Rewrite, origins_of, statement
from minicompile.ops.nodes import ALIASES, alias_root, has_effect, is_random, returned_nodes
from minicompile.ops.origin import union
from minicompile.passes.manager import Pass
from minicompile.passes.patterns import (
    Function,
    Match,
    Matcher,
    Pattern,
    Replacement,
    TracedPattern,
    register_pattern,
    value_of,
)

OTHERWISE_CALLED = ("getitem", "getattr", "invert", "truediv", "floordiv", "and_", "or_")
"""Python's operators that write nothing and have other names in ATen."""
TORCH = ("torch", "_operator", "None")
"""Whose functions do what their names say; built-in ones name no module."""


def pattern_passes(patterns: Mapping[str, Pattern]) -> list[Pass]:
    """Each pattern as a pass of its own."""
    return [
        Pass(f"pattern:{name}", p.stage, 50, partial(rewrite, p)) for name, p in patterns.items()
    ]


def rewrite(entry: Pattern, gm: fx.GraphModule, mode: Any) -> list[Rewrite]:
    """Rewrite every occurrence of a pattern."""
    rewriter = Rewriter(entry, gm, mode)
    return [*filter(None, map(rewriter.replaced, rewriter.matches(traced_search(entry))))]


# Tracing -----------------------------------------------------------------------------------------


def call(function: Function, values: Sequence[Any]) -> list[Any]:
    """Return a function's results as a list, be it one or several."""
    results = function(*values)
    return list(results) if isinstance(results, tuple | list) else [results]


def trace_function(
    function: Function, values: Sequence[Any], mode: Any, stage: str
) -> TracedPattern:
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
    return TracedPattern(gm.graph)


def trace_torch(function: Function, examples: Sequence[Any]) -> TracedPattern:
    """The function's calls of torch, written down without running them."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{number}") for number in range(len(examples))]
    for node, example in zip(nodes, examples):
        node.meta["val"] = example
    tracer = fx.proxy.GraphAppendingTracer(graph)  # one for all, as calls of several proxies want
    wild = (isinstance(example, float | torch.Tensor) for example in examples)
    inputs = [fx.Proxy(node, tracer) if w else e for node, w, e in zip(nodes, wild, examples)]
    graph.output([result.node for result in call(function, inputs)])
    for node in graph.nodes:
        if inspect.isfunction(node.target):  # torch's Python functions add their defaults
            known = inspect.signature(node.target).parameters
            given = node.kwargs.items()
            node.kwargs = {name: v for name, v in given if v is not known[name].default}
    return TracedPattern(graph)


@functools.cache
def traced_search(entry: Pattern) -> TracedPattern:
    """The search on its examples, traced when it is first needed."""
    try:
        traced = trace_function(entry.search, entry.examples, compat.fake_mode(), entry.stage)
        if any(op._schema.is_mutable for op in traced.targets if isinstance(op, OpOverload)):
            entry.fail("the search writes into a tensor")
        if entry.stage == "pre_grad":
            traced = trace_torch(entry.search, entry.examples)
    except OptionError:
        raise
    except Exception as error:
        entry.fail(f"the search can't be traced: {type(error).__name__}: {error}")
    if not set(traced.results) <= set(traced.calls):
        entry.fail("the search returns an argument")
    return traced


# Finding and replacing ---------------------------------------------------------------------------


def is_same(wanted: Any, given: Any) -> bool:
    """Equal arguments that aren't tensors; symbolic sizes by expression."""
    return bool(frozen(value_of(wanted)) == frozen(value_of(given)))


class Rewriter:
    """Looks for one pattern in a graph and replaces it."""

    def __init__(self, entry: Pattern, gm: fx.GraphModule, mode: Any) -> None:
        self.entry, self.gm, self.mode = entry, gm, mode
        self.known: dict[Any, TracedPattern | None] = {}
        """Traces of the search by the layouts of its arguments."""

    def matches(self, wanted: TracedPattern) -> Iterator[Match]:
        """Occurrences; the graph may be changed between one and the next."""
        index: dict[Any, list[fx.Node]] = defaultdict(list)
        for node in self.gm.graph.nodes:
            index[node.target].append(node)
        if not wanted.targets <= index.keys():
            return
        exact = self.entry.stage == "pre_grad"
        pairs = list(zip(wanted.parameters, self.entry.examples, strict=True))
        wild = {p: e for p, e in pairs if isinstance(e, float | torch.Tensor)}
        numbers = {e: p for p, e in wild.items() if isinstance(e, float) and not exact}
        matcher = Matcher(is_same if exact else None, numbers)
        for loose in matcher.occurrences(wanted.results, index, {}):
            if unused := [p.name for p in wild if p not in loose]:
                self.entry.fail(f"the search doesn't use {unused}")
            results = tuple(loose[result] for result in wanted.results)
            arguments = tuple(loose.get(p, e) for p, e in pairs)
            if not all(result.users for result in results):
                continue  # it was replaced already
            match = Match(results, arguments, wanted.nodes_in(loose))
            confirmed = match if exact else self.confirmed(match)
            if confirmed is not None and self.entry.when(confirmed):
                yield confirmed

    def confirmed(self, match: Match) -> Match | None:
        """The match, if the search on these very arguments is these very calls."""
        key = frozen(match.values)
        if key not in self.known:
            self.known[key] = None
            with contextlib.suppress(Exception):  # it doesn't take such arguments
                stage = self.entry.stage
                self.known[key] = trace_function(self.entry.search, match.values, self.mode, stage)
        exact = self.known[key]
        if exact is None or any(map(is_random, exact.calls)):
            return None
        pairs = list(zip_longest(exact.results, match.results))
        start = dict(zip(exact.parameters, match.arguments))
        bound = next(Matcher(is_same).unify_all(pairs, start), None)
        return Match(match.results, match.arguments, exact.nodes_in(bound)) if bound else None

    def replaced(self, match: Match) -> Rewrite | None:
        """Replace an occurrence; None where it can't go."""
        entry, inside, place = self.entry, set(match.nodes), place_of(match)
        read_outside = any(set(n.users) - inside for n in inside.difference(match.results))
        if read_outside or place is None or len(set(map(home, match.nodes))) > 1:
            return None
        function = self.replacement(match.results)
        try:
            new = trace_function(function, match.values, self.mode, entry.stage)
        except OptionError:
            raise
        except Exception as error:
            why = f"the replacement can't be traced: {type(error).__name__}: {error}"
            entry.fail(why, entry.replace)
        before, after = ("\n".join(map(statement, n)) for n in (match.nodes, new.calls))
        rewrite = Rewrite(entry.name, before, after, union(map(origins_of, match.nodes)))
        name, shown = f"pattern:{entry.name}", (lambda: before, lambda: after)
        if not allowed(f"{entry.stage} pass", name, *shown, lambda: rewrite.origins):
            return None
        put(self.gm.graph, match, place, Replacement(entry.name, function))
        for node in reversed(match.nodes):
            if not node.users:
                self.gm.graph.erase_node(node)
        return rewrite

    def replacement(self, results: Sequence[fx.Node]) -> Function:
        """The replacement, its results laid out as those found; what is returned has memory of its own."""
        entry, returned = self.entry, returned_nodes(self.gm.graph)
        alone = [entry.stage == "pre_grad" or alias_root(found) in returned for found in results]
        expected = list(map(value_of, results))

        def function(*values: Any) -> list[Any]:
            made = call(entry.replace, values)
            if len(made) != len(expected):
                entry.fail(f"{len(made)} results replace {len(expected)}", entry.replace)
            memory = {compat.storage_id(v) for v in values if isinstance(v, torch.Tensor)}
            for i, value in enumerate(expected):
                made[i] = conform(f"pattern {entry.name}", made[i], value)
                if alone[i] and compat.storage_id(made[i]) in memory:
                    made[i] = made[i].clone()
                memory.add(compat.storage_id(made[i]))
            return made

        return function


def replace_nodes(
    name: str, gm: fx.GraphModule, mode: Any, match: Match, function: Function, stage: str
) -> Rewrite | None:
    """A match that a pass found by itself: the function computes its results from its arguments."""
    entry = Pattern(name, function, function, tuple(match.values), stage, lambda match: True)
    return Rewriter(entry, gm, mode).replaced(match)


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


EXAMPLE = torch.empty(2, 2)


@register_pattern("relu_of_relu", search=lambda x: torch.relu(torch.relu(x)), examples=[EXAMPLE])
def relu(x: torch.Tensor) -> torch.Tensor:
    """The second one changes nothing."""
    return torch.relu(x)


@register_pattern("double_negation", search=lambda x: torch.neg(torch.neg(x)), examples=[EXAMPLE])
def itself(x: torch.Tensor) -> torch.Tensor:
    return x
