"""C kernels with reductions of columns: loops over r, inside them a loop over a tile of columns in vectors.

A reduction has an accumulator for each column of the tile. What is around it is in
`codegen/cpp_reductions.py` and chunks.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch

from minicompile.codegen.cpp_values import ALIGNED, Loop
from minicompile.codegen.phases import cost, float_sums, operands
from minicompile.codegen.plan import CppPlan
from minicompile.codegen.printing import kernel_template
from minicompile.ops.table import POSITIONS
from minicompile.plugins.cpu_reductions.chunks import ChunkPrinter
from minicompile.plugins.cpu_reductions.rows import MANY
from minicompile.scheduling.body import Value, varying
from minicompile.shapes.expr import product, size_hint

DEAR = 12
"""Operations on an element from which several rows aren't added up at once."""

COLUMN_BLOCK = 64
"""Longer float sums are summed in such blocks, so that rounding errors don't pile up."""


@kernel_template("columns")
class ColumnPrinter(ChunkPrinter):
    """For each tile of the last x: loops over r, inside them a loop over the columns in vectors."""

    block_length = COLUMN_BLOCK
    fewest = 16
    """Iterations of the inner loop from which each of the outer one adds to totals."""

    def __init__(self, plan: CppPlan) -> None:
        super().__init__(plan)
        self.lanes = plan.tiles["x"]
        """Columns of a tile."""
        self.columns = self.x_loops[-1]
        """The loop over them."""
        self.lane = ""
        """The column at hand: its place in the tile."""
        self.arrays: dict[Value, str] = {}
        """Where values stand that another phase than their own reads."""
        self.sums: dict[Value, str] = {}
        """What accumulates four iterations, while they are printed."""
        self.divided: Sequence[Value] = ()
        """Reductions whose chunks are still to be combined, by the loop that comes next."""

    def nest(self) -> None:
        self.declare_chunks()
        *outer, last = self.x_loops
        inner, size = last.var, last.size
        tiled = not isinstance(size, int) or size > self.lanes
        first = self.plan.phases[0]
        fixed = self._fixed(first.values) if first.level == "row" else frozenset()
        together = len(outer) + (tiled and not fixed)  # loops without anything in between
        shared = bool(outer or tiled) and not self.split
        pragma = self._parallel(max(together, 1)) if shared else ""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.loops(outer, pragma))
            self.compute(self.in_order(fixed))
            self.lane = str(inner)
            if tiled:
                start = f"{inner}_start"
                tiles = Loop(start, size, step=self.lanes)
                stack.enter_context(self.loop(tiles, "" if outer else pragma))
                self._end(inner, start, self.lanes, self.index(size))
                self.columns = Loop(inner, size, start, f"{inner}_end")
                self.lane = f"{inner} - {start}"
            carried = self.in_order(self._carried() - fixed)
            self._scratch([v for v in carried if v.op != "reduction"], "_tile", self.lanes)
            self.arrays = {v: self.accumulator(v) for v in carried}
            for phase in self.plan.phases:
                values = [v for v in phase.values if v not in fixed]
                if phase.level == "loop":
                    if self.divided:  # the sweep reads what the last one found
                        with self.each_lane():
                            self._first()
                    self.sweep(values)
                elif values:
                    self._over_columns(values)

    def _over_columns(self, values: Sequence[Value]) -> None:
        self._inner(self.columns, values, self._simd(values, self.x_loops[-1].var), self.arrays)

    def _first(self) -> None:
        """Combine what chunks have found, once."""
        divided, self.divided = self.divided, ()
        if divided:
            self.combine_parts(divided)

    def innermost(self, values: Sequence[Value], loop: Loop) -> None:
        """One row of the tile."""
        still = self._fixed(values, self.arrays)
        with self.loop(loop):
            self.compute(v for v in values if v in still)
            self._over_columns([v for v in values if v not in still])

    def sweep(self, values: Sequence[Value], start: str = "0", stop: str = "") -> None:
        """A few numbers in each column are added up at once, those of a few columns as doubles."""
        loop, columns = self.r_loops[0], product(self.plan.ranges.values())
        known = isinstance(loop.size, int) and loop.size < self.fewest and loop is self.r_loops[-1]
        if not known or self.split or not self._alone(values):
            super().sweep(values, start, stop)
            return
        for value in float_sums(values):
            self._declare_array(value, "", "float")
        few = size_hint(columns, self.plan.hints) < MANY
        self._at_once(values, loop, "double" if few else "float", "{0} = {1};")

    def _alone(self, values: Sequence[Value]) -> bool:
        """Sums and nothing else, which stay in registers: quicker and more exact than sums in memory."""
        others = {v for v in values if v.op in ("store", "reduction", "scan") or v.check}
        others -= {v for v in float_sums(values) if v.dtype is torch.float32}
        return not others and 0 < sum(map(cost, values)) + 1 < DEAR and self.plan.vector_width > 1

    def _at_once(self, values: Sequence[Value], loop: Loop, ctype: str, text: str) -> None:
        """A few iterations, whose sums are {1} in `text`; {0} are the accumulators, {2} their totals."""
        with self.loop(self.columns, self._simd(values, self.x_loops[-1].var)):
            for value in self.in_order(operands(values) & self.arrays.keys() - set(values)):
                self.declare(value, self.arrays[value])
            self.sums = {v: f"{self.names[v]}_part" for v in float_sums(values)}
            for value, name in self.sums.items():
                self.line(f"{ctype} {name} = 0;", value.origins)
            self.line(f"#pragma GCC unroll {loop.size}")
            with self.loop(loop):
                if loop.var == "k":
                    var = self.r_loops[-1].var
                    self.line(f"const int64_t {var} = {var}_four + k;")
                self.compute(values, self.accumulate)
            parts, self.sums = self.sums, {}
            for value, part in parts.items():
                places = self.accumulator(value), part, self.accumulator(value, "_total")
                self.line(text.format(*places), value.origins)

    def in_fours(self, values: Sequence[Value]) -> bool:
        """Are four iterations summed at once?"""
        size = self.r_loops[-1].size
        return isinstance(size, int) and size >= self.fewest and self._alone(values)

    def totals(self, values: Sequence[Value]) -> list[Value]:
        often = (
            self.r_loops[1:] and size_hint(self.r_loops[-1].size, self.plan.hints) >= self.fewest
        )
        at_times = often or self.in_fours(values) or self.in_blocks(values)
        return float_sums(values) if at_times else []

    def piece(self, values: Sequence[Value], loop: Loop, totals: list[Value]) -> None:
        left = self._fours(values, loop) if self.in_fours(values) else loop
        if left is not None:
            super().piece(values, left, totals)

    def _fours(self, values: Sequence[Value], loop: Loop) -> Loop | None:
        """Add up four iterations at a time, each four into the totals. Gives the loop over what is left."""
        var, size, start, stop, _ = loop
        with self.loop(Loop(f"{var}_four", size, start, f"{stop} - 3", 4)):
            self._at_once(values, Loop("k", 4), "float", "{2} += {1};")
        lengths = (size, 0 if start == "0" else self.plan.tiles["r"])
        if all(length % 4 == 0 for length in lengths):
            return None
        return loop._replace(start=f"{stop} - ({stop} - {start}) % 4")

    def in_blocks(self, values: Sequence[Value]) -> bool:
        """Columns of which more is summed than fits a block, or may be."""
        if self.in_fours(values):
            return False
        size = self.r_loops[-1].size
        if isinstance(size, int):
            chunk = self.plan.tiles.get("r", size) if len(self.r_loops) == 1 else size
            return bool(float_sums(values)) and min(size, chunk) > COLUMN_BLOCK
        return bool(float_sums(values))

    def _fixed(self, values: Sequence[Value], carried: Iterable[Value] = ()) -> frozenset[Value]:
        """Those that are the same in all columns of a tile, whose loop can read them from outside."""
        written = {store.buffer for store in self.plan.body.stores}
        effects = (
            v for v in values if v.op in ("store", "reduction", "scan") or v.buffer in written
        )
        along = {self.x_loops[-1].var}
        return frozenset(values) - varying(values, along, {*effects, *carried})

    def _carried(self) -> frozenset[Value]:
        """Row values and reductions that another phase than their own reads."""
        read = (operands(phase.values) - set(phase.values) for phase in self.plan.phases)
        found = frozenset[Value]().union(*read)
        return frozenset(v for v in found - self.plan.loop if v.op != "constant")

    # ---- accumulators: arrays with a place for each column

    def accumulator(self, value: Value, suffix: str = "") -> str:
        if not suffix and value in self.sums:
            return self.sums[value]
        return f"{self.names[value]}{suffix}_tile[{self.lane}]"

    @contextlib.contextmanager
    def each_lane(self) -> Iterator[None]:
        outside, self.lane = self.lane, "j"
        with self.loop(Loop("j", self.lanes), "simd"):
            yield
        self.lane = outside

    def for_each(self, values: Iterable[Value], text: str) -> None:
        for value in values:
            with self.each_lane():
                super().for_each([value], text)

    def by_row(self, value: Value) -> bool:
        return False

    def part(self, value: Value, suffix: str = "") -> str:
        return f"{self.names[value]}{suffix}_parts[c * {self.lanes} + {self.lane}]"

    def finish_chunks(self, reductions: Sequence[Value]) -> None:
        for value in reductions:
            for suffix, ctype, _ in self.accumulators(value):
                self._declare_array(value, suffix, ctype)
        self.divided = reductions

    def set_accumulator(self, value: Value, suffix: str, ctype: str, initial: str) -> None:
        if ctype:
            self._declare_array(value, suffix, ctype)
        with self.each_lane():
            self.start_lane(value, suffix, ctype, initial)

    def start_lane(self, value: Value, suffix: str, ctype: str, initial: str) -> None:
        super().set_accumulator(value, suffix, "", initial)  # the array is declared

    def _declare_array(self, value: Value, suffix: str, ctype: str) -> None:
        array = f"{self.names[value]}{suffix}_tile[{self.lanes}]"
        self.line(f"{ctype} {array} {ALIGNED};", value.origins)

    def take(self, value: Value, source: str, position: str) -> None:
        if value.kind not in POSITIONS:
            super().take(value, source, position)
            return
        total = self.accumulator(value, self.accumulators(value)[0][0])
        best = self.accumulator(value, "_best")
        better = self.better(value, source, best)
        moves = f"{self.names[value]}_moves"  # without a branch, so that it vectorises
        self.line(f"bool {moves} = {better};", value.origins)
        self.line(f"{best} = {moves} ? {source} : {best};", value.origins)
        self.line(f"{total} = {moves} ? {position} : {total};", value.origins)
