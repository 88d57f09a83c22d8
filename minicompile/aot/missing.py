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

from minicompile.aot.layout import same_value
from minicompile.errors import Unsupported
from minicompile.ops.graph import Graph, copied, output_node, placeholders
from minicompile.ops.nodes import aten_ops, is_size, is_view, results_of

aten = torch.ops.aten
SUMS = aten_ops("add.Tensor")
ZEROS_OF_ZEROS = aten_ops("clone.default sum.dim_IntList neg.default _to_copy.default")


def results_that_reach(
    results: Sequence[torch.Tensor], inputs: Mapping[int, Any]
) -> dict[int, tuple[int, ...]]:
    """For each input (a leaf, or a `GradientEdge`): the results from which autograd goes to it, by number.

    Raises Unsupported if not all results reach the same inputs that have a history: autograd would go on
    into another result's history, which may be used up, or run a user's code on zeros.
    """
    ends: dict[Any, int] = {
        x.node if isinstance(x, GradientEdge) else id(x): i for i, x in inputs.items()
    }
    reached = {number: set[int]() for number in inputs}
    for number, result in enumerate(results):
        waiting, seen = list[Any]([result.grad_fn]), set[Any]([None])
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                end = ends.get(node, ends.get(id(getattr(node, "variable", None))))
                if end is None:
                    waiting += [following for following, _ in node.next_functions]
                else:
                    reached[end].add(number)
    from_elsewhere = [i for i, x in inputs.items() if isinstance(x, GradientEdge)]
    if any(0 < len(reached[i]) < len(results) for i in from_elsewhere):
        raise Unsupported("some results come from an input with a history, and some don't")
    return {number: tuple(sorted(those)) for number, those in reached.items()}


def computed_from(backward: Graph, saved: int, missing: Collection[int]) -> set[fx.Node]:
    """The nodes that are computed from missing tangents (the inputs after the `saved` ones) and no others."""
    tangents: dict[fx.Node, set[int]] = {}
    for number, node in enumerate(placeholders(backward.gm.graph)):
        tangents[node] = {number - saved} if number >= saved else set()
    for node in backward.nodes:
        read = (tangents[x] for x in node.all_input_nodes if not is_size(x))
        tangents.setdefault(node, set()).update(*read)
    return {n for n, own in tangents.items() if own and own <= set(missing) and n.op != "output"}


def sufficient(backward: Graph, saved: int) -> tuple[int, ...]:
    """The tangents, each of which is enough for the compiled graph: zeros for the others change nothing, and
    are added where its own gradient arrives. A loss is, beside the logits that it was computed from.

    A sum doesn't count if only views and sums lead from it to a gradient: results meet there that share an
    input and no computation, so that one may be differentiated now and another later.
    """
    tangents, enough = range(len(placeholders(backward.gm.graph)) - saved), list[int]()
    ends = set[fx.Node]()
    for node in reversed([*backward.nodes]):
        if all(user.op == "output" or (user in ends and keeps_zeros(user)) for user in node.users):
            ends.add(node)
    for i in tangents if len(tangents) > 1 else ():
        lost = computed_from(backward, saved, {*tangents} - {i})
        zeros = (
            keeps_zeros(user) and all(x in lost or is_size(x) for x in user.all_input_nodes)
            if user in lost
            else user.target in SUMS and user not in ends
            for node in lost
            for user in node.users
        )
        if all(zeros):
            enough.append(i)
    return tuple(enough)


def keeps_zeros(node: fx.Node) -> bool:
    """Is it zeros, if what it reads is?"""
    return is_view(node) or node.target in SUMS | ZEROS_OF_ZEROS


def without(
    backward: Graph, saved: int, missing: Collection[int], reached_from: Sequence[Sequence[int]]
) -> Graph:
    """A graph with the same inputs that reads exact zeros in place of what is computed from missing tangents
    alone, or leaves them out of a sum. Gradients that no other tangent leads to are None: `reached_from`."""
    reduced = copied(backward)
    graph, lost = reduced.gm.graph, computed_from(reduced, saved, missing)
    gradients = zip(results_of(graph), reached_from)
    output_node(graph).args = (tuple(None if {*t} <= {*missing} else x for x, t in gradients),)
    for node in list(graph.nodes):
        operands = node.all_input_nodes
        if node.target in SUMS and not node.kwargs and len(operands) == 2:
            others = [x for x in operands if x not in lost]
            if len(others) == 1 and same_value(others[0].meta["val"], node.meta["val"]):
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
