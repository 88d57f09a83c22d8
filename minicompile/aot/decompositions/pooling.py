"""Pooling and resampling whose formula is short; the rest stay as library calls, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minicompile.aot.decompositions.registry import decompose

aten = torch.ops.aten


def windows(x: Tensor, rows: int, columns: int) -> list[int] | None:
    """[rows, window height, columns, window width] where windows tile the images evenly."""
    height, width = x.shape[-2:]
    known = isinstance(height, int) and isinstance(width, int) and x.numel() != 0
    if not known or height % rows or width % columns:
        return None
    return [rows, height // rows, columns, width // columns]


@decompose(aten._adaptive_avg_pool2d.default, to="prims", wide=True)
def adaptive_avg_pool2d(x: Tensor, size: list[Any]) -> Tensor:
    tiles = windows(x, *size)
    if tiles is None:
        return NotImplemented
    return x.reshape([*x.shape[:-2], *tiles]).mean([-3, -1])


@decompose(aten._adaptive_avg_pool2d_backward.default, to="prims", wide=True)
def adaptive_avg_pool2d_backward(grad: Tensor, x: Tensor) -> Tensor:
    tiles = windows(x, *grad.shape[-2:])
    if tiles is None:
        return NotImplemented
    each = (grad / (tiles[1] * tiles[3])).unsqueeze(-1).unsqueeze(-3)
    return each.expand([*x.shape[:-2], *tiles]).reshape(x.shape)


@decompose(aten.max_pool2d_with_indices_backward.default, to="prims", wide=True)
def max_pool2d_backward(grad: Tensor, x: Tensor, *window_and_indices: Any) -> Tensor:
    """Add each gradient to the pixel that was the largest of its window."""
    indices = window_and_indices[-1]
    planes = list(x.shape[:-2])
    empty = torch.zeros([*planes, x.shape[-2] * x.shape[-1]], dtype=grad.dtype, device=grad.device)
    at = indices.reshape([*planes, -1])
    return aten.scatter_add.default(empty, -1, at, grad.reshape([*planes, -1])).view(x.shape)
