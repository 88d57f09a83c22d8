"""C kernels with reductions and scans of rows: loops over r, the reduced dimensions, and their accumulators.

A scan is accumulated as a reduction is, and is what has been accumulated so far: its loop along r is not in
vectors. The plug-in cpu_reductions has quicker ways: helpers that reduce a row in memory, sums in blocks,
columns side by side, rows that threads share.
"""

from __future__ import annotations

from collections.abc import Sequence

from minicompile.codegen.cpp_loops import LoopPrinter
from minicompile.codegen.cpp_values import Loop
from minicompile.codegen.plan import CppPlan
from minicompile.ops.table import POSITIONS
from minicompile.scheduling.body import Value


class RowPrinter(LoopPrinter):
    """For each x: loops over r in vectors, one for each phase."""

    def __init__(self, plan: CppPlan) -> None:
        super().__init__(plan)
        self.started: set[Value] = set()
        """Scans whose accumulators are declared."""
        r_loops = [Loop(var, size) for var, size in plan.reduction_ranges.items()]
        self.r_loops = [loop for loop in r_loops if loop.size != 1] or r_loops[:1]

    def nest(self) -> None:
        self.rows(len(self.x_loops))

    def rows(self, shared: int) -> None:
        """All rows; threads share the outermost loops over x, `shared` in number."""
        with self.loops(self.x_loops, self._parallel(shared)):
            self._scratch(self.in_order(self.plan.stashed), "_row", self.plan.row_length)
            for phase in self.plan.phases:
                if phase.level == "row":
                    self.compute(phase.values)
                else:
                    self.sweep(phase.values)

    # ---- loops over r

    def sweep(self, values: Sequence[Value]) -> None:
        """Loops over r, and the accumulators around them. Rows that are kept are filled or read."""
        for value in values:
            if value.op in ("reduction", "scan"):
                self._start(value)
        *outer, inner = self.r_loops
        index = self.index(self.plan.position)
        rows = {v: f"{self.names[v]}_row[{index}]" for v in self.in_order(self.plan.stashed)}
        with self.loops(outer):
            self._inner(inner, values, self._simd(values, inner.var, riding=True), rows)
        for value in values:
            if value in self.plan.double_sums:
                self.declare(value, self.accumulator(value, "_total"))

    # ---- accumulators

    def accumulator(self, value: Value, suffix: str = "") -> str:
        """The accumulator of a reduction."""
        return self.names[value] + suffix

    def accumulators(self, value: Value) -> list[tuple[str, str, str]]:
        if value in self.plan.double_sums:
            return [("_total", "double", "0.0")]
        return super().accumulators(value)

    def _start(self, value: Value) -> None:
        again = value in self.started  # by an earlier loop, which computed the scan as well
        for suffix, ctype, initial in self.accumulators(value):
            self.set_accumulator(value, suffix, "" if again else ctype, initial)
        if value.op == "scan":
            self.started.add(value)

    def set_accumulator(self, value: Value, suffix: str, ctype: str, initial: str) -> None:
        """Give an accumulator a value, and declare it if it has a type."""
        text = f"{ctype} {self.accumulator(value, suffix)} = {initial};"
        self.line(text.lstrip(), value.origins)

    def accumulate(self, value: Value) -> None:
        self.take(value, self.ref(value.inputs[0]), self.index(self.plan.position))
        if value.op == "scan":
            self.declare(value, self.accumulator(value, "_so_far"))

    def take(self, value: Value, source: str, position: str) -> None:
        """One more element, or a partial result, into the accumulator."""
        if value.kind not in POSITIONS:
            total = self.accumulator(value, self.accumulators(value)[0][0])
            self.line(f"{total} = {self.combine(value, total, source)};", value.origins)
            return
        best = self.accumulator(value, "_best")
        better = self.better(value, source, best)
        with self.block(f"if ({better}) {{", "}", value.origins):  # it seldom moves on
            self.line(f"{best} = {source};", value.origins)
            self.line(f"{self.accumulator(value)} = {position};", value.origins)
