"""`ShapeEnv`: the symbols of a compilation, what is known of them, and the guards that their use has caused.

A symbol stands for a size of at least 2: sizes 0 and 1 broadcast and are laid out differently, so they stay
plain ints. A question about sizes ("is 4*s0 == s1?") is answered from what is known of the symbols; if that
doesn't decide it, it is answered for the sizes at hand, and the answer becomes a guard. A symbol for a float
only takes part in what kernels compute: a question about it fixes its value.

The real compiler: torch/fx/experimental/symbolic_shapes.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy.core.function import Application

from minicompile.ops.display import Shown
from minicompile.shapes.expr import (
    FloorDiv,
    ModularIndexing,
    bounds,
    exact_quotient,
    float_symbol,
    is_float,
    loop_symbol,
    ordered,
    python_number,
    python_text,
    size_symbol,
)
from minicompile.shapes.symnode import SymNode

SMALLEST_SIZE = 2
"""0 and 1 are specialised."""


@dataclass(frozen=True)
class ShapeFact:
    """What must hold of the symbols at run time: the condition, who needed it, and the user's line."""

    condition: sympy.Basic
    reason: str
    line: Any = None


def no_asker() -> tuple[str, Any]:
    return "an operator asked for it while shapes were computed", None


@contextlib.contextmanager
def asking(env: ShapeEnv | None, asker: Callable[[], tuple[str, Any]]) -> Iterator[None]:
    """Inside, `asker` says who needs what is assumed of the symbols."""
    if env is None:
        yield
        return
    before, env.asker = env.asker, asker
    try:
        yield
    finally:
        env.asker = before


