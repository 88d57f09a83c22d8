"""Softmax, its logarithm, and the losses on top of them; stable: the maximum is subtracted first."""

from __future__ import annotations

import torch

from minicompile.aot.decompositions.registry import decompose, wide

aten = torch.ops.aten
Tensor = torch.Tensor

NONE, MEAN, SUM = 0, 1, 2
"""ATen's numbers for `reduction`."""


def shifted(x: Tensor, dim: int) -> Tensor:
    """x less its maximum along dim. An empty dimension has no maximum and nothing to shift."""
    return x - x.amax(dim, keepdim=True) if x.numel() != 0 else x


@decompose(aten._softmax.default, to="prims")
def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    power = torch.exp(shifted(wide(x), dim))
    return power / power.sum(dim, keepdim=True)


@decompose(aten._log_softmax.default, to="prims")
def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    difference = shifted(wide(x), dim)
    return difference - torch.log(torch.exp(difference).sum(dim, keepdim=True))


@decompose(aten._softmax_backward_data.default, to="core")
def softmax_backward(grad: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    grad, y = wide(grad), wide(y)
    product = grad * y
    return product - y * product.sum(dim, keepdim=True)


@decompose(aten._log_softmax_backward_data.default, to="core")
def log_softmax_backward(grad: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    grad, y = wide(grad), wide(y)
    return grad - torch.exp(y) * grad.sum(dim, keepdim=True)


@decompose(aten.logsumexp.default, to="core")
def logsumexp(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    if x.numel() == 0:
        return NotImplemented
    if not x.is_floating_point():
        x = x.to(torch.get_default_dtype())
    x = wide(x)
    top = x.amax(dim, keepdim=True)
    top = torch.where(torch.abs(top) == float("inf"), 0.0, top)
    total = torch.log(torch.exp(x - top).sum(dim, keepdim=True)) + top
    if keepdim or x.dim() == 0:
        return total
    return total.squeeze(list(dim) or list(range(x.dim())))


def _class_dim(x: Tensor) -> int:
    """Class scores of one example, of a batch, or of each pixel of a batch of images."""
    return 0 if x.dim() == 1 else 1


def _class_weights(weight: Tensor, x: Tensor) -> Tensor:
    shape = [1] * x.dim()
    shape[_class_dim(x)] = weight.shape[0]
    return wide(weight).reshape(shape)


@decompose(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, to="core")
def nll_loss(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int
) -> tuple[Tensor, Tensor]:
    """(loss, total weight of the targets that count)."""
    dtype, dim = x.dtype, _class_dim(x)
    x = wide(x)
    if weight is not None:
        x = x * _class_weights(weight, x)
    counts = target != ignore
    picked = torch.where(counts, target, 0).unsqueeze(dim)
    losses = torch.where(counts, -x.gather(dim, picked).squeeze(dim), 0.0)
    if reduction == NONE and x.dim() > 1:
        return losses, x.new_zeros([], dtype=dtype)
    if weight is None:
        total = counts.sum().to(x.dtype)
    else:
        each = _class_weights(weight, x).expand(x.shape).gather(dim, picked).squeeze(dim)
        total = torch.where(counts, each, 0.0).sum()
    loss = losses.sum()
    return (loss / total if reduction == MEAN else loss), total


@decompose(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default, to="core")
def nll_loss_backward(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore: int,
    total: Tensor,
) -> Tensor:
    grad, dim = wide(grad), _class_dim(x)
    if reduction == MEAN:
        grad = grad / wide(total)
    classes = torch.arange(x.shape[dim], device=x.device)
    classes = classes.reshape([-1 if d == dim else 1 for d in range(x.dim())])
    chosen = (classes == target.unsqueeze(dim)) & (target != ignore).unsqueeze(dim)
    slope = -grad.unsqueeze(dim) if grad.dim() else -grad
    if weight is not None:
        slope = slope * _class_weights(weight, x)
    return torch.where(chosen, slope, 0.0)
