"""Elementwise operators: one table for what maps one to one to ops/table.py, then the special cases.

The AOT room has given operands one size and dtype, and taken composite functions (gelu, silu, ...) apart.
Semantics are eager's: NaN, signs of zero, integer division.
The real compiler: torch/_inductor/lowering.py (register_pointwise).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sympy
import torch

from minicompile.errors import Unsupported
from minicompile.lowering.context import LoweringContext, Rule, lowering
from minicompile.lowering.rules.common import (
    Formula,
    Operand,
    Scalar,
    aten,
    common_device,
    common_dtype,
    converted,
    elementwise,
    number,
    prims,
)
from minicompile.lowering.value import TensorValue
from minicompile.ops.dtypes import LOOP_DTYPES, computation_dtype
from minicompile.ops.handler import Ops, V
from minicompile.ops.table import BOOL_AS_LOGIC

OPERATORS = """
    sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p
    sin cos tan asin acos atan sinh cosh asinh acosh atanh tanh sigmoid erf erfc lgamma
    atan2 hypot copysign
    neg maximum minimum eq ne lt le gt ge isnan signbit
    logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not"""
"""ATen operators that have a loop operation of the same name."""
SHIFTS = {
    "lshift": (aten.__lshift__, aten.bitwise_left_shift),
    "rshift": (aten.__rshift__, aten.bitwise_right_shift),
}


def overloads(packet: Any) -> list[Any]:
    """An operator's overloads for tensors and numbers in any place."""
    names = {"default", "Tensor", "Scalar", "Scalar_Tensor", "Tensor_Scalar"}
    return [getattr(packet, name) for name in packet.overloads() if name in names]


def operation(name: str, dtype: torch.dtype) -> Formula:
    """A loop operation on operands of `dtype`."""
    chosen = BOOL_AS_LOGIC.get(name, name) if dtype is torch.bool else name
    return lambda ops, *values: ops.pointwise(chosen, *values)


def one_operation(name: str, unchanged: Collection[torch.dtype] = ()) -> Rule:
    """The rule of an operator that is one loop operation; it gives values of some dtypes back as they are."""

    def rule(ctx: LoweringContext, *operands: Operand) -> Operand:
        dtype = common_dtype(*operands)
        if dtype in unchanged:
            return operands[0]
        return elementwise(ctx, operation(name, dtype), *operands)

    return rule


for _name in OPERATORS.split():
    lowering(*overloads(getattr(aten, _name)))(one_operation(_name))
for _name, _packets in SHIFTS.items():
    for _packet in _packets:
        lowering(*overloads(_packet))(one_operation(_name))
lowering(aten.abs.default)(one_operation("abs", (torch.bool, torch.uint8)))
lowering(aten.sign.default)(one_operation("sign", (torch.bool,)))
WHOLE = [dtype for dtype in LOOP_DTYPES if not dtype.is_floating_point]
for _name in ("floor", "ceil", "trunc", "round"):
    lowering(getattr(aten, _name).default)(one_operation(_name, WHOLE))


