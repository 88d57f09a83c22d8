"""Means, variances and norms as sums; variance in two passes (mean, then squared differences),
which is stable.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from minicompile.aot.decompositions.registry import decompose, wide

aten = torch.ops.aten
Tensor = torch.Tensor


def all_dims(x: Tensor, dims: Any) -> list[int]:
    """The dimensions to reduce, not negative; all of them for None or an empty list."""
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return list(range(x.dim()))
    return [d % max(x.dim(), 1) for d in ([dims] if isinstance(dims, int) else dims)]


def count(x: Tensor, dims: list[int]) -> Any:
    """Elements that go into each result."""
    return math.prod(x.shape[d] for d in dims) if x.dim() else 1


def _cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None or dtype == x.dtype else x.to(dtype)


@decompose(aten.sum.default, to="core")
def sum_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return aten.sum.dim_IntList(x, list(range(x.dim())), False, dtype=dtype)


@decompose(aten.sum.dim_IntList, to="prims")
def sum_dims(
    x: Tensor, dims: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Explicit about the dtype (integers are added as int64) and the dimensions."""
    wanted = dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
    if x.dtype == wanted and dtype is None and dims:
        return NotImplemented
    if x.dim() == 0:
        return _cast(x, wanted).clone()
    return aten.sum.dim_IntList(_cast(x, wanted), all_dims(x, dims), keepdim)


@decompose(aten.mean.default, to="core")
def mean_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return aten.mean.dim(x, list(range(x.dim())), False, dtype=dtype)


@decompose(aten.mean.dim, to="prims")
def mean(
    x: Tensor, dims: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    dims = all_dims(x, dims)
    return wide(_cast(x, dtype)).sum(dims, keepdim) / count(x, dims)


def deviations(x: Tensor, dims: list[int], correction: float | None) -> tuple[Tensor, Tensor]:
    """(variance, mean), both with the reduced dimensions kept at size 1."""
    n = count(x, dims)
    middle = x.sum(dims, keepdim=True) / n
    difference = x - middle
    divisor = n - (1 if correction is None else correction)
    if isinstance(divisor, int | float) and divisor <= 0:
        divisor = 0.0
    return (difference * difference).sum(dims, keepdim=True) / divisor, middle


def _finish(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    return x if keepdim or x.dim() == 0 else x.squeeze(dims)


@decompose(aten.var_mean.correction, to="prims")
def var_mean(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    if x.is_complex():
        return NotImplemented
    dims = all_dims(x, dim)
    variance, middle = deviations(wide(x), dims, correction)
    return _finish(variance, dims, keepdim), _finish(middle, dims, keepdim)


@decompose(aten.var.correction, to="prims")
def var(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    if x.is_complex():
        return NotImplemented
    dims = all_dims(x, dim)
    return _finish(deviations(wide(x), dims, correction)[0], dims, keepdim)


@decompose(aten.std.correction, to="core")
def std(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    if x.is_complex():
        return NotImplemented
    return torch.sqrt(aten.var.correction(wide(x), dim, correction=correction, keepdim=keepdim))


@decompose(aten.std_mean.correction, to="core")
def std_mean(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    if x.is_complex():
        return NotImplemented
    variance, middle = aten.var_mean.correction(
        wide(x), dim, correction=correction, keepdim=keepdim
    )
    return torch.sqrt(variance), middle


@decompose(aten.linalg_vector_norm.default, to="core")
def vector_norm(
    x: Tensor,
    order: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    if (
        x.is_complex()
        or not x.is_floating_point()
        or (dtype is not None and dtype != x.dtype)
        or x.numel() == 0
    ):
        return NotImplemented
    x, dims = wide(x), all_dims(x, dim)
    if x.dim() == 0:
        return torch.abs(x) if order != 0 else NotImplemented
    if order == 2:
        return torch.sqrt((x * x).sum(dims, keepdim))
    if order == 1:
        return torch.abs(x).sum(dims, keepdim)
    if order == math.inf:
        return torch.abs(x).amax(dims, keepdim)
    return NotImplemented


@decompose(aten.norm.ScalarOpt_dim, to="core")
def norm(x: Tensor, order: float | None, dim: Any, keepdim: bool = False) -> Tensor:
    return vector_norm(x, 2 if order is None else order, dim, keepdim)


@decompose(aten.max.default, to="core")
def max_all(x: Tensor) -> Tensor:
    return x.amax(list(range(x.dim())))


@decompose(aten.min.default, to="core")
def min_all(x: Tensor) -> Tensor:
    return x.amin(list(range(x.dim())))


@decompose(aten.max.dim, to="prims")
def max_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    if x.dtype is torch.bool:  # argmax has no kernel for it
        return NotImplemented
    return x.amax(dim, keepdim), x.argmax(dim, keepdim)


@decompose(aten.min.dim, to="prims")
def min_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    if x.dtype is torch.bool:
        return NotImplemented
    return x.amin(dim, keepdim), x.argmin(dim, keepdim)


@decompose(aten.aminmax.default, to="core")
def aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    dims = all_dims(x, dim)
    return x.amin(dims, keepdim), x.amax(dims, keepdim)
