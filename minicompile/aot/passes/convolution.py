"""Batch norm after a convolution, in inference: its scale goes into the weights.

The real compiler: torch/_inductor/fx_passes/efficient_conv_bn_eval.py, torch/nn/utils/fusion.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from minicompile.aot.passes.linear import EXACT
from minicompile.aot.passes.patterns import replace_nodes
from minicompile.ops.graph import Rewrite
from minicompile.passes.manager import graph_pass
from minicompile.passes.patterns import Match

aten = torch.ops.aten
NORM = aten._native_batch_norm_legit_no_training.default


@graph_pass("fold_batch_norm", stage="joint", order=40, option="fold_batch_norm")
def fold_batch_norm(gm: fx.GraphModule, mode: Any) -> list[Rewrite]:
    """The statistics are inputs, so the scaled weights are computed in the graph."""
    done = []
    inference = all(node.meta.get("phase") != "backward" for node in gm.graph.nodes)
    for norm in gm.graph.find_nodes(op="call_function", target=NORM) if inference else ():
        conv, gamma, beta, mean, var, _, eps = norm.args
        first = [user for user in norm.users if user.args[1] == 0]
        if conv.target is not aten.convolution.default or len(first) != 1:
            continue
        x, weight, bias, stride, padding, dilation, transposed, padded, groups = conv.args
        if transposed or conv.meta["val"].dtype not in EXACT:
            continue

        def folded(
            x: Tensor, w: Tensor, b: Any, gamma: Any, beta: Any, mean: Tensor, var: Tensor,
            eps: Any = eps, rest: Any = (stride, padding, dilation, False, padded, groups),
        ) -> Tensor:  # fmt: skip
            scale = torch.rsqrt(var + eps) if gamma is None else gamma * torch.rsqrt(var + eps)
            shift = -mean if b is None else b - mean
            shift = shift * scale if beta is None else shift * scale + beta
            scaled = w * scale.view(-1, *[1] * (w.dim() - 1))
            return aten.convolution(x, scaled, shift, *rest)

        arguments = (x, weight, bias, gamma, beta, mean, var)
        match = Match((first[0],), arguments, (conv, norm, first[0]))
        done.append(replace_nodes("fold_batch_norm", gm, mode, match, folded, "joint"))
    return list(filter(None, done))
