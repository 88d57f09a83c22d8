"""`ShapeEnv`: symbols for sizes, and the guards that the compiled code relies on.

A symbol stands for a size of at least 2: sizes 0 and 1 broadcast and are laid out differently, so they stay
plain ints. A question about sizes ("is 4*s0 == s1?") is answered from what is known of the symbols; if that
doesn't decide it, it is answered for the sizes at hand, and the answer becomes a guard.

The real compiler: torch/fx/experimental/symbolic_shapes.py.
"""

from __future__ import annotations

import contextlib
from typing import Any

import sympy
import torch
from sympy.core.function import Application

from minicompile.ops.display import Shown
from minicompile.shapes.expr import PythonNumber, exact_quotient, loop_symbol, size_symbol
from minicompile.shapes.symnode import SymNode

SMALLEST_SIZE = 2
"""0 and 1 are specialised."""


class ShapeEnv(Shown):
    """The symbols of one capture.

    `hints` gives each symbol's size while compiling, `symbols` where it comes from (a capture `Source`),
    `guards` the facts `(expression, reason)` that must hold at run time, in the order they were assumed.
    """

    def __init__(self) -> None:
        self.hints: dict[sympy.Symbol, int] = {}
        self.symbols: dict[sympy.Symbol, Any] = {}
        self.guards: list[tuple[sympy.Basic, str]] = []
        self._answers: dict[sympy.Basic, sympy.Basic | None] = {}
        self._shifted: dict[sympy.Symbol, sympy.Expr] = {}
        self._equal: dict[sympy.Expr, sympy.Expr] = {}

    def create_symbol(self, hint: int, source: object | None) -> torch.SymInt:
        """A new size that is `hint` (at least 2) while compiling."""
        if hint < SMALLEST_SIZE:
            raise ValueError(f"size {hint} can't be symbolic: 0 and 1 are specialised")
        index = len(self.hints)
        symbol = size_symbol(f"s{index}")
        self.hints[symbol], self.symbols[symbol] = hint, source
        self._shifted[symbol] = loop_symbol(f"t{index}") + SMALLEST_SIZE
        return torch.SymInt(SymNode(symbol, self, int))

    def sym_int(self, expr: sympy.Expr | int) -> torch.SymInt | int:
        """A size expression as torch's operators take it."""
        expr = sympy.sympify(expr)
        return int(expr) if expr.is_Integer else torch.SymInt(SymNode(expr, self, int))

    def hint(self, expr: sympy.Basic) -> Any:
        """The expression's value for the sizes at hand."""
        return expr.xreplace(self.hints)

    def static(self, expr: sympy.Basic) -> sympy.Basic | None:
        """The value that `expr` has for all sizes that the guards allow, or None."""
        if not expr.free_symbols:
            return expr
        if expr not in self._answers:
            self._answers[expr] = self._decide(self.simplified(expr))
        return self._answers[expr]

    def simplified(self, expr: sympy.Basic) -> sympy.Basic:
        """The expression without the symbols that the guards give in terms of others."""
        return expr.xreplace(self._equal) if self._equal else expr

    def _decide(self, expr: sympy.Basic) -> sympy.Basic | None:
        if isinstance(expr, sympy.core.relational.Relational):
            return self._compare(expr)
        if isinstance(expr, sympy.And | sympy.Or | sympy.Not):
            settled = {part: self.static(part) for part in expr.args}
            expr = expr.func(*(part if value is None else value for part, value in settled.items()))
        return expr if not expr.free_symbols else None

    def _compare(self, relation: sympy.core.relational.Relational) -> sympy.Basic | None:
        """Decide by the sign of the difference, with every symbol written as 2 + (something not negative)."""
        difference = sympy.expand((relation.lhs - relation.rhs).xreplace(self._shifted))
        if isinstance(relation, sympy.Eq | sympy.Ne):
            if difference.is_zero:
                return sympy.S(isinstance(relation, sympy.Eq))
            if difference.is_positive or difference.is_negative:
                return sympy.S(isinstance(relation, sympy.Ne))
            return None
        decided = relation.func(difference, 0)
        return decided if decided in (sympy.true, sympy.false) else None

    def evaluate(self, expr: sympy.Basic, reason: str = "") -> sympy.Basic:
        """The value of a truth value or a size; adds a guard if it isn't the same for all sizes."""
        known = self.static(expr)
        if known is not None:
            return known
        value = self.hint(expr)
        if value in (sympy.true, sympy.false):
            fact = expr if value == sympy.true else sympy.Not(expr)
        else:
            fact = sympy.Eq(expr, value)
        self.guards.append((fact, reason or "an operator asked for it while shapes were computed"))
        self._learn(fact)
        self._answers[expr] = value
        return value

    def _learn(self, fact: sympy.Basic) -> None:
        """Remember what a guard says; an equation for a symbol also simplifies later questions."""
        self._answers = {k: v for k, v in self._answers.items() if v is not None}
        self._answers[fact], self._answers[sympy.Not(fact)] = sympy.true, sympy.false
        if isinstance(fact, sympy.Eq):
            fact = self.simplified(fact)
            if isinstance(fact, sympy.Eq):
                for term, value in self._solved(fact).items():
                    known = {k: v.xreplace({term: value}) for k, v in self._equal.items()}
                    self._equal = {**known, term: value}

    def _solved(self, fact: sympy.Eq) -> dict[sympy.Expr, sympy.Expr]:
        """A term (the youngest symbol, else a quotient, remainder, minimum) that an equation gives.

        One that gives none pins its symbols to the sizes at hand.
        """
        if isinstance(fact.lhs, PythonNumber) and fact.rhs.is_number:
            return {fact.lhs: fact.rhs}
        difference = sympy.factor(fact.lhs - fact.rhs)
        factors = [
            f for f in sympy.Mul.make_args(difference) if not f.is_number and not f.is_positive
        ]
        equation = sympy.expand(factors[0] if len(factors) == 1 else difference)
        symbols = sorted(fact.free_symbols, key=list(self.hints).index, reverse=True)
        for term in (*symbols, *sorted(equation.atoms(Application), key=str)):
            step = equation.coeff(term, 1)
            value = (
                exact_quotient(equation - step * term, -step) if step.is_Integer and step else None
            )
            if value is not None and not value.has(term):
                return {term: value}
        if equation.has(Application) and not fact.rhs.is_number:
            return {}
        pinned = {symbol: sympy.Integer(self.hints[symbol]) for symbol in symbols}
        reason = f"{fact} gives no size by the others"
        self.guards += [(sympy.Eq(*pair), reason) for pair in pinned.items()]
        return pinned

    # What FakeTensorMode asks of the environment of a SymNode it meets.

    def evaluate_sym_node(
        self, node: SymNode, size_oblivious: bool = False, fallback_value: object = None
    ) -> sympy.Basic:
        return self.evaluate(node.expr)

    def _maybe_evaluate_static(self, expr: sympy.Basic, **_: object) -> sympy.Basic | None:
        return self.static(expr) if isinstance(expr, sympy.Basic) else sympy.sympify(expr)

    def ignore_fresh_unbacked_symbols(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def __str__(self) -> str:
        lines = [f"{len(self.symbols)} symbolic sizes, {len(self.guards)} guards"]
        for symbol, source in self.symbols.items():
            origin = f" from {source}" if source is not None else ""
            lines.append(f"  {symbol} = {self.hints[symbol]}{origin}")
        lines += [f"  guard {fact}  # {reason}" for fact, reason in self.guards]
        return "\n".join(lines)
