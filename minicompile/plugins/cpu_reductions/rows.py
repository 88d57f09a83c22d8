"""C kernels whose rows are reduced by helpers: functions of `codegen/helpers.h` that read a row in memory.

A helper works in vectors, and is quicker than a loop that accumulates one element after the other; and
vectors of the compiler's, where they compare, might drop a NaN. Float sums of long rows go in blocks, so that
rounding errors don't pile up: each block sums for itself, and the sums are added up as doubles.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import sympy
import torch

from minicompile.codegen.cpp_ops import CTYPES
from minicompile.codegen.cpp_reductions import RowPrinter
from minicompile.codegen.cpp_values import Loop
from minicompile.codegen.phases import cone, float_sums
from minicompile.codegen.plan import CppPlan
from minicompile.codegen.printing import kernel_template
from minicompile.ops.table import POSITIONS
from minicompile.scheduling.body import Value
from minicompile.shapes.expr import Size, coefficient_of, product, size_hint

BLOCK = 2048
"""Iterations after which the sum of a long row goes into its total."""

LONG_ROW = 8192
"""Float sums over longer rows are summed in blocks, even by a helper."""

SHORT_ROW = 256
"""Rows up to this, or four times that as a kernel's only sum, are written to memory for a helper, which is
quicker than the loop that computes them."""

MANY = 256
"""So many short sums are sums of floats: doubles would take longer."""


@kernel_template("rows")
class RowHelperPrinter(RowPrinter):
    """Rows of which helpers reduce what lies in memory, and sums in blocks."""

    block_length = BLOCK

    def __init__(self, plan: CppPlan) -> None:
        super().__init__(plan)
        self.kept: set[Value] = set()
        """Values that have a place outside of the loops over a row."""
        self.at_once = False
        """The loop at hand is the whole reduction: nothing was accumulated before."""
        self.most: Size = 0
        """Iterations that the loop at hand can have."""

    def sweep(self, values: Sequence[Value], start: str = "0", stop: str = "") -> None:
        """Loops over r with their accumulators; `start` and `stop` bound the outermost variable."""
        *outer, last = self.r_loops
        inner, size = last.var, last.size
        in_blocks, totals = self.in_blocks(values), self.totals(values)
        self.at_once = not outer and not in_blocks
        self.most = self.block_length if in_blocks else size
        for value in values:
            if value.op == "scan" or (
                value.op == "reduction" and not (self.at_once and self.by_row(value))
            ):
                self._start(value)
            if value in totals:
                self.set_accumulator(value, "_total", "double", "0.0")
        with contextlib.ExitStack() as stack:
            for loop in outer:
                stack.enter_context(self.loop(loop._replace(start=start, stop=stop)))
                start, stop = "0", ""
            if in_blocks:
                block = f"{inner}_block"
                stack.enter_context(self.loop(Loop(block, size, start, stop, self.block_length)))
                self._end(inner, block, self.block_length, stop or self.index(size))
                start, stop = block, f"{inner}_end"
            loop = Loop(inner, size, start, stop or self.index(size))
            self.piece(values, loop, totals)
        self.for_each(totals, "{0} = {1};")

    def in_blocks(self, values: Sequence[Value]) -> bool:
        """Rows that are long or may be, for sums that no helper takes care of or what helpers read."""
        size = self.r_loops[-1].size
        by_row = [v for v in values if v.op == "reduction" and self.by_row(v)]
        most = LONG_ROW if set(float_sums(values)) <= {*by_row} else BLOCK
        long = not isinstance(size, int) or size > most
        return long and (most == BLOCK or bool(by_row))

    def totals(self, values: Sequence[Value]) -> list[Value]:
        """Float sums that are added up from those of blocks, or of innermost loops."""
        return float_sums(values) if self.r_loops[1:] or self.in_blocks(values) else []

    def piece(self, values: Sequence[Value], loop: Loop, totals: list[Value]) -> None:
        """The innermost loop over r, or a block of it, whose sums go into the totals."""
        self.for_each(totals, "{0} = 0;")
        self.innermost(values, loop)
        self.for_each(totals, "{1} += {0};")

    def innermost(self, values: Sequence[Value], loop: Loop) -> None:
        """Values, stores, what row reductions will read, other reductions."""
        by_row = [v for v in values if v.op == "reduction" and self.by_row(v)]
        stashed, index = self.plan.stashed, self.index(self.plan.position)
        scratch = {v: f"{self.names[v]}_row[{index}]" for v in self.in_order(stashed)}
        filled = self._filled(values)
        inner, _, start, *_ = loop
        before = "" if start == "0" else f" - {start}"
        for value in filled:
            scratch[value] = f"{self.names[value]}_part[{inner}{before}]"
        wanted = [v for v in values if v.op in ("store", "reduction") or v.check or v in scratch]
        if filled:
            assert isinstance(self.most, int)
            self._scratch([v for v in filled if v not in self.kept], "_part", self.most)
            self.kept.update(filled if self.at_once else ())
        elsewhere = scratch.keys() - set(values)
        needed = cone((v for v in wanted if v not in by_row), values, elsewhere)
        if inside := self.in_order(needed - elsewhere):
            self._inner(loop, inside, self._simd(inside, inner, riding=True), scratch)
        for value in by_row:
            self._reduce_row(value, loop)

    def for_each(self, values: Iterable[Value], text: str) -> None:
        """A line for each accumulator, {0}, and its total, {1}."""
        for value in values:
            places = self.accumulator(value), self.accumulator(value, "_total")
            self.line(text.format(*places), value.origins)

    def by_row(self, value: Value) -> bool:
        """A helper reduces a row of floats in memory; other reductions ride along in the loop.

        Of sums those of what is written anyway, and of short rows. The largest and the smallest number and
        their places always, since vectors that compare may drop a NaN.
        """
        source = value.inputs[0]
        single = source.dtype is torch.float32
        extremum = value.kind in ("max", "min") and source.dtype.is_floating_point
        summed = value.kind == "sum" and self._helper(source) != ""
        known = extremum or (single and (value.kind in POSITIONS or summed))
        return (
            value.op == "reduction"
            and known
            and source in self.plan.loop
            and self.plan.vector_width > 1
        )

    def _helper(self, source: Value) -> str:
        """What sums a row of this, or "" where a loop that computes it is as quick."""
        size, rows = self.r_loops[-1].size, product(self.plan.ranges.values())
        known, written = size if isinstance(size, int) else BLOCK, self._written(source)
        sums = [v for v in float_sums(self.plan.body.values) if not self._written(v.inputs[0])]
        many = known <= SHORT_ROW and size_hint(rows, self.plan.hints) >= MANY
        if not written and not 16 * many <= known <= (SHORT_ROW if sums[1:] else 4 * SHORT_ROW):
            return ""
        return "mc_short_sum" if many else "mc_row_sum"

    def _written(self, source: Value) -> bool:
        """A row that is in memory anyway."""
        return source in self.plan.stashed or self._lies_in_memory(source)

    def _filled(self, values: Sequence[Value]) -> list[Value]:
        """What row reductions read: the loop must write it to memory for them."""
        found = {v.inputs[0] for v in values if v.op == "reduction" and self.by_row(v)}
        kept = self.plan.stashed
        return self.in_order({v for v in found if v not in kept and not self._lies_in_memory(v)})

    def _reduce_row(self, value: Value, loop: Loop) -> None:
        """One call for a row in memory, or a block of it."""
        name, row = self.names[value], self._row_address(value.inputs[0], loop)
        count = loop.stop if loop.start == "0" else f"{loop.stop} - {loop.start}"
        ctype = CTYPES[value.inputs[0].dtype]
        place = value.kind in POSITIONS
        helper = f"mc_row_{value.kind[place and 3 :]}" + ("_double" if ctype == "double" else "")
        helper = self._helper(value.inputs[0]) if value.kind == "sum" else helper
        best = f"{name}{'_best' if place else ''}"
        found = best if self.at_once else f"{name}_part"
        self.line(f"{ctype} {found} = {helper}({row}, {count});", value.origins)
        if place:
            start = self.index(self.plan.position.xreplace({loop.var: _start_of(loop)}))
            first = f"{start} + " * (start != "0") + f"mc_row_find({row}, {count}, {found})"
            if self.at_once:
                self.line(f"int64_t {name} = {first};", value.origins)
            else:
                self.take(value, found, first)
        elif not self.at_once:
            self.line(f"{name} = {self.combine(value, name, found)};", value.origins)

    def _lies_in_memory(self, value: Value) -> bool:
        """A plain load whose elements stand side by side along the inner r, and stay there for the loop."""
        if value.buffer in self.plan.in_place and self._overwritten(value):
            return False
        inner = self.r_loops[-1].var
        plain = value.op == "load" and value.mask is None and not value.indirect
        return plain and value.index is not None and coefficient_of(value.index, inner) == 1

    def _overwritten(self, load: Value) -> bool:
        """A loop that loads an element also stores another one in its place."""
        phases = (phase.values for phase in self.plan.phases if load in phase.values)
        return any(v.op == "store" and v.buffer == load.buffer for vs in phases for v in vs)

    def _row_address(self, source: Value, loop: Loop) -> str:
        if self._lies_in_memory(source):
            assert source.index is not None
            base, place = self.arguments[source.buffer].name, source.index
        elif source in self.plan.stashed:
            base, place = f"{self.names[source]}_row", self.plan.position
        else:
            return f"{self.names[source]}_part"
        offset = self.index(place.xreplace({loop.var: _start_of(loop)}))
        return base if offset == "0" else f"{base} + {offset}"


def _start_of(loop: Loop) -> sympy.Expr:
    return sympy.Symbol(loop.start) if loop.start != "0" else sympy.Integer(0)
