"""Compound pointwise operators, and operators whose options (alpha, rounding) become operators of
their own.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from minicompile.aot.decompositions.registry import decompose, wide

aten = torch.ops.aten
Tensor = torch.Tensor
Number = int | float | bool


@decompose(aten.mul.Scalar, to="core")
def mul_scalar(x: Tensor, y: Number) -> Tensor:
    return aten.mul.Tensor(x, y)


@decompose(aten.div.Scalar, to="core")
def div_scalar(x: Tensor, y: Number) -> Tensor:
    return aten.div.Tensor(x, y)


@decompose(aten.add.Scalar, to="core")
def add_scalar(x: Tensor, y: Number, alpha: Number = 1) -> Tensor:
    return aten.add.Tensor(x, y, alpha=alpha)


@decompose(aten.sub.Scalar, to="core")
def sub_scalar(x: Tensor, y: Number, alpha: Number = 1) -> Tensor:
    return aten.sub.Tensor(x, y, alpha=alpha)


@decompose(aten.rsub.Scalar, aten.rsub.Tensor, to="core")
def rsub(x: Tensor, y: Any, alpha: Number = 1) -> Tensor:
    """y - alpha * x; a number y is added to the negative (`1 - x` would be `rsub` again)."""
    if isinstance(y, Tensor):
        return torch.sub(y, x, alpha=alpha)
    x = x.to(torch.result_type(x, y))
    return torch.add(torch.neg(x if alpha == 1 else x * alpha), y)


@decompose(aten.addcmul.default, to="core")
def addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: Number = 1) -> Tensor:
    product = wide(a) * wide(b)
    return wide(x) + (product if value == 1 else product * value)


@decompose(aten.addcdiv.default, to="core")
def addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: Number = 1) -> Tensor:
    ratio = wide(a) / wide(b)
    return wide(x) + (ratio if value == 1 else ratio * value)


@decompose(aten.lerp.Scalar, aten.lerp.Tensor, to="core")
def lerp(start: Tensor, end: Tensor, weight: Any) -> Tensor:
    """From the nearer end, so that weight 1 gives `end` exactly."""
    start, end = wide(start), wide(end)
    difference = end - start
    if isinstance(weight, Tensor):
        weight = wide(weight)
        near = torch.abs(weight) < 0.5
        return torch.where(near, start + weight * difference, end - difference * (1 - weight))
    return start + difference * weight if abs(weight) < 0.5 else end - difference * (1 - weight)


@decompose(aten.masked_fill.Scalar, aten.masked_fill.Tensor, to="core")
def masked_fill(x: Tensor, mask: Tensor, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return torch.where(mask, value.to(x.dtype), x)
    return torch.where(mask, torch.full([], value, dtype=x.dtype, device=x.device), x)


@decompose(aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar, to="core")
def where_scalar(condition: Tensor, x: Any, y: Any) -> Tensor:
    dtype = torch.result_type(x, y)
    constants = [
        v if isinstance(v, Tensor) else torch.full([], v, dtype=dtype, device=condition.device)
        for v in (x, y)
    ]
    return torch.where(condition, constants[0], constants[1])


@decompose(aten.square.default, to="core")
def square(x: Tensor) -> Tensor:
    return x * x


@decompose(aten.pow.Tensor_Scalar, to="prims")
def power(x: Tensor, exponent: Number) -> Tensor:
    """Small powers as products and roots, which eager's kernels do too."""
    if x.is_complex() or isinstance(exponent, bool) or not isinstance(exponent, int | float):
        return NotImplemented
    if not x.is_floating_point() and isinstance(exponent, float):
        x = x.to(torch.get_default_dtype())
    wider = wide(x)
    if exponent == 2:
        return wider * wider
    if exponent == 3:
        return wider * wider * wider
    if not x.is_floating_point():
        return NotImplemented
    if exponent == 0.5:
        return torch.sqrt(wider)
    if exponent == -0.5:
        return torch.rsqrt(wider)
    if exponent == -1:
        return torch.reciprocal(wider)
    if exponent == -2:
        return torch.reciprocal(wider * wider)
    return NotImplemented


