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
    if not dims:
        return roll(x.flatten(), shifts, [0]).view(x.shape)
    for shift, dim in zip(shifts, dims):
        if (size := x.shape[dim]) != 0:
            start = (size - shift) % size
            x = torch.cat([x.narrow(dim, start, size - start), x.narrow(dim, 0, start)], dim)
    return x.clone() if all(shift == 0 for shift in shifts) else x


def copied(view: Rule) -> Rule:
    """A view operator's copying variant."""

    def copy(*args: Any, **options: Any) -> Any:
        found = view(*args, **options)
        return found.clone() if isinstance(found, Tensor) else [part.clone() for part in found]

    return copy


VIEWS = """
    alias as_strided detach diagonal expand narrow permute select slice split split_with_sizes squeeze
    transpose unbind unfold unsqueeze view"""

for _name in VIEWS.split():
    _copies = getattr(aten, f"{_name}_copy", None)  # not every release has all of them
    for _overload in _copies.overloads() if _copies is not None else ():
        if not (_copy := getattr(_copies, _overload))._schema.is_mutable:
            decompose(_copy, to="core")(copied(getattr(getattr(aten, _name), _overload)))


def column_less_row(x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[-2], device=x.device).unsqueeze(-1)
    return torch.arange(x.shape[-1], device=x.device) - rows


@decompose(aten.diagonal_scatter.default, to="core")
def diagonal_scatter(
    x: Tensor, new: Tensor, offset: int = 0, dim0: int = 0, dim1: int = 1
) -> Tensor:
    """With the two dimensions last, row r of the diagonal has the element r + offset of its row."""
    turned = x.movedim((dim0, dim1), (-2, -1))
    before = max(-offset, 0)
    rows = aten.constant_pad_nd.default(new, [before, x.shape[dim0] - before - new.shape[-1]])
    found = torch.where(column_less_row(turned) == offset, rows.unsqueeze(-1), turned)
    return found.movedim((-2, -1), (dim0, dim1))


formulas(
    {
        aten.t.default: lambda x: x.permute([1, 0]) if x.dim() == 2 else x,
        aten.detach.default: lambda x: x,
        aten._unsafe_view.default: lambda x, size: x.view(size),
        aten.squeeze.default: lambda x: x.squeeze([d for d, n in enumerate(x.shape) if n == 1]),
        aten.unbind.int: lambda x, dim=0: [x.select(dim, i) for i in range(x.shape[dim])],
        aten.stack.default: lambda xs, dim=0: torch.cat([x.unsqueeze(dim) for x in xs], dim),
    },
    wide=False,
)


decompose(aten.t_copy.default, to="core")(lambda x: x.permute([*reversed(range(x.dim()))]).clone())
