"""How each loop operation is written in C: types, literals, index formulas, arithmetic.

`EXPRESSIONS` has a row for every operation that can stand in a legal body; the functions that begin with
`mc_` are in `helpers.h`, of which a kernel's source contains what it uses. The subset of C used here is also
C++. The float32 functions have no branches, so that gcc and clang vectorise the loops they stand in; their
coefficients come from `tests/codegen/minimax.py`, their errors from `tests/codegen/every_float.py`: under 1.6
ulp, sigmoid under 2. NaN, infinities, zeros and denormals behave as in the C library. (glibc's libmvec was an
alternative: up to 4 ulp, and only gcc on x86-64 vectorises with it.)
The real compiler: torch/_inductor/codegen/cpp.py (CppOverrides) and cpp_utils.py.
"""

from __future__ import annotations

import ctypes
import math

import torch

from minicompile.codegen.printing import INFIX, IndexPrinter, OpRule, by_kind, by_width, form

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


def literal(value: float | int | bool, dtype: torch.dtype) -> str:
    """A constant of `dtype`; negative ones in parentheses."""
    if dtype is torch.bool:
        return "true" if value else "false"
    if dtype.is_floating_point:
        text = _float_literal(float(value), dtype is torch.float32)
    elif value == -(2**63):
        return "INT64_MIN"
    else:
        text = str(int(value))
    return f"({text})" if text.startswith("-") else text


def _float_literal(value: float, single: bool) -> str:
    if single:
        value = ctypes.c_float(value).value
    if not math.isfinite(value):
        return "NAN" if math.isnan(value) else f"{'-' if value < 0 else ''}INFINITY"
    text = repr(value)
    if single:  # the fewest digits that give the same float32
        tried = (f"{value:.{digits}g}" for digits in range(6, 10))
        text = next(t for t in tried if ctypes.c_float(float(t)).value == value)
    if "." not in text and "e" not in text:
        text += ".0"
    return text + "f" if single else text


class CIndex(IndexPrinter):
    language = "C"
    divide = "/"
    floor_divide = "mc_index_div"
    floor_modulo = "mc_index_mod"


def _libm(name: str, arity: int = 1) -> OpRule:
    """The C library's function, which ends in f for float32."""
    operands = ", ".join(f"{{{i}}}" for i in range(arity))
    return by_width(f"{name}f({operands})", f"{name}({operands})")


def _divide(sign: str, helper: str) -> OpRule:
    def write(dtype: torch.dtype, a: str, b: str) -> str:
        constant = b.strip("()-").strip("0").isdigit()  # not 0: the compiler knows better
        return f"{a} {sign} {b}" if constant else f"{helper}({a}, {b})"

    return write


_LIBM = """
asin acos atan sinh cosh asinh acosh atanh lgamma floor ceil trunc sqrt
"""

_OWN = "exp exp2 expm1 log log2 log10 log1p sin cos tan tanh erf erfc"
"""The C library's for float64 only."""

EXPRESSIONS: dict[str, OpRule] = {
    **INFIX,
    **{name: _libm(name) for name in _LIBM.split()},
    **{name: by_width(f"mc_{name}({{0}})", f"{name}({{0}})") for name in _OWN.split()},
    **{name: _libm(name, 2) for name in ("atan2", "copysign", "hypot")},
    "truediv": form("{0} / {1}"),
    "truncdiv": _divide("/", "mc_div"),
    "fmod": by_kind(_libm("fmod", 2), _divide("%", "mc_mod")),
    "maximum": form("{0} > {1} ? {0} : {1}"),
    "minimum": form("{0} < {1} ? {0} : {1}"),
    "pow": by_kind(by_width("mc_pow({0}, {1})", "pow({0}, {1})"), form("mc_int_pow({0}, {1})")),
    "fma": _libm("fma", 3),
    "neg": form("-{0}"),
    "abs": by_kind(_libm("fabs"), form("{0} < 0 ? -{0} : {0}")),
    "sign": form("({0} > 0) - ({0} < 0)"),
    "round": _libm("rint"),
    "rsqrt": by_width("1.0f / sqrtf({0})", "1.0 / sqrt({0})"),
    "reciprocal": by_width("1.0f / {0}", "1.0 / {0}"),
    "sigmoid": by_width("mc_sigmoid({0})", "1.0 / (1.0 + exp(-{0}))"),
    # not by signbit(): gcc 12 fails on it in vector loops
    "signbit": by_width("mc_bits({0}) < 0", "mc_bits64({0}) < 0"),
    "logical_not": form("!{0}"),
    "bitwise_not": form("~{0}"),
    "lshift": form("mc_lshift({0}, {1}, {bits})"),
    "rshift": form("mc_rshift({0}, {1}, {bits})"),
    "where": form("{0} ? {1} : {2}"),
    "rand": form("mc_rand({0}, {1})"),
    "randn": form("mc_randn({0}, {1})"),
}

HALVES = {torch.bfloat16: "bf16", torch.float16: "f16"}


def conversion(text: str, source: torch.dtype, target: torch.dtype) -> str:
    """`to_dtype` between legal types: half types meet float32 only."""
    if source in HALVES:
        return f"mc_from_{HALVES[source]}({text})"
    if target in HALVES:
        return f"mc_to_{HALVES[target]}({text})"
    if target is torch.bool:
        return f"{text} != 0"
    if source is torch.bool and target.is_floating_point:  # gcc 12 doesn't vectorise the cast
        return f"{text} ? {literal(1, target)} : {literal(0, target)}"
    if source.is_floating_point and target.itemsize < 4:
        return f"({CTYPES[target]})(int32_t){text}"  # out of range: as eager's vector code
    return f"({CTYPES[target]}){text}"
