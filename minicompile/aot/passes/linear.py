"""Matrix products: biases, products of products, products of one input.

A bias leaves `addmm` on the way to prims, so that the kernel that follows can add it; where none follows, it
goes back.

The real compiler: torch/_inductor/fx_passes/{post_grad,b2b_gemm,group_batch_fusion}.py.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, fx

from minicompile.aot.layout import hint
from minicompile.aot.passes.patterns import home, replace_nodes
from minicompile.aot.views import alias_root, argument, is_view
from minicompile.ops.graph import Rewrite, origins_of, statement
from minicompile.passes.manager import graph_pass
from minicompile.passes.patterns import Match, register_pattern

aten = torch.ops.aten

PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.convolution.default}
EXACT = (torch.float32, torch.float64)
"""Half types round after each operator: `addmm` rounds once."""


def read_by_library(node: fx.Node) -> bool:
    """Do only library calls, and the caller, read the node or views of it?"""
    return all(
        read_by_library(user) if is_view(user) else user.op == "output" or user.target in PRODUCTS
        for user in node.users
    )


@graph_pass("addmm", stage="post_grad", order=60)
def add_bias_in_product(gm: fx.GraphModule, mode: Any) -> list[Rewrite]:
    """mm + bias is one library call where no kernel could take the addition."""
    done: list[Rewrite] = []
    for node in gm.graph.nodes:
        if node.target is not aten.add.Tensor or node.kwargs or not read_by_library(node):
            continue
        for product, wide in (node.args, node.args[::-1]):
            bias = argument(wide, 0) if getattr(wide, "target", "") is aten.expand.default else None
            if bias is None or getattr(product, "target", "") is not aten.mm.default:
                continue
            fits = bias.meta["val"].dim() == 1 and bias.meta["val"].dtype in EXACT
            if fits and len(product.users) == 1 and product.meta["val"].dtype in EXACT:
                before = "\n".join(map(statement, (product, node)))
                node.target, node.args = aten.addmm.default, (bias, *product.args)
                node.meta["origins"] = origins_of(node) | origins_of(product)
                done.append(Rewrite("addmm", before, statement(node), origins_of(node)))
                break
    if done:
        gm.graph.eliminate_dead_code()
    return done


@graph_pass("back_to_back_gemm", stage="post_grad", order=70)
def mark_products_of_products(gm: fx.GraphModule, mode: Any) -> list[Rewrite]:
    """mm(mm(x, a), b): `meta["back_to_back"]` of the outer one has the bytes that lie between them."""
    done = []
    for node in gm.graph.find_nodes(op="call_function", target=aten.mm.default):
        inner = node.args[0]
        if inner.target is aten.mm.default and len(inner.users) == 1:
            value = inner.meta["val"]
            size = value.itemsize * hint(value.numel())
            node.meta["back_to_back"] = size
            text = f"{statement(inner)}\n{statement(node)}"
            origins = origins_of(node) | origins_of(inner)
            done.append(
                Rewrite("back_to_back_gemm", text, f"{text}  # {size} bytes between", origins)
            )
    return done


def is_cheaper(match: Match) -> bool:
    """Is x @ (a @ b) less arithmetic than (x @ a) @ b?"""
    x, a, b = match.values
    (rows, inner), (_, middle), (_, columns) = (map(hint, v.shape) for v in (x, a, b))
    return inner * middle * columns + rows * inner * columns < rows * middle * (inner + columns)


EXAMPLES = [torch.empty(size, requires_grad=True) for size in ((2, 3), (3, 4), (4, 5))]


@register_pattern(
    "reassociate_gemm",
    search=lambda x, a, b: torch.mm(torch.mm(x, a), b),
    examples=EXAMPLES,
    when=is_cheaper,
    option="reassociate_gemm",
)
def weights_first(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(x, torch.mm(a, b))


@graph_pass("batch_linears", stage="prims", order=60, option="batch_linears")
def batch_linears(gm: fx.GraphModule, mode: Any) -> list[Rewrite]:
    """Products of one input with several weights are one product with the weights side by side."""
    groups: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in gm.graph.find_nodes(op="call_function", target=aten.mm.default):
        if alias_root(node.args[1]).op == "placeholder" and node.meta["val"].dtype in EXACT:
            groups[node.args[0], home(node)].append(node)
    done = []
    for (x, _), group in groups.items():
        for node in group[1:]:
            hoist(node.args[1], group[0])
        match = Match(tuple(group), (x, *(node.args[1] for node in group)), tuple(group))
        if len(group) > 1:
            done.append(replace_nodes("batch_linears", gm, mode, match, side_by_side, "post_grad"))
    return list(filter(None, done))


def hoist(node: Any, place: fx.Node) -> None:
    """Compute a view of an input before `place`."""
    if node.op != "placeholder" and place < node:
        for used in node.all_input_nodes:
            hoist(used, place)
        place.prepend(node)


def side_by_side(x: Tensor, *weights: Tensor) -> Any:
    return torch.mm(x, torch.cat(weights, 1)).split([w.shape[1] for w in weights], 1)
