"""Clean-up passes on functional graphs: no-ops, constant folding, common subexpressions, dead code.

No pass merges or removes random operators' draws, merges two results that the user may write to
separately, or touches an operator kept for its effect. A merged node keeps the origins of all it stands for.

The real compiler: torch/_inductor/fx_passes/{post_grad,joint_graph}.py, torch/_functorch/compile_utils.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from minicompile.aot.layout import same_sizes, same_strides
from minicompile.aot.views import (
    alias_root,
    argument,
    has_effect,
    is_pointwise,
    is_random,
    is_size,
    is_symbolic,
    returned_nodes,
)
from minicompile.ops.graph import origins_of
from minicompile.passes.manager import graph_pass

aten = torch.ops.aten
prims = torch.ops.prims


def replace(node: fx.Node, by: fx.Node) -> None:
    """Use `by` instead of `node`, and remember where `node` came from."""
    by.meta["origins"] = origins_of(by) | origins_of(node)
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


# No-ops ------------------------------------------------------------------------------------------


def _same_value(node: fx.Node) -> bool:
    """Has the result the type and layout of the first argument?"""
    first = node.args[0]
    if not isinstance(first, fx.Node):
        return False
    old, new = first.meta["val"], node.meta["val"]
    return (
        isinstance(old, torch.Tensor)
        and isinstance(new, torch.Tensor)
        and (old.dtype, old.device) == (new.dtype, new.device)
        and same_sizes(old, new)
        and same_strides(old, new)
    )


def _identity_order(node: fx.Node) -> bool:
    order = argument(node, 1)
    return [d % len(order) for d in order] == list(range(len(order)))


def _second_is(number: int) -> Callable[[fx.Node], bool]:
    def check(node: fx.Node) -> bool:
        second = argument(node, 1)
        return isinstance(second, int | float) and second == number and not node.kwargs

    return check


NO_OPS: dict[OpOverload, Callable[[fx.Node], bool]] = {
    aten.clone.default: lambda node: True,
    aten.view.default: lambda node: True,
    aten.expand.default: lambda node: True,
    aten.permute.default: _identity_order,
    aten.slice.Tensor: lambda node: argument(node, 4, 1) == 1,
    aten.alias.default: lambda node: True,
    prims.convert_element_type.default: lambda node: True,
    aten.mul.Tensor: _second_is(1),
    aten.div.Tensor: _second_is(1),
    aten.sub.Tensor: _second_is(0),
    aten.pow.Tensor_Scalar: _second_is(1),
}
"""Operators that give back their argument when the condition holds and type and layout agree.

