"""Views reduced to `view`, `permute`, `expand`, `slice`, `select`, `unsqueeze`, `squeeze`, and
their derivatives; operators that only move elements, written with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minicompile.aot.decompositions.registry import decompose, formulas

aten = torch.ops.aten


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


formulas({aten.detach.default: lambda x: x}, wide=False)
