"""What the printers of C and Triton share: lines, tables of operations, index formulas."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sympy
import torch

from minicompile.codegen.plan import INT32_END, CodeLine, KernelPlan, KernelSource, Language
from minicompile.errors import Unsupported
from minicompile.ops.origin import Origins
from minicompile.ops.registry import Registry
from minicompile.scheduling.body import Value, names
from minicompile.shapes.expr import (
    Expr,
    FloorDiv,
    ModularIndexing,
    Ranges,
    Size,
    bounds,
    is_nonnegative,
)


class LinePrinter:
    """Collects the lines of a kernel, each with its origins."""

    def __init__(self, plan: KernelPlan) -> None:
        self.plan = plan
        self.whole = plan.origins
        self.lines: list[CodeLine] = []
        self.depth = 0
        self.names = names(plan.body.values)
        self.arguments = {a.buffer: a for a in plan.arguments}

    def line(self, text: str, origins: Origins | None = None, scaffold: bool = False) -> None:
        """A line with the origins of what it computes; without any it is scaffold, of the whole kernel."""
        known = (self.whole, True) if origins is None else (origins, scaffold)
        self.lines.append(CodeLine("    " * self.depth + text, *known))

    @contextlib.contextmanager
    def block(self, first: str, last: str = "", origins: Origins | None = None) -> Iterator[None]:
        """A head, indented lines, and perhaps an end. A head that computes has `origins`."""
        self.line(first, origins)
        self.depth += 1
        yield
        self.depth -= 1
        if last:
            self.line(last)

    def source(self, language: Language, prelude: Callable[[str], str]) -> KernelSource:
        """The lines as a kernel; `prelude` finds what its text needs."""
        text = "\n".join(line.text for line in self.lines)
        return KernelSource(self.plan.name, language, self.lines, self.plan, prelude(text))


OpRule = Callable[..., str]
"""`rule(dtype, *operands) -> expression`; `dtype` is the operands', which are names or literals."""


class OperationPrinter(LinePrinter):
    """Prints values of a loop body; a language says how it writes them."""

    table: Mapping[str, OpRule]
    index: IndexPrinter
    """Sizes as text."""

    def constant(self, value: Value) -> str:
        raise NotImplementedError

    def declare(self, value: Value, expression: str) -> None:
        """Give the value's name to an expression."""
        raise NotImplementedError

    def check_index(self, value: Value, name: str, size: str) -> None:
        """Report a loaded index that isn't from 0 to below `size`."""
        raise NotImplementedError

    def ref(self, value: Value) -> str:
        """How an operand is written."""
        return self.constant(value) if value.op == "constant" else self.names[value]

    def indirect(self, value: Value) -> None:
        """A loaded index: negative ones count from the end, others out of range are errors."""
        source, size = self.ref(value.inputs[0]), self.index(value.size)
        if value.wrap_negative:
            negative = f"{source} < 0"
            source = self.table["where"](value.dtype, negative, f"{source} + {size}", source)
        self.declare(value, source)
        if value.check:
            self.check_index(value, self.names[value], size)


def printer_of(plan: KernelPlan, own: Mapping[str, Callable[[Any], Any]]) -> Any:
    """The printer of a plan: a template's, or the language's own for this kind of reduction."""
    return (kernel_template.get(plan.reduction) or own[plan.reduction])(plan)


kernel_template: Registry[Callable[[Any], Any]] = Registry(
    "kernel_template",
    "a plan's template or kind of reduction -> what prints the kernel, where tiles of rows won't do",
)


def form(text: str) -> OpRule:
    """A rule from a format string: operands are {0}, {1}, ...; {name}, {bits} and {sign_bit} tell of their
    dtype: what it is called, its width, and the place of its last bit."""

    def write(dtype: torch.dtype, *operands: str) -> str:
        name, bits = str(dtype).removeprefix("torch."), 8 * dtype.itemsize
        return text.format(*operands, name=name, bits=bits, sign_bit=bits - 1)

    return write


def by_kind(on_float: OpRule, on_int: OpRule) -> OpRule:
    """Different words for floats and for integers."""
    return lambda dtype, *operands: (on_float if dtype.is_floating_point else on_int)(
        dtype, *operands
    )


