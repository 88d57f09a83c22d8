"""How Triton writes each operation of a legal loop body: one rule per operation.

    @triton_op("add")
    def add(dtype, a, b): return f"{a} + {b}"          # dtype: of the operands; a, b: their names or literals

A rule returns one expression. It may call a function of `HELPERS` by name: the kernel's prelude then holds
that function. Each gives eager's value, NaN and signed zeros included, compiled and interpreted:

- fp32 division and square root are the IEEE ones (`/` and `tl.sqrt` compile to approximations).
- Transcendental functions are libdevice's, as eager CUDA's are (1 to 2 ulp); `tl.exp` is `ex2.approx`, which
  loses up to 40 ulp at large arguments.
- What legalize.py has already written out (floor division, remainders, NaN in maximum, arithmetic on bools
  and half types) has no rule here.

The real compiler: torch/_inductor/codegen/triton.py (TritonOverrides).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

import torch

from minicompile.codegen.legalize import COMPARISONS
from minicompile.errors import Unsupported
from minicompile.ops.registry import Registry
from minicompile.scheduling.body import Value

OpRule = Callable[..., str]
"""`rule(dtype, *operands) -> expression`."""

triton_op: Registry[OpRule] = Registry("triton_op", "loop operation -> its Triton expression")

TRITON_DTYPES: dict[torch.dtype, str] = {
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.int16: "tl.int16",
    torch.int8: "tl.int8",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
}

_HELPER_TEXT = """
@triton.jit
def floor_div(a, b):
    quotient = a // b
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), quotient - 1, quotient)

@triton.jit
def floor_mod(a, b):
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)

@triton.jit
def pow_int(base, exponent):
    result = base * 0 + 1
    square = base
    rest = exponent
    for _ in range(0, 63):
        result = tl.where((rest & 1) != 0, result * square, result)
        square = square * square
        rest = rest >> 1
    sign = 1 - 2 * (exponent & 1)
    inverse = tl.where(base == 1, base, tl.where(base + 1 == 0, sign, 0))
    return tl.where(exponent < 0, inverse, result)

@triton.jit
def max_combine(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)

@triton.jit
def min_combine(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)

@triton.jit
def prod_combine(a, b):
    return a * b

@triton.jit
def argmax_combine(a, at, b, bt):
    wins = (a > b) | ((a != a) & (b == b))
    ties = (a == b) | ((a != a) & (b != b))
    first = wins | (ties & (at < bt))
    return tl.where(first, a, b), tl.where(first, at, bt)

@triton.jit
def argmin_combine(a, at, b, bt):
    wins = (a < b) | ((a != a) & (b == b))
    ties = (a == b) | ((a != a) & (b != b))
    first = wins | (ties & (at < bt))
    return tl.where(first, a, b), tl.where(first, at, bt)
"""

HELPERS: dict[str, str] = {
    match.group(1): text.strip()
    for text in _HELPER_TEXT.split("\n\n")
    if (match := re.search(r"def (\w+)\(", text))
}
"""Device functions by name; a kernel's prelude holds those that it calls."""


def helpers_used(lines: Iterable[str]) -> list[str]:
    """Names of the helpers that these lines call, in the table's order."""
    words = {word for line in lines for word in re.findall(r"\w+", line)}
    return [name for name in HELPERS if name in words]


def literal(value: float | int | bool) -> str:
    """A Python literal that Triton's front end reads: `float("inf")` for infinities and NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def typed_constant(value: float | int | bool, dtype: torch.dtype) -> str:
    """A scalar of exactly this dtype."""
    if _is_minus_zero(value):  # the front end reads -0.0 as 0
        return f"({typed_constant(0.0, dtype)} * -1.0)"
    if dtype in (torch.float16, torch.bfloat16):
        return f"{typed_constant(value, torch.float32)}.to({TRITON_DTYPES[dtype]})"
    return f"tl.full([], {literal(value)}, {TRITON_DTYPES[dtype]})"


def _is_minus_zero(value: float | int | bool) -> bool:
    return isinstance(value, float) and value == 0 and math.copysign(1.0, value) < 0


LITERAL_DTYPES = frozenset({torch.float32, torch.float64, torch.int32, torch.int64, torch.bool})
LITERAL_OPS = COMPARISONS | {"add", "sub", "mul", "truediv", "maximum", "minimum", "where"}
"""Operations that convert a Python literal to the dtype of their other operand."""


def operand_texts(value: Value, name_of: Callable[[Value], str]) -> list[str]:
    """Operands as text; a constant stands as a literal where another operand fixes its dtype."""
    alike = value.inputs[1:] if value.op == "where" else value.inputs
    bare = value.op in LITERAL_OPS and any(v.op != "constant" for v in alike)

    def text(v: Value) -> str:
        if v.op != "constant":
            return name_of(v)
        if bare and v in alike and v.dtype in LITERAL_DTYPES and not _is_minus_zero(v.constant):
            return literal(v.constant)
        return typed_constant(v.constant, v.dtype)

    return [text(v) for v in value.inputs]


def convert(text: str, source: torch.dtype, target: torch.dtype) -> str:
    """`ops.to_dtype`: what eager's `.to` does."""
    if target is torch.bool:
        return f"{text} != 0"
    if source.is_floating_point and target in (torch.uint8, torch.int8, torch.int16):
        text = f"{text}.to(tl.int64)"  # as eager: negative and large values wrap
    if torch.bfloat16 in (source, target) and torch.float32 not in (source, target):
        text = f"{text}.to(tl.float32)"  # the interpreter knows no other way
    return f"{text}.to({TRITON_DTYPES[target]})"


