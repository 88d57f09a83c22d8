"""Kernels that reduce along r with vectors along x: accumulators for a tile of columns stand in arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import sympy

from minicompile.codegen.cpp_loops import (
    BLOCK,
    LoopPrinter,
    is_float_sum,
    is_long,
    least,
    operands,
    reductions_of,
)
from minicompile.codegen.cpp_ops import CTYPES
from minicompile.codegen.plan import Phase
from minicompile.codegen.rules import varying
from minicompile.scheduling.body import Value
from minicompile.shapes.expr import Size


@dataclass(frozen=True)
class Columns:
    """The tile at hand: its variable and bounds, how many columns it has, what its phases hand on."""

    inner: sympy.Symbol
    start: str
    stop: str
    tile: int
    kept: frozenset[Value]
    """Row values and reductions that stand in arrays."""
    fixed: frozenset[Value]
    """Row values that are the same for all columns: computed before."""

    @property
    def lane(self) -> str:
        """The place of a column in the tile."""
        return str(self.inner) if self.start == "0" else f"{self.inner} - {self.start}"


class ColumnPrinter(LoopPrinter):
    """Tiles of columns, and tiles whose rows threads share."""

    def _columns(self) -> None:
        *outer, (inner, size) = self._x_loops()
        tile = self.plan.tiles["x"]
        tiled = not isinstance(size, int) or size > tile
        fixed = self._fixed(inner)
        shared = self._chunks() if "r" in self.plan.tiles else None
        together = len(outer) + (tiled and not fixed)  # loops without anything in between
        pragma = self._parallel(together) if not shared and (outer or tiled) else ""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.loops(outer, pragma))
            self.compute(self.in_order(fixed))
            start, stop = "0", self.index(size)
            if tiled:
                start, stop = f"{inner}_start", f"{inner}_end"
                first = "" if outer else pragma
                stack.enter_context(self.loop(start, size, first, step=tile))
                self.line(f"const int64_t {stop} = {least(f'{start} + {tile}', self.index(size))};")
            kept = self._carried() - fixed
            self._scratch([v for v in self.in_order(kept) if v.op != "reduction"], "_tile", tile)
            columns = Columns(inner, start, stop, tile, kept, fixed)
            for phase in self.plan.phases:
                if shared and phase.level == "loop":
                    self._chunked_phase(phase, columns, *shared)
                elif not set(phase.values) <= fixed:
                    self._column_phase(phase, columns)

    def _fixed(self, inner: sympy.Symbol) -> frozenset[Value]:
        """Row values that need no reduction and don't vary along the tile."""
        first = self.plan.phases[0]
        if first.level != "row":
            return frozenset()
        moving = varying(first.values, inner)
        return frozenset(v for v in first.values if v not in moving and v.op != "store")

    def _carried(self) -> frozenset[Value]:
        """Row values and reductions that another phase than their own reads."""
        found: set[Value] = set()
        for phase in self.plan.phases:
            found |= {
                v
                for v in operands(phase.values) - set(phase.values)
                if v not in self.plan.loop and v.op != "constant"
            }
        return frozenset(found)

    def _start_tile(self, value: Value, tile: int) -> None:
        for suffix, ctype, initial in self.accumulators(value):
            array = f"{self.names[value]}{suffix}_tile"
            self.line(f"{ctype} {array}[{tile}] __attribute__((aligned(64)));", value.origins)
            with self.loop("j", tile):
                self.line(f"{array}[j] = {initial};", value.origins)

    def _column_phase(
        self, phase: Phase, columns: Columns, start: str = "0", stop: str = ""
    ) -> None:
        """One sweep over r, or none at row level; `start` and `stop` bound the outermost variable."""
        reductions = reductions_of(phase)
        for value in reductions:
            self._start_tile(value, columns.tile)
        nest = self._r_loops() if phase.level == "loop" else []
        sums = [v for v in reductions if is_float_sum(v)]
        with contextlib.ExitStack() as stack:
            for i, (var, size) in enumerate(nest):
                bounds = (start, stop) if i == 0 else ("0", "")
                if sums and var == nest[-1][0] and is_long(size):
                    blocks = self._column_blocks(sums, var, size, columns.tile, *bounds)
                    stack.enter_context(blocks)
                else:
                    stack.enter_context(self.loop(var, size, "", *bounds))
            self._lanes(phase, columns)

    @contextlib.contextmanager
    def _column_blocks(
        self,
        sums: Sequence[Value],
        var: sympy.Symbol,
        size: Size,
        tile: int,
        start: str,
        stop: str,
    ) -> Iterator[None]:
        """The loop over r in blocks, each with float sums of its own."""
        with self.loop(f"{var}_block", size, "", start, stop, BLOCK):
            end = least(f"{var}_block + {BLOCK}", stop or self.index(size))
            self.line(f"const int64_t {var}_end = {end};")
            for value in sums:
                name = f"{self.names[value]}_tile"
                self.line(f"{CTYPES[value.dtype]} {name}_sum[{tile}];", value.origins)
                with self.loop("j", tile):
                    self.line(f"{name}_sum[j] = {name}[j];", value.origins)
                    self.line(f"{name}[j] = 0;", value.origins)
            with self.loop(var, size, "", f"{var}_block", f"{var}_end"):
                yield
            for value in sums:
                name = f"{self.names[value]}_tile"
                with self.loop("j", tile):
                    self.line(f"{name}[j] += {name}_sum[j];", value.origins)

    def _lanes(self, phase: Phase, columns: Columns) -> None:
        """The loop over the columns of a tile."""
        inner, lane = columns.inner, columns.lane
        values = [v for v in phase.values if v not in columns.fixed]
        simd = self._simd(values, inner)
        with self.loop(inner, 0, simd, columns.start, columns.stop):
            for value in self.in_order(columns.kept & (operands(values) - set(values))):
                self.declare(value, f"{self.names[value]}_tile[{lane}]")
            self.compute(values, partial(self._accumulate_lane, lane=lane))
            for value in values:
                if value in columns.kept and value.op != "reduction":
                    name = self.names[value]
                    self.line(f"{name}_tile[{lane}] = {name};", value.origins)

    def _accumulate_lane(self, value: Value, lane: str) -> None:
        """One element into the accumulator of its column."""
        self._combine_lane(value, "_tile", lane, self.ref(value.inputs[0]), self.position())

    def _combine_lane(
        self, value: Value, array: str, lane: str, source: str, position: str
    ) -> None:
        name = self.names[value]
        total = f"{name}{array}[{lane}]"
        if not self.is_positional(value):
            self.line(f"{total} = {self.combine(value, total, source)};", value.origins)
            return
        best = f"{name}_best{array}[{lane}]"
        self.line(f"bool {name}_moves = {self.better(value, source, best)};", value.origins)
        self.line(f"{best} = {name}_moves ? {source} : {best};", value.origins)
        self.line(f"{total} = {name}_moves ? {position} : {total};", value.origins)

    def _chunked_phase(self, phase: Phase, columns: Columns, most: int, size: str) -> None:
        """Threads share chunks of rows; each has accumulators, combined in the order of the chunks."""
        reductions, tile = reductions_of(phase), columns.tile
        for value in reductions:
            for suffix, ctype, _ in self.accumulators(value):
                name = f"{self.names[value]}{suffix}_parts"
                self.line(f"{ctype} {name}[{most * tile}];", value.origins)
        self.pragma(self._parallel())
        with self.block("for (int64_t c = 0; c < chunks; c++)"):
            self.line(f"const int64_t end = {least('(c + 1) * chunk', size)};")
            self._column_phase(phase, columns, "c * chunk", "end")
            for value in reductions:
                for suffix, _, _ in self.accumulators(value):
                    name = self.names[value] + suffix
                    with self.loop("j", tile):
                        self.line(f"{name}_parts[c * {tile} + j] = {name}_tile[j];", value.origins)
        for value in reductions:
            self._start_tile(value, tile)
            name = self.names[value]
            part = f"parts[c * {tile} + j]"
            source = f"{name}_best_{part}" if self.is_positional(value) else f"{name}_{part}"
            with (
                self.block("for (int64_t c = 0; c < chunks; c++)"),
                self.loop("j", tile, "simd"),
            ):
                self._combine_lane(value, "_tile", "j", source, f"{name}_{part}")
