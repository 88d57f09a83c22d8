"""May a value of a graph before functionalization be computed later than it is? Not if something writes to
it, or to what it is computed from, in between.

Calls here are Python's: what they give may lie in the memory of what they take, unless they are known to
allocate. Inputs may lie in each other's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from minicompile.aot.passes.patterns import may_write
from minicompile.ops.graph import target_name
from minicompile.ops.nodes import is_pointwise

ALLOCATE = {
    "arange",
    "ones",
    "zeros",
    "full",
    "ones_like",
    "zeros_like",
    "full_like",
    "tril",
    "triu",
}
ALLOCATE |= {"matmul", "linear", "softmax", "embedding", "layer_norm", "mean", "sum"}
MAY_BE_THE_SAME = {
    "to",
    "float",
    "bool",
    "long",
    "int",
    "half",
    "bfloat16",
    "type_as",
    "contiguous",
}


def allocates(node: fx.Node) -> bool:
    """Is the result surely in memory of its own?"""
    if not node.op.startswith("call") or "out" in node.kwargs:
        return False
    name = target_name(node.target).rpartition(".")[2]
    packet: Any = getattr(torch.ops.aten, name, None)
    if name in ALLOCATE:
        return True
    if packet is None or name.endswith("_") or name in MAY_BE_THE_SAME:
        return False
    ops = [getattr(packet, overload) for overload in packet.overloads()]
    plain = (op for op in ops if not op._schema.is_mutable)
    return any(map(is_pointwise, ops)) and all(
        r.alias_info is None for op in plain for r in op._schema.returns
    )


class Writes:
    """The calls before `end` that may write, but for those that write to nothing that others see."""

    def __init__(self, end: fx.Node, unseen: Collection[fx.Node] = ()) -> None:
        self.homes: dict[fx.Node, set[fx.Node]] = {}
        self.found = list[tuple[fx.Node, set[fx.Node]]]()
        for node in end.graph.nodes:
            if node is end:
                break
            inputs = node.all_input_nodes
            own = not inputs or not node.op.startswith("call") or allocates(node)
            self.homes[node] = {node} if own else self.of(inputs)
            if may_write(node) and node not in unseen:
                self.found.append((node, self.of(inputs)))

    def of(self, nodes: list[fx.Node]) -> set[fx.Node]:
        """Whose memory they may lie in."""
        return set[fx.Node]().union(*(self.homes[node] for node in nodes))

    def spare(self, node: fx.Node) -> bool:
        """Is a value the same if it is computed at the end?"""
        homes = self.of([node, *node.all_input_nodes])
        outside = any(map(is_outside, homes))
        for call, written in self.found:
            if call > node and (
                not homes.isdisjoint(written) or (outside and any(map(is_outside, written)))
            ):
                return False
        return True


def is_outside(node: fx.Node) -> bool:
    return not node.op.startswith("call")
