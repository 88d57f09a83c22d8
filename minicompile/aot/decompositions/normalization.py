"""Layer, RMS, group and batch normalization: subtract the mean, multiply by the reciprocal
deviation, scale, shift.

Statistics are computed in float32 for half types. The backward rules use x^ = (x - mean) * rstd and
dx = rstd * (g - mean(g) - x^ * mean(g * x^)), with g the incoming gradient times the weight.
"""

from __future__ import annotations

from typing import Any

import torch

from minicompile.aot.decompositions.reductions import count, deviations
from minicompile.aot.decompositions.registry import decompose, wide

aten = torch.ops.aten
Tensor = torch.Tensor
Optional3 = tuple[Tensor | None, Tensor | None, Tensor | None]


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * wide(weight)
    return x if bias is None else x + wide(bias)


def _input_gradient(grad: Tensor, normal: Tensor, rstd: Tensor, dims: list[int]) -> Tensor:
    """Gradient through the normalization over dims; every argument broadcasts against `grad`."""
    n = count(grad, dims)
    along = (grad * normal).sum(dims, keepdim=True)
    return rstd * (grad - grad.sum(dims, keepdim=True) / n - normal * (along / n))


@decompose(aten.native_layer_norm.default, to="prims")
def layer_norm(
    x: Tensor, shape: list[Any], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(x.dim() - len(shape), x.dim()))
    x = wide(x)
    variance, mean = deviations(x, dims, 0)
    rstd = torch.rsqrt(variance + eps)
    return _affine((x - mean) * rstd, weight, bias), mean, rstd


@decompose(aten.native_layer_norm_backward.default, to="core")
def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: list[Any],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: list[bool],
) -> Optional3:
    split = x.dim() - len(shape)
    outer, inner = list(range(split)), list(range(split, x.dim()))
    grad, rstd = wide(grad), wide(rstd)
    normal = (wide(x) - wide(mean)) * rstd
    scaled = grad if weight is None else grad * wide(weight)
    return (
        _input_gradient(scaled, normal, rstd, inner) if mask[0] else None,
        _sum(grad * normal, outer) if mask[1] and weight is not None else None,
        _sum(grad, outer) if mask[2] and bias is not None else None,
    )


def _sum(x: Tensor, dims: list[int]) -> Tensor:
    """A sum over no dimensions is the value itself (torch would take all of them)."""
    return x.sum(dims) if dims else x.clone()


