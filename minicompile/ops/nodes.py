"""What rooms ask of a node or an operator: is it a view, a size, random, kept for its effect?

Answers come from the operator's schema and tags, and from the value that the node keeps.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Collection
from typing import Any, TypeGuard

import torch
from torch import fx
from torch._ops import OpOverload

from minicompile.ops.graph import output_node
from minicompile.ops.overloads import aten_ops as aten_ops
from minicompile.ops.writes import arguments
from minicompile.shapes.symnode import hint

aten = torch.ops.aten


ADDRESSED = aten_ops("as_strided.default as_strided_scatter.default")
"""Their offset counts from the start of the storage, not of the tensor."""
ALIASES = {aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.detach_.default}
"""The same elements in the same places: functional graphs do without them."""


def is_kept_copy(node: fx.Node, results: Collection[fx.Node]) -> bool:
    """Did the program keep what an input or a result holds, which may be written to after the graph?"""
    if node.target is not torch.ops.aten.clone.default:
        return False
    root = alias_root(node.all_input_nodes[0])
    return root.op == "placeholder" or root in results


@functools.cache
def gives_view(op: OpOverload) -> bool:
    """Does the operator return (part of) an argument's memory, and not what it wrote there, by its schema?"""
    shown = (result.alias_info for result in op._schema.returns)
    return any(alias is not None and not alias.is_write for alias in shown)


def is_view(node: fx.Node) -> bool:
    """Does the node return (part of) its first argument's memory?"""
    target = node.target
    if target is operator.getitem:
        whole = node.args[0]
        return isinstance(whole, fx.Node) and is_view(whole)
    known = isinstance(target, OpOverload) and gives_view(target)
    return known or target is aten._unsafe_view.default


def alias_root(node: fx.Node) -> fx.Node:
    """The node whose memory a view (of views) shows; the node itself if it isn't a view."""
    while is_view(node):
        first = node.args[0]
        assert isinstance(first, fx.Node)
        node = first
    return node


def has_effect(node: fx.Node) -> bool:
    """Must the node stay even if nothing reads it? Assertions return nothing; random numbers that are drawn
    and thrown away change those that come later."""
    if node.op in ("placeholder", "output") or is_random(node):
        return True
    return isinstance(node.target, OpOverload) and not node.target._schema.returns


def is_tagged(target: object, tag: torch.Tag) -> TypeGuard[OpOverload]:
    return isinstance(target, OpOverload) and tag in target.tags


def is_random(node: fx.Node) -> bool:
    """Would a second call give other numbers? Attention without dropout would not."""
    if not is_tagged(node.target, torch.Tag.nondeterministic_seeded):
        return False
    dropout = arguments(node.target, node.args, node.kwargs, lambda p: p.name == "dropout_p")
    return not dropout or bool(dropout[0])


def is_pointwise(target: object) -> bool:
    return is_tagged(target, torch.Tag.pointwise)


def is_inplace_view(target: object) -> bool:
    """`t_`, `unsqueeze_`: same memory, the tensor's own shape changes."""
    return is_tagged(target, torch.Tag.inplace_view)


def is_size(node: fx.Node) -> bool:
    """A symbolic size, or a float that is known at run time."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat)


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_symbolic(node: fx.Node) -> bool:
    """A tensor with a size that isn't known when compiling."""
    return is_tensor(node) and any(isinstance(n, torch.SymInt) for n in node.meta["val"].shape)


def elements(node: fx.Node) -> int:
    """How many a tensor has, for the sizes at hand; 0 for anything else."""
    return math.prod(map(hint, node.meta["val"].shape)) if is_tensor(node) else 0


def bytes_of(node: fx.Node) -> int:
    """Of a tensor's elements, for the sizes at hand."""
    return node.meta["val"].element_size() * elements(node) if is_tensor(node) else 0


def argument(node: fx.Node, index: int, default: Any = None) -> Any:
    """A positional argument, or the default if it was left out."""
    return node.args[index] if index < len(node.args) else default


def writes(target: object) -> TypeGuard[OpOverload]:
    """Does the operator write elements? In-place views don't."""
    mutable = isinstance(target, OpOverload) and target._schema.is_mutable
    return mutable and not is_inplace_view(target)


def results_of(graph: fx.Graph) -> Any:
    """What a graph returns: a tuple, for joint graphs a pair of them."""
    return output_node(graph).args[0]


def returned_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose memory the graph's results show, or what speaks of addresses."""
    addressed = [argument(node, 0) for node in graph.nodes if node.target in ADDRESSED]
    return {alias_root(node) for node in (*output_node(graph).all_input_nodes, *addressed)}
