"""How each loop operation is written in C: types, literals, index formulas, arithmetic.

`EXPRESSIONS` has a row for every operation that can stand in a legal body. The subset of C used here is
also C++. The real compiler: torch/_inductor/codegen/cpp.py (CppOverrides) and cpp_utils.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import sympy
import torch

from minicompile.ops.dtypes import is_int
from minicompile.ops.handler import Index
from minicompile.shapes.expr import FloorDiv, ModularIndexing, Size, is_nonnegative

CTYPES: dict[torch.dtype, str] = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "uint16_t",
    torch.bfloat16: "uint16_t",
    torch.int64: "int64_t",
    torch.int32: "int32_t",
    torch.int16: "int16_t",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
    torch.bool: "bool",
}

STORAGE = {**CTYPES, torch.bool: "uint8_t"}
"""Types of elements in memory."""


def float_digits(value: float) -> str:
    """The fewest digits that give the same float32."""
    single = struct.unpack("f", struct.pack("f", value))[0]
    for digits in range(6, 10):
        text = f"{single:.{digits}g}"
        if struct.unpack("f", struct.pack("f", float(text)))[0] == single:
            break
    return text


def literal(value: float | int | bool, dtype: torch.dtype) -> str:
    """A constant of `dtype`; negative ones in parentheses."""
    if dtype is torch.bool:
        return "true" if value else "false"
    if dtype.is_floating_point:
        value = float(value)
        if dtype is torch.float32:
            value = _to_float32(value)
        if value != value:
            return "NAN"
        if value in (float("inf"), float("-inf")):
            return "INFINITY" if value > 0 else "(-INFINITY)"
        text = float_digits(value) if dtype is torch.float32 else repr(value)
        if "." not in text and "e" not in text:
            text += ".0"
        if dtype is torch.float32:
            text += "f"
    else:
        if value == -(2**63):
            return "INT64_MIN"
        text = str(int(value)) + ("LL" if not -(2**31) < value < 2**31 else "")
    return f"({text})" if text.startswith("-") else text


def _to_float32(value: float) -> float:
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    return rounded


_ATOM, _PRODUCT, _SUM = 3, 2, 1


class IndexPrinter:
    """Index formulas in C. `helpers` collects the functions they need."""

    def __init__(self, helpers: set[str]) -> None:
        self.helpers = helpers
        self.known: dict[Index, str] = {}

    def __call__(self, expr: Index | Size) -> str:
        if isinstance(expr, int):
            return str(expr)
        if expr not in self.known:
            self.known[expr] = self._print(expr)[0]
        return self.known[expr]

    def _in(self, expr: Index, level: int) -> str:
        text, own = self._print(expr)
        return text if own >= level else f"({text})"

    def _print(self, expr: Index) -> tuple[str, int]:
        if expr.is_Symbol:
            return str(expr), _ATOM
        if expr.is_Integer:
            return str(expr), _ATOM if expr >= 0 else _SUM
        if isinstance(expr, sympy.Add):
            terms = [self._in(term, _PRODUCT) for term in expr.as_ordered_terms()]
            return " + ".join(terms).replace("+ (-1)*", "- "), _SUM
        if isinstance(expr, sympy.Mul):
            return "*".join(
                self._in(factor, _ATOM) for factor in expr.as_ordered_factors()
            ), _PRODUCT
        if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 0:
            return "*".join([self._in(expr.base, _ATOM)] * int(expr.exp)), _PRODUCT
        if isinstance(expr, FloorDiv):
            return self._divided(expr.args[0], expr.args[1])
        if isinstance(expr, ModularIndexing):
            base, divisor, modulus = expr.args
            quotient = base if divisor == 1 else FloorDiv(base, divisor)
            if is_nonnegative(base):
                return f"{self._in(quotient, _PRODUCT)} % {self._in(modulus, _ATOM)}", _PRODUCT - 1
            self.helpers.add("mc_floor_index")
            return f"mc_index_mod({self(quotient)}, {self(modulus)})", _ATOM
        if isinstance(expr, sympy.Max | sympy.Min):
            sign = ">" if isinstance(expr, sympy.Max) else "<"
            text = self(expr.args[0])
            for other in map(self, expr.args[1:]):
                text = f"(({text}) {sign} ({other}) ? ({text}) : ({other}))"
            return text, _ATOM
        raise TypeError(f"no C for the index expression {expr}")

    def _divided(self, base: Index, divisor: Index) -> tuple[str, int]:
        if is_nonnegative(base):
            return f"{self._in(base, _PRODUCT)} / {self._in(divisor, _ATOM)}", _PRODUCT - 1
        self.helpers.add("mc_floor_index")
        return f"mc_index_div({self(base)}, {self(divisor)})", _ATOM


Written = tuple[str, tuple[str, ...]]
"""An expression and the helpers it calls."""


def _binary(sign: str) -> Callable[..., Written]:
    return lambda dtype, a, b: (f"{a} {sign} {b}", ())


def _libm(name: str) -> Callable[..., Written]:
    def write(dtype: torch.dtype, *args: str) -> Written:
        suffix = "f" if dtype is torch.float32 else ""
        return f"{name}{suffix}({', '.join(args)})", ()

    return write


def _own(name: str, inline: str) -> Callable[..., Written]:
    """The prelude's function for float32; for float64 an expression of the C library."""

    def write(dtype: torch.dtype, x: str) -> Written:
        if dtype is torch.float32:
            return f"{name}({x})", (name,)
        return inline.format(x=x), ()

    return write