@decompose(aten._fused_rms_norm.default, to="prims")
def rms_norm(
    x: Tensor, shape: list[Any], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    dims = list(range(x.dim() - len(shape), x.dim()))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    x = wide(x)
    rstd = torch.rsqrt((x * x).mean(dims, keepdim=True) + eps)
    return _affine(x * rstd, weight, None), rstd


@decompose(aten._fused_rms_norm_backward.default, to="core")
def rms_norm_backward(
    grad: Tensor, x: Tensor, shape: list[Any], rstd: Tensor, weight: Tensor | None, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    split = x.dim() - len(shape)
    outer, inner = list(range(split)), list(range(split, x.dim()))
    grad, rstd = wide(grad), wide(rstd)
    normal = wide(x) * rstd
    scaled = grad if weight is None else grad * wide(weight)
    along = (scaled * normal).mean(inner, keepdim=True)
    return (
        rstd * (scaled - normal * along) if mask[0] else None,
        _sum(grad * normal, outer) if mask[1] and weight is not None else None,
    )


def _channels(value: Tensor, rank: int) -> Tensor:
    """[C] as [1, C, 1, ...]."""
    return wide(value).reshape([1, -1] + [1] * (rank - 2))


@decompose(aten.native_group_norm.default, to="prims")
def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: Any,
    c: Any,
    spatial: Any,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grouped = wide(x).reshape(
        [n, groups, -1] if x.numel() != 0 else [n, groups, (c // groups) * spatial]
    )
    variance, mean = deviations(grouped, [2], 0)
    rstd = torch.rsqrt(variance + eps)
    normal = ((grouped - mean) * rstd).reshape(x.shape)
    scale = None if weight is None else _channels(weight, x.dim())
    shift = None if bias is None else _channels(bias, x.dim())
    return _affine(normal, scale, shift), mean.squeeze(2), rstd.squeeze(2)


@decompose(aten.native_group_norm_backward.default, to="core")
def group_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    n: Any,
    c: Any,
    spatial: Any,
    groups: int,
    mask: list[bool],
) -> Optional3:
    size = [n, groups, c // groups, spatial]
    grad, x = wide(grad).reshape(size), wide(x)
    shape, x = x.shape, x.reshape(size)
    center, rstd = wide(mean).reshape([n, groups, 1, 1]), wide(rstd).reshape([n, groups, 1, 1])
    normal = (x - center) * rstd
    scaled = grad if weight is None else grad * wide(weight).reshape([1, groups, c // groups, 1])
    return (
        _input_gradient(scaled, normal, rstd, [2, 3]).reshape(shape) if mask[0] else None,
        (grad * normal).sum([0, 3]).reshape([c]) if mask[1] else None,
        grad.sum([0, 3]).reshape([c]) if mask[2] else None,
    )


def _batch_dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


@decompose(aten._native_batch_norm_legit_functional.default, to="prims")
def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """(result, saved mean, saved rstd, new running mean, new running variance)."""
    if not training:
        result = _batch_norm_with(
            x, running_mean, torch.rsqrt(wide(running_var) + eps), weight, bias
        )
        return (
            result,
            x.new_zeros([0]),
            x.new_zeros([0]),
            running_mean.clone(),
            running_var.clone(),
        )
    result, mean, rstd, variance = _batch_norm_training(x, weight, bias, eps)
    n = count(x, _batch_dims(x))
    unbiased = variance * (n / (n - 1))
    return (
        result,
        mean,
        rstd,
        running_mean * (1 - momentum) + mean.to(running_mean.dtype) * momentum,
        running_var * (1 - momentum) + unbiased.to(running_var.dtype) * momentum,
    )


def _batch_norm_with(
    x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    rank = x.dim()
    normal = (wide(x) - _channels(mean, rank)) * _channels(rstd, rank)
    scale = None if weight is None else _channels(weight, rank)
    return _affine(normal, scale, None if bias is None else _channels(bias, rank))


def _batch_norm_training(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dims = _batch_dims(x)
    variance, mean = (value.squeeze(dims) for value in deviations(wide(x), dims, 0))
    rstd = torch.rsqrt(variance + eps)
    return _batch_norm_with(x, mean, rstd, weight, bias), mean, rstd, variance


@decompose(aten._native_batch_norm_legit.no_stats, to="prims")
def batch_norm_no_stats(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    result, mean, rstd, _ = _batch_norm_training(x, weight, bias, eps)
    return result, mean, rstd


@decompose(aten._native_batch_norm_legit_no_training.default, to="prims")
def batch_norm_inference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    result = _batch_norm_with(x, running_mean, torch.rsqrt(wide(running_var) + eps), weight, bias)
    return result, x.new_zeros([0]), x.new_zeros([0])


@decompose(aten.native_batch_norm_backward.default, to="core")
def batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    training: bool,
    eps: float,
    mask: list[bool],
) -> Optional3:
    rank, dims = x.dim(), _batch_dims(x)
    if not training:
        assert running_mean is not None and running_var is not None
        mean, rstd = running_mean, torch.rsqrt(wide(running_var) + eps)
    assert mean is not None and rstd is not None
    grad, rstd = wide(grad), _channels(rstd, rank)
    normal = (wide(x) - _channels(mean, rank)) * rstd
    scaled = grad if weight is None else grad * _channels(weight, rank)
    to_input = _input_gradient(scaled, normal, rstd, dims) if training else scaled * rstd
    return (
        to_input if mask[0] else None,
        (grad * normal).sum(dims) if mask[1] else None,
        grad.sum(dims) if mask[2] else None,
    )
