"""Index simplification: never another value, and known forms as simple as they should be."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import sympy

from minicompile.shapes import expr
from minicompile.shapes.expr import (
    FloorDiv,
    ModularIndexing,
    Size,
    bounds,
    is_nonnegative,
    loop_symbol,
    simplify_index,
    size_symbol,
)

Tree = Any
"""An int, a symbol, or (operator, tree, ...): what an index means, before any simplification."""
Values = Mapping[sympy.Symbol, int]

p0, p1, p2 = (loop_symbol(f"p{i}") for i in range(3))
s0, s1 = size_symbol("s0"), size_symbol("s1")

MEANING: dict[str, Callable[..., int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "digit": lambda a, b, c: a // b % c,
}
EXPRESSION: dict[str, Callable[..., Any]] = {
    **MEANING,
    "//": FloorDiv,
    "%": lambda a, b: ModularIndexing(a, sympy.Integer(1), b),
    "digit": ModularIndexing,
}


def evaluated(tree: Tree, leaf: Callable[[Any], Any], operators: Mapping[str, Any]) -> Any:
    if not isinstance(tree, tuple):
        return leaf(tree)
    return operators[tree[0]](*(evaluated(part, leaf, operators) for part in tree[1:]))


def value_of(found: sympy.Expr, values: Values) -> int:
    """A simplified expression, evaluated without any of sympy's own rules."""
    if found.is_Integer:
        return int(found)
    if found.is_Symbol:
        return values[found]
    parts = [value_of(part, values) for part in found.args]
    if found.func is sympy.Add:
        return sum(parts)
    if found.func is sympy.Mul:
        return math.prod(parts)
    if found.func is sympy.Pow:
        return int(parts[0] ** parts[1])
    assert found.func in (FloorDiv, ModularIndexing), found
    return MEANING["//" if found.func is FloorDiv else "digit"](*parts)


class Problem:
    """A random index over random loops."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.sizes = [s0, s1][: rng.choice([0, 0, 1, 2])]
        extents: list[Size] = [1, 2, 3, 4, 8, 16, 64, *self.sizes, *self.sizes]
        extents += [size * rng.choice([2, 4]) for size in self.sizes]
        loops = [loop_symbol(f"p{i}") for i in range(rng.randint(1, 4))]
        self.ranges = {loop: rng.choice(extents) for loop in loops}
        self.tree = self.index(rng.randint(1, 4))
        self.expr = sympy.sympify(evaluated(self.tree, sympy.sympify, EXPRESSION))

    def index(self, depth: int) -> Tree:
        rng = self.rng
        if depth == 0 or rng.random() < 0.15:
            numbers = [0, 1, 1, 2, 3, 4, 5, 7, 8, 16, 64, -1, -2]
            kinds: list[list[Any]] = [list(self.ranges), self.sizes or numbers, numbers]
            return rng.choice(rng.choices(kinds, [6, 2, 2])[0])
        operator = rng.choices(["+", "*", "//", "%", "digit", "-"], [6, 6, 3, 3, 2, 1])[0]
        first = self.index(depth - 1)
        if operator == "*" and rng.random() < 0.85:
            return operator, first, rng.choice([*self.sizes, 2, 3, 4, 8, 64, -1])
        if operator in ("+", "-", "*"):
            return operator, first, self.index(depth - 1)
        if operator == "digit":
            return operator, first, self.divisor(), self.divisor()
        return operator, first, self.divisor()

    def divisor(self) -> Tree:
        rng, extents = self.rng, list(self.ranges.values())
        if rng.random() < 0.8:
            return rng.choice([*self.sizes, 2, 3, 4, 8, 64, *extents])
        return "*", rng.choice([*self.sizes, 2, 4]), rng.choice([*extents, 2, 3])

    def value(self, values: Values) -> int:
        """What the index means at a point, by Python's own arithmetic."""
        found = evaluated(self.tree, lambda leaf: value_of(sympy.sympify(leaf), values), MEANING)
        assert isinstance(found, int)
        return found

    def point(self) -> Values:
        """Values within the loops, often at their ends."""
        rng = self.rng
        values: dict[sympy.Symbol, int] = {s: rng.choice([1, 1, 2, 3, 5, 8]) for s in self.sizes}
        for loop, extent in self.ranges.items():
            last = value_of(sympy.sympify(extent), values) - 1
            values[loop] = rng.choice([0, last, rng.randint(0, last)])
        return values


