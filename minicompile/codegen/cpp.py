"""Prints kernel plans as C functions (a subset that is also C++).

Every loop operation is one line that carries its origins, with constants in place; gcc and clang do the rest:
`omp parallel for` shares outer loops among threads, `omp simd` vectorises inner ones. A kernel returns 0, or
`INDEX_ERROR`.
The real compiler: torch/_inductor/codegen/cpp.py (CppKernel, CppVecKernel, LoopNest).
"""

from __future__ import annotations

import sympy

from minicompile.codegen.cpp_loops import LoopPrinter, PointwisePrinter
from minicompile.codegen.cpp_ops import STORAGE
from minicompile.codegen.cpp_reductions import RowPrinter
from minicompile.codegen.helpers import c_prelude
from minicompile.codegen.plan import CppPlan, KernelSource
from minicompile.codegen.printing import printer_of
from minicompile.shapes.expr import is_float

PRINTERS = {"none": PointwisePrinter, "looped": RowPrinter}
"""What prints loops, by the kind of reduction."""


def print_kernel(plan: CppPlan) -> KernelSource:
    """The C function of one plan."""
    printer: LoopPrinter = printer_of(plan, PRINTERS)
    *first, last = _head(plan).split("\n")
    for text in first:
        printer.line(text)
    with printer.braces(last):
        for symbol in filter(is_float, plan.sizes):
            printer.line(f"const double {symbol} = mc_double({symbol}_bits);")
        if printer.checks:
            printer.line("int32_t error = 0;")
        printer.nest()
        printer.line("return error;" if printer.checks else "return 0;")
    return printer.source("cpp", c_prelude)


def call_of(original: KernelSource, plan: CppPlan) -> str:
    """The kernel of `plan` as a call of an equal one."""
    given = [a.name for a in plan.arguments] + [_number(s) for s in plan.sizes]
    return f"{_head(plan)} {{ return {original.name}({', '.join(given)}); }}\n"


def _number(symbol: sympy.Symbol) -> str:
    """A parameter that is no tensor: floats travel in the registers of integers, bit by bit."""
    return f"{symbol}_bits" if is_float(symbol) else str(symbol)


def _head(plan: CppPlan) -> str:
    parameters = [
        f"{'const ' if a.role == 'in' else ''}{STORAGE[a.dtype]}* __restrict {a.name}"
        for a in plan.arguments
    ]
    parameters += [f"int64_t {_number(symbol)}" for symbol in plan.sizes]
    head = f"int64_t {plan.name}({', '.join(parameters)})"
    if len(head) <= 100:
        return head
    return f"int64_t {plan.name}(\n    " + ",\n    ".join(parameters) + ")"