@decompose(aten.pow.Scalar, to="prims")
def scalar_power(base: Number, exponent: Tensor) -> Tensor:
    dtype = torch.result_type(base, exponent)
    return torch.pow(torch.full([], base, dtype=dtype, device=exponent.device), exponent.to(dtype))


@decompose(aten.clamp_min.default, aten.clamp_min.Tensor, to="core")
def clamp_min(x: Tensor, low: Any) -> Tensor:
    return torch.clamp(x, min=low)


@decompose(aten.clamp_max.default, aten.clamp_max.Tensor, to="core")
def clamp_max(x: Tensor, high: Any) -> Tensor:
    return torch.clamp(x, max=high)


@decompose(aten.clamp.Tensor, to="prims")
def clamp_tensor(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    if low is not None:
        x = torch.maximum(x, low)
    return x if high is None else torch.minimum(x, high)


@decompose(aten.floor_divide.default, aten.floor_divide.Scalar, to="core")
def floor_divide(x: Tensor, y: Any) -> Tensor:
    return torch.div(x, y, rounding_mode="floor")


@decompose(aten.xlogy.Tensor, aten.xlogy.Scalar_Other, aten.xlogy.Scalar_Self, to="core")
def xlogy(x: Any, y: Any) -> Tensor:
    """x log y, and 0 where x is 0 unless y is NaN."""
    example = x if isinstance(x, Tensor) else y
    x, y = (
        v if isinstance(v, Tensor) else torch.full([], float(v), device=example.device)
        for v in (x, y)
    )
    x, y = (wide(v) if v.is_floating_point() else v.to(torch.get_default_dtype()) for v in (x, y))
    product = x * torch.log(y)
    return torch.where(torch.isnan(y), float("nan"), torch.where(x == 0, 0.0, product))


@decompose(aten.frac.default, to="core")
def frac(x: Tensor) -> Tensor:
    return x - torch.trunc(x)


@decompose(aten.sgn.default, to="core")
def sgn(x: Tensor) -> Tensor:
    return NotImplemented if x.is_complex() else torch.sign(x)


@decompose(aten.isinf.default, to="core")
def isinf(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return NotImplemented if x.is_complex() else torch.zeros_like(x, dtype=torch.bool)
    return torch.abs(x) == float("inf")


@decompose(aten.isposinf.default, to="core")
def isposinf(x: Tensor) -> Tensor:
    return x == float("inf") if x.is_floating_point() else torch.zeros_like(x, dtype=torch.bool)


@decompose(aten.isneginf.default, to="core")
def isneginf(x: Tensor) -> Tensor:
    return x == float("-inf") if x.is_floating_point() else torch.zeros_like(x, dtype=torch.bool)


@decompose(aten.nan_to_num.default, to="core")
def nan_to_num(
    x: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    if not x.is_floating_point():
        return NotImplemented if x.is_complex() else x.clone()
    limits = torch.finfo(x.dtype)
    result = torch.where(torch.isnan(x), 0.0 if nan is None else nan, x)
    result = torch.where(x == float("inf"), limits.max if posinf is None else posinf, result)
    return torch.where(x == float("-inf"), limits.min if neginf is None else neginf, result)


@decompose(aten.heaviside.default, to="core")
def heaviside(x: Tensor, at_zero: Tensor) -> Tensor:
    zero = torch.zeros_like(x)
    step = torch.where(x > 0, torch.ones_like(x), zero)
    return torch.where(
        x == 0, at_zero, torch.where(torch.isnan(x), zero, step) if x.is_floating_point() else step
    )


@decompose(aten.deg2rad.default, to="core")
def deg2rad(x: Tensor) -> Tensor:
    return x * (math.pi / 180)


@decompose(aten.rad2deg.default, to="core")
def rad2deg(x: Tensor) -> Tensor:
    return x * (180 / math.pi)


@decompose(aten.logaddexp.default, to="core")
def logaddexp(x: Tensor, y: Tensor) -> Tensor:
    if x.is_complex() or y.is_complex():
        return NotImplemented
    x, y = wide(x), wide(y)
    top = torch.maximum(x, y)
    total = top + torch.log1p(torch.exp(-torch.abs(x - y)))
    return torch.where((x == y) & (torch.abs(x) == float("inf")), x, total)


@decompose(torch.ops.prims.convert_element_type.default, to="prims")
def convert_element_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else NotImplemented
