"""Index expressions over sympy: floor division, modular indexing, bounds, simplification.

A `Size` is an int or a sympy expression over size symbols (`s0`, positive). An index is a sympy
expression over loop variables (`p0`, `r0`: 0 <= var < its range), size symbols and symbols that stand
for loaded values.
The real compiler: torch/utils/_sympy/functions.py and torch/_inductor/sizevars.py.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import sympy
import sympy.tensor.tensor  # the first sum would import it
from sympy.printing.pycode import PythonCodePrinter

Expr: TypeAlias = sympy.Expr
Symbol: TypeAlias = sympy.Symbol
Size: TypeAlias = int | sympy.Expr
Ranges: TypeAlias = Mapping[sympy.Symbol, Size]

ZERO = sympy.Integer(0)
ONE = sympy.Integer(1)


@functools.cache
def loop_symbol(name: str) -> sympy.Symbol:
    """A loop variable or a loaded index: an integer >= 0."""
    return sympy.Symbol(name, integer=True, nonnegative=True)


@functools.cache
def size_symbol(name: str) -> sympy.Symbol:
    """A symbolic size: an integer >= 1."""
    return sympy.Symbol(name, integer=True, positive=True)


@functools.cache
def float_symbol(name: str) -> sympy.Symbol:
    """A Python float that is known at run time."""
    return sympy.Symbol(name, real=True)


def is_float(expr: sympy.Basic) -> bool:
    """Does a number known at run time contain a float?"""
    return any(not symbol.is_integer for symbol in expr.free_symbols)


class PythonFunction(sympy.Function):  # type: ignore[misc]
    """A function that prints as Python, in the form that its class gives."""

    form: Any

    def _sympystr(self, printer: Any) -> str:
        return self.form.format(*(printer.parenthesize(arg, 60) for arg in self.args))

    _pythoncode = _sympystr


class FloorDiv(PythonFunction):
    """`base // divisor` on integers, rounding towards minus infinity."""

    nargs = (2,)
    form = "({0} // {1})"
    is_integer = True

    @classmethod
    def eval(cls, base: Expr, divisor: Expr) -> Expr | None:
        if divisor == 1:
            return base
        if base.is_zero:
            return ZERO
        if base.is_Integer and divisor.is_Integer:
            return sympy.Integer(int(base) // int(divisor))
        if divisor.is_negative:
            return FloorDiv(-base, -divisor)
        if isinstance(base, FloorDiv) and divisor.is_positive:
            return FloorDiv(base.args[0], base.args[1] * divisor)
        if not divisor.is_Integer and _below(base, divisor):
            return ZERO
        return ONE if base == divisor else exact_quotient(base, divisor)

    def _eval_is_nonnegative(self) -> bool | None:
        return True if self.args[0].is_nonnegative and self.args[1].is_positive else None


class ModularIndexing(PythonFunction):
    """`(base // divisor) % modulus`, the digit of `base` that a reshape picks out."""

    nargs = (3,)
    is_integer = True
    is_nonnegative = True

    @classmethod
    def eval(cls, base: Expr, divisor: Expr, modulus: Expr) -> Expr | None:
        if modulus == 1 or base.is_zero:
            return ZERO
        if all(a.is_Integer for a in (base, divisor, modulus)):
            return sympy.Integer((int(base) // int(divisor)) % int(modulus))
        if isinstance(base, FloorDiv):
            return ModularIndexing(base.args[0], base.args[1] * divisor, modulus)
        if not modulus.is_Integer and _below(base, divisor * modulus):
            return FloorDiv(base, divisor)
        return None

    @property
    def form(self) -> str:
        return "({0} % {2})" if self.args[1] == 1 else "(({0} // {1}) % {2})"


class PythonNumber(PythonFunction):
    """A number that Python computes with floats: they round, so sympy must leave it as it is."""

    is_real = True
    compute: Callable[..., int | float]

    @classmethod
    def eval(cls, *args: Expr) -> Expr | None:
        if not all(arg.is_number for arg in args):
            return None
        return sympy.sympify(cls.compute(*map(python_number, args)))


class RoundedNumber(PythonNumber):
    """An int made of floats."""

    is_integer = True


PYTHON_NUMBERS: dict[str, Any] = {
    name: type(name, (kind,), {"form": form, "compute": staticmethod(compute)})
    for name, kind, form, compute in (
        ("add", PythonNumber, "({0} + {1})", operator.add),
        ("sub", PythonNumber, "({0} - {1})", operator.sub),
        ("mul", PythonNumber, "({0} * {1})", operator.mul),
        ("truediv", PythonNumber, "({0} / {1})", operator.truediv),
        ("floordiv", PythonNumber, "({0} // {1})", operator.floordiv),
        ("mod", PythonNumber, "({0} % {1})", operator.mod),
        ("pow", PythonNumber, "({0} ** {1})", operator.pow),
        ("float", PythonNumber, "float({0})", float),
        ("sqrt", PythonNumber, "math.sqrt({0})", math.sqrt),
        ("int", RoundedNumber, "int({0})", int),
        ("floor", RoundedNumber, "math.floor({0})", math.floor),
        ("ceil", RoundedNumber, "math.ceil({0})", math.ceil),
    )
}


def exact_quotient(base: Expr, divisor: Expr) -> Expr | None:
    """base / divisor if the division leaves no remainder for any value, else None."""
    if divisor.is_zero:
        return None
    quotients = []
    for term in sympy.Add.make_args(base if divisor.is_Integer else sympy.expand(base)):
        if divisor.is_Integer:
            coefficient, rest = term.as_coeff_Mul()
            if not coefficient.is_Integer or int(coefficient) % int(divisor):
                return None
            quotients.append(sympy.Integer(int(coefficient) // int(divisor)) * rest)
        else:
            quotients.append(sympy.cancel(term / divisor))
            if not _is_integer_monomial(quotients[-1]):
                return None
    return sympy.Add(*quotients)


def _is_integer_monomial(expr: Expr) -> bool:
    """A product of integers and variables, without a quotient."""
    powers = [factor.as_base_exp() for factor in sympy.Mul.make_args(expr)]
    return all(
        base.is_integer and exponent.is_Integer and exponent > 0 for base, exponent in powers
    )


def to_size(value: Any) -> Size:
    """A Python int, SymInt or sympy number as a Size (an int where it is one); SymFloats as expressions."""
    if isinstance(value, int):
        return value
    node = getattr(value, "node", None)
    expr = value if node is None else node.expr
    return expr if isinstance(expr, sympy.Expr) and not expr.is_Integer else int(expr)


def python_number(expr: Expr) -> int | float:
    """A sympy number as Python's."""
    return int(expr) if expr.is_Integer else float(expr)


