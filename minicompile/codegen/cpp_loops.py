"""The loop nests of C kernels: one inner loop in vectors, along x or along r, and what stands around it.

    pointwise   loops over x, the innermost in vectors
    rows        for each x: loops over r in vectors, one per phase, scratch rows between them

The first is here, after what both have in common; rows are in `cpp_reductions.py`. Plug-ins have more:
squares of two x (`plugins/transposed_tiles`), tiles of columns (`plugins/column_reductions`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import sympy

from minicompile.codegen.cpp_ops import CTYPES
from minicompile.codegen.cpp_values import ALIGNED, SIGNS, Loop, ValuePrinter
from minicompile.codegen.phases import is_update, separates
from minicompile.codegen.plan import CppPlan, count
from minicompile.ops.table import POSITIONS
from minicompile.scheduling.body import Value, iterate_indices, varying

OUTER_ITERATIONS = 8
"""Outer loops with fewer iterations leave threads idle: then the inner loop is shared."""


class LoopPrinter(ValuePrinter):
    """Prints the loops of a plan and everything inside them: what all shapes have in common."""

    def __init__(self, plan: CppPlan) -> None:
        super().__init__(plan)
        self.x_loops = [Loop(var, size) for var, size in plan.ranges.items() if size != 1]

    def body(self) -> None:
        """The loops that the plan asks for. Those of one iteration are no loops."""
        used = set().union(*(index.free_symbols for index in iterate_indices(self.plan.body)))
        for var, size in self.plan.body.all_ranges.items():
            if size == 1 and var in used:
                self.line(f"const int64_t {var} = 0;")
        self.nest()

    def nest(self) -> None:
        """The loops, in the plan's shape."""
        raise NotImplementedError

    # ---- who shares a loop, and how it becomes vectors

    def _parallel(self, nest: int = 1, simd: bool = False) -> str:
        """`parallel for`, or nothing where one thread does it all."""
        region, share = self._shared(nest)
        return (
            f"parallel for{' simd' if simd else ''}{region}{share}" if self._threads(nest) else ""
        )

    def _threads(self, nest: int) -> bool:
        """Do threads share a nest of loops? Scatters run in order: two iterations may change one element."""
        return self.plan.parallel and nest > 0 and not any(map(is_update, self.plan.body.stores))

    def _shared(self, nest: int) -> tuple[str, str]:
        """The clauses of `parallel`, and those of the `for` inside it."""
        plan, region, share = self.plan, "", f" collapse({nest})" if nest > 1 else ""
        if plan.parallel_above:
            sizes = [self.index.within(s) for s in plan.body.all_ranges.values() if s != 1]
            region = f" if(parallel: {'*'.join(sizes)} > {plan.parallel_above})"
        return region, share + " reduction(|:error)" * self.checks

    def _simd(self, values: Collection[Value], var: sympy.Symbol, riding: bool = False) -> str:
        """`simd` with its reductions, or nothing where iterations depend on each other.

        `riding`: the loop runs along r, and its reductions are accumulated across its iterations.
        """
        plan = self.plan
        updates = [v for v in values if v.op == "store" and is_update(v)]
        if plan.vector_width == 1 or not all(separates(v, var, plan.body) for v in updates):
            return ""
        clauses: dict[str, list[str]] = {}
        for value in values:
            if value.op == "scan" and riding:
                return ""
            if value.op == "reduction" and riding:
                extremum = value.kind in ("max", "min") and value.dtype.is_floating_point
                if extremum or value.kind in POSITIONS:  # OpenMP's own max and min may drop a NaN
                    return ""
                clauses.setdefault(SIGNS.get(value.kind, value.kind), []).append(self.names[value])
        if any(v.check for v in values):
            clauses.setdefault("|", []).append("error")
        found = ["simd" if plan.vector_width >= 8 else f"simd simdlen({plan.vector_width})"]
        found += [f"reduction({sign}:{', '.join(names)})" for sign, names in clauses.items()]
        return " ".join(found)

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
        inside, simd = self.inside(inner)
        around = self._parallel(len(outer))
        if not self.enough(outer) and self._parallel():
            simd, around = self._parallel(simd=bool(simd)), ""
        with self.loops(outer, around):
            self.compute(v for v in values if v not in inside)
            self._inner(inner, inside, simd)

    def inside(self, inner: Loop) -> tuple[list[Value], str]:
        """Return the values of the innermost loop, and what makes vectors of it."""
        body = self.plan.body
        moving = varying(body.values, {inner.var})
        values = [v for v in body.values if v in moving or v.op == "store"]
        return values, self._simd(values, inner.var)

    def enough(self, outer: Sequence[Loop]) -> bool:
        """Iterations for all threads."""
        return count((loop.size for loop in outer), self.plan.hints) >= OUTER_ITERATIONS


def operands(values: Iterable[Value]) -> set[Value]:
    """Everything that the values read."""
    return {operand for value in values for operand in value.operands}


def least(a: str, b: str) -> str:
    """The smaller of two C expressions."""
    return f"{a} < {b} ? {a} : {b}"
