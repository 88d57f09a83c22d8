"""Losses: softmax and its logarithm (stable: the maximum is subtracted first), the gradient of the negative
log likelihood on top of them, and of elementwise losses."""

from __future__ import annotations

import torch
from torch import Tensor, exp, log, where

from minicompile.aot.decompositions.registry import Maybe, decompose, formulas
from minicompile.compat import torch_decompositions

aten = torch.ops.aten

MEAN = 1
"""ATen's number for `reduction="mean"`."""


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


@decompose(aten.huber_loss.default, to="core")
def huber(x: Tensor, y: Tensor, reduction: int = MEAN, delta: float = 1.0) -> Tensor:
    """torch's formula, where eager's result has the promoted dtype."""
    if x.dtype is not y.dtype:
        return NotImplemented
    loss: Tensor = torch_decompositions[aten.huber_loss.default](x, y, reduction, delta)
    return loss


def slope(grad: Tensor, x: Tensor, reduction: int) -> Tensor:
    """The incoming gradient of each element's loss."""
    return grad / x.numel() if reduction == MEAN else grad


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
