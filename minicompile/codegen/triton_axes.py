"""Which axes of a tile values vary along, and their indices by these axes.

An axis flattens loops: `xindex` numbers the elements of all its loops as one. A loop variable that an index
needs apart from the others is a digit of that number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import sympy

from minicompile.codegen.plan import TritonPlan
from minicompile.ops.handler import Index
from minicompile.ops.origin import Origins, union
from minicompile.scheduling.body import Value
from minicompile.shapes.expr import (
    ZERO,
    Size,
    coefficient_of,
    contiguous_strides,
    loop_symbol,
    same,
)

Axes = frozenset[str]
"""Which of the tile's axes, "y", "x" and "r", a value varies along."""


class Digit(NamedTuple):
    """`var = number // below % size`, where `size` isn't None, for the values of `origins`."""

    var: sympy.Symbol
    below: Size
    size: Size | None
    origins: Origins


def index_axes(plan: TritonPlan, value: Value, axes: Mapping[Value, Axes]) -> Axes:
    """Axes of the loop variables and loaded indices in a value's index."""
    if value.index is None:
        return frozenset()
    symbols = value.index.free_symbols
    own = frozenset(a for a, loops in plan.axes.items() if not symbols.isdisjoint(loops))
    return own.union(*(axes[indirect] for indirect in value.indirect))


def value_axes(plan: TritonPlan) -> dict[Value, Axes]:
    """The axes of each value: those of its operands and index, but a reduction has no r, and a scan all."""
    axes: dict[Value, Axes] = {}
    whole = {"reduction": frozenset(plan.axes) - {"r"}, "scan": frozenset("xr")}
    for value in plan.body.values:
        across = (axes[operand] for operand in value.operands)
        axes[value] = whole.get(value.op) or index_axes(plan, value, axes).union(*across)
    return axes


def flat_index(plan: TritonPlan, index: Index) -> Index:
    """An index by an axis's own flattened index, where it walks that axis's loops in one stride."""
    for axis, loops in plan.axes.items():
        strides = contiguous_strides(list(loops.values()))
        steps = [coefficient_of(index, var) for var in loops]
        pairs = zip(steps, strides, strict=True)
        last = steps[-1] if len(loops) > 1 else None
        if last and all(a is not None and same(a, last * b) for a, b in pairs):
            rest = index.xreplace(dict.fromkeys(loops, ZERO))
            index = rest + last * loop_symbol(f"{axis}index")
    return index


def digits(plan: TritonPlan, ranges: dict[sympy.Symbol, Size]) -> list[Digit]:
    """The loop variables among `ranges` that an index mentions, as digits of the flattened index."""
    values = [v for v in plan.body.values if v.index is not None]
    places = [(flat_index(plan, v.index).free_symbols, v.origins) for v in values]
    below: Size = 1
    found: list[Digit] = []
    for var, size in reversed(ranges.items()):
        if users := [origins for symbols, origins in places if var in symbols]:
            first = var is next(iter(ranges))
            found.append(Digit(var, below, None if first else size, union(users)))
        below = below * size
    return found[::-1]
