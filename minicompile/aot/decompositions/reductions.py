"""Means, variances and norms as sums; variance in two passes (mean, then squared differences), which is
stable."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from minicompile.aot.decompositions.registry import Dtype, Rule, decompose, formulas
from minicompile.compat import torch_decompositions
from minicompile.ops.dtypes import computation_dtype, sum_dtype

aten = torch.ops.aten


def all_dims(x: Tensor, dims: Any) -> list[int]:
    """The dimensions to reduce, not negative; all of them for None or an empty list."""
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return list(range(x.dim()))
    return [d % max(x.dim(), 1) for d in ([dims] if isinstance(dims, int) else dims)]


def count(x: Tensor, dims: list[int]) -> Any:
    """Elements that go into each result."""
    return math.prod(x.shape[d] for d in dims) if x.dim() else 1


def deviations(x: Tensor, dims: list[int], correction: float | None) -> tuple[Tensor, Tensor]:
    """(variance, mean), both with the reduced dimensions kept at size 1."""
    n = count(x, dims)
    middle = x.sum(dims, keepdim=True) / n
    difference = x - middle
    divisor = torch.sym_max(n - (1 if correction is None else correction), 0)
    return (difference * difference).sum(dims, keepdim=True) / divisor, middle


@decompose(aten.sum.dim_IntList, to="prims")
def sum_dims(x: Tensor, dims: Any, keepdim: bool = False, *, dtype: Dtype = None) -> Tensor:
    """Explicit about the dtype (integers are added as int64) and the dimensions."""
    wanted = dtype or sum_dtype(x.dtype)
    if x.dtype == wanted and dtype is None and dims:
        return NotImplemented
    if x.dim() == 0:
        return x.to(wanted, copy=True)
    return aten.sum.dim_IntList(x.to(wanted), all_dims(x, dims), keepdim)


@decompose(aten.mean.dim, to="prims")
def mean(x: Tensor, dims: Any, keepdim: bool = False, *, dtype: Dtype = None) -> Tensor:
    dims = all_dims(x, dims)
    return x.to(computation_dtype(dtype or x.dtype)).sum(dims, keepdim) / count(x, dims)


@decompose(aten.linalg_vector_norm.default, to="core")
def vector_norm(
    x: Tensor, order: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Dtype = None
) -> Tensor:
    """torch's formula, but for one number, which may have no finite power."""
    dims = all_dims(x, dim)
    one = order != 0 and x.is_floating_point() and dtype in (None, x.dtype)
    if one and (x.dim() == 0 or all(x.shape[d] == 1 for d in dims)):
        return x.abs().sum(dims, keepdim)
    formula = torch_decompositions[aten.linalg_vector_norm.default]
    return formula(x, order, dim, keepdim, dtype=dtype)


@decompose(aten.var_mean.correction, to="prims", wide=True)
def var_mean(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = all_dims(x, dim)
    variance, middle = deviations(x, dims, correction)
    if keepdim or x.dim() == 0:
        return variance, middle
    return variance.squeeze(dims), middle.squeeze(dims)


formulas(
    {
        aten.sum.default: lambda x, **kw: aten.sum.dim_IntList(x, all_dims(x, None), **kw),
        aten.mean.default: lambda x, **kw: aten.mean.dim(x, all_dims(x, None), **kw),
        aten.max.default: lambda x: x.amax(all_dims(x, None)),
        aten.min.default: lambda x: x.amin(all_dims(x, None)),
    },
    wide=False,
)


def with_place(reduce: Rule, place: Rule) -> Rule:
    """(largest value, its index): no index is found among truth values, so they are made numbers."""
    return lambda x, dim, keepdim=False: (
        reduce(x, dim, keepdim),
        place(x.int() if x.dtype is torch.bool else x, dim, keepdim),
    )


formulas({aten.max.dim: with_place(torch.amax, torch.argmax)}, to="prims", wide=False)
formulas({aten.min.dim: with_place(torch.amin, torch.argmin)}, to="prims", wide=False)
formulas({aten.var.correction: lambda *args, **kw: var_mean(*args, **kw)[0]}, to="prims")
formulas({aten.std.correction: lambda *args, **kw: aten.var.correction(*args, **kw).sqrt()})