class ShapeEnv(Shown):
    """The symbols of one capture.

    `hints` gives each symbol's value while compiling, `symbols` where it comes from (a capture `Source`),
    `ranges` its smallest and largest value, `wishes` why it is one; `guards` what was assumed, in order.
    """

    def __init__(self) -> None:
        self.hints: dict[sympy.Symbol, Any] = {}
        self.symbols: dict[sympy.Symbol, Any] = {}
        self.ranges: dict[sympy.Symbol, tuple[int, int | None]] = {}
        self.wishes: dict[sympy.Symbol, str] = {}
        self.guards: list[ShapeFact] = []
        self.fixed: dict[sympy.Symbol, ShapeFact] = {}
        """Symbols that turned out to have one value only, and what fixed them."""
        self.asker: Callable[[], tuple[str, Any]] = no_asker
        """Says who needs what is being assumed, and the user's line."""
        self.general = False
        """Whether what operators ask for speed alone is answered for all sizes at once, without a guard."""
        self.unguarded: list[sympy.Basic] = []
        """Such questions: of memory layouts, and which of the library's kernels is the fastest."""
        self.quotients: dict[sympy.Symbol, sympy.Expr] = {}
        """Symbols of exact quotients: after the guard `s0 % 8 == 0`, `q1` stands for `s0 // 8`."""
        self._answers: dict[sympy.Basic, sympy.Basic | None] = {}
        self._shifted: dict[sympy.Symbol, sympy.Expr] = {}
        self._limits: dict[sympy.Symbol, int] = {}
        self._equal: dict[sympy.Expr, sympy.Expr] = {}

    def create_symbol(
        self,
        hint: int,
        source: object | None,
        wish: str = "",
        low: int = 0,
        high: int | None = None,
    ) -> torch.SymInt:
        """A new size that is `hint` (at least 2) while compiling. `low` and `high`: its range, inclusive."""
        if hint < SMALLEST_SIZE:
            raise ValueError(f"size {hint} can't be symbolic: 0 and 1 are specialised")
        index, low = len(self.hints), max(low, SMALLEST_SIZE)
        symbol = size_symbol(f"s{index}")
        self.hints[symbol], self.symbols[symbol], self.wishes[symbol] = hint, source, wish
        self.ranges[symbol] = low, high
        self._shift(symbol)
        return torch.SymInt(SymNode(symbol, self, int))

    def _shift(self, symbol: sympy.Symbol) -> None:
        """Prepare for questions: the symbol is its lowest value and a number that isn't negative."""
        low, high = self.ranges[symbol]
        above = loop_symbol(f"{symbol} - {low}")
        self._shifted[symbol] = above + low
        if high is not None:
            self._limits[above] = high - low + 1

    def create_float(self, hint: float, source: object | None, wish: str = "") -> torch.SymFloat:
        """A new float that is `hint` (finite) while compiling."""
        symbol = float_symbol(f"f{len(self.hints)}")
        self.hints[symbol], self.symbols[symbol], self.wishes[symbol] = hint, source, wish
        return torch.SymFloat(SymNode(symbol, self, float))

    def number(self, expr: sympy.Expr) -> torch.SymInt | torch.SymFloat | int:
        """An expression as torch's operators take it: a size, or a float."""
        if expr.is_Integer:
            return int(expr)
        kind = torch.SymFloat if is_float(expr) else torch.SymInt
        return kind(SymNode(expr, self, float if is_float(expr) else int))

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
            apart = difference.is_positive or difference.is_negative
            if not apart and (ends := bounds(difference, self._limits)) is not None:
                apart = ends[0].is_positive or ends[1].is_negative
            return sympy.S(isinstance(relation, sympy.Ne)) if apart else None
        decided = relation.func(difference, 0)
        if decided in (sympy.true, sympy.false):
            return decided
        ends = bounds(difference, self._limits)
        both = {relation.func(end, 0) for end in ends} if ends is not None else set()
        return both.pop() if both in ({sympy.true}, {sympy.false}) else None

    def evaluate(self, expr: sympy.Basic, reason: str = "") -> sympy.Basic:
        """The value of a truth value or a size; adds a guard if it isn't the same for all sizes."""
        known = self.static(expr)
        if known is not None:
            return known
        value = self.hint(expr)
        fact = sympy.Eq(expr, value)
        if value in (sympy.true, sympy.false):
            fact = expr if value == sympy.true else sympy.Not(expr)
        compared = fact.is_Relational and fact.lhs.is_Symbol and fact.rhs.is_number
        if isinstance(fact, sympy.Eq) or not compared:
            for symbol in sorted(self.simplified(expr).free_symbols - self.ranges.keys(), key=str):
                self._equal[symbol] = sympy.Float(self.hints[symbol])  # a float
                self._assume(sympy.Eq(symbol, self._equal[symbol]), reason)
        if self.static(expr) is None:
            self._assume(fact, reason)
        self._answers[expr] = value
        return value

    def settle(self, expr: sympy.Basic, answer: bool | None = None) -> sympy.Basic:
        """The value of what is asked for speed alone: `answer` is right for all sizes, None: any is."""
        if not self.general or self.static(expr) is not None:
            return self.evaluate(expr)
        self.unguarded.append(expr)
        return self.hint(expr) if answer is None else sympy.sympify(answer)

    def _assume(self, condition: sympy.Basic, reason: str = "") -> None:
        asked, line = self.asker()
        self.guards.append(ShapeFact(self.rooted(condition), reason or asked, line))
        self._learn(condition)
        for symbol in self.symbols.keys() - self.fixed.keys():
            if self.simplified(symbol).is_number:
                self.fixed[symbol] = self.guards[-1]

    def _learn(self, fact: sympy.Basic) -> None:
        """Remember what a guard says; an equation for a symbol also simplifies later questions."""
        self._answers = {k: v for k, v in self._answers.items() if v is not None}
        self._answers[fact], self._answers[sympy.Not(fact)] = sympy.true, sympy.false
        fact = self.simplified(fact)
        if isinstance(fact, sympy.StrictLessThan | sympy.StrictGreaterThan):
            sign = 1 if isinstance(fact, sympy.StrictGreaterThan) else -1
            fact = (sympy.Ge if sign > 0 else sympy.Le)(fact.lhs, fact.rhs + sign)
        if isinstance(fact, sympy.Ge | sympy.Le):
            self._narrow(fact.canonical)
        if isinstance(fact, sympy.Eq):
            for term, value in (self._divided(fact) or self._solved(fact)).items():
                known = {k: v.xreplace({term: value}) for k, v in self._equal.items()}
                self._equal = {**known, term: value}

    def _divided(self, fact: sympy.Eq) -> dict[sympy.Expr, sympy.Expr]:
        """A symbol by a quotient, if an equation says that division is exact: `(s0 + 3) % 8 == 0`."""
        remainder = fact.lhs
        if not (isinstance(remainder, ModularIndexing) and fact.rhs.is_zero):
            return {}
        base, divisor, modulus = remainder.args
        rest, term = base.as_coeff_Add()
        factor, symbol = term.as_coeff_Mul()
        whole = divisor == 1 and modulus.is_Integer and factor.is_Integer
        if not whole or symbol not in self.ranges or (rest and factor != 1):
            return {}
        step = int(modulus) // math.gcd(int(modulus), int(factor))
        low, high = self.ranges[symbol]
        quotient = size_symbol(f"q{len(self.hints)}")
        self.hints[quotient] = (self.hints[symbol] + int(rest)) // step
        self.quotients[quotient] = FloorDiv(symbol + rest, sympy.Integer(step))
        self.wishes[quotient] = "a guard says that it divides"
        self.ranges[quotient] = -(-(low + int(rest)) // step), high and (high + int(rest)) // step
        self._shift(quotient)
        return {symbol: step * quotient - rest}

    def rooted(self, expr: sympy.Basic) -> sympy.Basic:
        """The expression in terms of symbols that have a source."""
        while any(symbol in self.quotients for symbol in expr.free_symbols):
            expr = expr.xreplace(self.quotients)
        return expr

    def _narrow(self, fact: sympy.Ge | sympy.Le) -> None:
        """A bound on a symbol narrows its range."""
        symbol, bound = fact.lhs, fact.rhs
        if symbol in self.ranges and bound.is_Integer:
            low, high = self.ranges[symbol]
            if isinstance(fact, sympy.Ge):
                low = max(low, int(bound))
            else:
                high = int(bound) if high is None else min(high, int(bound))
            self.ranges[symbol] = low, high
            self._shift(symbol)

    def _solved(self, fact: sympy.Eq) -> dict[sympy.Expr, sympy.Expr]:
        """A term (the youngest symbol, else a quotient, remainder, minimum) that an equation gives."""
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
        return {}

    # What FakeTensorMode asks of the environment of a SymNode it meets.

    def evaluate_sym_node(
        self, node: SymNode, size_oblivious: bool = False, fallback_value: bool | None = None
    ) -> sympy.Basic:
        return self.settle(node.expr, fallback_value)

    def _maybe_evaluate_static(self, expr: sympy.Basic, **_: object) -> sympy.Basic | None:
        return self.static(expr) if isinstance(expr, sympy.Basic) else sympy.sympify(expr)

    # What a reader sees

    def text(self, expr: sympy.Basic) -> str:
        """An expression with the user's names for its symbols: `x.size(0) % 8 == 0`."""
        expr = self.rooted(expr)
        return python_text(expr, [str(self.symbols[s]) for s in ordered(expr)])

    def values(self, symbol: sympy.Symbol) -> str:
        """Which values a symbol stands for."""
        value = self.simplified(symbol)
        if symbol in self.fixed:
            return f"only {python_number(value)}"
        low, high = self.ranges.get(symbol, (None, None))
        if low is None:
            return "a float"
        return f"from {low} on" if high is None else f"{low} to {high}"

    def cause(self, symbol: sympy.Symbol) -> str:
        """What fixed a symbol's value: who needed which fact, and the user's line; "" if it varies."""
        fact = self.fixed.get(symbol)
        if fact is None:
            return ""
        at = f"\n    at {fact.line}" if fact.line else ""
        return f"{fact.reason}: {self.text(fact.condition)}{at}"

    def line(self, symbol: sympy.Symbol) -> str:
        """Where a symbol comes from, its values, why it is one, and what fixed it."""
        wish, cause = self.wishes[symbol], self.cause(symbol)
        text = f"{symbol} is {self.text(symbol)}, {self.values(symbol)}"
        return text + (f" ({wish})" if wish else "") + (f": {cause}" if cause else "")

    def lines(self) -> list[str]:
        """What there is to know of each symbol."""
        return list(map(self.line, self.everything))

    @property
    def everything(self) -> list[sympy.Symbol]:
        """All symbols, quotients last."""
        return [*self.symbols, *self.quotients]

    def __str__(self) -> str:
        lines = [f"{len(self.symbols)} symbols, {len(self.guards)} guards"]
        lines += [f"  {line}" for line in self.lines()]
        lines += [f"  guard {self.text(fact.condition)}  # {fact.reason}" for fact in self.guards]
        return "\n".join(lines)