def wrong(problem: Problem, points: int = 12) -> str | None:
    """Where simplification or its parts say something untrue about an index; None if nowhere."""
    simplified = simplify_index(problem.expr, problem.ranges)
    ends = bounds(problem.expr, problem.ranges)
    sign = is_nonnegative(problem.expr)
    for _ in range(points):
        values = problem.point()
        true = problem.value(values)
        for name, found in (("built", problem.expr), ("simplified", simplified)):
            if value_of(found, values) != true:
                return f"{problem.tree} {name} to {found}: not {true} at {values}"
        if ends is not None and not (
            value_of(ends[0], values) <= true <= value_of(ends[1], values)
        ):
            return f"{problem.tree} is {true} at {values}, outside {ends}"
        if sign and true < 0:
            return f"{problem.tree} is {true} at {values}: negative"
    return None


@pytest.mark.long
def test_simplifying_keeps_every_value():
    assert [found for seed in range(1500) if (found := wrong(Problem(seed)))] == []


@pytest.mark.parametrize("fault", ["_fits", "_below", "_split"])
def test_a_wrong_rule_is_found(fault: str, monkeypatch: pytest.MonkeyPatch):
    kept = getattr(expr, fault)
    broken = {
        "_fits": lambda e, limit, ranges: kept(e, limit + 1, ranges),
        "_below": lambda e, limit: kept(e, limit + 1),
        "_split": lambda base, divisor: (kept(base, divisor)[0], sympy.Integer(0)),
    }
    monkeypatch.setattr(expr, fault, broken[fault])
    assert any(wrong(Problem(seed)) for seed in range(1500))


def div(a: Any, b: Any) -> Any:
    return FloorDiv(sympy.sympify(a), sympy.sympify(b))


def mod(a: Any, b: Any) -> Any:
    return ModularIndexing(sympy.sympify(a), sympy.Integer(1), sympy.sympify(b))


def digit(a: Any, b: Any, c: Any) -> Any:
    return ModularIndexing(sympy.sympify(a), sympy.sympify(b), sympy.sympify(c))


@pytest.mark.parametrize(
    ("index", "extents", "simple"),
    [
        # rows and columns of a flattened index
        (div(s0 * p0 + p1, s0), (8, s0), p0),
        (mod(s0 * p0 + p1, s0), (8, s0), p1),
        (digit(s0 * s1 * p0 + s1 * p1 + p2, s1, s0), (8, s0, s1), p1),
        # within range: nothing to divide
        (div(p0, 64), (64,), 0),
        (mod(8 * p0 + p1, 16), (2, 8), 8 * p0 + p1),
        # a digit in the middle
        (digit(64 * p0 + p1, 8, 8), (8, 64), div(p1, 8)),
        (div(div(p0, 4), 8), (256,), div(p0, 32)),
        # constants
        (div(8 * p0 + 4, 4), (8,), 2 * p0 + 1),
        (div(p0 + 64, 64), (64,), 1),
        # backwards
        (div(63 - p0, 64), (64,), 0),
        (div(s0 * p0 + s0 - 1 - p1, s0), (8, s0), p0),
        # loops of one iteration
        (64 * p0 + p1, (1, 64), p1),
    ],
)
def test_known_forms(index: sympy.Expr, extents: tuple[Size, ...], simple: Any):
    found = simplify_index(index, dict(zip((p0, p1, p2), extents)))
    assert found == sympy.sympify(simple)