def pointwise_text(value: Value, operands: list[str]) -> str:
    """One operation of the table. Raises Unsupported when there is no rule for it."""
    rule = triton_op.get(value.op)
    if rule is None:
        raise Unsupported(
            f"no way to write ops.{value.op} in Triton", hint=f'register triton_op("{value.op}")'
        )
    return rule(value.inputs[-1].dtype, *operands)


def _infix(symbol: str) -> OpRule:
    return lambda dtype, a, b: f"{a} {symbol} {b}"


def _call(function: str) -> OpRule:
    return lambda dtype, *operands: f"{function}({', '.join(operands)})"


def _by_kind(on_float: OpRule, on_int: OpRule) -> OpRule:
    def rule(dtype: torch.dtype, *operands: str) -> str:
        return (on_float if dtype.is_floating_point else on_int)(dtype, *operands)

    return rule


for _op, _symbol in {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truncdiv": "//",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "bitwise_and": "&",
    "bitwise_or": "|",
    "bitwise_xor": "^",
    "logical_and": "&",
    "logical_or": "|",
    "logical_xor": "^",
}.items():
    triton_op(_op)(_infix(_symbol))

_LIBDEVICE = """rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh erf
    atan2 copysign hypot trunc"""
for _op in _LIBDEVICE.split():
    triton_op(_op)(_call(f"libdevice.{_op}"))

triton_op("round")(_call("libdevice.nearbyint"))
triton_op("fmod")(_by_kind(_call("libdevice.fmod"), _infix("%")))
triton_op("pow")(_by_kind(_call("libdevice.pow"), _call("pow_int")))
triton_op("maximum")(_call("tl.maximum"))
triton_op("minimum")(_call("tl.minimum"))
triton_op("abs")(_call("tl.abs"))
triton_op("floor")(_call("tl.floor"))
triton_op("ceil")(_call("tl.ceil"))
triton_op("fma")(_call("tl.fma"))
triton_op("where")(_call("tl.where"))


@triton_op("truediv")
def _truediv(dtype: torch.dtype, a: str, b: str) -> str:
    return f"{a} / {b}" if dtype is torch.float64 else f"tl.div_rn({a}, {b})"


@triton_op("reciprocal")
def _reciprocal(dtype: torch.dtype, a: str) -> str:
    return _truediv(dtype, "1.0", a)


@triton_op("sigmoid")
def _sigmoid(dtype: torch.dtype, a: str) -> str:
    return _truediv(dtype, "1.0", f"(1.0 + libdevice.exp(-{a}))")


@triton_op("sqrt")
def _sqrt(dtype: torch.dtype, a: str) -> str:
    return f"tl.sqrt({a})" if dtype is torch.float64 else f"tl.sqrt_rn({a})"


@triton_op("neg")
def _neg(dtype: torch.dtype, a: str) -> str:
    # Triton's own -x is 0 - x, which is +0 for 0.0
    return f"{a} * -1.0" if dtype.is_floating_point else f"0 - {a}"


@triton_op("sign")
def _sign(dtype: torch.dtype, a: str) -> str:
    name = TRITON_DTYPES[dtype]
    return f"({a} > 0).to({name}) - ({a} < 0).to({name})"


@triton_op("isnan")
def _isnan(dtype: torch.dtype, a: str) -> str:
    return f"{a} != {a}"


@triton_op("isinf")
def _isinf(dtype: torch.dtype, a: str) -> str:
    return f'tl.abs({a}) == float("inf")'


@triton_op("signbit")
def _signbit(dtype: torch.dtype, a: str) -> str:
    bits = "tl.int64" if dtype is torch.float64 else "tl.int32"
    return f"{a}.to({bits}, bitcast=True) < 0"


@triton_op("logical_not")
def _logical_not(dtype: torch.dtype, a: str) -> str:
    return f"{a} == 0"


@triton_op("bitwise_not")
def _bitwise_not(dtype: torch.dtype, a: str) -> str:
    return f"{a} ^ 255" if dtype is torch.uint8 else f"~{a}"  # the interpreter has no ~ on uint8


@triton_op("lshift")
def _lshift(dtype: torch.dtype, a: str, b: str) -> str:
    return f"tl.where({_valid_shift(dtype, b)}, {a} << {b}, 0)"


@triton_op("rshift")
def _rshift(dtype: torch.dtype, a: str, b: str) -> str:
    if dtype is torch.uint8:
        return f"tl.where({_valid_shift(dtype, b)}, {a} >> {b}, 0)"
    return f"{a} >> tl.where({_valid_shift(dtype, b)}, {b}, {torch.iinfo(dtype).bits - 1})"


def _valid_shift(dtype: torch.dtype, b: str) -> str:
    """Eager defines shifts by too much: 0, or the sign when shifting right."""
    return f"({b} >= 0) & ({b} < {torch.iinfo(dtype).bits})"
