"""Gathers and scatters written with `index`, `gather`, `index_put` and `scatter_add`."""

from __future__ import annotations

from typing import Any

import torch

from minicompile.aot.decompositions.registry import decompose

aten = torch.ops.aten
Tensor = torch.Tensor


def _at(dim: int, index: Tensor, rank: int) -> list[Tensor | None]:
    """Index only dimension `dim`."""
    return [index if d == dim % max(rank, 1) else None for d in range(dim % max(rank, 1) + 1)]


@decompose(aten.embedding_dense_backward.default, to="prims")
def embedding_backward(
    grad: Tensor, index: Tensor, rows: Any, padding: int, scale_by_freq: bool
) -> Tensor:
    """Add each row of the gradient to its word's row; in float32 for half types."""
    if scale_by_freq:
        return NotImplemented
    dtype = torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else grad.dtype
    grad = grad.to(dtype)
    if padding >= 0:
        grad = torch.where((index == padding).unsqueeze(-1), 0.0, grad)
    empty = torch.zeros([rows, grad.shape[-1]], dtype=dtype, device=grad.device)
    return aten.index_put.default(empty, [index], grad, True)


@decompose(aten.index_add.default, to="prims")
def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Tensor:
    if x.dim() == 0:
        return NotImplemented
    source = source if alpha == 1 else source * alpha
    return aten.index_put.default(x, _at(dim, index.reshape([-1]), x.dim()), source, True)


@decompose(aten.index_copy.default, to="prims")
def index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    if x.dim() == 0:
        return NotImplemented
    return aten.index_put.default(x, _at(dim, index.reshape([-1]), x.dim()), source)


@decompose(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, to="prims")
def index_fill(x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    if x.dim() == 0:
        return NotImplemented
    filler = (
        value
        if isinstance(value, Tensor)
        else torch.full([], value, dtype=x.dtype, device=x.device)
    )
    return aten.index_put.default(x, _at(dim, index.reshape([-1]), x.dim()), filler.to(x.dtype))


@decompose(aten.take.default, to="core")
def take(x: Tensor, index: Tensor) -> Tensor:
    return aten.index.Tensor(x.reshape([-1]), [index])


@decompose(aten._index_put_impl.default, aten._unsafe_index_put.default, to="core")
def index_put(
    x: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False, *_: Any
) -> Tensor:
    return aten.index_put.default(x, indices, values, accumulate)


@decompose(aten._unsafe_index.Tensor, to="core")
def unsafe_index(x: Tensor, indices: list[Tensor | None]) -> Tensor:
    return aten.index.Tensor(x, indices)
