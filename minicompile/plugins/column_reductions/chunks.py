"""C kernels whose rows threads share: each takes chunks of the outermost r.

Partial results are combined in the order of the chunks, so that they don't depend on the number of threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from minicompile.codegen.cpp_loops import least
from minicompile.codegen.cpp_reductions import RowPrinter
from minicompile.codegen.plan import CppPlan
from minicompile.codegen.printing import kernel_template
from minicompile.ops.table import POSITIONS
from minicompile.scheduling.body import Value


@kernel_template("chunks")
class ChunkPrinter(RowPrinter):
    """Rows in chunks, if the plan has such tiles. A lane is a column of a tile, or the only row."""

    lanes = 1

    def __init__(self, plan: CppPlan) -> None:
        super().__init__(plan)
        self.split = "r" in plan.tiles
        """Threads share chunks of r."""

    def nest(self) -> None:
        self.declare_chunks()
        self.rows(0)

    def declare_chunks(self) -> None:
        """Declare how many chunks of the outermost r threads share, and how long they are."""
        if not self.split:
            return
        size = self.r_loops[0].size
        chunk, most, text = self.plan.tiles["r"], self.plan.tiles["chunks"], self.index(size)
        if isinstance(size, int):
            self.line(f"const int64_t chunk = {chunk}, chunks = {-(-size // chunk)};")
        else:
            fair = f"({text} + {most - 1}) / {most}"
            self.line(f"const int64_t chunk = {fair} > {chunk} ? {fair} : {chunk};")
            self.line(f"const int64_t chunks = ({text} + chunk - 1) / chunk;")

    def sweep(self, values: Sequence[Value], start: str = "0", stop: str = "") -> None:
        """Threads share a sweep over r, and their results are combined in order."""
        if not self.split:
            super().sweep(values, start, stop)
            return
        reductions = [v for v in values if v.op == "reduction"]
        parts = [(v, *found) for v in reductions for found in self.accumulators(v)]
        size = self.index(self.r_loops[0].size)
        most = self.plan.tiles["chunks"]
        for value, suffix, ctype, _ in parts:
            room = f"{self.names[value]}{suffix}_parts[{most * self.lanes}]"
            self.line(f"{ctype} {room};", value.origins)
        self.pragma(self._parallel())
        with self.braces("for (int64_t c = 0; c < chunks; c++)"):
            self.line(f"const int64_t end = {least('(c + 1) * chunk', size)};")
            super().sweep(values, "c * chunk", "end")
            for value, suffix, _, _ in parts:
                with self.each_lane():
                    result = self.accumulator(value, suffix)
                    self.line(f"{self.part(value, suffix)} = {result};", value.origins)
        if reductions:
            self.finish_chunks(reductions)

    def finish_chunks(self, reductions: Sequence[Value]) -> None:
        """Each chunk has found its part: combine them, now or in the loop that comes next."""
        self.combine_parts(reductions)

    def combine_parts(self, reductions: Sequence[Value]) -> None:
        """What the chunks found, in their order, in the lane at hand."""
        for value in reductions:
            for suffix, ctype, initial in self.accumulators(value):
                self.start_lane(value, suffix, ctype, initial)
        with self.braces("for (int64_t c = 0; c < chunks; c++)"):
            for value in reductions:
                best = self.part(value, "_best" if value.kind in POSITIONS else "")
                self.take(value, best, self.part(value))

    def start_lane(self, value: Value, suffix: str, ctype: str, initial: str) -> None:
        """The start of an accumulator in the lane at hand."""
        self.set_accumulator(value, suffix, ctype, initial)

    def part(self, value: Value, suffix: str = "") -> str:
        """The result of chunk c in the lane at hand."""
        return f"{self.names[value]}{suffix}_parts[c]"

    @contextlib.contextmanager
    def each_lane(self) -> Iterator[None]:
        """What follows is done for each lane."""
        yield
