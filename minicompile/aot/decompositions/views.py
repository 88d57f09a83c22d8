"""Views reduced to `view`, `permute`, `expand`, `slice`, `select`, `unsqueeze`, `squeeze`, and
their derivatives; operators that only move elements, written with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minicompile.aot.decompositions.registry import Rule, decompose, formulas

aten = torch.ops.aten


@decompose(aten.transpose.int, to="core")
def transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:
    order = list(range(x.dim()))
    if order:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return x.permute(order)


@decompose(aten.split_with_sizes.default, to="prims")
def split_with_sizes(x: Tensor, sizes: list[Any], dim: int = 0) -> list[Tensor]:
    ends = itertools.accumulate(sizes)
    return [aten.slice.Tensor(x, dim, end - size, end) for size, end in zip(sizes, ends)]


@decompose(aten.split.Tensor, to="core")
def split(x: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    length = x.shape[dim]
    count = int((length + size - 1) // size) if length != 0 else 1
    sizes = [size] * (count - 1)
    return aten.split_with_sizes.default(x, [*sizes, length - size * (count - 1)], dim)


@decompose(aten.repeat.default, to="prims")
def repeat(x: Tensor, times: list[Any]) -> Tensor:
    """Insert a dimension before each, expand it, and merge the pairs."""
    shape = [1] * (len(times) - x.dim()) + list(x.shape)
    pairs = x.reshape([part for size in shape for part in (1, size)])
    wide = pairs.expand([part for n, size in zip(times, shape) for part in (n, size)])
    copied = wide.clone(memory_format=torch.contiguous_format)
    return copied.view([n * size for n, size in zip(times, shape)])


@decompose(aten.roll.default, to="core")
def roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    if not dims:
        return roll(x.flatten(), shifts, [0]).view(x.shape)
    for shift, dim in zip(shifts, dims):
        if (size := x.shape[dim]) != 0:
            start = (size - shift) % size
            x = torch.cat([x.narrow(dim, start, size - start), x.narrow(dim, 0, start)], dim)
    return x.clone() if all(shift == 0 for shift in shifts) else x


def column_less_row(x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[-2], device=x.device).unsqueeze(-1)
    return torch.arange(x.shape[-1], device=x.device) - rows


def kept(x: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, x, torch.zeros([], dtype=x.dtype, device=x.device))


def placed(scatter: Rule) -> Rule:
    """A gradient in its place among zeros."""
    return lambda grad, size, *place: scatter(grad.new_zeros(size), grad, *place)


formulas(
    {
        aten.t.default: lambda x: x.permute([1, 0]) if x.dim() == 2 else x,
        aten.detach.default: lambda x: x,
        aten._unsafe_view.default: lambda x, size: x.view(size),
        aten.squeeze.default: lambda x: x.squeeze([d for d, n in enumerate(x.shape) if n == 1]),
        aten.unbind.int: lambda x, dim=0: [x.select(dim, i) for i in range(x.shape[dim])],
        aten.stack.default: lambda xs, dim=0: torch.cat([x.unsqueeze(dim) for x in xs], dim),
        aten.tril.default: lambda x, diagonal=0: kept(x, column_less_row(x) <= diagonal),
        aten.triu.default: lambda x, diagonal=0: kept(x, column_less_row(x) >= diagonal),
        aten.slice_backward.default: placed(aten.slice_scatter.default),
        aten.select_backward.default: placed(aten.select_scatter.default),
        aten.diagonal_backward.default: placed(aten.diagonal_scatter.default),
    },
    wide=False,
)
