"""Pooling and resampling whose formula is short; the rest stay as library calls, forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from minicompile.aot.decompositions.registry import decompose, wide

aten = torch.ops.aten
Tensor = torch.Tensor


@decompose(aten._adaptive_avg_pool2d.default, to="prims")
def adaptive_avg_pool2d(x: Tensor, size: list[Any]) -> Tensor:
    """Where the windows tile the image evenly: a mean over each."""
    height, width = x.shape[-2:]
    if any(not isinstance(v, int) for v in (height, width)) or x.numel() == 0:
        return NotImplemented
    if height % size[0] or width % size[1]:
        return NotImplemented
    windows = wide(x).reshape(
        [*x.shape[:-2], size[0], height // size[0], size[1], width // size[1]]
    )
    return windows.mean([-3, -1])


@decompose(aten._adaptive_avg_pool2d_backward.default, to="prims")
def adaptive_avg_pool2d_backward(grad: Tensor, x: Tensor) -> Tensor:
    height, width = x.shape[-2:]
    rows, columns = grad.shape[-2:]
    if any(not isinstance(v, int) for v in (height, width)) or x.numel() == 0:
        return NotImplemented
    if height % rows or width % columns:
        return NotImplemented
    tall, across = height // rows, width // columns
    each = (wide(grad) / (tall * across)).unsqueeze(-1).unsqueeze(-3)
    return each.expand([*x.shape[:-2], rows, tall, columns, across]).reshape(x.shape)


@decompose(aten.max_pool2d_with_indices_backward.default, to="prims")
def max_pool2d_backward(
    grad: Tensor,
    x: Tensor,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """Add each gradient to the pixel that was the largest of its window."""
    planes = list(x.shape[:-2])
    empty = torch.zeros(
        [*planes, x.shape[-2] * x.shape[-1]], dtype=wide(grad).dtype, device=grad.device
    )
    positions = indices.reshape([*planes, -1])
    return aten.scatter_add.default(empty, -1, positions, wide(grad).reshape([*planes, -1])).view(
        x.shape
    )
