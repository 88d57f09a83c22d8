"""Constant folding: values that are one number everywhere, by eager's own kernels.

The real compiler: torch/_inductor/fx_passes/joint_graph.py (UniformValueConstantFolder).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from minicompile.aot.views import (
    argument,
    aten_ops,
    has_effect,
    is_pointwise,
    is_random,
    is_size,
    is_symbolic,
    is_view,
    returned_nodes,
)
from minicompile.passes.manager import graph_pass

aten = torch.ops.aten

SCALAR_OPERANDS = aten_ops("add.Tensor sub.Tensor mul.Tensor div.Tensor")
"""Binary operators whose second operand may be a number of the same dtype."""


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
    if is_view(node) or target is aten.clone.default:
        return known[inputs[0]] if known[inputs[0]].dtype == value.dtype else None
    if not is_pointwise(target) or inputs != node.all_input_nodes:
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
    result = target(*args, **kwargs)  # type: ignore[operator]
    return result if isinstance(result, torch.Tensor) and result.dtype == value.dtype else None


@graph_pass("fold_constants", stage="prims", order=20)
def fold_constants(gm: fx.GraphModule, mode: Any) -> int:
    """What is one number everywhere becomes `full`; a binary operator takes such an operand as a number."""
    known: dict[fx.Node, torch.Tensor] = {}
    changed, returned = 0, returned_nodes(gm.graph)
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        found, result = uniform_value(node, known), node.meta["val"]
        if found is not None:
            known[node] = found
            fixed = result.is_contiguous() and not is_symbolic(node) and node not in returned
            if fixed and node.target is not aten.full.default:
                node.target, node.args = aten.full.default, (list(result.shape), found.item())
                node.kwargs = {"dtype": result.dtype, "device": result.device}
                changed += 1
        elif node.target in SCALAR_OPERANDS and node.args[1] in known and same_dtype(node):
            node.update_arg(1, known[node.args[1]].item())
            changed += 1
    gm.graph.eliminate_dead_code(has_effect)
    return changed


def same_dtype(node: fx.Node) -> bool:
    """Would a Python number in place of an operand be computed in the same dtype?"""
    dtypes = {value.meta["val"].dtype for value in (node, *node.all_input_nodes)}
    return (
        isinstance(node.args[0], fx.Node)
        and len(dtypes) == 1
        and dtypes <= {torch.float32, torch.float64, torch.int64}
    )
