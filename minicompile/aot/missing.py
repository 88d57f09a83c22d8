"""Makes the backward graph for a call where some results take no part in the loss.

    return a.sqrt(), a * 2      if the second alone is differentiated: 2 * tangent, as in eager. Zeros for the
                                other tangent would add 0 / (2 * sqrt(a)), which is NaN where `a` is 0

What depends on missing tangents alone is left out, with the saved tensors that nothing else reads: they may
have been written to since. The real compiler runs the whole graph on zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from sympy import sympify
from torch import fx

from minicompile.aot.layout import inverse_order, same_value, stride_order
from minicompile.aot.result import BackwardWithout, BoxedCallable, Reduced
from minicompile.errors import BackendError
from minicompile.ops.graph import Graph, copied, output_node, placeholders
from minicompile.ops.nodes import aten_ops, has_effect, is_size, is_view, results_of
from minicompile.shapes.symnode import SizeNodes, size_expr

aten = torch.ops.aten
SUMS = aten_ops("add.Tensor")
ZEROS_OF_ZEROS = aten_ops("clone.default sum.dim_IntList neg.default _to_copy.default")


def backwards(
    whole: Callable[[], Graph],
    saved: int,
    compiled: Callable[[Graph], BoxedCallable],
    interpreted: Callable[[Graph], BoxedCallable],
) -> BackwardWithout:
    """What runs a backward graph without some tangents. `saved`: how many inputs come before these.

    Each is made when it is first needed, in a thread of its own: no user's mode is active there.
    """

    def make(missing: frozenset[int], kernels: bool, device: int) -> Reduced:
        graph, takes = without(whole(), saved, missing)
        gradients: Any = enumerate(results_of(graph.gm.graph))
        absent = frozenset(i for i, gradient in gradients if gradient is None)
        with torch.cuda.device(device):
            if kernels and takes:
                with suppress(
                    BackendError
                ):  # the compiler is gone, or there is no room for a library
                    return compiled(graph), takes, absent
            return interpreted(graph), takes, absent

    @cache
    def made(missing: frozenset[int], kernels: bool) -> Reduced:
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(make, missing, kernels, device).result()

    return made


def tangents_before(node: fx.Node) -> frozenset[int]:
    """The tangents that a node of a backward was computed from, or for."""
    return frozenset() if is_size(node) else node.meta.get("after", frozenset())


def without(backward: Graph, saved: int, missing: Set[int]) -> tuple[Graph, list[int]]:
    """Return the graph without these tangents, and the numbers of the inputs that it takes: all other
    tangents, and what is still read. A gradient that no other tangent leads to is None."""
    reduced = copied(backward)
    graph, inputs = reduced.gm.graph, placeholders(reduced.gm.graph)
    tangents = inputs[saved:]
    lost = computed_from(graph, tangents, missing)
    sizes, top = SizeNodes(graph), inputs[-1].next
    for node in filter(is_size, inputs):
        sizes.add_input(node, node.meta["val"])
    ends = [None if node in lost else node for node in results_of(graph)]
    output_node(graph).args = (tuple(ends),)
    for node in lost:
        for user in set(node.users) - lost:
            leave_out(user, node, sizes, top)
    graph.eliminate_dead_code(lambda n: n in inputs or (has_effect(n) and n not in lost))
    kept = {tangent for i, tangent in enumerate(tangents) if i not in missing}
    unread = {n for n in inputs if not (n.users or is_size(n) or n in kept)}
    takes = [i for i, node in enumerate(inputs) if node not in unread]
    for node in unread:
        graph.erase_node(node)
    reduced.gm.recompile()
    return reduced, takes


def computed_from(graph: fx.Graph, tangents: Sequence[fx.Node], missing: Set[int]) -> set[fx.Node]:
    """The nodes that are computed from missing tangents, or made for them of constants, and from no other."""
    present, lost = set[fx.Node](), set[fx.Node]()
    numbers = {node: {number} for number, node in enumerate(tangents)}
    for node in graph.nodes:
        read = [x for x in node.all_input_nodes if not is_size(x)]
        own = numbers.get(node, set() if read else tangents_before(node))
        if not own <= missing or not present.isdisjoint(read):
            present.add(node)
        elif (own or not lost.isdisjoint(read)) and not is_size(node) and node.op != "output":
            lost.add(node)
    return lost


def sufficient(backward: Graph, saved: int) -> list[int]:
    """The tangents, each of which is enough for the whole graph: zeros for the others change nothing. A loss
    is, beside the logits that it was computed from: its gradient is added to theirs."""
    graph = backward.gm.graph
    tangents, enough = placeholders(graph)[saved:], list[int]()
    for i in range(len(tangents) if len(tangents) > 1 else 0):
        lost = computed_from(graph, tangents, {*range(len(tangents))} - {i})
        exact = all(node.op == "placeholder" or keeps_zeros(node, lost) for node in lost)
        if exact and all(
            user in lost or user.target in SUMS for node in lost for user in node.users
        ):
            enough.append(i)
    return enough


def keeps_zeros(node: fx.Node, zeros: Collection[fx.Node]) -> bool:
    """Is it zeros if these nodes are, whatever else there is?"""
    known = is_view(node) or node.target in SUMS | ZEROS_OF_ZEROS
    return known and all(x in zeros or is_size(x) for x in node.all_input_nodes)


def leave_out(user: fx.Node, lost: fx.Node, sizes: SizeNodes, top: fx.Node) -> None:
    """Let a node do without one of its operands: a sum is the other one, anything else gets zeros."""
    others = [x for x in user.all_input_nodes if x is not lost]
    is_sum = user.target in SUMS and len(others) == 1 and not user.kwargs
    if is_sum and same_value(others[0].meta["val"], user.meta["val"]):
        user.replace_all_uses_with(others[0])
    else:
        user.replace_input_with(lost, zeros_for(lost, sizes, top))


def zeros_for(lost: fx.Node, sizes: SizeNodes, top: fx.Node) -> fx.Node:
    """Zeros that are laid out as a value was; made before `top`, as are the `sizes`."""
    value, order = lost.meta["val"], stride_order(lost.meta["val"])

    def call(op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = lost.graph.call_function(op, args, kwargs)
        with value.fake_mode:
            known = fx.map_arg((args, kwargs), lambda x: x.meta["val"])
            node.meta.update(lost.meta, val=op(*known[0], **known[1]))
        return node

    with lost.graph.inserting_before(top):
        shape = [sympify(size_expr(value.shape[dim])) for dim in order]
        size = [sizes.argument(expr, sizes.env, lost.meta) for expr in shape]
        zeros = call(aten.full.default, size, 0, dtype=value.dtype, device=value.device)
        return call(aten.permute.default, zeros, inverse_order(order))
