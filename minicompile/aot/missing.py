"""The backward graph of calls of which some results get no gradient.

    return a.sqrt(), a * 2      if the second alone is differentiated: 2 * tangent, as in eager. Zeros for the
                                other tangent would add 0 / (2 * sqrt(a)), which is NaN where `a` is 0

What depends on missing tangents alone is left out, with the saved tensors that nothing else reads: they may
have been written to since. The real compiler runs the whole graph on zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from sympy import sympify
from torch import fx

from minicompile.aot.layout import inverse_order, same_value, stride_order
from minicompile.aot.partition import ancestors, is_constant, size_expressions
from minicompile.aot.result import BackwardWithout, BoxedCallable, Reduced
from minicompile.errors import BackendError
from minicompile.ops.graph import Graph, copied, output_node, placeholders
from minicompile.ops.nodes import aten_ops, has_effect, is_random, is_size, is_view, results_of
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


def without(
    backward: Graph, saved: int, missing: Set[int], of_part: Collection[int] | None = None
) -> tuple[Graph, list[int]]:
    """The graph without these tangents, and the numbers of the inputs that it takes. Gradients that no other
    tangent leads to are None; elsewhere zeros stand for what is left out. `of_part`: the gradients of a part,
    which are zeros then, or constant; it takes all its tangents."""
    found = copied(backward)
    graph, inputs = found.gm.graph, placeholders(found.gm.graph)
    tangents = dict(enumerate(inputs[saved:]))
    absent = [tangents.pop(i) for i in missing]
    possible = [node for node in inputs if node not in absent]
    possible += absent if of_part is None else []
    if missing:
        (present, lost), gradients = split_tangents(inputs[saved:], missing), results_of(graph)
        sizes, top = SizeNodes(graph), inputs[-1].next
        for node in possible:
            sizes.add_input(node, node.meta["val"])

        ends: list[fx.Node | None] = []
        for i, node in enumerate(gradients):
            after = node.meta.get("after", frozenset()) if node is not None else frozenset()
            wanted = i in of_part if of_part is not None else not after <= missing
            end = zeros_for(node, sizes, top) if wanted and node in lost else node
            ends.append(end if wanted or node in present else None)
        output_node(graph).args = (tuple(ends),)
        for node in lost:
            for user in present.intersection(node.users):
                leave_out(user, node, sizes, top)
        others = {n for n in graph.nodes if n in lost or (is_random(n) and n not in present)}
        graph.eliminate_dead_code(lambda n: has_effect(n) and n not in others.difference(inputs))
    taken = {node for node in inputs if not missing or node.users or is_size(node)}
    taken.update(tangents.values() if of_part is not None else ())
    values = map(size_expressions, (node for node in graph.nodes if node not in inputs))
    unknown = set().union(*(expr.free_symbols for expr in set().union(*values)))
    unknown -= set().union(*map(size_expressions, taken))
    for node in reversed(possible):  # whose shape tells a size
        if not unknown.isdisjoint(size_expressions(node)):
            unknown -= size_expressions(node)
            taken.add(node)
    takes = [i for i, node in enumerate(inputs) if node in taken]
    for i in set(range(len(inputs))).difference(takes):
        graph.erase_node(inputs[i])
    found.gm.recompile()
    return found, takes


def numbers_after(graph: fx.Graph, tangents: Collection[int]) -> list[fx.Node]:
    """The constants that a backward made of these tangents, and others."""
    marked = (node for node in graph.nodes if node.op != "placeholder" and "after" in node.meta)
    return [n for n in marked if is_constant(n) and not n.meta["after"].isdisjoint(tangents)]


def split_tangents(
    tangents: Sequence[fx.Node], missing: Collection[int]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """What is computed from tangents that there are, and from missing ones alone. Constants made of these are
    zeros, or lead to what a sum can do without."""
    graph, there = tangents[0].graph, set(range(len(tangents))).difference(missing)
    made = numbers_after(graph, there)
    present = dependents([*(tangents[i] for i in there), *made])
    lost = dependents(tangents[i] for i in missing).difference(present)
    rest = dependents(set(numbers_after(graph, missing)).difference(made)).difference(present, lost)
    needed = [n for n in rest if any(u in present and u.target not in SUMS for u in n.users)]
    return present, lost | (rest - ancestors(needed))


def sufficient(backward: Graph, saved: int) -> list[int]:
    """The tangents, each of which is enough for the whole graph: zeros for the others change nothing. A loss
    is, beside the logits that it was computed from: its gradient is added to theirs."""
    tangents = placeholders(backward.gm.graph)[saved:]
    found = []
    for i in range(len(tangents) if len(tangents) > 1 else 0):
        present, lost = split_tangents(tangents, {*range(len(tangents))} - {i})
        exact = all(node.op == "placeholder" or keeps_zeros(node, lost) for node in lost)
        sums = {user.target for node in lost for user in present.intersection(node.users)}
        if exact and sums <= SUMS and lost.isdisjoint(results_of(backward.gm.graph)):
            found.append(i)
    return found


def keeps_zeros(node: fx.Node, zeros: Collection[fx.Node]) -> bool:
    """Is it zeros if these nodes are, whatever else there is?"""
    known = is_view(node) or node.target in SUMS | ZEROS_OF_ZEROS
    return known and all(x in zeros or is_size(x) for x in node.all_input_nodes)


def dependents(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """What is computed from some nodes, and these."""
    found, waiting = set[fx.Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found and node.op != "output":
            found.add(node)
            waiting.extend(node.users)
    return found


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
