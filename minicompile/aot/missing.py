"""Backward calls in which some results get no gradient, because the loss was not computed from them.

    return a.sqrt(), a * 2      if the second alone is differentiated: 2 * tangent, as in eager. Zeros for the
                                other tangent would add 0 / (2 * sqrt(a)), which is NaN where `a` is 0

Where zeros may change a gradient, eager's operators run the backward graph, with exact zeros for whatever is
computed from missing tangents alone. The real compiler runs its kernels on zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import GradientEdge

from minicompile.errors import Unsupported
from minicompile.ops.graph import Graph, copied, output_node, placeholders
from minicompile.ops.nodes import aten_ops, is_size, is_view

aten = torch.ops.aten
SUMS = aten_ops("add.Tensor")
ZEROS_OF_ZEROS = aten_ops("clone.default sum.dim_IntList neg.default _to_copy.default")


def results_that_reach(
    results: Sequence[torch.Tensor], inputs: Mapping[int, Any]
) -> tuple[dict[int, tuple[int, ...]], tuple[int, ...]]:
    """For each input (a leaf, or a `GradientEdge`): the results from which autograd goes to it, by number.
    And the results that share a part of their history with every other one: after one of these eager can't
    differentiate the others, unless the graph is retained.

    Raises Unsupported if not all results reach the same inputs that have a history: autograd would go on
    into another result's history, which may be used up, or run a user's code on zeros.
    """
    ends = {x.node if isinstance(x, GradientEdge) else id(x): i for i, x in inputs.items()}
    reached = {number: set[int]() for number in inputs}
    histories = list[set[Any]]()
    for number, result in enumerate(results):
        waiting, seen, inner = [result.grad_fn], set[Any](), set[Any]()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            end = ends.get(node, ends.get(id(getattr(node, "variable", None))))
            if end is None:
                inner.add(node)
                waiting += [following for following, _ in node.next_functions]
            else:
                reached[end].add(number)
        histories.append(inner)
    from_elsewhere = [i for i, x in inputs.items() if isinstance(x, GradientEdge)]
    if any(0 < len(reached[i]) < len(results) for i in from_elsewhere):
        raise Unsupported("some results come from an input with a history, and some don't")
    shared = tuple(
        i
        for i, own in enumerate(histories)
        if not any(own.isdisjoint(other) for other in histories)
    )
    return {number: tuple(sorted(those)) for number, those in reached.items()}, shared


def computed_from(backward: Graph, saved: int, missing: Collection[int]) -> set[fx.Node]:
    """The nodes that are computed from missing tangents (the inputs after the `saved` ones) and no others."""
    tangents: dict[fx.Node, set[int]] = {}
    for number, node in enumerate(placeholders(backward.gm.graph)):
        tangents[node] = {number - saved} if number >= saved else set()
    for node in backward.nodes:
        read = (tangents[x] for x in node.all_input_nodes if not is_size(x))
        tangents.setdefault(node, set()).update(*read)
    return {n for n, own in tangents.items() if own and own <= set(missing) and n.op != "output"}


def sufficient(backward: Graph, saved: int, shared: Collection[int]) -> tuple[int, ...]:
    """The tangents, each of which is enough for the compiled graph: zeros for the others change nothing, and
    its result shares history with the others. A loss is, beside the logits that it was computed from: its
    gradient is added to theirs."""
    tangents, enough = range(len(placeholders(backward.gm.graph)) - saved), list[int]()
    for i in shared if len(tangents) > 1 else ():
        lost = computed_from(backward, saved, {*tangents} - {i})
        exact = all(node.op == "placeholder" or keeps_zeros(node, lost) for node in lost)
        if exact and all(
            user in lost or user.target in SUMS for node in lost for user in node.users
        ):
            enough.append(i)
    return tuple(enough)


def keeps_zeros(node: fx.Node, zeros: Collection[fx.Node]) -> bool:
    """Is it zeros if these nodes are, whatever else there is?"""
    known = is_view(node) or node.target in SUMS | ZEROS_OF_ZEROS
    return known and all(x in zeros or is_size(x) for x in node.all_input_nodes)


def without(
    backward: Graph, saved: int, missing: Collection[int], reached_from: Sequence[Sequence[int]]
) -> Graph:
    """A graph with the same inputs that reads exact zeros in place of what is computed from missing tangents
    alone, or leaves them out of a sum. Gradients that no other tangent leads to are None: `reached_from`."""
    reduced = copied(backward)
    graph, lost = reduced.gm.graph, computed_from(reduced, saved, missing)
    output, reached = (
        output_node(graph),
        [not {*tangents} <= {*missing} for tangents in reached_from],
    )
    results: Any = output.args[0]
    output.args = (tuple(x if there else None for x, there in zip(results, reached)),)
    for node in list(graph.nodes):
        if node.target in SUMS and not node.kwargs and len(node.all_input_nodes) == 2:
            others = [x for x in node.all_input_nodes if x not in lost]
            if len(others) == 1 and layout(others[0]) == layout(node):
                node.replace_all_uses_with(others[0])
    for node in lost:
        if readers := set(node.users) - lost:
            with graph.inserting_after(node):
                zeros = graph.call_function(aten.zeros_like.default, (node,))
            zeros.meta.update(node.meta)
            for user in readers:
                user.replace_input_with(node, zeros)
    graph.eliminate_dead_code()
    return reduced


def layout(node: fx.Node) -> Any:
    """Attributes in which a sum and its only operand must agree."""
    value = node.meta["val"]
    return value.dtype, repr(value.shape), repr(value.stride())