def product(sizes: Iterable[Size]) -> Size:
    out: Size = 1
    for size in sizes:
        out = out * size
    return to_size(out)


def floor_div(a: Size | Expr, b: Size | Expr) -> Size:
    return to_size(FloorDiv(sympy.sympify(a), sympy.sympify(b)))


def same(a: Size, b: Size) -> bool:
    """Equal for every value of the size symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(a == b) or bool(sympy.expand(sympy.sympify(a) - sympy.sympify(b)) == 0)


def size_hint(size: Size, hints: Mapping[sympy.Symbol, int]) -> int:
    """The size when compiling: for heuristics, never for correctness."""
    return size if isinstance(size, int) else int(size.xreplace(hints))


def is_nonnegative(value: Size | Expr) -> bool:
    """Provably >= 0 for sizes >= 1 and loop variables >= 0."""
    if isinstance(value, int) or value.is_Integer:
        return int(value) >= 0
    if not value.is_Add and value.is_nonnegative:  # of sums, sympy asks too much
        return True
    shifted = {s: loop_symbol(f"{s} - 1") + 1 for s in value.free_symbols if s.is_positive}
    terms = sympy.Add.make_args(sympy.expand(value.xreplace(shifted)))
    return all(f.is_nonnegative for term in terms for f in sympy.Mul.make_args(term))


def _below(expr: Expr, limit: Expr) -> bool:
    """0 <= expr < limit for sizes >= 1 and loop variables >= 0."""
    return is_nonnegative(expr) and is_nonnegative(limit - 1 - expr)


def bounds(expr: Expr, ranges: Ranges) -> tuple[Expr, Expr] | None:
    """Smallest and largest value (inclusive) over the ranges, or None where unknown."""
    if expr in ranges:
        return ZERO, sympy.sympify(ranges[expr]) - 1
    if expr.is_Integer or (expr.is_Symbol and expr.is_positive):  # a size symbol bounds itself
        return expr, expr
    if isinstance(expr, ModularIndexing):
        return ZERO, expr.args[2] - 1
    parts = [part for a in expr.args if (part := bounds(a, ranges)) is not None]
    if not parts or len(parts) < len(expr.args):
        return None
    if expr.is_Add:
        return sympy.Add(*(low for low, _ in parts)), sympy.Add(*(high for _, high in parts))
    if expr.is_Mul:
        return _product_bounds(parts)
    below, above = parts[0]
    if expr.is_Pow and is_nonnegative(below):
        return below**expr.exp, above**expr.exp
    if isinstance(expr, FloorDiv) and expr.args[1].is_positive:
        return FloorDiv(below, expr.args[1]), FloorDiv(above, expr.args[1])
    return None


def _product_bounds(parts: Iterable[tuple[Expr, Expr]]) -> tuple[Expr, Expr] | None:
    """Bounds of a product from those of its factors: at most one, a negative number, comes first."""
    low, high = ONE, ONE
    for below, above in parts:
        if is_nonnegative(below) and is_nonnegative(low):
            low, high = low * below, high * above
        elif above.is_negative and above.is_Integer and is_nonnegative(low):
            low, high = high * below, low * above
        elif is_nonnegative(below) and is_nonnegative(-high):
            low, high = low * above, high * below
        else:
            return None
    return low, high


def _fits(expr: Expr, limit: Expr, ranges: Ranges) -> bool:
    """0 <= expr < limit over the ranges."""
    found = bounds(expr, ranges)
    return found is not None and is_nonnegative(found[0]) and is_nonnegative(limit - 1 - found[1])


def _split(base: Expr, divisor: Expr) -> tuple[Expr, Expr]:
    """base = quotient * divisor + rest, moving every term that divides exactly."""
    quotient, rest = [], []
    for term in sympy.Add.make_args(base):
        exact = exact_quotient(term, divisor)
        if exact is not None:
            quotient.append(exact)
        elif term.is_Integer and divisor.is_Integer:  # a constant: keep its remainder
            quotient.append(term // divisor)
            rest.append(term % divisor)
        else:
            rest.append(term)
    return sympy.Add(*quotient), sympy.Add(*rest)


def _common_factor(base: Expr, divisor: Expr, ranges: Ranges) -> tuple[Expr, Expr, Expr] | None:
    """A factor of the divisor, with base = factor * quotient + rest and 0 <= rest < factor."""
    number, symbols = divisor.as_coeff_Mul()
    powers = symbols.as_powers_dict()
    for term in sympy.Add.make_args(base):
        coefficient, own = term.as_coeff_Mul()
        own = own.as_powers_dict()
        shared = (s ** min(own[s], powers[s]) for s in powers if s in own)
        factor = sympy.Mul(math.gcd(int(coefficient), int(number)), *shared)
        if factor != 1:
            quotient, rest = _split(base, factor)
            if quotient != 0 and _fits(rest, factor, ranges):
                return factor, quotient, rest
    return None


def _simplify_floor(base: Expr, divisor: Expr, ranges: Ranges) -> Expr:
    if _fits(base, divisor, ranges):
        return ZERO
    quotient, rest = _split(base, divisor)
    if _fits(rest, divisor, ranges):
        return quotient
    if _fits(rest + divisor, divisor, ranges):
        return quotient - 1
    if (common := _common_factor(rest, divisor, ranges)) is not None:
        smaller = exact_quotient(divisor, common[0])
        return quotient + _simplify_floor(common[1], smaller, ranges)
    return quotient + FloorDiv(rest, divisor)


def _simplify_modular(base: Expr, divisor: Expr, modulus: Expr, ranges: Ranges) -> Expr:
    whole = divisor * modulus
    if _fits(base, whole, ranges):
        return _simplify_floor(base, divisor, ranges)
    quotient, rest = _split(base, whole)
    if quotient != 0 and rest != base:
        # dropping whole multiples of divisor*modulus changes nothing: the digit is periodic
        return _simplify_modular(rest, divisor, modulus, ranges) if rest != 0 else ZERO
    if (common := _common_factor(base, divisor, ranges)) is not None:
        smaller = exact_quotient(divisor, common[0])
        return _simplify_modular(common[1], smaller, modulus, ranges)
    return ModularIndexing(base, divisor, modulus)


def _join(expr: Expr) -> Expr:
    """c*(x//d % m) + c*m*(x//(d*m)) = c*(x//d): undo a split whose digits meet again."""
    if not isinstance(expr, sympy.Add):
        return expr
    for low in expr.args:
        coefficient, digit = _modular_factor(low)
        if digit is None:
            continue
        base, divisor, modulus = digit.args
        for high in expr.args:
            above = _modular_factor(high)[1]
            choices = [(FloorDiv(base, divisor), FloorDiv(base, divisor * modulus))]
            if above is not None and above.args[:2] == (base, divisor * modulus):
                choices.append((ModularIndexing(base, divisor, modulus * above.args[2]), above))
            for joined, upper in choices:
                if upper != 0 and sympy.expand(high - coefficient * modulus * upper) == 0:
                    return _join(expr - low - high + coefficient * joined)
    return expr


def _modular_factor(term: Expr) -> tuple[Expr, ModularIndexing | None]:
    """A term's first digit, and what it is multiplied with."""
    digits = [f for f in sympy.Mul.make_args(term) if isinstance(f, ModularIndexing)]
    return (term / digits[0], digits[0]) if digits else (term, None)


def simplify_index(expr: Expr, ranges: Ranges) -> Expr:
    """The same index for all loop variables within their ranges, with fewer divisions.

    Variables whose range is 1 become 0.
    """
    expr = expr.xreplace({v: ZERO for v in expr.free_symbols if ranges.get(v) == 1})
    if not expr.has(FloorDiv, ModularIndexing):
        return sympy.expand(expr)

    def visit(e: Expr) -> Expr:
        if not e.args or not e.has(FloorDiv, ModularIndexing):
            return e
        args = [visit(a) for a in e.args]
        if isinstance(e, FloorDiv):
            return _simplify_floor(sympy.expand(args[0]), args[1], ranges)
        if isinstance(e, ModularIndexing):
            return _simplify_modular(sympy.expand(args[0]), args[1], args[2], ranges)
        return e.func(*args)

    return _join(sympy.expand(visit(expr)))


def contiguous_strides(size: Sequence[Size]) -> tuple[Size, ...]:
    """Row-major strides; a dimension of size 0 counts as 1, as in eager."""
    strides: list[Size] = []
    step: Size = 1
    for extent in reversed(size):
        strides.append(step)
        step = to_size(step * (extent if not isinstance(extent, int) else max(extent, 1)))
    return tuple(reversed(strides))


def strides_agree(size: Sequence[Size], have: Sequence[Size], want: Sequence[Size]) -> bool:
    """Equal wherever they matter: in dimensions longer than 1."""
    return all(n == 1 or same(a, b) for n, a, b in zip(size, have, want, strict=True))


def linear_index(index: Sequence[Expr | int], stride: Sequence[Size], offset: Size = 0) -> Expr:
    """offset + sum(index * stride)."""
    return sympy.Add(
        sympy.sympify(offset), *[sympy.sympify(i) * s for i, s in zip(index, stride, strict=True)]
    )


def coefficient_of(expr: Expr, var: sympy.Symbol) -> Expr | None:
    """The stride of `var` in a linear index; None if the index isn't linear in it."""
    if var not in expr.free_symbols:
        return ZERO
    step = sympy.expand(expr.xreplace({var: var + 1}) - expr)
    return None if var in step.free_symbols or step.has(FloorDiv, ModularIndexing) else step


PRINTER = PythonCodePrinter()


@functools.lru_cache(maxsize=4096)
def index_text(index: Expr | int) -> str:
    """`str`, remembered: sympy sorts terms each time, and the same few indices are printed everywhere."""
    return str(index)


def ordered(expr: sympy.Basic) -> list[sympy.Symbol]:
    """The symbols of an expression by name."""
    return sorted(expr.free_symbols, key=str)


def python_text(expr: sympy.Basic, values: Sequence[str]) -> str:
    """An expression or condition as Python; `values`: names of its symbols, these ordered by name."""
    symbols = ordered(expr)
    kinds = [size_symbol if symbol.is_integer else float_symbol for symbol in symbols]
    names = {s: kind(value) for s, kind, value in zip(symbols, kinds, values, strict=True)}
    digits = {number: float_symbol(repr(float(number))) for number in expr.atoms(sympy.Float)}
    renamed = expr.xreplace(names | digits)
    if isinstance(renamed, sympy.core.relational.Relational):
        return f"{_outermost(renamed.lhs)} {renamed.rel_op} {_outermost(renamed.rhs)}"
    return _outermost(renamed)


def _outermost(expr: Expr) -> str:
    text: str = PRINTER.doprint(expr)
    return text[1:-1] if isinstance(expr, FloorDiv | ModularIndexing) else text
