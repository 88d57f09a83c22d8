"""Splits a backward graph by results, so that each can be differentiated in a call of its own, as in eager.

    return net(real), net(fake)     two parts, each a node of autograd: they share parameters alone
    return logits, loss             one: what the operators that both come from keep is gone after a backward

Eager frees what it passes. So results are one part if they share an operation that keeps something for its
backward; views, sums and casts keep nothing, and run in the backward of every part. Of the joint graph's
backward each part gets its piece, compiled alone: what is shared is little, but kernels aren't fused across.
The real compiler has one node for all, and refuses the second backward.

Autograd goes on from a node to all of its inputs, with no gradient for some. So a part's results also come
from the same inputs with a history: it may be used up, or run a user's code. Where that would divide results
that share an operation which keeps something, the frame runs in eager.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from minicompile import compat
from minicompile.aot.missing import without
from minicompile.aot.result import AotResult, Part
from minicompile.errors import Unsupported
from minicompile.ops.graph import Graph, output_node, placeholders
from minicompile.ops.nodes import results_of


def find_parts(results: Sequence[torch.Tensor], inputs: Mapping[int, Any]) -> list[Part]:
    """Which differentiable results go together, the inputs (leaves, or `GradientEdge`s) that they reach, and
    whether nothing is kept on the way, so that eager goes it any number of times."""
    places = {x.node if isinstance(x, GradientEdge) else id(x): i for i, x in inputs.items()}
    leader, owner = [*range(len(results))], dict[Any, int]()
    reached, keeping = [set[int]() for _ in results], set[int]()
    several = len(results) > 1
    continued = {i for i, x in inputs.items() if several and isinstance(x, GradientEdge)}

    def first(number: int) -> int:
        while leader[number] != number:
            number = leader[number]
        return number

    for number, result in enumerate(results):
        waiting, seen = [result.grad_fn], set[Any]()
        last = number + 1 == len(results) and not continued
        while waiting:
            node: Any = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            end = places.get(node, places.get(id(getattr(node, "variable", None))))
            if end is not None:
                reached[number].add(end)
                continue
            if number not in keeping and compat.keeps_something(node):
                keeping.add(number)
            before = owner.setdefault(node, number)
            one, other = first(before), first(number)
            if one != other and compat.keeps_something(node):
                leader[max(one, other)] = min(one, other)
            if last and number in keeping and not any(map(first, leader)):
                return [Part(tuple(range(len(results))), tuple(inputs))]
            if continued or before == number or first(before) != first(number):
                waiting += [following for following, _ in node.next_functions]
    groups: dict[tuple[int, frozenset[int]], list[int]] = {}
    for number, ends in enumerate(reached):
        groups.setdefault((first(number), frozenset(continued & ends)), []).append(number)
    if len({together for together, _ in groups}) < len(groups):
        raise Unsupported("results share an operation, but some come from inputs that others don't")
    found = []
    for group in groups.values():
        inputs_of = sorted(set[int]().union(*(reached[i] for i in group)))
        found.append(Part(tuple(group), tuple(inputs_of), keeping.isdisjoint(group)))
    return found


def backward_of(aot: AotResult) -> list[tuple[Graph, Sequence[int]]]:
    """The backward graph of each part, and the numbers of the saved values that it takes."""
    whole, saved = aot.backward, aot.metadata.saved
    if whole is None or len(aot.metadata.parts) == 1:
        return [] if whole is None else [(whole, range(saved))]
    found: list[tuple[Graph, Sequence[int]]] = []
    for number, part in enumerate(aot.metadata.parts, 1):
        graph, takes = piece(whole, saved, part)
        graph.name = "backward" if number == 1 else f"backward_{number}"
        found.append((graph, takes))
    return found


def piece(whole: Graph, saved: int, part: Part) -> tuple[Graph, list[int]]:
    """A part's backward graph, with all of its tangents and gradients."""
    tangents = len(placeholders(whole.gm.graph)) - saved
    graph, takes = without(whole, saved, set(range(tangents)).difference(part.results))
    numbers = {old: new for new, old in enumerate(sorted(part.results))}
    for node in graph.nodes:
        after = node.meta.get("after", ())
        node.meta["after"] = frozenset(numbers[i] for i in after if i in numbers)
    gradients = results_of(graph.gm.graph)
    output_node(graph.gm.graph).args = (tuple(gradients[i] for i in part.inputs),)
    graph.gm.recompile()
    return graph, [i for i in takes if i < saved]
