"""How Triton writes each operation of a legal loop body: one rule per operation.

    @triton_op("add")
    def add(dtype, a, b):          # dtype: of the operands; a, b: their names or literals
        return f"{a} + {b}"

`form` makes a rule from a format string. A rule may call a function of `helpers.triton` by name: the
kernel's prelude then holds that function. Each gives eager's value, NaN and signed zeros included, compiled
or not:

- fp32 division and square root are the IEEE ones (`/` and `tl.sqrt` compile to approximations).
- Transcendental functions are libdevice's, as eager CUDA's are (1 to 2 ulp); `tl.exp` is `ex2.approx`, which
  loses up to 40 ulp at large arguments.
- A share of a softmax, exp(v - m) by the sum of these, is divided by multiplying with the inverse and
  correcting, which rounds as division does where the share is above 2^-100 (Markstein: "Computation of
  elementary functions on the IBM RISC System/6000 processor", 1990).
- What legalize.py has already written out (floor division, remainders, NaN in maximum, arithmetic on bools
  and half types) has no rule here.

The real compiler: torch/_inductor/codegen/triton.py (TritonOverrides).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from minicompile.codegen.legalize import COMPARISONS
from minicompile.codegen.printing import INFIX, IndexPrinter, OpRule, by_kind, by_width, form
from minicompile.errors import Unsupported
from minicompile.ops.dtypes import LOOP_DTYPES
from minicompile.ops.registry import Registry
from minicompile.scheduling.body import Value

triton_op: Registry[OpRule] = Registry("triton_op", "loop operation -> its Triton expression")

TRITON_DTYPES = {dtype: str(dtype).replace("torch", "tl") for dtype in LOOP_DTYPES}
TRITON_DTYPES[torch.bool] = "tl.int1"


class TritonIndex(IndexPrinter):
    language = "Triton"
    divide = "//"
    floor_divide = "floor_div"
    floor_modulo = "floor_mod"


def literal(value: float | int | bool) -> str:
    """A Python literal that Triton's front end reads: `float("inf")` for infinities and NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def typed_constant(value: float | int | bool, dtype: torch.dtype) -> str:
    """A scalar of exactly this dtype."""
    if _is_minus_zero(value):  # the front end reads -0.0 as 0
        return f"({typed_constant(0.0, dtype)} * -1.0)"
    return f"tl.full([], {literal(value)}, {TRITON_DTYPES[dtype]})"


def _is_minus_zero(value: float | int | bool) -> bool:
    return isinstance(value, float) and value == 0 and math.copysign(1.0, value) < 0


LITERAL_DTYPES = frozenset({torch.float32, torch.float64, torch.int32, torch.int64, torch.bool})
LITERAL_OPS = COMPARISONS | {"add", "sub", "mul", "truediv", "maximum", "minimum", "where"}
"""Operations that convert a Python literal to the dtype of their other operand."""


def _operand_texts(value: Value, name_of: Callable[[Value], str]) -> list[str]:
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
    """`ops.to_dtype`: what eager's `.to` does. Half types meet float32 only."""
    if target is torch.bool:
        return f"{text} != 0"
    if source.is_floating_point and target in (torch.uint8, torch.int8, torch.int16):
        text = f"{text}.to(tl.int64)"  # as eager: negative and large values wrap
    return f"{text}.to({TRITON_DTYPES[target]})"


def pointwise_text(value: Value, name_of: Callable[[Value], str]) -> str:
    """One operation of the table. Raises Unsupported when there is no rule for it."""
    rule = triton_op.get(value.op)
    if rule is None:
        raise Unsupported(
            f"no way to write ops.{value.op} in Triton", hint=f'register triton_op("{value.op}")'
        )
    return rule(value.inputs[-1].dtype, *_operand_texts(value, name_of))


QUICK = {
    "rough_exp": "tl.exp({0})",
    "share": "share_of({0}, {1})",
    "narrowed_share": "{0} * tl.div_rn(1.0, {1})",
}
"""How a plan may have a softmax computed (`TritonPlan.forms`)."""

_LIBDEVICE = """
rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh asinh acosh atanh tanh erf erfc
lgamma trunc
"""
_VALID_SHIFT = "({1} >= 0) & ({1} < {bits})"
"""Eager defines shifts by too much: 0, or the sign when shifting right."""


def _unless_byte(rule: OpRule, byte: str) -> OpRule:
    """Other words for uint8."""
    return lambda dtype, *operands: (form(byte) if dtype is torch.uint8 else rule)(dtype, *operands)


for _name, _rule in {
    **INFIX,
    **{name: form(f"libdevice.{name}({{0}})") for name in _LIBDEVICE.split()},
    **{name: form(f"libdevice.{name}({{0}}, {{1}})") for name in ("atan2", "copysign", "hypot")},
    **{name: form(f"tl.{name}({{0}})") for name in ("abs", "floor", "ceil")},
    **{name: form(f"tl.{name}({{0}}, {{1}})") for name in ("maximum", "minimum")},
    "truncdiv": form("{0} // {1}"),
    "fmod": by_kind(form("libdevice.fmod({0}, {1})"), form("{0} % {1}")),
    "pow": by_kind(form("libdevice.pow({0}, {1})"), form("pow_int({0}, {1})")),
    "round": form("libdevice.nearbyint({0})"),
    "fma": form("tl.fma({0}, {1}, {2})"),
    "where": form("tl.where({0}, {1}, {2})"),
    **{name: form(f"tl.{name}({{0}}, {{1}})") for name in ("rand", "randn")},
    "truediv": by_width("tl.div_rn({0}, {1})", "{0} / {1}"),
    "reciprocal": by_width("tl.div_rn(1.0, {0})", "1.0 / {0}"),
    "sigmoid": by_width(
        "tl.div_rn(1.0, (1.0 + libdevice.exp(-{0})))", "1.0 / (1.0 + libdevice.exp(-{0}))"
    ),
    "sqrt": by_width("tl.sqrt_rn({0})", "tl.sqrt({0})"),
    # Triton's own -x is 0 - x, which is +0 for 0.0
    "neg": by_kind(form("{0} * -1.0"), form("0 - {0}")),
    "sign": form("({0} > 0).to(tl.{name}) - ({0} < 0).to(tl.{name})"),
    "signbit": form("{0}.to(tl.int{bits}, bitcast=True) < 0"),
    "logical_not": form("{0} == 0"),
    # the interpreter has no ~ on uint8
    "bitwise_not": _unless_byte(form("~{0}"), "{0} ^ 255"),
    "lshift": form(f"tl.where({_VALID_SHIFT}, {{0}} << {{1}}, 0)"),
    "rshift": _unless_byte(
        form(f"{{0}} >> tl.where({_VALID_SHIFT}, {{1}}, {{sign_bit}})"),
        f"tl.where({_VALID_SHIFT}, {{0}} >> {{1}}, 0)",
    ),
}.items():
    triton_op(_name)(_rule)
