"""Views reduced to `view`, `permute`, `expand`, `slice`, `select`, `unsqueeze`, `squeeze`, and
their derivatives; operators that only move elements, written with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minicompile.aot.decompositions.registry import decompose, formulas

aten = torch.ops.aten


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


@decompose(aten.roll.default, to="core")
def roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """Two slices in the other order; torch's rule gathers."""
    if not dims:
        return roll(x.flatten(), shifts, [0]).view(x.shape)
    for shift, dim in zip(shifts, dims):
        if (size := x.shape[dim]) != 0:
            start = (size - shift) % size
            x = torch.cat([x.narrow(dim, start, size - start), x.narrow(dim, 0, start)], dim)
    return x


formulas(
    {
        aten.detach.default: lambda x: x,
        aten.unbind.int: lambda x, dim=0: [x.select(dim, i) for i in range(x.shape[dim])],
    },
    wide=False,
)
