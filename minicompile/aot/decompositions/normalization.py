"""Layer and batch normalization: subtract the mean, multiply by the reciprocal
deviation, scale, shift.

Statistics are computed in float32 for half types. The backward rules use n = (x - mean) * rstd and
dx = rstd * (g - mean(g) - n * mean(g * n)), with g the incoming gradient times the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minicompile.aot.decompositions.reductions import count, deviations
from minicompile.aot.decompositions.registry import Maybe, decompose, formulas

aten = torch.ops.aten


def normalize(x: Tensor, dims: list[int], eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(normalized x, mean, reciprocal deviation, variance); statistics keep the dims at size 1."""
    variance, mean = deviations(x, dims, 0)
    rstd = torch.rsqrt(variance + eps)
    return (x - mean) * rstd, mean, rstd, variance


def affine(x: Tensor, weight: Maybe, bias: Maybe) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


# Over the last dimensions ------------------------------------------------------------------------


def outer_and_inner(x: Tensor, shape: list[Any]) -> tuple[list[int], list[int]]:
    """The dimensions before and in `shape`, the last ones of x."""
    split = x.dim() - len(shape)
    return list(range(split)), list(range(split, x.dim()))


@decompose(aten.native_layer_norm.default, to="prims", wide=True)
def layer_norm(
    x: Tensor, shape: list[Any], weight: Maybe, bias: Maybe, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    normal, mean, rstd, _ = normalize(x, outer_and_inner(x, shape)[1], eps)
    return affine(normal, weight, bias), mean, rstd


def total(x: Tensor, dims: list[int]) -> Tensor:
    """A sum over no dimensions is the value itself (torch would take all of them)."""
    return x.sum(dims) if dims else x.clone()


@decompose(aten.native_layer_norm_backward.default, to="core", wide=True)
def layer_norm_backward(
    grad: Tensor, x: Tensor, shape: list[Any], mean: Tensor, rstd: Tensor, weight: Maybe,
    bias: Maybe, mask: list[bool],
) -> tuple[Maybe, ...]:  # fmt: skip
    outer, inner = outer_and_inner(x, shape)
    normal, scaled, n = (x - mean) * rstd, affine(grad, weight, None), count(x, inner)
    steep = (scaled * normal).sum(inner, keepdim=True)
    middle = scaled - scaled.sum(inner, keepdim=True) / n
    return (
        rstd * (middle - normal * (steep / n)) if mask[0] else None,
        total(grad * normal, outer) if mask[1] and weight is not None else None,
        total(grad, outer) if mask[2] and bias is not None else None,
    )


# Over all but the channels -----------------------------------------------------------------------


def channels(value: Maybe, x: Tensor) -> Any:
    """[C] as [1, C, 1, ...]; None stays."""
    return None if value is None else value.reshape([1, -1] + [1] * (x.dim() - 2))


@decompose(aten._native_batch_norm_legit_functional.default, to="prims", wide=True)
def batch_norm(
    x: Tensor, weight: Maybe, bias: Maybe, running_mean: Maybe, running_var: Maybe, training: bool,
    momentum: float, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(result, saved mean, saved rstd, new running mean, new running variance, as far as there are old)."""
    scale, shift = channels(weight, x), channels(bias, x)
    if not training:
        assert running_mean is not None and running_var is not None
        rstd = torch.rsqrt(running_var + eps)
        normal = (x - channels(running_mean, x)) * channels(rstd, x)
        # the CPU's operator saves nothing
        nothing = (x.new_zeros([0]), x.new_zeros([0]))
        saved = nothing if x.device.type == "cpu" else (running_mean.clone(), rstd)
        updated = (running_mean.clone(), running_var.clone())
        return affine(normal, scale, shift), *saved, *updated
    dims = [0, *range(2, x.dim())]
    normal, *statistics = normalize(x, dims, eps)
    mean, rstd, variance = (value.squeeze(dims) for value in statistics)
    results = (affine(normal, scale, shift), mean, rstd)
    if running_mean is None or running_var is None:
        return results
    n = count(x, dims)
    return (
        *results,
        running_mean * (1 - momentum) + mean * momentum,
        running_var * (1 - momentum) + variance * n / (n - 1) * momentum,
    )


formulas(
    {
        aten._native_batch_norm_legit.no_stats: lambda x, weight, bias, *rest: batch_norm(
            x, weight, bias, None, None, *rest
        ),
        aten._native_batch_norm_legit_no_training.default: lambda *args: batch_norm(
            *args[:5], False, *args[5:]
        )[:3],
    },
    to="prims",
)


@decompose(aten.native_batch_norm_backward.default, to="core", wide=True)
def batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Maybe, running_mean: Maybe, running_var: Maybe, mean: Maybe,
    rstd: Maybe, training: bool, eps: float, mask: list[bool],
) -> tuple[Maybe, ...]:  # fmt: skip
    """A channel has one weight, so the sums for weight and bias serve the input's gradient too."""
    dims = [0, *range(2, x.dim())]
    if not training:
        assert running_mean is not None and running_var is not None
        mean, rstd = running_mean, torch.rsqrt(running_var + eps)
    scale = channels(rstd, x)
    normal = (x - channels(mean, x)) * scale
    to_weight, to_bias = (grad * normal).sum(dims), grad.sum(dims)
    if training:
        shared = normal * channels(to_weight, x) + channels(to_bias, x)
        grad = grad - shared / count(x, dims)
    results = affine(grad, channels(weight, x), None) * scale, to_weight, to_bias
    return tuple(value if wanted else None for value, wanted in zip(results, mask))
