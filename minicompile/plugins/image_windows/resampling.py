"""Resampling: each result is a sum of some elements, times weights.

Along each dimension a table, made when compiling, says which elements and weights: its rows are the results'
positions. The gradient reads the turned table, so nothing is scattered. The real compiler: upsample_nearest2d
and its like in torch/_inductor/lowering.py, and decompositions that index with computed positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from minicompile.errors import Unsupported
from minicompile.lowering.context import LoweringContext, Rule, lowering
from minicompile.lowering.rules.common import aten, converted
from minicompile.lowering.value import TensorValue
from minicompile.ops.dtypes import computation_dtype
from minicompile.ops.handler import Index, Ops, V
from minicompile.plugins.image_windows.windows import INT, Axis, folded, unfolded
from minicompile.shapes.expr import FloorDiv, Size


@dataclass
class Table:
    """`places[i]`: the elements, of `extent`, that result i is made of; -1 where there are fewer."""

    places: torch.Tensor
    extent: int
    weights: torch.Tensor | None = None

    def turned(self) -> Table:
        """For each element the results that it goes into, in order."""
        rows, taps = self.places.shape
        elements, order = self.places.reshape(-1).sort(stable=True)
        order = order[elements >= 0]
        elements = elements[elements >= 0]
        counts = torch.bincount(elements, minlength=self.extent)
        column = torch.arange(len(order)) - (counts.cumsum(0) - counts)[elements]
        places = torch.full((self.extent, max(int(counts.max()), 1)), -1)
        places[elements, column] = order // taps
        if self.weights is None:
            return Table(places, rows)
        weights = self.weights.new_zeros(places.shape)
        weights[elements, column] = self.weights.reshape(-1)[order]
        return Table(places, rows, weights)


class Tabled(Axis):
    """An axis whose places stand in memory."""

    def __init__(self, ctx: LoweringContext, x: TensorValue, table: Table, name: str) -> None:
        def constant(values: torch.Tensor, what: str) -> TensorValue:
            return ctx.constant(values.to(x.device).contiguous(), f"{ctx.node}_{name}_{what}")

        self.extent, self.table = table.extent, table
        self.count, self.taps = table.places.shape
        self.places = constant(table.places, "places")
        self.weights = constant(table.weights, "weights") if table.weights is not None else None

    def place(self, ops: Ops, window: Index, tap: Index) -> tuple[Index, list[V]]:
        formula = self.formula(int(tap)) if tap.is_Integer else None
        if formula is not None:
            return formula(window), []
        found = self.places.load(ops, [window, tap])
        column = self.table.places[:, int(tap)] if tap.is_Integer else self.table.places
        missing = bool((column < 0).any())
        checks = [ops.ge(found, ops.constant(0, INT))] if missing else []
        return ops.indirect_indexing(found, self.extent, False, False), checks

    def formula(self, tap: int) -> Callable[[Index], Index] | None:
        """The places of a tap where they go in steps, or stay for a while: nothing is loaded for these."""
        column, at = self.table.places[:, tap], torch.arange(self.count)
        start, step = int(column[0]), int((column[1:2] - column[:1]).sum())
        stay = int((column == start).cumprod(0).sum())
        if start >= 0 and step >= 0 and bool((column == start + step * at).all()):
            return lambda window: start + step * window
        if start >= 0 and bool((column == start + at // stay).all()):
            return lambda window: start + FloorDiv(window, sympy.Integer(stay))
        return None


def nearest(extent: int, count: int, scale: float | None) -> Table:
    """The element that each result copies."""
    ratio = torch.tensor(1 / scale if scale else extent / count, dtype=torch.float32)
    if count in (extent, 2 * extent):
        ratio = torch.tensor(extent / count)
    at = torch.floor(torch.arange(count, dtype=torch.float32) * ratio).long().clamp(max=extent - 1)
    return Table(at.unsqueeze(1), extent)


def linear(
    extent: int, count: int, scale: float | None, corners: bool, dtype: torch.dtype
) -> Table:
    """Linear weights; `corners`: the corner elements' centres stay where they are."""
    at = torch.arange(count, dtype=dtype)
    if corners:
        at = at * (torch.tensor(extent - 1, dtype=dtype) / max(count - 1, 1) * (count > 1))
    else:
        whole = torch.tensor(extent, dtype=dtype) / count
        copied = count == extent  # whatever the scale
        ratio = torch.tensor(1 / scale, dtype=dtype) if scale and not copied else whole
        at = ((at + 0.5) * ratio - 0.5).clamp(min=0)
    before = at.floor()
    part = (at - before).unsqueeze(1)
    places = (before.long().unsqueeze(1) + torch.arange(2)).clamp(0, extent - 1)
    places = places[:, :1].expand(-1, 2) if count == extent else places
    return Table(places, extent, torch.cat([1 - part, part], 1))


def by_tables(ctx: LoweringContext, x: TensorValue, tables: Sequence[Table]) -> TensorValue:
    """Sums of elements of x along its last two dimensions."""
    dtype = computation_dtype(x.dtype)
    axes = [Tabled(ctx, x, table, f"axis{k}") for k, table in enumerate(tables)]
    elements = unfolded(ctx, converted(ctx, x, dtype), axes)
    rows, columns = (axis.weights for axis in axes)

    def weighted(ops: Ops, index: Sequence[Index]) -> V:
        assert rows is not None and columns is not None
        row = rows.load_as(ops, [index[-4], index[-2]], dtype)
        column = columns.load_as(ops, [index[-3], index[-1]], dtype)
        return ops.mul(elements.load(ops, index), ops.mul(row, column))

    terms = elements
    if rows is not None:
        terms = ctx.pointwise(elements.size, x.device, weighted)
    return converted(ctx, folded(ctx, "sum", terms), x.dtype)


def upsample(kind: str, backward: bool) -> Rule:
    """The rule of an operator, which gets x, the result's size, in the backward x's, then options."""

    def rule(
        ctx: LoweringContext, x: TensorValue, size: Sequence[Size], *options: Any
    ) -> TensorValue:
        extents = options[0][2:] if backward else x.size[2:]
        if not all(isinstance(n, int) and n > 0 for n in (*size, *extents)):
            raise Unsupported(
                "a table of positions for sizes that are only known at run time, or 0"
            )
        if kind == "bilinear" and not x.dtype.is_floating_point:
            raise Unsupported("interpolation between integers")
        rest = [*options[backward:], None, None]
        corners = rest.pop(0) if kind == "bilinear" else False
        dtype = torch.promote_types(computation_dtype(x.dtype), torch.float32)
        tables = [
            linear(*axis, corners, dtype) if kind == "bilinear" else nearest(*axis)
            for axis in zip(extents, size, rest[:2], strict=True)
        ]
        return by_tables(ctx, x, [table.turned() for table in tables] if backward else tables)

    return rule


for _name in ("nearest", "bilinear"):
    for _backward in (False, True):
        _op = getattr(aten, f"upsample_{_name}2d" + "_backward" * _backward)
        lowering(_op.default)(upsample(_name, _backward))