def _abs(dtype: torch.dtype, x: str) -> Written:
    if is_int(dtype):
        return f"{x} < 0 ? -{x} : {x}", ()
    return _libm("fabs")(dtype, x)


def _sign(dtype: torch.dtype, x: str) -> Written:
    return f"({x} > 0) - ({x} < 0)", ()


def _extremum(sign: str) -> Callable[..., Written]:
    return lambda dtype, a, b: (f"{a} {sign} {b} ? {a} : {b}", ())


def _divide(sign: str, helper: str) -> Callable[..., Written]:
    def write(dtype: torch.dtype, a: str, b: str) -> Written:
        if b.strip("()-").isdigit():  # a constant, which is not 0: the compiler knows better
            return f"{a} {sign} {b}", ()
        return f"{helper}({a}, {b})", ("mc_div",)

    return write


def _fmod(dtype: torch.dtype, a: str, b: str) -> Written:
    if is_int(dtype):
        return _divide("%", "mc_mod")(dtype, a, b)
    return _libm("fmod")(dtype, a, b)


def _pow(dtype: torch.dtype, a: str, b: str) -> Written:
    if is_int(dtype):
        return f"mc_int_pow({a}, {b})", ("mc_int_pow",)
    return _libm("pow")(dtype, a, b)


def _one(dtype: torch.dtype) -> str:
    return literal(1, dtype)


def _rsqrt(dtype: torch.dtype, x: str) -> Written:
    return f"{_one(dtype)} / {_libm('sqrt')(dtype, x)[0]}", ()


def _shift(name: str) -> Callable[..., Written]:
    def write(dtype: torch.dtype, a: str, b: str) -> Written:
        return f"{name}({a}, {b}, {dtype.itemsize * 8})", ("mc_shift",)

    return write


def _signbit(dtype: torch.dtype, x: str) -> Written:
    if dtype is torch.float32:  # not by signbit(): gcc 12 fails on it in vector loops
        return f"mc_bits({x}) < 0", ("mc_float_bits",)
    return f"mc_bits64({x}) < 0", ("mc_double_bits",)


