"""Gathers and scatters by `index`, `gather`, `index_put` and `scatter_add`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minicompile.aot.decompositions.registry import decompose

aten = torch.ops.aten
index = aten.index.Tensor
index_put = aten.index_put.default


@decompose(aten.embedding_dense_backward.default, to="prims", wide=True)
def embedding_backward(
    grad: Tensor, at: Tensor, rows: Any, padding: int, scale_by_freq: bool
) -> Tensor:
    """Add each row of the gradient to its word's row; in float32 for half types."""
    if scale_by_freq:
        return NotImplemented
    if padding >= 0:
        grad = torch.where((at == padding).unsqueeze(-1), 0.0, grad)
    return index_put(grad.new_zeros([rows, grad.shape[-1]]), [at], grad, True)
