"""Prints kernel plans as C functions (a subset that is also C++).

Every loop operation is one line that carries its origins, with constants in place; gcc and clang do the rest:
`omp parallel for` shares outer loops among threads, `omp simd` vectorises inner ones. A kernel returns 0, or
`INDEX_ERROR`.
The real compiler: torch/_inductor/codegen/cpp.py (CppKernel, CppVecKernel, LoopNest).
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from minicompile.codegen.cpp_loops import LoopPrinter, PointwisePrinter
from minicompile.codegen.cpp_ops import STORAGE, prelude
from minicompile.codegen.cpp_reductions import RowPrinter
from minicompile.codegen.plan import CppPlan, KernelModule, KernelSource
from minicompile.codegen.printing import kernel_template
from minicompile.shapes.expr import is_float

KERNELS_OF_ONE = 8
"""With more distinct kernels than this, two compilers at work are faster than one."""


def print_kernel(plan: CppPlan) -> KernelSource:
    """The C function of one plan."""
    printer = loop_printer(plan)
    *first, last = _head(plan).split("\n")
    for text in first:
        printer.line(text)
    with printer.braces(last):
        for symbol in filter(is_float, plan.sizes):
            printer.line(f"const double {symbol} = mc_double({symbol}_bits);")
        if printer.checks:
            printer.line("int32_t error = 0;")
        printer.body()
        printer.line("return error;" if printer.checks else "return 0;")
    return printer.source("cpp", prelude)


def loop_printer(plan: CppPlan) -> LoopPrinter:
    """What prints loops in the plan's shape."""
    if plan.reduction in kernel_template:
        printer = kernel_template[plan.reduction](plan)
        assert isinstance(printer, LoopPrinter)
        return printer
    return RowPrinter(plan) if plan.reduction_ranges else PointwisePrinter(plan)


def kernel_module(plans: Sequence[CppPlan]) -> KernelModule:
    """All kernels of a graph: one text, and the same as one or two files to compile side by side.

    Kernels that differ in name only (the layers of a model) are compiled once: the others call the first.
    """
    sources = [print_kernel(plan) for plan in plans]
    alike: dict[str, list[KernelSource]] = {}
    for source in sources:
        alike.setdefault(source.text.replace(source.name, "", 1), []).append(source)
    groups = list(alike.values())
    units: list[list[list[KernelSource]]] = [[], []] if len(groups) > KERNELS_OF_ONE else [[]]
    for group in sorted(groups, key=lambda group: -len(group[0].lines)):
        min(units, key=lambda unit: sum(len(g[0].lines) for g in unit)).append(group)
    return KernelModule("cpp", _unit_text(groups), sources, tuple(map(_unit_text, units)))


def _unit_text(groups: Sequence[Sequence[KernelSource]]) -> str:
    parts = []
    for original, *copies in groups:
        parts.append(original.text)
        parts += [_call_of(original, copy.plan) for copy in copies]
    text = "\n".join(parts)
    return f"{prelude(text)}\n{text}"


def _call_of(original: KernelSource, plan: CppPlan) -> str:
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
