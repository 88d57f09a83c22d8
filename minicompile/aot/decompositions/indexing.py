"""Gathers and scatters by `index`, `gather`, `index_put` and `scatter_add`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minicompile.aot.decompositions.pointwise import scaled
from minicompile.aot.decompositions.registry import decompose
from minicompile.ops.dtypes import HALF_TYPES

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


def column(x: Tensor, dim: int, at: Tensor, source: Tensor) -> Tensor:
    """Positions along one dimension for all elements of `source`."""
    shape = [-1 if d == dim % x.dim() else 1 for d in range(x.dim())]
    return at.reshape(shape).expand(source.shape).long()


@decompose(aten.index_add.default, to="prims")
def index_add(x: Tensor, dim: int, at: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    """As `scatter_add`, for which a negative index is an error too."""
    if x.dim() == 0 or source.dim() != x.dim() or x.dtype in (*HALF_TYPES, torch.bool):
        return NotImplemented
    return x.scatter_add(dim, column(x, dim, at, source), scaled(source, alpha))


@decompose(aten.index_copy.default, to="prims")
def index_copy(x: Tensor, dim: int, at: Tensor, source: Tensor) -> Tensor:
    if x.dim() == 0 or source.dim() != x.dim():
        return NotImplemented
    return x.scatter(dim, column(x, dim, at, source), source)


@decompose(aten.masked_scatter.default, to="prims")
def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Where the mask holds, the next element of `source`."""
    if source.numel() == 0:
        return NotImplemented
    x, mask = torch.broadcast_tensors(x, mask)
    place = mask.reshape([-1]).cumsum(0).reshape(x.shape) - 1
    return torch.where(mask, index(source.reshape([-1]), [torch.where(mask, place, 0)]), x)
