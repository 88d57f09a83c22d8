"""A bias leaves `addmm` on the way to prims, so that the kernel that follows can add it. Where only library
calls follow, or none, it goes back.

The real compiler: the patterns for addmm in torch/_inductor/fx_passes/post_grad.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from minicompile.ops.dtypes import EXACT
from minicompile.ops.graph import Rewrite, origins_of, statement
from minicompile.ops.nodes import has_effect, is_view
from minicompile.passes.manager import graph_pass

aten = torch.ops.aten

LIBRARY = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.convolution.default}
LIBRARY |= {aten._scaled_dot_product_flash_attention_for_cpu.default}


def is_call(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target


def read_by_library(node: fx.Node) -> bool:
    """Do only library calls, and the caller, read the node or views of it?"""
    return all(
        read_by_library(user) if is_view(user) else user.op == "output" or user.target in LIBRARY
        for user in node.users
    )


@graph_pass("addmm", stage="post_grad", order=60)
def add_bias_in_product(gm: fx.GraphModule, mode: Any) -> list[Rewrite]:
    """Make mm + bias one library call where no kernel could take the addition."""
    done: list[Rewrite] = []
    for node in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        product, wide = node.args if is_call(node.args[0], aten.mm.default) else node.args[::-1]
        if not is_call(product, aten.mm.default) or not is_call(wide, aten.expand.default):
            continue
        bias, alone = wide.args[0], len(product.users) == 1 and not node.kwargs
        types = {value.meta["val"].dtype for value in (bias, product)}
        if alone and types <= EXACT and bias.meta["val"].dim() == 1 and read_by_library(node):
            before = "\n".join(map(statement, (product, node)))
            node.target, node.args = aten.addmm.default, (bias, *product.args)
            node.meta["origins"] = origins_of(node) | origins_of(product)
            done.append(Rewrite("addmm", before, statement(node), origins_of(node)))
            gm.graph.eliminate_dead_code(has_effect)
    return done
