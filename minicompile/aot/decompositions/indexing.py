"""Gathers and scatters written with `index`, `gather`, `index_put` and `scatter_add`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minicompile.aot.decompositions.pointwise import scaled
from minicompile.aot.decompositions.registry import Rule, decompose, formulas

aten = torch.ops.aten
index = aten.index.Tensor
index_put = aten.index_put.default


def along(rule: Rule) -> Rule:
    """rule(x, indices, ...) for operators (x, dim, index, ...); tensors without dimensions keep theirs."""

    def run(x: Tensor, dim: int, at: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dim() == 0:
            return NotImplemented
        return rule(x, [None] * (dim % x.dim()) + [at.reshape([-1])], *args, **kwargs)

    return run


@decompose(aten.embedding_dense_backward.default, to="prims", wide=True)
def embedding_backward(
    grad: Tensor, at: Tensor, rows: Any, padding: int, scale_by_freq: bool
) -> Tensor:
    """Add each row of the gradient to its word's row; in float32 for half types."""
    if scale_by_freq:
        return NotImplemented
    if padding >= 0:
        grad = torch.where((at == padding).unsqueeze(-1), 0.0, grad)
    empty = torch.zeros([rows, grad.shape[-1]], dtype=grad.dtype, device=grad.device)
    return index_put(empty, [at], grad, True)


formulas(
    {
        aten.index_add.default: along(
            lambda x, at, source, *, alpha=1: index_put(x, at, scaled(source, alpha), True)
        ),
        aten.index_copy.default: along(index_put),
    },
    to="prims",
    wide=False,
)
formulas(
    {
        aten.take.default: lambda x, at: index(x.reshape([-1]), [at]),
        aten._unsafe_index.Tensor: lambda x, at: index(x, at),
        aten._index_put_impl.default: lambda x, at, values, add=False, *_: index_put(
            x, at, values, add
        ),
        aten._unsafe_index_put.default: lambda x, at, values, add=False: index_put(
            x, at, values, add
        ),
    },
    wide=False,
)
