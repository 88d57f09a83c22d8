"""Elementwise losses: a formula per element, then none, mean or sum."""

from __future__ import annotations

import torch

from minicompile.aot.decompositions.registry import decompose, wide
from minicompile.aot.decompositions.softmax import MEAN, SUM

aten = torch.ops.aten
Tensor = torch.Tensor
SMALLEST_LOG = -100.0
"""Binary cross entropy clamps logarithms here, so that log(0) stays finite."""


def reduce(losses: Tensor, reduction: int) -> Tensor:
    if reduction == MEAN:
        return losses.mean()
    return losses.sum() if reduction == SUM else losses


def slope(grad: Tensor, count: int, reduction: int) -> Tensor:
    """The incoming gradient of each element's loss."""
    return wide(grad) / count if reduction == MEAN else wide(grad)


@decompose(aten.mse_loss.default, to="core")
def mse_loss(x: Tensor, y: Tensor, reduction: int = MEAN) -> Tensor:
    difference = wide(x) - wide(y)
    return reduce(difference * difference, reduction)


@decompose(aten.mse_loss_backward.default, to="core")
def mse_loss_backward(grad: Tensor, x: Tensor, y: Tensor, reduction: int) -> Tensor:
    return (wide(x) - wide(y)) * (slope(grad, x.numel(), reduction) * 2)


@decompose(aten.smooth_l1_loss.default, to="core")
def smooth_l1_loss(x: Tensor, y: Tensor, reduction: int = MEAN, beta: float = 1.0) -> Tensor:
    distance = torch.abs(wide(x) - wide(y))
    if beta == 0:
        return reduce(distance, reduction)
    return reduce(
        torch.where(distance < beta, 0.5 * distance * distance / beta, distance - 0.5 * beta),
        reduction,
    )


@decompose(aten.smooth_l1_loss_backward.default, to="core")
def smooth_l1_loss_backward(
    grad: Tensor, x: Tensor, y: Tensor, reduction: int, beta: float
) -> Tensor:
    difference, step = wide(x) - wide(y), slope(grad, x.numel(), reduction)
    if beta == 0:
        return torch.sign(difference) * step
    return (
        torch.where(torch.abs(difference) < beta, difference / beta, torch.sign(difference)) * step
    )


@decompose(aten.huber_loss.default, to="core")
def huber_loss(x: Tensor, y: Tensor, reduction: int = MEAN, delta: float = 1.0) -> Tensor:
    distance = torch.abs(wide(x) - wide(y))
    near, far = 0.5 * distance * distance, delta * (distance - 0.5 * delta)
    return reduce(torch.where(distance <= delta, near, far), reduction)


@decompose(aten.huber_loss_backward.default, to="core")
def huber_loss_backward(grad: Tensor, x: Tensor, y: Tensor, reduction: int, delta: float) -> Tensor:
    difference = wide(x) - wide(y)
    return torch.clamp(difference, -delta, delta) * slope(grad, x.numel(), reduction)


@decompose(aten.binary_cross_entropy.default, to="core")
def binary_cross_entropy(
    x: Tensor, y: Tensor, weight: Tensor | None = None, reduction: int = MEAN
) -> Tensor:
    p, y = wide(x), wide(y)
    positive = torch.clamp(torch.log(p), min=SMALLEST_LOG)
    negative = torch.clamp(torch.log1p(-p), min=SMALLEST_LOG)
    losses = (y - 1) * negative - y * positive
    return reduce(losses if weight is None else losses * weight, reduction)


@decompose(aten.binary_cross_entropy_backward.default, to="core")
def binary_cross_entropy_backward(
    grad: Tensor, x: Tensor, y: Tensor, weight: Tensor | None = None, reduction: int = MEAN
) -> Tensor:
    p, y = wide(x), wide(y)
    result = wide(grad) * (p - y) / torch.clamp((1 - p) * p, min=1e-12)
    if weight is not None:
        result = result * weight
    return result / x.numel() if reduction == MEAN else result


@decompose(aten.binary_cross_entropy_with_logits.default, to="core")
def binary_cross_entropy_with_logits(
    x: Tensor,
    y: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = MEAN,
) -> Tensor:
    x, y = wide(x), wide(y)
    log_sigmoid = torch.clamp(x, max=0) - torch.log1p(torch.exp(-torch.abs(x)))
    scale = 1 if pos_weight is None else (pos_weight - 1) * y + 1
    losses = (1 - y) * x - scale * log_sigmoid
    return reduce(losses if weight is None else losses * weight, reduction)
