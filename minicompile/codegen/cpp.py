"""Prints kernel plans as C functions (a subset that is also C++).

Every loop operation is one line that carries its origins, with constants in place; gcc and clang do the rest:
`omp parallel for` shares outer loops among threads, `omp simd` vectorises inner ones. The shapes of kernels:

    pointwise   loops over x, the innermost in vectors
    squares     the same by squares of two x, so that loads that jump can be turned in the cache
    rows        for each x: loops over r in vectors, one per phase, scratch rows between them
    columns     for each tile of x: loops over r, inside them a loop over the tile in vectors
    split       few long rows: threads share chunks of r, partial results are combined in order

A kernel returns 0, or the bits of `INDEX_ERROR` and `ZERO_DIVISION`.
The real compiler: torch/_inductor/codegen/cpp.py (CppKernel, CppVecKernel, LoopNest).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import sympy

from minicompile.codegen.cpp_columns import ColumnPrinter
from minicompile.codegen.cpp_loops import least
from minicompile.codegen.cpp_math import prelude
from minicompile.codegen.cpp_ops import STORAGE
from minicompile.codegen.cpp_rows import RowPrinter
from minicompile.codegen.plan import KernelModule, KernelPlan, KernelSource
from minicompile.codegen.rules import count, transposed, varying
from minicompile.scheduling.body import Value
from minicompile.shapes.expr import coefficient_of

KERNELS_PER_UNIT = 8
"""With more distinct kernels than this, two compilers at work are faster than one."""

OUTER_ITERATIONS = 8
"""Outer loops with fewer iterations leave threads idle: then the inner loop is shared."""


def print_kernel(plan: KernelPlan) -> KernelSource:
    """The C function of one plan."""
    printer = KernelPrinter(plan)
    return printer.print()


def generate_module(plans: Sequence[KernelPlan]) -> tuple[str, list[KernelSource]]:
    """One source text with all kernels of a graph, and each kernel by itself."""
    module = kernel_module(plans)
    return module.text, module.kernels


def kernel_module(plans: Sequence[KernelPlan], most_units: int = 2) -> KernelModule:
    """All kernels of a graph: one text, and the same as up to `most_units` files to compile side by side.

    Kernels that differ in name only (the layers of a model) are compiled once: the others call the first.
    """
    printers = [KernelPrinter(plan) for plan in plans]
    sources = [printer.print() for printer in printers]
    first: dict[str, KernelPrinter] = {}
    alike: dict[str, list[KernelPrinter]] = {}
    for printer, source in zip(printers, sources, strict=True):
        original = first.setdefault(source.text.replace(source.name, "", 1), printer)
        alike.setdefault(original.plan.name, []).append(printer)
    groups = list(alike.values())
    count_of_units = most_units if len(groups) > KERNELS_PER_UNIT else 1
    units: list[list[list[KernelPrinter]]] = [[] for _ in range(count_of_units)]
    sizes = [0] * count_of_units
    for group in sorted(groups, key=lambda group: -len(group[0].lines)):
        shortest = sizes.index(min(sizes))
        units[shortest].append(group)
        sizes[shortest] += len(group[0].lines)
    texts = tuple(_unit_text(unit) for unit in units)
    return KernelModule("cpp", _unit_text(groups), sources, texts)


def _unit_text(groups: Sequence[Sequence[KernelPrinter]]) -> str:
    helpers: set[str] = set().union(*(group[0].helpers for group in groups))
    parts = [prelude(helpers)]
    for original, *copies in groups:
        parts.append("\n".join(line.text for line in original.lines) + "\n")
        parts += [copy.call_of(original) for copy in copies]
    return "\n".join(parts)


class KernelPrinter(RowPrinter, ColumnPrinter):
    """One kernel: its head, and the shape that its plan asks for."""

    def print(self) -> KernelSource:
        plan = self.plan
        parameters = self._parameters()
        head = f"int64_t {plan.name}({', '.join(parameters)})"
        if len(head) > 100:
            head = f"int64_t {plan.name}(\n    " + ",\n    ".join(parameters) + ")"
        *first, last = head.split("\n")
        for text in first:
            self.line(text)
        with self.block(last):
            if self.checks:
                self.line("int32_t error = 0;")
            self._units()
            if not plan.reduction_ranges and plan.tiles:
                self._squares()
            elif not plan.reduction_ranges:
                self._pointwise()
            elif plan.vector_axis == "x":
                self._columns()
            elif "r" in plan.tiles:
                self._split()
            else:
                self._rows()
            self.line("return error;" if self.checks else "return 0;")
        return KernelSource(plan.name, "cpp", self.lines, plan, prelude(self.helpers))

    def _parameters(self) -> list[str]:
        tensors = [
            f"{'const ' if a.role == 'in' else ''}{STORAGE[a.dtype]}* __restrict {a.name}"
            for a in self.plan.arguments
        ]
        return tensors + [f"int64_t {symbol}" for symbol in self.plan.sizes]

    def call_of(self, other: KernelPrinter) -> str:
        """This kernel as a call of an equal one."""
        given = [a.name for a in self.plan.arguments] + [str(s) for s in self.plan.sizes]
        head = f"int64_t {self.plan.name}({', '.join(self._parameters())})"
        return f"{head} {{ return {other.plan.name}({', '.join(given)}); }}\n"

    def _units(self) -> None:
        """Loops of one iteration are not loops."""
        used: set[sympy.Symbol] = set()
        for value in self.plan.body.values:
            if value.index is not None:
                used |= value.index.free_symbols
        for var, size in self.plan.body.all_ranges.items():
            if size == 1 and var in used:
                self.line(f"const int64_t {var} = 0;")

    # ---- pointwise

    def _pointwise(self) -> None:
        values = [v for phase in self.plan.phases for v in phase.values]
        nest = self._x_loops()
        if not nest:
            self.compute(values)
            return
        *outer, (inner, size) = nest
        moving = varying(values, inner)
        fixed = [v for v in values if v not in moving and v.op != "store"]
        inside = [v for v in values if v in moving or v.op == "store"]
        simd = self._simd(inside, inner)
        share_outer = count((s for _, s in outer), self.plan.hints) >= OUTER_ITERATIONS
        if share_outer or not self._parallel():
            with self.loops(outer, self._parallel(len(outer)) if outer else ""):
                self.compute(fixed)
                with self.loop(inner, size, simd):
                    self.compute(inside)
            return
        with self.loops(outer):
            self.compute(fixed)
            with self.loop(inner, size, self._parallel(simd=bool(simd))):
                self.compute(inside)

    # ---- squares

    def _squares(self) -> None:
        """Loads that jump along the inner loop fill squares of scratch first."""
        values = [v for phase in self.plan.phases for v in phase.values]
        nest = self._x_loops()
        inner, size = nest[-1]
        across = next(var for var, _ in nest if str(var) in self.plan.tiles and var is not inner)
        tile = self.plan.tiles[str(inner)]
        outer = [(var, extent) for var, extent in nest if var not in (across, inner)]
        sides = [(across, self.plan.ranges[across]), (inner, size)]
        turned = [v for v in values if transposed(v, inner, across)]
        pragma = self._parallel(len(outer) + 2)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.loops(outer, pragma))
            for i, (var, extent) in enumerate(sides):
                first = "" if outer or i else pragma
                stack.enter_context(self.loop(f"{var}_start", extent, first, step=tile))
            for var, extent in sides:
                end = least(f"{var}_start + {tile}", self.index(extent))
                self.line(f"const int64_t {var}_end = {end};")
            for value in turned:
                self._turn(value, across, inner, tile)
            simd = self._simd(values, inner)
            with (
                self.loop(across, 0, "", f"{across}_start", f"{across}_end"),
                self.loop(inner, 0, simd, f"{inner}_start", f"{inner}_end"),
            ):
                place = f"{tile}*({across} - {across}_start) + {inner} - {inner}_start"
                for value in turned:
                    self.declare(value, f"{self.names[value]}_square[{place}]")
                self.compute(v for v in values if v not in turned)

    def _turn(self, value: Value, across: sympy.Symbol, inner: sympy.Symbol, tile: int) -> None:
        """Copy the square of a load, turned, into scratch."""
        assert value.index is not None
        corner = {
            var: sympy.Symbol(f"{var}_start", integer=True, nonnegative=True)
            for var in (across, inner)
        }
        self._scratch([value], "_square", tile * tile)
        helper = f"mc_transpose_{value.dtype.itemsize}"
        self.helpers.add(helper)
        source = f"{self.arguments[value.buffer].name} + {self.index(value.index.xreplace(corner))}"
        jump = self.index(coefficient_of(value.index, inner))
        counts = f"{inner}_end - {inner}_start, {across}_end - {across}_start"
        target = f"{self.names[value]}_square"
        self.line(f"{helper}({source}, {jump}, {target}, {tile}, {counts});", value.origins)
