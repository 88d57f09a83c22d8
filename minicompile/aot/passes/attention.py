"""Attention that is written out becomes the library's fused operator, which never holds the weights whole.

Off unless asked for: it rounds differently, and gives 0 for a row whose every position is masked, where
softmax gives NaN. It rewrites the captured graph, so that its gradient is the library's too.

The real compiler: torch/_inductor/fx_passes/fuse_attention.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from minicompile.aot.layout import size_expr
from minicompile.aot.passes.linear import EXACT
from minicompile.passes.patterns import Match, register_pattern

SCALES: dict[str, Any] = {
    "multiplied": (lambda s, f: s * f, lambda f: f),
    "divided": (lambda s, f: s / f, lambda f: 1 / f),
    "unscaled": (lambda s: s, lambda: 1.0),
}
"""How scores are scaled, and the factor that this is."""
MASKS: dict[str, Any] = {
    "filled": (lambda s, m: s.masked_fill(m, float("-inf")), lambda m: ~m),
    "added": (lambda s, m: s + m, lambda m: m),
    "unmasked": (lambda s: s, lambda: None),
}
"""How scores are masked, and the mask that the library takes for it."""
SOFTMAX: dict[str, Any] = {
    "torch": lambda s: torch.softmax(s, dim=-1),
    "functional": lambda s: F.softmax(s, dim=-1),
    "method": lambda s: s.softmax(-1),
    "method_dim": lambda s: s.softmax(dim=-1),
}


def fits(match: Match) -> bool:
    """One dtype that is computed as it is stored, and the same batch and heads for all."""
    q, k, v, *rest = match.values
    masks = [value for value in rest if isinstance(value, Tensor)]
    heads = {tuple(map(size_expr, value.shape[:-2])) for value in (q, k, v)}
    dtypes = {value.dtype for value in (q, k, v, match.results[0].meta["val"])}
    return (
        len(heads) == len(dtypes) == 1
        and dtypes <= set(EXACT)
        and (q.dim(), size_expr(v.shape[-1])) == (4, size_expr(q.shape[-1]))
        and all(mask.dtype in (torch.bool, q.dtype) and not mask.requires_grad for mask in masks)
    )


def register(scale: str, mask: str, softmax: str) -> None:
    scaled, factor = SCALES[scale]
    masked, allowed = MASKS[mask]
    numbers = [0.123] if scale != "unscaled" else []
    masks = [torch.empty(2, 2)] if mask != "unmasked" else []
    count = len(numbers)

    def written(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        weights = SOFTMAX[softmax](masked(scaled(q @ k, *rest[:count]), *rest[count:]))
        return weights @ v

    @register_pattern(
        f"attention.{scale}.{mask}.{softmax}",
        search=written,
        examples=[*[torch.empty(2, 2, 2, 2)] * 3, *numbers, *masks],
        stage="pre_grad",
        when=fits,
        option="fuse_attention",
    )
    def attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        mask, scale = allowed(*rest[count:]), factor(*rest[:count])
        return F.scaled_dot_product_attention(q, k.transpose(-2, -1), v, mask, scale=scale)


for choice in itertools.product(SCALES, MASKS, SOFTMAX):
    register(*choice)
