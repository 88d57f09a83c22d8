"""Attention. The fused operators (flash, memory-efficient) and their backward stay as library calls:

they never write the score matrix. The written-out form (`_scaled_dot_product_attention_math`) is
composite and arrives as matrix products and a softmax.
"""

from __future__ import annotations

import torch

from minicompile.aot.decompositions.registry import decompose
from minicompile.aot.decompositions.softmax import softmax

aten = torch.ops.aten


@decompose(aten._safe_softmax.default, to="core")
def safe_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Softmax that gives zeros instead of NaN for a row of minus infinities (everything masked)."""
    if dtype is not None:
        x = x.to(dtype)
    masked = torch.all(x == float("-inf"), dim, keepdim=True)
    return torch.where(masked, 0.0, softmax(x, dim, False))