EXPRESSIONS: dict[str, Callable[..., Written]] = {
    "add": _binary("+"),
    "sub": _binary("-"),
    "mul": _binary("*"),
    "truediv": _binary("/"),
    "truncdiv": _divide("/", "mc_div"),
    "fmod": _fmod,
    "maximum": _extremum(">"),
    "minimum": _extremum("<"),
    "pow": _pow,
    "atan2": _libm("atan2"),
    "copysign": _libm("copysign"),
    "hypot": _libm("hypot"),
    "neg": lambda dtype, x: (f"-{x}", ()),
    "abs": _abs,
    "sign": _sign,
    "floor": _libm("floor"),
    "ceil": _libm("ceil"),
    "trunc": _libm("trunc"),
    "round": _libm("rint"),
    "fma": _libm("fma"),
    "sqrt": _libm("sqrt"),
    "rsqrt": _rsqrt,
    "reciprocal": lambda dtype, x: (f"{_one(dtype)} / {x}", ()),
    "exp": _own("mc_exp", "exp({x})"),
    "exp2": _libm("exp2"),
    "expm1": _libm("expm1"),
    "log": _own("mc_log", "log({x})"),
    "log2": _libm("log2"),
    "log10": _libm("log10"),
    "log1p": _libm("log1p"),
    "sin": _libm("sin"),
    "cos": _libm("cos"),
    "tan": _libm("tan"),
    "asin": _libm("asin"),
    "acos": _libm("acos"),
    "atan": _libm("atan"),
    "sinh": _libm("sinh"),
    "cosh": _libm("cosh"),
    "tanh": _own("mc_tanh", "tanh({x})"),
    "sigmoid": _own("mc_sigmoid", "1.0 / (1.0 + exp(-{x}))"),
    "erf": _own("mc_erf", "erf({x})"),
    "eq": _binary("=="),
    "ne": _binary("!="),
    "lt": _binary("<"),
    "le": _binary("<="),
    "gt": _binary(">"),
    "ge": _binary(">="),
    "isnan": lambda dtype, x: (f"{x} != {x}", ()),
    "isinf": lambda dtype, x: (f"{_libm('fabs')(dtype, x)[0]} == INFINITY", ()),
    "signbit": _signbit,
    "logical_and": _binary("&"),
    "logical_or": _binary("|"),
    "logical_xor": _binary("^"),
    "logical_not": lambda dtype, x: (f"!{x}", ()),
    "bitwise_and": _binary("&"),
    "bitwise_or": _binary("|"),
    "bitwise_xor": _binary("^"),
    "bitwise_not": lambda dtype, x: (f"~{x}", ()),
    "lshift": _shift("mc_lshift"),
    "rshift": _shift("mc_rshift"),
    "where": lambda dtype, c, a, b: (f"{c} ? {a} : {b}", ()),
}

FROM_HALF = {torch.bfloat16: ("mc_from_bf16", "mc_bf16"), torch.float16: ("mc_from_f16", "mc_f16")}
TO_HALF = {torch.bfloat16: ("mc_to_bf16", "mc_bf16"), torch.float16: ("mc_to_f16", "mc_f16")}

_BITCASTS = {
    (torch.float32, torch.int32): ("mc_bits", "mc_float_bits"),
    (torch.int32, torch.float32): ("mc_float", "mc_float_bits"),
    (torch.float64, torch.int64): ("mc_bits64", "mc_double_bits"),
    (torch.int64, torch.float64): ("mc_double", "mc_double_bits"),
}


def conversion(text: str, source: torch.dtype, target: torch.dtype) -> Written:
    """`to_dtype` between legal types: half types meet float32 only."""
    if source in FROM_HALF:
        name, helper = FROM_HALF[source]
        return f"{name}({text})", (helper,)
    if target in TO_HALF:
        name, helper = TO_HALF[target]
        return f"{name}({text})", (helper,)
    if target is torch.bool:
        return f"{text} != 0", ()
    if source.is_floating_point and target.itemsize < 4:
        return f"({CTYPES[target]})(int32_t){text}", ()  # out of range: as eager's vector code
    return f"({CTYPES[target]}){text}", ()


def bitcast(text: str, source: torch.dtype, target: torch.dtype) -> Written:
    """The same bits as another type; half types and integers of one width are alike already."""
    if (source, target) in _BITCASTS:
        name, helper = _BITCASTS[source, target]
        return f"{name}({text})", (helper,)
    return f"({CTYPES[target]}){text}", ()
