"""Losses: softmax and its logarithm (stable: the maximum is subtracted first), the negative log
likelihood on top of them, and elementwise losses: a formula per element, then none, mean or sum."""

from __future__ import annotations

import torch
from torch import Tensor, clamp, exp, log, log1p, where

from minicompile.aot.decompositions.registry import Maybe, decompose, formulas, wide

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2
"""ATen's numbers for `reduction`."""

SMALLEST_LOG = -100.0
"""Binary cross entropy clamps logarithms here, so that log(0) stays finite."""


# Softmax -----------------------------------------------------------------------------------------


def shifted(x: Tensor, dim: int) -> Tensor:
    """x less its maximum along dim. An empty dimension has no maximum and nothing to shift."""
    return x - x.amax(dim, keepdim=True) if x.numel() != 0 else x


@decompose(aten._softmax.default, to="prims", wide=True)
def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    power = exp(shifted(x, dim))
    return power / power.sum(dim, keepdim=True)


@decompose(aten._log_softmax.default, to="prims", wide=True)
def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    difference = shifted(x, dim)
    return difference - log(exp(difference).sum(dim, keepdim=True))


# Negative log likelihood -------------------------------------------------------------------------


def class_dim(x: Tensor) -> int:
    """Class scores of one example, of a batch, or of each pixel of a batch of images."""
    return 0 if x.dim() == 1 else 1


def along_classes(values: Tensor, x: Tensor) -> Tensor:
    """One value per class, shaped to broadcast against x."""
    return values.reshape([-1 if dim == class_dim(x) else 1 for dim in range(x.dim())])


@decompose(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, to="core", wide=True)
def nll_loss(
    x: Tensor, target: Tensor, weight: Maybe, reduction: int, ignore: int
) -> tuple[Tensor, Tensor]:
    """(loss, total weight of the targets that count). Eager refuses other types of targets."""
    if target.dtype not in (torch.int64, torch.uint8):
        return NotImplemented
    dim, counts = class_dim(x), target != ignore
    if weight is not None:
        weight = along_classes(weight, x).expand(x.shape)
        x = x * weight
    picked = where(counts, target, 0).unsqueeze(dim)
    losses = where(counts, -x.gather(dim, picked).squeeze(dim), 0.0)
    if reduction == NONE and x.dim() > 1:
        return losses, x.new_zeros([])
    if weight is None:
        total = counts.sum().to(x.dtype)
    else:
        total = where(counts, weight.gather(dim, picked).squeeze(dim), 0.0).sum()
    loss = losses.sum()
    return (loss / total if reduction == MEAN else loss), total


@decompose(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default, to="core", wide=True)
def nll_loss_backward(
    grad: Tensor, x: Tensor, target: Tensor, weight: Maybe, reduction: int, ignore: int,
    total: Tensor,
) -> Tensor:  # fmt: skip
    dim = class_dim(x)
    if reduction == MEAN:
        grad = grad / total
    classes = along_classes(torch.arange(x.shape[dim], device=x.device), x)
    chosen = (classes == target.unsqueeze(dim)) & (target != ignore).unsqueeze(dim)
    slope = -grad.unsqueeze(dim) if grad.dim() else -grad
    if weight is not None:
        slope = slope * along_classes(weight, x)
    return where(chosen, slope, 0.0).expand(x.shape)


# Elementwise losses ------------------------------------------------------------------------------


def reduce(losses: Tensor, reduction: int) -> Tensor:
    if reduction == MEAN:
        return losses.mean()
    return losses.sum() if reduction == SUM else losses


@decompose(aten.binary_cross_entropy.default, to="core", wide=True)
def bce(x: Tensor, y: Tensor, weight: Maybe = None, reduction: int = MEAN) -> Tensor:
    for name, value in (("input", x), ("target", y)):
        text = f"all elements of {name} should be between 0 and 1"
        aten._assert_async.msg(((value >= 0) & (value <= 1)).all(), text)
    positive = clamp(log(x), min=SMALLEST_LOG)
    negative = clamp(log1p(-x), min=SMALLEST_LOG)
    losses = (y - 1) * negative - y * positive
    return reduce(losses if weight is None else losses * weight, reduction)


@decompose(aten.huber_loss.default, to="core")
def huber(x: Tensor, y: Tensor, reduction: int = MEAN, delta: float = 1.0) -> Tensor:
    """A parabola near 0, lines further out."""
    if x.dtype is not y.dtype or not x.is_floating_point():
        return NotImplemented  # eager's result doesn't have the promoted dtype
    z = (wide(x) - wide(y)).abs()
    return reduce(where(z < delta, 0.5 * z * z, delta * (z - 0.5 * delta)), reduction)


def slope(grad: Tensor, x: Tensor, reduction: int) -> Tensor:
    """The incoming gradient of each element's loss."""
    return grad / x.numel() if reduction == MEAN else grad


@decompose(aten.smooth_l1_loss.default, to="core", wide=True)
def smooth_l1(x: Tensor, y: Tensor, reduction: int = MEAN, beta: float = 1.0) -> Tensor:
    """Return the smooth L1 loss; its lines have slope 1. Eager refuses a negative beta."""
    if beta < 0:
        return NotImplemented
    z = (x - y).abs()
    near = 0.5 * z * z / beta if beta else z
    return reduce(where(z < beta, near, z - 0.5 * beta), reduction)


@decompose(aten.smooth_l1_loss_backward.default, to="core", wide=True)
def smooth_l1_backward(grad: Tensor, x: Tensor, y: Tensor, reduction: int, beta: float) -> Tensor:
    z = x - y
    steep = where(z <= -beta, -1.0, where(z >= beta, 1.0, z / beta))
    return steep * slope(grad, x, reduction)


formulas(
    {
        aten._softmax_backward_data.default: lambda grad, y, dim, dtype: (
            (grad - (grad * y).sum(dim, keepdim=True)) * y
        ),
        aten._log_softmax_backward_data.default: lambda grad, y, dim, dtype: (
            grad - exp(y) * grad.sum(dim, keepdim=True)
        ),
        aten.huber_loss_backward.default: lambda grad, x, y, reduction, delta: (
            (x - y).clamp(-delta, delta) * slope(grad, x, reduction)
        ),
        aten.mse_loss_backward.default: lambda grad, x, y, reduction: (
            (x - y) * (slope(grad, x, reduction) * 2)
        ),
    }
)