@lowering(aten.relu.default)
def relu(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    return elementwise(ctx, operation("maximum", x.dtype), x, 0)


# -- sums, products, quotients


def arithmetic(
    ctx: LoweringContext, formula: Formula, *operands: Operand, exact: bool
) -> TensorValue:
    """A formula of tensors and numbers. Half types with a number are computed in float32 and rounded once.

    Eager's kernels on CUDA take the number unrounded; those on CPU only if `exact`.
    """
    dtype = common_dtype(*operands)
    wide = computation_dtype(dtype)
    if wide is dtype or all(isinstance(o, TensorValue) for o in operands):
        return elementwise(ctx, formula, *operands)
    rounds = not exact and common_device(*operands).type == "cpu"
    dtypes = [dtype if rounds and not isinstance(o, TensorValue) else wide for o in operands]

    def rounded_once(ops: Ops, *values: V) -> V:
        pairs = zip(values, dtypes, strict=True)
        widened = (v if held is wide else ops.to_dtype(v, wide) for v, held in pairs)
        return ops.to_dtype(formula(ops, *widened), dtype)

    return elementwise(ctx, rounded_once, *operands, dtypes=dtypes)


def scaled_sum(name: str) -> Rule:
    """a + alpha * b, or a - alpha * b."""

    def rule(ctx: LoweringContext, a: Operand, b: Operand, alpha: Scalar = 1) -> TensorValue:
        dtype = common_dtype(a, b)
        if alpha != 1 and dtype.is_floating_point:  # eager's kernels fuse the product into the sum
            factor = alpha if name == "add" else -alpha
            return arithmetic(ctx, lambda ops, x, y, f: ops.fma(f, y, x), a, b, factor, exact=False)
        if alpha != 1:
            b = elementwise(ctx, operation("mul", dtype), b, alpha)
        return arithmetic(ctx, operation(name, dtype), a, b, exact=False)

    return rule


def product(name: str) -> Rule:
    def rule(ctx: LoweringContext, a: Operand, b: Operand) -> TensorValue:
        return arithmetic(ctx, operation(name, common_dtype(a, b)), a, b, exact=True)

    return rule


lowering(aten.add.Tensor)(scaled_sum("add"))
lowering(aten.sub.Tensor)(scaled_sum("sub"))
lowering(aten.mul.Tensor)(product("mul"))


def division(name: str) -> Rule:
    """On a CPU, eager looks whether an integer is divided by zero, and so do we: it is a library call, unless
    the divisor is a number that is known not to be 0.
    """

    def rule(ctx: LoweringContext, a: Operand, b: Operand) -> TensorValue:
        dtype = common_dtype(a, b)
        known = isinstance(b, int) and b != 0
        known |= isinstance(b, sympy.Expr) and bool(b.is_positive)
        if not known and not dtype.is_floating_point and common_device(a, b).type == "cpu":
            raise Unsupported("an integer divided by what may be 0")
        return elementwise(ctx, operation(name, dtype), a, b)

    return rule


DIVISIONS: dict[str | None, Rule] = {
    None: product("truediv"),
    "floor": division("floordiv"),
    "trunc": division("truncdiv"),
}
"""By rounding mode."""

lowering(*overloads(aten.remainder))(division("remainder"))
lowering(*overloads(aten.fmod))(division("fmod"))


@lowering(aten.div.Tensor, aten.div.Tensor_mode, aten.div.Scalar_mode)
def div(ctx: LoweringContext, a: Operand, b: Operand, rounding_mode: str | None = None) -> Any:
    return DIVISIONS[rounding_mode](ctx, a, b)


# -- powers


@lowering(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor)
def power(ctx: LoweringContext, base: TensorValue, exponent: Operand) -> TensorValue:
    """Of an integer, a number as exponent must be one that its type holds."""
    dtype, fits = common_dtype(base, exponent), True
    if not dtype.is_floating_point and not isinstance(exponent, TensorValue):
        fits = isinstance(exponent, int) and 0 <= exponent <= 64
    if dtype is torch.bool or not fits:
        raise Unsupported(f"a power of {dtype} with exponent {exponent}")
    return elementwise(ctx, operation("pow", dtype), base, exponent)


# -- choosing


@lowering(aten.where.self)
def where(
    ctx: LoweringContext, condition: TensorValue, a: TensorValue, b: TensorValue
) -> TensorValue:
    dtype = common_dtype(a, b)
    kinds = (torch.bool, dtype, dtype)
    return elementwise(ctx, operation("where", dtype), condition, a, b, dtypes=kinds)


@lowering(aten.clamp.default)
def clamp(
    ctx: LoweringContext, x: TensorValue, min: Scalar | None = None, max: Scalar | None = None
) -> TensorValue:
    """min(max(x, low), high): NaN stays NaN, and `high` wins where the bounds cross."""
    for bound in (min, max):
        if isinstance(bound, int | float):
            number(bound, x.dtype)  # must fit
    if min is not None:
        x = elementwise(ctx, operation("maximum", x.dtype), x, min)
    if max is not None:
        x = elementwise(ctx, operation("minimum", x.dtype), x, max)
    return x


# -- conversions and copies


lowering(prims.convert_element_type.default)(converted)


@lowering(aten.clone.default)
def clone(
    ctx: LoweringContext, x: TensorValue, memory_format: torch.memory_format | None = None
) -> TensorValue:
    return ctx.copy_of(x)
