"""Views reduced to `view`, `permute`, `expand`, `slice`, `select`, `unsqueeze`, `squeeze`; and
their derivatives.
"""

from __future__ import annotations

from typing import Any

import torch

from minicompile.aot.decompositions.registry import decompose

aten = torch.ops.aten
Tensor = torch.Tensor


@decompose(aten.t.default, to="core")
def t(x: Tensor) -> Tensor:
    return x.permute([1, 0]) if x.dim() == 2 else x


@decompose(aten.transpose.int, to="core")
def transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:
    order = list(range(x.dim()))
    if order:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return x.permute(order)


@decompose(aten.detach.default, aten.alias.default, aten.lift_fresh.default, to="core")
def alias(x: Tensor) -> Tensor:
    return x


@decompose(aten._unsafe_view.default, aten._reshape_alias.default, to="core")
def unsafe_view(x: Tensor, size: list[int], *_: Any) -> Tensor:
    return x.view(size)


@decompose(aten.squeeze.default, to="core")
def squeeze(x: Tensor) -> Tensor:
    return x.squeeze([d for d, size in enumerate(x.shape) if size == 1])


@decompose(aten.unbind.int, to="core")
def unbind(x: Tensor, dim: int = 0) -> list[Tensor]:
    return [x.select(dim, index) for index in range(x.shape[dim])]


@decompose(aten.split.Tensor, to="core")
def split(x: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    length = int(x.shape[dim])
    return [
        x.narrow(dim, start, min(size, length - start))
        for start in range(0, max(length, 1), max(size, 1))
    ]


@decompose(aten.split_with_sizes.default, to="prims")
def split_with_sizes(x: Tensor, sizes: list[Any], dim: int = 0) -> list[Tensor]:
    parts, start = [], 0
    for size in sizes:
        parts.append(aten.slice.Tensor(x, dim, start, start + size))
        start = start + size
    return parts


@decompose(aten.repeat.default, to="prims")
def repeat(x: Tensor, times: list[Any]) -> Tensor:
    """Insert a dimension before each, expand it, and merge the pairs."""
    x = x.reshape([1] * (len(times) - x.dim()) + list(x.shape))
    if any(isinstance(n, int) and n == 0 for n in times):
        return torch.full(
            [n * size for n, size in zip(times, x.shape)], 0, dtype=x.dtype, device=x.device
        )
    pairs = x.reshape([part for size in x.shape for part in (1, size)])
    wide = pairs.expand([part for n, size in zip(times, x.shape) for part in (n, size)])
    return wide.clone(memory_format=torch.contiguous_format).view(
        [n * size for n, size in zip(times, x.shape)]
    )


@decompose(aten.stack.default, to="core")
def stack(tensors: list[Tensor], dim: int = 0) -> Tensor:
    return torch.cat([x.unsqueeze(dim) for x in tensors], dim)


@decompose(aten.roll.default, to="core")
def roll(x: Tensor, shifts: list[int], dims: list[int] = ()) -> Tensor:  # type: ignore[assignment]
    if not dims:
        return roll(x.flatten(), shifts, [0]).view(x.shape)
    for shift, dim in zip(shifts, dims):
        size = x.shape[dim]
        if size != 0:
            start = (size - shift) % size
            x = torch.cat([x.narrow(dim, start, size - start), x.narrow(dim, 0, start)], dim)
    return x.clone() if all(shift == 0 for shift in shifts) else x


@decompose(aten.tril.default, to="core")
def tril(x: Tensor, diagonal: int = 0) -> Tensor:
    return torch.where(
        _column_less_row(x) <= diagonal, x, torch.zeros([], dtype=x.dtype, device=x.device)
    )


@decompose(aten.triu.default, to="core")
def triu(x: Tensor, diagonal: int = 0) -> Tensor:
    return torch.where(
        _column_less_row(x) >= diagonal, x, torch.zeros([], dtype=x.dtype, device=x.device)
    )


def _column_less_row(x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[-2], device=x.device).unsqueeze(-1)
    return torch.arange(x.shape[-1], device=x.device) - rows


@decompose(aten.slice_backward.default, to="core")
def slice_backward(
    grad: Tensor, size: list[Any], dim: int, start: Any, end: Any, step: int
) -> Tensor:
    return aten.slice_scatter.default(grad.new_zeros(size), grad, dim, start, end, step)


@decompose(aten.select_backward.default, to="core")
def select_backward(grad: Tensor, size: list[Any], dim: int, index: Any) -> Tensor:
    return aten.select_scatter.default(grad.new_zeros(size), grad, dim, index)


@decompose(aten.diagonal_backward.default, to="core")
def diagonal_backward(grad: Tensor, size: list[Any], offset: int, dim1: int, dim2: int) -> Tensor:
    return aten.diagonal_scatter.default(grad.new_zeros(size), grad, offset, dim1, dim2)


@decompose(aten.pixel_shuffle.default, to="prims")
def pixel_shuffle(x: Tensor, factor: int) -> Tensor:
    *batch, channels, height, width = x.shape
    blocks = x.reshape([*batch, channels // (factor * factor), factor, factor, height, width])
    n = len(batch)
    order = [*range(n), n, n + 3, n + 1, n + 4, n + 2]
    return blocks.permute(order).reshape(
        [*batch, channels // (factor * factor), height * factor, width * factor]
    )


@decompose(aten.pixel_unshuffle.default, to="prims")
def pixel_unshuffle(x: Tensor, factor: int) -> Tensor:
    *batch, channels, height, width = x.shape
    blocks = x.reshape([*batch, channels, height // factor, factor, width // factor, factor])
    n = len(batch)
    order = [*range(n), n, n + 2, n + 4, n + 1, n + 3]
    return blocks.permute(order).reshape(
        [*batch, channels * factor * factor, height // factor, width // factor]
    )
