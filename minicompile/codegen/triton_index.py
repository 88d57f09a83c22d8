"""Index expressions in Triton's words.

The real compiler: torch/_inductor/codegen/triton.py (TritonPrinter).
"""

from __future__ import annotations

from collections.abc import Callable

import sympy

from minicompile.errors import Unsupported
from minicompile.shapes.expr import (
    Expr,
    FloorDiv,
    ModularIndexing,
    Ranges,
    bounds,
    is_nonnegative,
)

SymbolText = Callable[[sympy.Symbol], str]


def index_text(expr: Expr, ranges: Ranges, symbol: SymbolText) -> str:
    """`expr` as a Triton expression; `symbol` names loop variables, sizes and loaded indices.

    Triton's `//` and `%` truncate, so a dividend that may be negative goes through a helper.
    """

    def text(e: Expr) -> str:
        if isinstance(e, sympy.Symbol):
            return symbol(e)
        if e.is_Integer:
            return str(int(e))
        if isinstance(e, sympy.Add):
            return _sum([text(term) for term in e.args])
        if isinstance(e, sympy.Mul):
            return "*".join(factor(f) for f in e.args)
        if isinstance(e, sympy.Pow) and e.exp.is_Integer and e.exp > 0:
            return "*".join([factor(e.base)] * int(e.exp))
        if isinstance(e, FloorDiv):
            return divide("//", "floor_div", *e.args)
        if isinstance(e, ModularIndexing):
            base, divisor, modulus = e.args
            return divide("%", "floor_mod", FloorDiv(base, divisor), modulus)
        if isinstance(e, sympy.Max | sympy.Min):
            return extremum("tl.maximum" if isinstance(e, sympy.Max) else "tl.minimum", e.args)
        raise Unsupported(f"no way to write the index {e} in Triton")

    def factor(e: Expr) -> str:
        return f"({text(e)})" if isinstance(e, sympy.Add | FloorDiv | ModularIndexing) else text(e)

    def divide(operator: str, helper: str, base: Expr, divisor: Expr) -> str:
        if not nonnegative(base):
            return f"{helper}({text(base)}, {text(divisor)})"
        plain = isinstance(divisor, sympy.Symbol) or divisor.is_Integer
        below = text(divisor) if plain else f"({text(divisor)})"
        above = text(base) if isinstance(base, sympy.Symbol) else f"({text(base)})"
        return f"{above} {operator} {below}"

    def extremum(function: str, args: tuple[Expr, ...]) -> str:
        out = text(args[0])
        for arg in args[1:]:
            out = f"{function}({out}, {text(arg)})"
        return out

    def nonnegative(e: Expr) -> bool:
        if is_nonnegative(e):
            return True
        found = bounds(e, ranges)
        return found is not None and is_nonnegative(found[0])

    return text(expr)


def _sum(terms: list[str]) -> str:
    """`a + b - 3` rather than `a + b + -3`; constants last."""
    terms = sorted(terms, key=lambda t: t.lstrip("-").isdigit())
    out = terms[0]
    for term in terms[1:]:
        out += f" - {term[1:]}" if term.startswith("-") else f" + {term}"
    return out
