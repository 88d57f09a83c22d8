"""Gathers and scatters by `index`, `gather`, `index_put` and `scatter_add`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minicompile.aot.decompositions.pointwise import scaled
from minicompile.aot.decompositions.registry import HALF_TYPES, decompose, formulas

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


@decompose(aten.index_add.default, to="prims")
def index_add(x: Tensor, dim: int, at: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    """As `scatter_add`, for which a negative index is an error too."""
    if x.dim() == 0 or source.dim() != x.dim() or x.dtype in (*HALF_TYPES, torch.bool):
        return NotImplemented
    column = at.reshape([-1 if d == dim % x.dim() else 1 for d in range(x.dim())])
    return x.scatter_add(dim, column.expand(source.shape).long(), scaled(source, alpha))


formulas(
    {
        aten.take.default: lambda x, at: index(x.reshape([-1]), [at]),
        aten._unsafe_index.Tensor: lambda x, at: index(x, at),
        aten._unsafe_index_put.default: lambda x, at, values, *add: index_put(x, at, values, *add),
    },
    wide=False,
)
