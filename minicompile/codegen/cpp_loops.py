"""What the shapes of C kernels have in common: loop variables, pragmas, scratch, chunks of r."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import sympy

from minicompile.codegen.cpp_ops import CTYPES
from minicompile.codegen.cpp_values import Loop, ValuePrinter
from minicompile.codegen.plan import Phase
from minicompile.codegen.rules import is_update, separates
from minicompile.scheduling.body import Value
from minicompile.shapes.expr import Size

LONG_ROW = 8192
"""Float sums over longer rows are summed in blocks, so that rounding errors don't pile up."""

BLOCK = 1024


class LoopPrinter(ValuePrinter):
    """Loops of a plan, before they have a shape."""

    def _x_loops(self) -> list[Loop]:
        return [(var, size) for var, size in self.plan.ranges.items() if size != 1]

    def _r_loops(self) -> list[Loop]:
        found = [(var, size) for var, size in self.plan.reduction_ranges.items() if size != 1]
        return found or [next(iter(self.plan.reduction_ranges.items()))]

    def _parallel(self, nest: int = 1, simd: bool = False) -> str:
        """`parallel for`, or nothing where one thread does it all."""
        plan = self.plan
        if not plan.parallel or any(is_update(store) for store in plan.body.stores):
            return ""  # scatters run in order: two iterations may change the same element
        clauses = ["parallel for" + (" simd" if simd else "")]
        if nest > 1:
            clauses.append(f"collapse({nest})")
        if plan.parallel_above:
            sizes = [self.index(s) for s in plan.body.all_ranges.values() if s != 1]
            total = "*".join(f"({s})" if " " in s else s for s in sizes)
            clauses.append(f"if(parallel: {total} > {plan.parallel_above})")
        if self.checks:
            clauses.append("reduction(|:error)")
        return " ".join(clauses)

    def _simd(self, values: Sequence[Value], var: sympy.Symbol, clauses: Sequence[str] = ()) -> str:
        """`simd` with its reductions, or nothing where iterations depend on each other."""
        plan = self.plan
        updates = [v for v in values if v.op == "store" and is_update(v)]
        if plan.vector_width == 1 or not all(separates(v, var, plan.body) for v in updates):
            return ""
        found = ["simd" if plan.vector_width >= 8 else f"simd simdlen({plan.vector_width})"]
        found += clauses
        if any(self.can_fail(v) for v in values):
            found.append("reduction(|:error)")
        return " ".join(found)

    def _scratch(self, values: Iterable[Value], suffix: str, length: int) -> None:
        for value in values:
            text = f"{CTYPES[value.dtype]} {self.names[value]}{suffix}[{length}]"
            self.line(f"{text} __attribute__((aligned(64)));", value.origins)

    def _chunks(self) -> tuple[int, str]:
        """Declare how many chunks the outermost r has; returns the most there can be and where r ends."""
        _, size = self._r_loops()[0]
        chunk, most, text = self.plan.tiles["r"], self.plan.tiles["chunks"], self.index(size)
        if isinstance(size, int):
            self.line(f"const int64_t chunk = {chunk}, chunks = {-(-size // chunk)};")
        else:
            fair = f"({text} + {most - 1}) / {most}"
            self.line(f"const int64_t chunk = {fair} > {chunk} ? {fair} : {chunk};")
            self.line(f"const int64_t chunks = ({text} + chunk - 1) / chunk;")
        return most, text


def reductions_of(phase: Phase) -> list[Value]:
    """The reductions that a loop computes."""
    return [v for v in phase.values if v.op == "reduction"]


def is_float_sum(value: Value) -> bool:
    """A sum that collects rounding errors."""
    return value.op == "reduction" and value.kind == "sum" and value.dtype.is_floating_point


def is_long(size: Size) -> bool:
    """Long enough, or perhaps, for rounding errors to count."""
    return not isinstance(size, int) or size > LONG_ROW


def operands(values: Iterable[Value]) -> set[Value]:
    """Everything that the values read."""
    return {operand for value in values for operand in value.operands}


def least(a: str, b: str) -> str:
    """The smaller of two C expressions."""
    return f"{a} < {b} ? {a} : {b}"
