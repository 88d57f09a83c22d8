"""The loop nests of C kernels: one inner loop in vectors, along x or along r, and what stands around it.

    pointwise   loops over x, the innermost in vectors
    rows        for each x: loops over r in vectors, one per phase, scratch rows between them

The first is here, after what both have in common; rows are in `cpp_reductions.py`. Plug-ins have more:
squares of two x (`plugins/transposed_tiles`), tiles of columns (`plugins/cpu_reductions`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import sympy

from minicompile.codegen.cpp_ops import CTYPES
from minicompile.codegen.cpp_rules import vectorised
from minicompile.codegen.cpp_values import ALIGNED, Loop, ValuePrinter
from minicompile.codegen.phases import innermost, operands
from minicompile.codegen.plan import CppPlan
from minicompile.scheduling.body import Value


class LoopPrinter(ValuePrinter):
    """Prints the loops of a plan and everything inside them: what all shapes have in common."""

    def __init__(self, plan: CppPlan) -> None:
        super().__init__(plan)
        self.x_loops = [Loop(var, size) for var, size in plan.ranges.items() if size != 1]

    def nest(self) -> None:
        """The loops that the plan asks for. Those of one iteration are no loops."""
        raise NotImplementedError

    # ---- who shares a loop, and how it becomes vectors

    def _parallel(self, nest: int = 1, simd: bool = False) -> str:
        """`parallel for` over a nest of loops, or nothing where one thread does it all."""
        plan = self.plan
        if not plan.parallel or not nest:
            return ""
        text = "parallel for" + " simd" * simd
        if plan.parallel_above:
            sizes = [self.index.within(s) for s in plan.body.all_ranges.values() if s != 1]
            text += f" if(parallel: {'*'.join(sizes)} > {plan.parallel_above})"
        text += f" collapse({nest})" if nest > 1 else ""
        return text + " reduction(|:error)" * self.checks

    def _simd(self, values: Collection[Value], var: sympy.Symbol, riding: bool = False) -> str:
        """`simd` with its reductions, or nothing where iterations depend on each other."""
        reductions = vectorised(self.plan, values, var, riding)
        if reductions is None:
            return ""
        clauses: dict[str, list[str]] = {}
        for value, sign in reductions.items():
            total = self.names[value] + self.accumulators(value)[0][0]
            clauses.setdefault(sign, []).append(total)
        if any(v.check for v in values):
            clauses.setdefault("|", []).append("error")
        width = self.plan.vector_width
        text = "simd" if width >= 8 else f"simd simdlen({width})"
        return text + "".join(f" reduction({s}:{', '.join(names)})" for s, names in clauses.items())

    # ---- inner loops, scratch

    def _inner(
        self,
        loop: Loop,
        values: Collection[Value],
        pragma: str,
        scratch: Mapping[Value, str] | None = None,
    ) -> None:
        """The innermost loop. `scratch`: where values stand that other loops compute or need."""
        places = scratch or {}
        with self.loop(loop, pragma):
            self._first()
            for value in self.in_order(operands(values) - set(values)):
                if value in places:
                    self.declare(value, places[value])
            self.compute(values, self.accumulate)
            for value in values:
                if value in places and value.op != "reduction":
                    self.line(f"{places[value]} = {self.names[value]};", value.origins)

    def _first(self) -> None:
        """What stands before all else in the innermost loop."""

    def accumulate(self, value: Value) -> None:
        """What a reduction or scan does with one element."""
        raise NotImplementedError

    def _scratch(self, values: Iterable[Value], suffix: str, length: int) -> None:
        for value in values:
            text = f"{CTYPES[value.dtype]} {self.names[value]}{suffix}[{length}]"
            self.line(f"{text} {ALIGNED};", value.origins)

    def _end(self, var: sympy.Symbol, start: str, step: int | str, size: str) -> None:
        """Declare where a piece of a loop ends."""
        self.line(f"const int64_t {var}_end = {least(f'{start} + {step}', size)};")


class PointwisePrinter(LoopPrinter):
    """Loops over x alone."""

    def nest(self) -> None:
        values = self.plan.body.values
        if not self.x_loops:
            self.compute(values)
            return
        *outer, inner = self.x_loops
        inside = innermost(self.plan.body, inner.var)
        around, simd = self._parallel(len(outer)), self._simd(inside, inner.var)
        if self.plan.shares_inner:
            simd, around = self._parallel(simd=bool(simd)), ""
        with self.loops(outer, around):
            self.compute(v for v in values if v not in inside)
            self._inner(inner, inside, simd)


def least(a: str, b: str) -> str:
    """The smaller of two C expressions."""
    return f"{a} < {b} ? {a} : {b}"
