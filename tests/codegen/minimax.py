"""Where the coefficients in `minicompile/codegen/helpers.h` come from: `python -m tests.codegen.minimax`.

The Remez exchange. Of all polynomials of a degree, the one with the smallest largest error has one that
alternates in sign at degree + 2 points and is equally large there: solve for the polynomial that errs so at
some points, move the points to where its error is really largest, repeat.
(E. Remez, 1934; J.-M. Muller, Elementary Functions, chapter 3.)
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mpmath

Real = Any
"""An mpmath number."""


@dataclass(frozen=True)
class Fit:
    """`target` over [low, high], errors weighted by `weight`, as a polynomial of `degree`."""

    name: str
    target: Callable[[Real], Real]
    weight: Callable[[Real], Real]
    low: Real
    high: Real
    degree: int
    double: bool = False
    """Are the coefficients float64?"""

    def literal(self, coefficient: Real) -> str:
        """As it stands in C."""
        if self.double:
            return repr(float(coefficient))
        (rounded,) = struct.unpack("f", struct.pack("f", float(coefficient)))
        return f"{rounded:.9g}f"


def remez(fit: Fit, rounds: int = 20, grid: int = 1200) -> tuple[list[Real], Real]:
    """Coefficients from the constant term upwards, and the largest weighted error.

    Where the weight vanishes inside the interval the exchange can circle; the best round counts.
    """
    count = fit.degree + 2
    middle, half = (fit.low + fit.high) / 2, (fit.high - fit.low) / 2
    dense = [middle - half * mpmath.cos(mpmath.pi * i / grid) for i in range(grid + 1)]
    values = [(fit.target(x), max(fit.weight(x), mpmath.mpf("1e-12"))) for x in dense]
    chosen = [round(i * grid / (count - 1)) for i in range(count)]
    best: list[Real] = []
    smallest = mpmath.inf
    for _ in range(rounds):
        rows = mpmath.matrix(count, count)
        right = mpmath.matrix(count, 1)
        for row, at in enumerate(chosen):
            for power in range(fit.degree + 1):
                rows[row, power] = dense[at] ** power
            rows[row, count - 1] = (-1) ** row / values[at][1]
            right[row] = values[at][0]
        solution = list(mpmath.lu_solve(rows, right))
        coefficients = solution[:-1]
        errors = [
            w * (f - mpmath.polyval(coefficients[::-1], x))
            for x, (f, w) in zip(dense, values, strict=True)
        ]
        worst = max(abs(e) for e in errors)
        if worst < smallest:
            best, smallest = coefficients, worst
        moved = _alternating_extrema(errors, count)
        if moved == chosen:
            break
        chosen = moved
    return best, smallest


def _alternating_extrema(errors: list[Real], count: int) -> list[int]:
    """Positions of the largest error between sign changes; the `count` neighbours with the largest ones."""
    best: list[int] = [0]
    for i, error in enumerate(errors):
        if error * errors[best[-1]] < 0:
            best.append(i)
        elif abs(error) > abs(errors[best[-1]]):
            best[-1] = i
    while len(best) > count:
        best.pop(0 if abs(errors[best[0]]) < abs(errors[best[-1]]) else -1)
    if len(best) < count:
        raise ArithmeticError("fewer alternations than the degree needs: use a finer grid")
    return best


def _tail(function: Callable[[Real], Real], known: Callable[[Real], Real], power: int) -> Any:
    """(function(x) - known(x)) / x**power, computed with enough digits near 0."""

    def quotient(x: Real) -> Real:
        x = x if x != 0 else mpmath.mpf(10) ** -12
        return (function(x) - known(x)) / x**power

    return quotient


def fits() -> list[Fit]:
    """What the math header needs; weights turn absolute errors into errors relative to the result."""
    mpf, root = mpmath.mpf, mpmath.sqrt
    one, tiny, quarter = mpf(1), mpf("1e-9"), (mpmath.pi / 4 * mpf("1.09")) ** 2
    half_ln2 = mpmath.log(2) / 2 * mpf("1.001")
    return [
        Fit("exp: 1 + r + r^2 P(r)", _tail(mpmath.exp, lambda r: 1 + r, 2),
            lambda r: r * r / mpmath.exp(r), -half_ln2, half_ln2, 4),
        Fit("log: f - f^2/2 + f^3 P(f)", _tail(mpmath.log1p, lambda f: f - f * f / 2, 3),
            lambda f: f * f, root(one / 2) - 1, root(2 * one) - 1, 7),
        Fit("tanh: x + x^3 P(x^2)", lambda t: (mpmath.tanh(root(t)) / root(t) - 1) / t,
            lambda t: t, tiny, mpf("0.4"), 4),
        Fit("erf near 0: x + x P(x^2)", lambda t: mpmath.erf(root(t)) / root(t) - 1,
            lambda t: one, tiny, mpf("0.81"), 6),
        Fit("erf from 0.9 to 4: 1 - exp(P(x))", lambda x: mpmath.log(mpmath.erfc(x)),
            lambda x: mpmath.erfc(x), mpf("0.89"), mpf("4.0"), 6),
        Fit("sin: x + x^3 P(x^2)", lambda t: (mpmath.sin(root(t)) / root(t) - 1) / t,
            lambda t: t, tiny, quarter, 2),
        Fit("cos: 1 - x^2/2 + x^4 P(x^2)", lambda t: (mpmath.cos(root(t)) - 1 + t / 2) / t**2,
            lambda t: t * t, tiny, quarter, 2),
        Fit("tan: x + x^3 P(x^2)", lambda t: (mpmath.tan(root(t)) / root(t) - 1) / t,
            lambda t: t, tiny, quarter, 6),
        Fit("exp2 for doubles: P(x)", lambda x: 2**x, lambda x: 2**-x, -one / 2, one / 2, 6, True),
        Fit("log2 for doubles: s P(s^2), s = (m - 1) / (m + 1)",
            lambda t: mpmath.log((1 + root(t)) / (1 - root(t)), 2) / root(t),
            lambda t: one, tiny, (root(2 * one) - 1) ** 2 / (root(2 * one) + 1) ** 2, 4, True),
        Fit("erfc for doubles: exp(-x^2) P(t), t = (x - 4) / (x + 4)", _scaled_erfc,
            lambda t: 1 / _scaled_erfc(t), -one, mpf("0.44"), 10, True),
        Fit("randn: sin(2 pi x) = x P(x^2)", lambda t: mpmath.sin(2 * mpmath.pi * root(t)) / root(t),
            lambda t: root(t) / mpmath.sin(2 * mpmath.pi * root(t)), tiny, one / 16, 4),
    ]  # fmt: skip


def _scaled_erfc(t: Real) -> Real:
    x = 4 * (1 + t) / (1 - t)
    return mpmath.exp(x * x) * mpmath.erfc(x)


def main() -> None:
    """Print each fit as the list of its coefficients."""
    with mpmath.workdps(50):
        for fit in fits():
            coefficients, worst = remez(fit)
            listed = ", ".join(map(fit.literal, coefficients))
            print(f"{fit.name}: largest error {mpmath.nstr(worst, 3)}\n    {listed}")


if __name__ == "__main__":
    main()
