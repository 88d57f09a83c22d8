"""`mc.register_pattern`: rewriting by a search function and a replacement function over torch operators.

    @mc.register_pattern("twice_negated", search=lambda x: -(-x), examples=[torch.empty(2)])
    def itself(x): return x

The search is traced on the examples and looked for: tensors among them stand for any tensor, floats for any
number, sizes for any size. What is found counts only if the search, traced on the very arguments found there,
is the very calls found there. Several results are found together. A pattern becomes a graph pass
`pattern:<name>` of its stage.

The real compiler: torch/_inductor/pattern_matcher.py (register_replacement, which also matches gradients).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from minicompile import compat
from minicompile.aot.layout import frozen
from minicompile.aot.passes.replacing import call, fail, replace_nodes, trace_function
from minicompile.custom.matching import Matcher, TracedPattern
from minicompile.errors import OptionError
from minicompile.ops.graph import Rewrite
from minicompile.passes.manager import graph_pass
from minicompile.passes.replacements import Function, Match, value_of

PATTERN_STAGES = ("pre_grad", "joint", "post_grad")


@dataclass(frozen=True, eq=False)
class Pattern:
    """`replace(*arguments)` computes what `search` does. `when(match)` may refuse an occurrence."""

    name: str
    search: Function
    replace: Function
    examples: tuple[Any, ...]
    stage: str
    when: Callable[[Match], bool]


def register_pattern(
    name: str,
    *,
    search: Function,
    examples: Sequence[Any],
    stage: str = "joint",
    when: Callable[[Match], bool] = lambda match: True,
) -> Callable[[Function], Function]:
    """Decorator: the function replaces what `search` matches. A pattern that can't be raises OptionError, for
    its stage here, else when compiling.
    """
    if stage not in PATTERN_STAGES:
        fail(name, search, f"no stage {stage!r}; known: {', '.join(PATTERN_STAGES)}")
    # no number that the search writes itself, and no two that are equal
    numbers = (
        e + i * math.ulp(e) if isinstance(e, float) else e for i, e in enumerate(examples, 1)
    )
    values = tuple(numbers)

    def add(replace: Function) -> Function:
        entry = Pattern(name, search, replace, values, stage, when)
        graph_pass(f"pattern:{name}", stage=stage)(partial(rewrite, entry))
        return replace

    return add


def rewrite(entry: Pattern, gm: fx.GraphModule, mode: Any) -> list[Rewrite]:
    """Rewrite every occurrence of a pattern."""
    done = (
        replace_nodes(entry.name, gm, mode, match, entry.replace, entry.stage)
        for match in matches(entry, gm, mode)
    )
    return [*filter(None, done)]


# Tracing -----------------------------------------------------------------------------------------


def trace_torch(function: Function, examples: Sequence[Any]) -> fx.Graph:
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
    return graph


@functools.cache
def traced_search(entry: Pattern) -> TracedPattern:
    """The search on its examples, traced when it is first needed."""
    try:
        graph = trace_function(entry.search, entry.examples, compat.fake_mode(), entry.stage)
        targets = (node.target for node in graph.nodes)
        if any(op._schema.is_mutable for op in targets if isinstance(op, OpOverload)):
            fail(entry.name, entry.search, "the search writes into a tensor")
        if entry.stage == "pre_grad":
            graph = trace_torch(entry.search, entry.examples)
    except OptionError:
        raise
    except Exception as error:
        why = f"the search can't be traced: {type(error).__name__}: {error}"
        fail(entry.name, entry.search, why)
    traced = TracedPattern(graph)
    if not set(traced.results) <= set(traced.calls):
        fail(entry.name, entry.search, "the search returns an argument")
    return traced


# Finding -----------------------------------------------------------------------------------------


def is_same(wanted: Any, given: Any) -> bool:
    """Equal arguments that aren't tensors; symbolic sizes by expression."""
    return bool(frozen(value_of(wanted)) == frozen(value_of(given)))


def matches(entry: Pattern, gm: fx.GraphModule, mode: Any) -> Iterator[Match]:
    """Occurrences of a pattern; the graph may be changed between one and the next."""
    wanted = traced_search(entry)
    index: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        index[node.target].append(node)
    if not wanted.targets <= index.keys():
        return
    exact = entry.stage == "pre_grad"
    pairs = list(zip(wanted.parameters, entry.examples, strict=True))
    wild = {p: e for p, e in pairs if isinstance(e, float | torch.Tensor)}
    numbers = {e: p for p, e in wild.items() if isinstance(e, float) and not exact}
    matcher = Matcher(is_same if exact else None, numbers)
    for loose in matcher.occurrences(wanted.results, index, {}):
        if unused := [p.name for p in wild if p not in loose]:
            fail(entry.name, entry.search, f"the search doesn't use {unused}")
        results = tuple(loose[result] for result in wanted.results)
        arguments = tuple(loose.get(p, e) for p, e in pairs)
        if not all(result.users for result in results):
            continue  # it was replaced already
        match = Match(results, arguments, wanted.nodes_in(loose))
        found = match if exact else confirmed(entry, match, mode)
        if found is not None and entry.when(found):
            yield found


def confirmed(entry: Pattern, match: Match, mode: Any) -> Match | None:
    """The match, if the search on these very arguments is these very calls."""
    with contextlib.suppress(Exception):  # it doesn't take such arguments
        exact = TracedPattern(trace_function(entry.search, match.values, mode, entry.stage))
        pairs = list(zip_longest(exact.results, match.results))
        start = dict(zip(exact.parameters, match.arguments))
        bound = next(Matcher(is_same).unify_all(pairs, start), None)
        return Match(match.results, match.arguments, exact.nodes_in(bound)) if bound else None
    return None