def by_width(single: str, double: str) -> OpRule:
    """Different words for float32 and for float64."""
    return lambda dtype, *operands: (double if dtype is torch.float64 else single).format(*operands)


INFIX: Mapping[str, OpRule] = {
    name: form(f"{{0}} {sign} {{1}}")
    for name, sign in {
        "add": "+", "sub": "-", "mul": "*",
        "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
        "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^",
        "logical_and": "&", "logical_or": "|", "logical_xor": "^",
    }.items()
} | {"isnan": form("{0} != {0}")}  # fmt: skip
"""Operators that mean the same in both."""


SIGNS = {"sum": "+", "prod": "*", "any": "|", "all": "&"}
"""How a reduction combines two elements, in both and in OpenMP."""


_ATOM, _PRODUCT, _QUOTIENT, _SUM = 3, 2, 1, 0
"""How tightly an expression holds together."""


class IndexPrinter:
    """Index formulas as text. `symbol` names loop variables, sizes and loaded indices.

    Division truncates in both languages, so a dividend that may be negative goes through a helper.
    """

    language: str
    divide: str
    floor_divide: str
    floor_modulo: str

    def __init__(
        self,
        ranges: Ranges,
        symbol: Callable[[sympy.Symbol], str] = str,
    ) -> None:
        self.ranges, self.symbol = ranges, symbol

    def __call__(self, expr: Expr | Size) -> str:
        if isinstance(expr, int):
            return str(expr)
        return self._print(expr)[0]

    def within(self, expr: Expr | Size, level: int = _ATOM) -> str:
        """The text in parentheses where it binds less tightly than its surroundings."""
        text, own = self._print(sympy.sympify(expr))
        return text if own >= level else f"({text})"

    def _print(self, expr: Expr) -> tuple[str, int]:
        if expr.is_Symbol:
            return self.symbol(expr), _ATOM
        if expr.is_Integer:
            return str(expr), _ATOM if expr >= 0 else _SUM
        if isinstance(expr, sympy.Add):
            first, *others = expr.as_ordered_terms()
            text = self.within(first, _QUOTIENT)
            for term in others:
                minus = term.could_extract_minus_sign()
                sign, size = ("-", -term) if minus else ("+", term)
                text += f" {sign} {self.within(size, _QUOTIENT)}"
            return text, _SUM
        if isinstance(expr, sympy.Mul):
            return "*".join(map(self.within, expr.as_ordered_factors())), _PRODUCT
        if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 0:
            return "*".join([self.within(expr.base)] * int(expr.exp)), _PRODUCT
        if isinstance(expr, FloorDiv):
            return self._divided(self.divide, self.floor_divide, *expr.args)
        if isinstance(expr, ModularIndexing):
            base, divisor, modulus = expr.args
            quotient = base if divisor == 1 else FloorDiv(base, divisor)
            return self._divided("%", self.floor_modulo, quotient, modulus)
        raise Unsupported(f"no way to write the index {expr} in {self.language}")

    def _divided(self, sign: str, helper: str, base: Expr, divisor: Expr) -> tuple[str, int]:
        found = (base, base) if is_nonnegative(base) else bounds(base, self.ranges)
        if found is not None and is_nonnegative(found[0]) and is_nonnegative(divisor):
            return f"{self.within(base, _QUOTIENT)} {sign} {self.within(divisor)}", _QUOTIENT
        return f"{helper}({self(base)}, {self(divisor)})", _ATOM


def reach(index: Expr, ranges: Ranges) -> set[Expr] | None:
    """What must be below 2**31 for int32 to hold the index and what it divides, whatever its variables are;
    None where that isn't known.

    Sums and products may wrap on the way and still end right; quotients of what has wrapped don't.
    """
    parts = [index]
    for part in sympy.preorder_traversal(index):
        if isinstance(part, FloorDiv | ModularIndexing):
            parts += part.args
    ends: set[Expr] = set()
    for found in (bounds(part, ranges) for part in parts):
        if found is None:
            return None
        ends |= {-1 - found[0], found[1]}
    return ends


def index_dtype(index: Expr, ranges: Ranges) -> torch.dtype:
    """int32 where it provably holds the index, else int64."""
    ends = reach(index, ranges)
    fits = ends is not None and all(end.is_Integer and end < INT32_END for end in ends)
    return torch.int32 if fits else torch.int64