x + 0 is not among them: it turns -0.0 into 0.0.
"""


@graph_pass("remove_no_ops", stage="prims", order=10)
def remove_no_ops(gm: fx.GraphModule, mode: Any) -> int:
    """Drop calls that return their argument. A copy that gives a result memory of its own stays."""
    changed, returned = 0, returned_nodes(gm.graph)
    for node in list(gm.graph.nodes):
        rule = NO_OPS.get(node.target)
        if rule is not None and node not in returned and _same_value(node) and rule(node):
            replace(node, node.args[0])
            changed += 1
    return changed


# View chains -------------------------------------------------------------------------------------


@graph_pass("merge_views", stage="prims", order=15)
def merge_views(gm: fx.GraphModule, mode: Any) -> int:
    """view(view(x)) is one view, permute(permute(x)) one permutation (often none)."""
    changed = 0
    for node in list(gm.graph.nodes):
        inner: Any = argument(node, 0)
        if not isinstance(inner, fx.Node) or inner.target is not node.target:
            continue
        if node.target is aten.view.default and argument(inner, 0).meta["val"].is_contiguous():
            node.update_arg(0, inner.args[0])
        elif node.target is aten.permute.default:
            first, second = argument(inner, 1), argument(node, 1)
            rank = len(first)
            node.update_arg(1, [first[d % rank] % rank for d in second])
            node.update_arg(0, inner.args[0])
        else:
            continue
        node.meta["origins"] = origins_of(node) | origins_of(inner)
        changed += 1
    gm.graph.eliminate_dead_code(has_effect)
    return changed + remove_no_ops(gm, mode) if changed else 0


# Constants ---------------------------------------------------------------------------------------

FOLDED_VIEWS = {
    aten.expand.default,
    aten.view.default,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.slice.Tensor,
    aten.select.int,
    aten.clone.default,
}


def uniform_value(node: fx.Node, known: dict[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    """The 0-d tensor that every element of the node equals, computed by eager's own kernels; None
    if unknown.
    """
    value, target = node.meta.get("val"), node.target
    if (
        not isinstance(value, torch.Tensor)
        or not isinstance(target, OpOverload)
        or value.is_complex()
    ):
        return None
    if target is aten.full.default:
        fill = argument(node, 1)
        return None if isinstance(fill, fx.Node) else torch.full([], fill, dtype=value.dtype)
    inputs = node.all_input_nodes
    if not inputs or is_random(node) or any(i not in known for i in inputs if not is_size(i)):
        return None
    if target in FOLDED_VIEWS:
        return known.get(node.args[0])  # type: ignore[arg-type]
    if not is_pointwise(target) or any(is_size(i) for i in inputs):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
    result = target(*args, **kwargs)
    return result if isinstance(result, torch.Tensor) and result.dtype == value.dtype else None


@graph_pass("fold_constants", stage="prims", order=20)
def fold_constants(gm: fx.GraphModule, mode: Any) -> int:
    """What is one number everywhere becomes `full`; a binary operator takes such an operand as a number."""
    known: dict[fx.Node, torch.Tensor] = {}
    changed, returned = 0, returned_nodes(gm.graph)
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        found = uniform_value(node, known)
        if found is not None:
            known[node] = found
            if (
                node.target is not aten.full.default
                and node not in returned
                and not is_symbolic(node)
            ):
                changed += make_full(node, found)
        elif node.target in SCALAR_OPERANDS:
            second = node.args[1]
            if isinstance(second, fx.Node) and second in known and same_dtype(node, second):
                node.update_arg(1, known[second].item())
                changed += 1
    gm.graph.eliminate_dead_code(has_effect)
    return changed


SCALAR_OPERANDS = {
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
}
"""Binary operators whose second operand may be a number of the same dtype."""


def same_dtype(node: fx.Node, operand: fx.Node) -> bool:
    """Would a Python number in place of the operand be computed in the same dtype?"""
    first = node.args[0]
    if not isinstance(first, fx.Node):
        return False
    dtypes = {first.meta["val"].dtype, operand.meta["val"].dtype, node.meta["val"].dtype}
    return len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64, torch.int64}


def make_full(node: fx.Node, value: torch.Tensor) -> int:
    """Replace a call by `full`; False where the layout would change."""
    result = node.meta["val"]
    if not result.is_contiguous():
        return 0
    node.target, node.kwargs = aten.full.default, {"dtype": result.dtype, "device": result.device}
    node.args = (list(result.shape), value.item())
    return 1


# Common subexpressions ---------------------------------------------------------------------------


def frozen(value: Any) -> Any:
    """A hashable form of an argument that tells 1, 1.0 and True apart, and 0.0 from -0.0."""
    if isinstance(value, fx.Node):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(frozen, value))
    if isinstance(value, float):
        return (float, value.hex())
    return (type(value), value)


@graph_pass("cse", stage="prims", order=30)
def merge_equal_calls(gm: fx.GraphModule, mode: Any) -> int:
    """Compute the same thing once. A returned value keeps its own call: the user may write to it."""
    seen: dict[Any, fx.Node] = {}
    changed, returned = 0, returned_nodes(gm.graph)
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or is_random(node) or has_effect(node):
            continue
        key = (
            node.target,
            frozen(node.args),
            tuple((k, frozen(v)) for k, v in sorted(node.kwargs.items())),
        )
        first = seen.setdefault(key, node)
        if first is not node and alias_root(node) not in returned:
            replace(node, first)
            changed += 1
    return changed


@graph_pass("dead_code", stage="prims", order=90)
def remove_dead_code(gm: fx.GraphModule, mode: Any) -> int:
    """Remove what nothing reads; assertions stay."""
    before = len(gm.graph.nodes)
    gm.graph.eliminate_dead_code(has_effect)
    return before - len(gm.graph.nodes)


graph_pass("remove_no_ops", stage="forward", order=10)(remove_no_ops)
