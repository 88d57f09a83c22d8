"""Resampling: each result copies the nearest element, and a gradient is the sum over an element's copies.

Along each dimension a table, made when compiling, says which elements: its rows are the results' positions.
The gradient reads the table of copies, so nothing is scattered. The real compiler: upsample_nearest2d and its
like in torch/_inductor/lowering.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class Tabled(Axis):
    """An axis whose places stand in memory: row i of `table` has the elements, of `extent`, of result i; -1
    where there are fewer."""

    def __init__(self, constant: TensorValue, table: torch.Tensor, extent: int) -> None:
        self.extent, self.table, self.places = extent, table, constant
        self.count, self.taps = table.shape

    def place(self, ops: Ops, window: Index, tap: Index) -> tuple[Index, list[V]]:
        formula = self.formula(int(tap)) if tap.is_Integer else None
        if formula is not None:
            return formula(window), []
        element = self.places.load(ops, [window, tap])
        column = self.table[:, int(tap)] if tap.is_Integer else self.table
        checks = [ops.ge(element, ops.constant(0, INT))] if bool((column < 0).any()) else []
        return ops.indirect_indexing(element, self.extent, False, False), checks

    def formula(self, tap: int) -> Callable[[Index], Index] | None:
        """The places of a tap where they go in steps, or stay for a while: nothing is loaded for these."""
        column, at = self.table[:, tap], torch.arange(self.count)
        start, step = int(column[0]), int((column[1:2] - column[:1]).sum())
        stay = int((column == start).cumprod(0).sum())
        if start >= 0 and step >= 0 and bool((column == start + step * at).all()):
            return lambda window: start + step * window
        if start >= 0 and bool((column == start + at // stay).all()):
            return lambda window: start + FloorDiv(window, sympy.Integer(stay))
        return None


def nearest(extent: int, count: int, scale: float | None) -> torch.Tensor:
    """The element that each result copies, as a table of one column."""
    ratio = torch.tensor(1 / scale if scale else extent / count, dtype=torch.float32)
    if count in (extent, 2 * extent):
        ratio = torch.tensor(extent / count)
    at = torch.floor(torch.arange(count, dtype=torch.float32) * ratio).long().clamp(max=extent - 1)
    return at.unsqueeze(1)


def copies_of(sources: torch.Tensor, extent: int) -> torch.Tensor:
    """For each element the results that copy it, which are neighbours: those of `sources` grow."""
    counts = torch.bincount(sources.flatten(), minlength=extent).unsqueeze(1)
    taps = torch.arange(max(int(counts.max()), 1))
    return torch.where(taps < counts, counts.cumsum(0) - counts + taps, -1)


def upsample(backward: bool) -> Rule:
    """The rule of an operator, which gets x, the result's size, in the backward x's, then scales."""

    def rule(
        ctx: LoweringContext, x: TensorValue, size: Sequence[Size], *options: Any
    ) -> TensorValue:
        extents = options[0][2:] if backward else x.size[2:]
        if not all(isinstance(n, int) and n > 0 for n in (*size, *extents)):
            raise Unsupported(
                "a table of positions for sizes that are only known at run time, or 0"
            )
        axes = []
        scales = [*options[backward:], None, None][:2]
        for number, (extent, count, scale) in enumerate(zip(extents, size, scales, strict=True)):
            table = nearest(extent, count, scale)
            if backward:
                table = copies_of(table, extent)
            constant = ctx.constant(table.to(x.device), f"{ctx.node}_axis{number}_places")
            axes.append(Tabled(constant, table, count if backward else extent))
        elements = unfolded(ctx, converted(ctx, x, computation_dtype(x.dtype)), axes)
        return converted(ctx, folded(ctx, "sum", elements), x.dtype)

    return rule


lowering(aten.upsample_nearest2d.default)(upsample(backward=False))
lowering(aten.upsample_nearest2d_backward.default)(upsample(backward=True))
