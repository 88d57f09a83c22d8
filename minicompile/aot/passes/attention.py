"""Attention that is written out becomes the library's fused operator, which never holds all weights at once.

Off unless asked for: it rounds differently, and gives 0 for a row whose every position is masked, where
softmax gives NaN. The captured graph is rewritten, so that the gradient is the library's too.

The real compiler: torch/_inductor/fx_passes/fuse_attention.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from minicompile.ops.dtypes import EXACT
from minicompile.ops.graph import target_name
from minicompile.passes.manager import graph_pass
from minicompile.passes.patterns import Match, register_pattern
from minicompile.shapes.symnode import size_expr

SCALES: dict[str, Any] = {
    "multiplied": (lambda s, f: s * f, lambda f: f, [0.1]),
    "divided": (lambda s, f: s / f, lambda f: 1 / f, [0.1]),
    "unscaled": (lambda s: s, lambda: 1.0, []),
}
"""How scores are scaled, the factor that this is, and an example."""
MASKS: dict[str, Any] = {
    "filled": (lambda s, m: s.masked_fill(m, -torch.inf), lambda q, m: ~m, [torch.empty(2, 2) > 0]),
    "added": (lambda s, m: s + m, lambda q, m: m.to(q.dtype), [torch.empty(2, 2)]),
    "unmasked": (lambda s: s, lambda q: None, []),
}
"""How scores are masked, the library's mask for it, and an example. Added truth values count as 1."""
SOFTMAX: dict[str, Any] = {
    "function": lambda s: torch.softmax(s, dim=-1),
    "functional": lambda s: F.softmax(s, dim=-1),
    "method": lambda s: s.softmax(-1),
    "method_dim": lambda s: s.softmax(dim=-1),
}


@graph_pass("idle_dropout", stage="pre_grad", order=10, option="fuse_attention")
def remove_idle_dropout(gm: fx.GraphModule, mode: Any) -> int:
    """Dropout that drops nothing has given its argument back; its call reads the softmax for nobody."""
    calls = [n for n in gm.graph.nodes if target_name(n.target).endswith("dropout") and not n.users]
    calls = [n for n in calls if not any((*n.args[3:], n.kwargs.get("inplace")))]
    idle = [n for n in calls if n.meta["val"] is n.all_input_nodes[0].meta["val"]]
    for node in idle:
        gm.graph.erase_node(node)
    return len(idle)


def fits(match: Match) -> bool:
    """Full precision, the same batch and heads for queries, keys and values, a scale that isn't zero, and a
    mask without gradient, no less than a matrix."""
    q, k, v, *rest = match.values
    masks = [value for value in rest if isinstance(value, Tensor)]
    sizes = [tuple(map(size_expr, value.shape)) for value in (q, k.mT, v)]
    dtypes = {value.dtype for value in (q, k, v, match.results[0].meta["val"])}
    return (
        len({size[:2] + size[3:] for size in sizes}) == 1
        and q.dim() == 4
        and (len(dtypes) == 1 and dtypes <= EXACT)
        and all(mask.dim() > 1 and not mask.requires_grad for mask in masks)
        and all(isinstance(value, Tensor) or value != 0 for value in rest)
    )


def add_pattern(scale: str, mask: str, how: str) -> None:
    scaled, factor, numbers = SCALES[scale]
    masked, allowed, masks = MASKS[mask]
    softmax, n = SOFTMAX[how], len(numbers)

    @register_pattern(
        f"attention.{scale}.{mask}.{how}",
        search=lambda q, k, v, *rest: softmax(masked(scaled(q @ k, *rest[:n]), *rest[n:])) @ v,
        examples=[*[torch.empty(2, 2, 2, 2)] * 3, *numbers, *masks],
        stage="pre_grad",
        when=fits,
        option="fuse_attention",
    )
    def attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        scale, mask = factor(*rest[:n]), allowed(q, *rest[n:])
        return F.scaled_dot_product_attention(q, k.transpose(-2, -1), v, mask, scale=scale)


for names in itertools.product(SCALES, MASKS, SOFTMAX):
    add_pattern(*names)
