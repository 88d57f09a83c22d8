"""No-ops, constants, common subexpressions and dead code on functional graphs.

No pass merges or removes random operators' draws, merges two results that the user may write to
separately, or touches an operator kept for its effect. A merged node keeps the origins of all that it
computes; a call that changes nothing leaves no trace.

The real compiler: torch/_inductor/fx_passes/{post_grad,joint_graph}.py, torch/_functorch/compile_utils.py.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from minicompile.aot.layout import frozen, same_value
from minicompile.ops.graph import origins_of
from minicompile.ops.nodes import (
    alias_root,
    argument,
    aten_ops,
    has_effect,
    is_kept_copy,
    is_pointwise,
    is_random,
    is_size,
    is_symbolic,
    is_view,
    returned_nodes,
)
from minicompile.ops.origin import Origins
from minicompile.passes.manager import graph_pass

aten = torch.ops.aten
prims = torch.ops.prims


def replace(node: fx.Node, by: fx.Node) -> None:
    """Use `by` instead of `node`."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


# No-ops ------------------------------------------------------------------------------------------


NO_OPS = aten_ops("clone.default view.default expand.default permute.default slice.Tensor") | {
    prims.convert_element_type.default
}
"""Operators that give back their argument when type and layout agree."""

NEUTRAL = {aten.mul.Tensor: 1, aten.div.Tensor: 1, aten.sub.Tensor: 0, aten.pow.Tensor_Scalar: 1}
"""Operators that do so for this number. x + 0 and x - -0.0 are not among them: they turn -0.0 into 0.0."""


def gives_back_argument(node: fx.Node) -> bool:
    if node.target in NEUTRAL:
        number = node.args[1]
        if not isinstance(number, int | float) or number != NEUTRAL[node.target] or node.kwargs:
            return False
        if math.copysign(1, number) < 0 or node.meta["val"].is_complex():  # inf times 1 + 0j is NaN
            return False
    elif node.target not in NO_OPS:
        return False
    first = node.args[0]
    return isinstance(first, fx.Node) and same_value(first.meta["val"], node.meta["val"])


@graph_pass("remove_no_ops", stage="post_grad", order=10)
def remove_no_ops(gm: fx.GraphModule, mode: Any) -> int:
    """Drop calls that return their argument. A copy that gives a result memory of its own stays."""
    return drop_no_ops(gm, returned_nodes(gm.graph))


@graph_pass("remove_no_ops", stage="prims", order=10)
def remove_early_no_ops(gm: fx.GraphModule, mode: Any) -> int:
    """The same, but copies of inputs and results stay: the backward may read them."""
    returned = returned_nodes(gm.graph)
    return drop_no_ops(gm, {*returned, *(n for n in gm.graph.nodes if is_kept_copy(n, returned))})


def drop_no_ops(gm: fx.GraphModule, kept: Collection[fx.Node]) -> int:
    found = [node for node in gm.graph.nodes if gives_back_argument(node) and node not in kept]
    for node in found:
        replace(node, node.args[0])
    return len(found)


# Constants ---------------------------------------------------------------------------------------


def uniform_value(node: fx.Node, known: dict[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    """The 0-d tensor that every element of the node equals, by eager's own kernels; None if unknown."""
    value, target = node.meta["val"], node.target
    if not isinstance(value, torch.Tensor) or value.is_complex():
        return None
    if target is aten.full.default:
        fill = argument(node, 1)
        return None if isinstance(fill, fx.Node) else torch.full([], fill, dtype=value.dtype)
    inputs = [used for used in node.all_input_nodes if not is_size(used)]
    if not inputs or is_random(node) or any(used not in known for used in inputs):
        return None
    if target is aten._neg_view.default:
        return None
    if target is aten._to_copy.default and not node.kwargs.get("pin_memory"):  # to another device
        return known[inputs[0]].to(value.dtype)
    if is_view(node) or target is aten.clone.default:
        return known[inputs[0]] if known[inputs[0]].dtype == value.dtype else None
    if not is_pointwise(target) or inputs != node.all_input_nodes:
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
    result = target(*args, **kwargs)  # type: ignore[operator]
    return result if isinstance(result, torch.Tensor) and result.dtype == value.dtype else None


@graph_pass("fold_constants", stage="prims", order=20)
def fold_constants(gm: fx.GraphModule, mode: Any) -> int:
    """Replace each tensor whose elements are all one known number by `full`."""
    known: dict[fx.Node, torch.Tensor] = {}
    made_by: dict[fx.Node, Origins] = {}
    changed, returned = 0, returned_nodes(gm.graph)
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        found, result = uniform_value(node, known), node.meta["val"]
        if found is not None:
            known[node] = found
            operands = (made_by[used] for used in node.all_input_nodes if used in made_by)
            made_by[node] = origins_of(node).union(*operands)
            seen = alias_root(node) in returned  # with where it lies in its memory
            fixed = result.is_contiguous() and not is_symbolic(node) and not seen
            if fixed and node.target is not aten.full.default:
                node.meta["origins"] = made_by[node]
                node.target, node.args = aten.full.default, (list(result.shape), found.item())
                node.kwargs = {"dtype": result.dtype, "device": result.device}
                changed += 1
    gm.graph.eliminate_dead_code(has_effect)
    return changed


# Common subexpressions ---------------------------------------------------------------------------


@graph_pass("cse", stage="prims", order=30)
def merge_equal_calls(gm: fx.GraphModule, mode: Any) -> int:
    """Compute the same thing once. A returned value keeps a call that nothing else shares, since the user may
    write to it before backward reads it, and a checkpoint region its own, since only it is computed again."""
    seen: dict[Any, fx.Node] = {}
    changed, returned = 0, returned_nodes(gm.graph)
    returned |= {node.all_input_nodes[0] for node in returned if node.target is operator.getitem}
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or is_random(node) or has_effect(node):
            continue
        if alias_root(node) in returned:
            continue
        key = node.target, frozen(node.args), frozen(node.kwargs), node.meta.get("region")
        first = seen.setdefault(key, node)
        if first is not node:
            first.meta["origins"] = origins_of(first) | origins_of(node)
            replace(node, first)
            changed += 1
    return changed


@graph_pass("dead_code", stage="prims", order=90)
def remove_dead_code(gm: fx.GraphModule, mode: Any) -> int:
    """Remove what nothing reads; assertions stay."""
    before = len(gm.graph.nodes)
    gm.graph.eliminate_dead_code(has_effect)
    return before - len(gm.graph.nodes)
