"""Elementwise arithmetic: one table for what maps one to one to ops/table.py, then the special cases.

Composite functions (gelu, silu, ...) are in activations.py. Semantics are eager's: promotion, NaN, signs of
zero, integer division. The real compiler: torch/_inductor/lowering.py (register_pointwise).
"""

from __future__ import annotations

from typing import Any

import sympy
import torch

from minicompile.errors import Unsupported
from minicompile.lowering.context import LoweringContext
from minicompile.lowering.promotion import Operand, Scalar, promote, promote_float
from minicompile.lowering.registry import Rule, lowering
from minicompile.lowering.rules.common import (
    Formula,
    aten,
    broadcast_index,
    broadcast_size,
    constant,
    converted,
    elementwise,
    expanded,
    full,
    load_as,
    number,
    on_device,
    prims,
    result_device,
)
from minicompile.lowering.value import TensorValue
from minicompile.ops.dtypes import computation_dtype, is_int
from minicompile.ops.handler import Ops, V

# -- one operator, one row of the table

FLOAT_UNARY = (
    *("sqrt", "rsqrt", "reciprocal", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "sigmoid", "erf"),
)
"""Ints become floats first."""

BOOL_AS_LOGIC = {
    "add": "logical_or",
    "mul": "logical_and",
    "maximum": "logical_or",
    "minimum": "logical_and",
    "bitwise_and": "logical_and",
    "bitwise_or": "logical_or",
    "bitwise_xor": "logical_xor",
    "bitwise_not": "logical_not",
}
"""Arithmetic on bools is logic: said here, so that code generators need no bool arithmetic."""


def apply(ops: Ops, name: str, dtype: torch.dtype, *values: V) -> V:
    """An operation of the table on operands of `dtype`."""
    return ops.pointwise(BOOL_AS_LOGIC.get(name, name) if dtype is torch.bool else name, *values)


def unary_float(name: str) -> Rule:
    def rule(ctx: LoweringContext, x: TensorValue) -> TensorValue:
        formula = lambda ops, v: ops.pointwise(name, v)  # noqa: E731
        return elementwise(ctx, formula, x, dtype=promote_float(x), wide=False)

    return rule


def binary(name: str) -> Rule:
    """Operands promoted, result of their dtype (or bool): bitwise and comparison operators, maximum, ..."""

    def rule(ctx: LoweringContext, a: Operand, b: Operand) -> TensorValue:
        dtype = promote(a, b)
        formula = lambda ops, x, y: apply(ops, name, dtype, x, y)  # noqa: E731
        return elementwise(ctx, formula, a, b, dtype=dtype, wide=False)

    return rule


def binary_float(name: str) -> Rule:
    def rule(ctx: LoweringContext, a: Operand, b: Operand) -> TensorValue:
        formula = lambda ops, x, y: ops.pointwise(name, x, y)  # noqa: E731
        return elementwise(ctx, formula, a, b, dtype=promote_float(a, b), wide=False)

    return rule


def logical(name: str) -> Rule:
    def rule(ctx: LoweringContext, *operands: Operand) -> TensorValue:
        formula = lambda ops, *values: ops.pointwise(name, *values)  # noqa: E731
        return elementwise(ctx, formula, *operands, dtype=torch.bool)

    return rule


for _name in FLOAT_UNARY:
    lowering(getattr(aten, _name).default)(unary_float(_name))
for _name in ("maximum", "minimum"):
    lowering(getattr(aten, _name).default)(binary(_name))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    lowering(getattr(aten, _name).Tensor, getattr(aten, _name).Scalar)(binary(_name))
for _name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    _packet = getattr(aten, _name)
    lowering(_packet.Tensor, _packet.Scalar, _packet.Scalar_Tensor)(binary(_name))
for _name in ("logical_and", "logical_or", "logical_xor", "logical_not"):
    lowering(getattr(aten, _name).default)(logical(_name))
lowering(aten.atan2.default)(binary_float("atan2"))
lowering(aten.hypot.default)(binary_float("hypot"))
lowering(aten.copysign.Tensor, aten.copysign.Scalar)(binary_float("copysign"))


@lowering(aten.bitwise_not.default)
def bitwise_not(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    return elementwise(ctx, lambda ops, v: apply(ops, "bitwise_not", x.dtype, v), x)


@lowering(aten.neg.default)
def neg(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    return elementwise(ctx, lambda ops, v: ops.neg(v), x, wide=False)


@lowering(aten.abs.default)
def abs_(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    if x.dtype in (torch.bool, torch.uint8):
        return x
    return elementwise(ctx, lambda ops, v: ops.abs(v), x, wide=False)


@lowering(aten.sign.default, aten.sgn.default)
def sign(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    if x.dtype is torch.bool:
        return x
    return elementwise(ctx, lambda ops, v: ops.sign(v), x, wide=False)


def rounding(name: str) -> Rule:
    def rule(ctx: LoweringContext, x: TensorValue) -> TensorValue:
        if x.dtype is torch.bool:
            raise Unsupported(f"{name} of bools")
        if is_int(x.dtype):
            return x
        return elementwise(ctx, lambda ops, v: ops.pointwise(name, v), x, wide=False)

    return rule


for _name in ("floor", "ceil", "trunc", "round"):
    lowering(getattr(aten, _name).default)(rounding(_name))


@lowering(aten.isnan.default)
def isnan(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    if not x.dtype.is_floating_point:
        return full(ctx, x.size, False, torch.bool, x.device)
    return elementwise(ctx, lambda ops, v: ops.isnan(v), x, wide=False)


@lowering(aten.isinf.default)
def isinf(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    if not x.dtype.is_floating_point:
        return full(ctx, x.size, False, torch.bool, x.device)
    return elementwise(ctx, lambda ops, v: ops.isinf(v), x, wide=False)


@lowering(aten.signbit.default)
def signbit(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    if x.dtype.is_floating_point:
        return elementwise(ctx, lambda ops, v: ops.signbit(v), x, wide=False)
    if x.dtype in (torch.bool, torch.uint8):
        return full(ctx, x.size, False, torch.bool, x.device)
    return elementwise(ctx, lambda ops, v: ops.lt(v, ops.constant(0, x.dtype)), x)


# -- sums, products, quotients


def _plain(*operands: Operand) -> bool:
    """All tensors of one dtype: the operation itself rounds, nothing needs to be computed wider."""
    return all(isinstance(o, TensorValue) for o in operands) and (
        len({o.dtype for o in operands if isinstance(o, TensorValue)}) == 1
    )


def _is_one(value: Scalar) -> bool:
    return isinstance(value, int | float) and value == 1


def kept_wide(
    ctx: LoweringContext, operand: Operand, dtype: torch.dtype, on_cpu: bool, *operands: Operand
) -> Operand:
    """An operand of an operation that computes half types in float32 and rounds once.

    Eager's kernels take a Python number or a 0-d CPU tensor unrounded: on CUDA always, on CPU where `on_cpu`
    says so (the second operand of a product or quotient). Any other is rounded to `dtype` first.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return operand
    scalar = not isinstance(operand, TensorValue) or (
        not operand.size and operand.device.type == "cpu"
    )
    if scalar and (on_cpu or result_device(*operands).type != "cpu"):
        return operand
    if isinstance(operand, TensorValue):
        return converted(ctx, operand, dtype)
    return operand if isinstance(operand, sympy.Expr) else number(operand, dtype)


def scaled_sum(
    ctx: LoweringContext, a: Operand, b: Operand, alpha: Scalar, sign: int
) -> TensorValue:
    """a + sign * alpha * b."""
    dtype = promote(a, b)
    if not dtype.is_floating_point and isinstance(alpha, float):
        raise Unsupported("a float alpha for integer tensors")
    name = "add" if sign > 0 else "sub"
    if _is_one(alpha) and _plain(a, b):
        return elementwise(ctx, lambda ops, x, y: apply(ops, name, dtype, x, y), a, b, wide=False)
    factor = kept_wide(ctx, alpha, dtype, False, a, b)
    wide = computation_dtype(dtype)

    def formula(ops: Ops, x: V, y: V) -> V:
        if _is_one(alpha):
            return apply(ops, name, dtype, x, y)
        scale = constant(ops, factor, wide)
        if dtype.is_floating_point:  # eager's kernels fuse the product into the sum
            return ops.fma(scale if sign > 0 else ops.neg(scale), y, x)
        return apply(ops, name, dtype, x, apply(ops, "mul", dtype, y, scale))

    first, second = (kept_wide(ctx, o, dtype, False, a, b) for o in (a, b))
    return elementwise(ctx, formula, first, second, dtype=dtype)


@lowering(aten.add.Tensor, aten.add.Scalar)
def add(ctx: LoweringContext, a: Operand, b: Operand, alpha: Scalar = 1) -> TensorValue:
    return scaled_sum(ctx, a, b, alpha, 1)


@lowering(aten.sub.Tensor, aten.sub.Scalar)
def sub(ctx: LoweringContext, a: Operand, b: Operand, alpha: Scalar = 1) -> TensorValue:
    return scaled_sum(ctx, a, b, alpha, -1)


@lowering(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(ctx: LoweringContext, a: Operand, b: Operand, alpha: Scalar = 1) -> TensorValue:
    return scaled_sum(ctx, b, a, alpha, -1)


@lowering(aten.mul.Tensor, aten.mul.Scalar)
def mul(ctx: LoweringContext, a: Operand, b: Operand) -> TensorValue:
    dtype = promote(a, b)
    return _product(ctx, lambda ops, x, y: apply(ops, "mul", dtype, x, y), a, b, dtype)


@lowering(aten.div.Tensor, aten.div.Scalar, prims.div.default)
def div(ctx: LoweringContext, a: Operand, b: Operand) -> TensorValue:
    return _product(ctx, lambda ops, x, y: ops.truediv(x, y), a, b, promote_float(a, b))


def _product(
    ctx: LoweringContext, formula: Formula, a: Operand, b: Operand, dtype: torch.dtype
) -> TensorValue:
    if _plain(a, b):
        return elementwise(ctx, formula, a, b, dtype=dtype, wide=False)
    first = kept_wide(ctx, a, dtype, False, a, b)
    second = kept_wide(ctx, b, dtype, True, a, b)
    return elementwise(ctx, formula, first, second, dtype=dtype)


def nonzero_divisor(dtype: torch.dtype, divisor: Operand) -> None:
    """Integer division by zero must raise as eager does: only a known divisor can go into a loop."""
    if dtype.is_floating_point:
        return
    if dtype is torch.bool:
        raise Unsupported("integer division of bools")
    if isinstance(divisor, sympy.Expr) and divisor.is_positive:
        return
    if not isinstance(divisor, int) or divisor in (0, -1):
        raise Unsupported("an integer division whose divisor may be zero (eager raises)")


def division(name: str) -> Rule:
    def rule(ctx: LoweringContext, a: Operand, b: Operand) -> TensorValue:
        dtype = promote(a, b)
        nonzero_divisor(dtype, b)
        return elementwise(
            ctx, lambda ops, x, y: ops.pointwise(name, x, y), a, b, dtype=dtype, wide=False
        )

    return rule


floor_divide = lowering(aten.floor_divide.default, aten.floor_divide.Scalar)(division("floordiv"))
truncate_divide = division("truncdiv")
lowering(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)(
    division("remainder")
)
lowering(aten.fmod.Tensor, aten.fmod.Scalar)(division("fmod"))


@lowering(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(ctx: LoweringContext, a: Operand, b: Operand, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return div(ctx, a, b)
    return (floor_divide if rounding_mode == "floor" else truncate_divide)(ctx, a, b)


@lowering(aten.__lshift__.Tensor, aten.__lshift__.Scalar)
@lowering(aten.bitwise_left_shift.Tensor, aten.bitwise_left_shift.Tensor_Scalar)
def left_shift(ctx: LoweringContext, a: TensorValue, b: Operand) -> TensorValue:
    return _shift(ctx, "lshift", a, b)


@lowering(aten.__rshift__.Tensor, aten.__rshift__.Scalar)
@lowering(aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar)
def right_shift(ctx: LoweringContext, a: TensorValue, b: Operand) -> TensorValue:
    return _shift(ctx, "rshift", a, b)


def _shift(ctx: LoweringContext, name: str, a: TensorValue, b: Operand) -> TensorValue:
    dtype = promote(a, b)
    if not is_int(dtype):
        raise Unsupported(f"a shift of {dtype}")
    return elementwise(ctx, lambda ops, x, y: ops.pointwise(name, x, y), a, b, dtype=dtype)


@lowering(aten.addcmul.default)
def addcmul(
    ctx: LoweringContext, x: TensorValue, a: TensorValue, b: TensorValue, value: Scalar = 1
) -> TensorValue:
    if is_int(promote(x, a, b)) and isinstance(value, float):
        raise Unsupported("a float value for integer tensors")

    def formula(ops: Ops, v: V, s: V, t: V) -> V:
        return ops.add(v, ops.mul(_scaled(ops, s, value, promote(x, a, b)), t))

    return elementwise(ctx, formula, x, a, b)


@lowering(aten.addcdiv.default)
def addcdiv(
    ctx: LoweringContext, x: TensorValue, a: TensorValue, b: TensorValue, value: Scalar = 1
) -> TensorValue:
    if not promote(x, a, b).is_floating_point:
        raise Unsupported("addcdiv of integers")

    def formula(ops: Ops, v: V, s: V, t: V) -> V:
        return ops.add(v, ops.truediv(_scaled(ops, s, value, promote(x, a, b)), t))

    return elementwise(ctx, formula, x, a, b)


def _scaled(ops: Ops, value: V, factor: Scalar, dtype: torch.dtype) -> V:
    if _is_one(factor):
        return value
    return ops.mul(value, constant(ops, factor, computation_dtype(dtype)))


@lowering(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(ctx: LoweringContext, a: TensorValue, b: TensorValue, weight: Operand) -> TensorValue:
    """a + w (b - a), from the nearer end, as eager does."""
    wide = computation_dtype(a.dtype)

    def formula(ops: Ops, x: V, y: V, w: V) -> V:
        one, half = ops.constant(1.0, wide), ops.constant(0.5, wide)
        step = ops.sub(y, x)
        near = ops.add(x, ops.mul(w, step))
        far = ops.sub(y, ops.mul(step, ops.sub(one, w)))
        return ops.where(ops.lt(ops.abs(w), half), near, far)

    return elementwise(ctx, formula, a, b, weight, dtype=a.dtype)


if hasattr(prims, "fma"):

    @lowering(prims.fma.default)
    def fma(ctx: LoweringContext, a: TensorValue, b: TensorValue, c: TensorValue) -> TensorValue:
        return elementwise(ctx, lambda ops, x, y, z: ops.fma(x, y, z), a, b, c, wide=False)


# -- powers


@lowering(aten.square.default)
def square(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    return elementwise(ctx, lambda ops, v: apply(ops, "mul", x.dtype, v, v), x, wide=False)


@lowering(aten.pow.Tensor_Scalar)
def pow_scalar(ctx: LoweringContext, x: TensorValue, exponent: Scalar) -> TensorValue:
    dtype = promote(x, exponent)
    if isinstance(exponent, sympy.Expr) or dtype is torch.bool:
        raise Unsupported(f"a power of {dtype} with exponent {exponent}")
    if exponent == 0:
        return full(ctx, x.size, 1, dtype, x.device)
    if exponent == 1:
        return converted(ctx, x, dtype)
    if not dtype.is_floating_point:
        if not isinstance(exponent, int) or not 0 <= exponent <= 64:
            raise Unsupported("a negative or large power of integers")
        return elementwise(ctx, lambda ops, v: repeated_product(ops, v, exponent), x, dtype=dtype)
    special = {
        0.5: lambda ops, v: ops.sqrt(v),
        -0.5: lambda ops, v: ops.rsqrt(v),
        2: lambda ops, v: ops.mul(v, v),
        3: lambda ops, v: ops.mul(ops.mul(v, v), v),
        -1: lambda ops, v: ops.reciprocal(v),
        -2: lambda ops, v: ops.reciprocal(ops.mul(v, v)),
    }
    if exponent in special:
        return elementwise(ctx, special[exponent], x, dtype=dtype)
    return elementwise(ctx, lambda ops, v, e: ops.pow(v, e), x, exponent, dtype=dtype, wide=False)


def repeated_product(ops: Ops, value: V, exponent: int) -> V:
    """value ** exponent for exponent >= 1 by squaring; wraps around as eager's integers do."""
    if exponent == 1:
        return value
    half = repeated_product(ops, value, exponent // 2)
    squared = ops.mul(half, half)
    return ops.mul(squared, value) if exponent % 2 else squared


@lowering(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def pow_tensor(ctx: LoweringContext, base: Operand, exponent: TensorValue) -> TensorValue:
    dtype = promote(base, exponent)
    if not dtype.is_floating_point:
        raise Unsupported("a power of integers with a tensor as exponent")
    return elementwise(
        ctx, lambda ops, b, e: ops.pow(b, e), base, exponent, dtype=dtype, wide=False
    )


# -- choosing


@lowering(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def where(ctx: LoweringContext, condition: TensorValue, a: Operand, b: Operand) -> TensorValue:
    return choose(ctx, condition, a, b, promote(a, b))


def choose(
    ctx: LoweringContext, condition: TensorValue, a: Operand, b: Operand, dtype: torch.dtype
) -> TensorValue:
    """a where the condition holds, else b, both converted to `dtype`."""
    size, device = broadcast_size(condition, a, b), result_device(condition, a, b)
    mask = on_device(ctx, condition, device)
    first, second = (on_device(ctx, o, device) if isinstance(o, TensorValue) else o for o in (a, b))

    def body(ops: Ops, index: Any) -> V:
        test = mask.load(ops, broadcast_index(mask, index, size))
        if mask.dtype is not torch.bool:
            test = ops.to_dtype(test, torch.bool)
        x, y = (load_as(ops, o, index, size, dtype) for o in (first, second))
        return ops.where(test, x, y)

    return ctx.pointwise(size, device, body, dtype)


@lowering(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(
    ctx: LoweringContext, x: TensorValue, mask: TensorValue, value: Operand
) -> TensorValue:
    if not isinstance(value, TensorValue) and isinstance(value, float) and is_int(x.dtype):
        raise Unsupported("a float written into integers")
    return choose(ctx, mask, value, x, x.dtype)


def clamp_between(
    ctx: LoweringContext, x: TensorValue, low: Operand | None, high: Operand | None
) -> TensorValue:
    """min(max(x, low), high): NaN stays NaN, and `high` wins where the bounds cross."""
    bounds = [b for b in (low, high) if b is not None]
    dtype = promote(x, *bounds)

    def formula(ops: Ops, v: V, *limits: V) -> V:
        left = list(limits)
        if low is not None:
            v = apply(ops, "maximum", dtype, v, left.pop(0))
        if high is not None:
            v = apply(ops, "minimum", dtype, v, left.pop(0))
        return v

    return elementwise(ctx, formula, x, *bounds, dtype=dtype, wide=False)


@lowering(aten.clamp.default, aten.clamp.Tensor)
def clamp(
    ctx: LoweringContext, x: TensorValue, min: Operand | None = None, max: Operand | None = None
) -> TensorValue:
    return clamp_between(ctx, x, min, max)


@lowering(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(ctx: LoweringContext, x: TensorValue, low: Operand) -> TensorValue:
    return clamp_between(ctx, x, low, None)


@lowering(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(ctx: LoweringContext, x: TensorValue, high: Operand) -> TensorValue:
    return clamp_between(ctx, x, None, high)


# -- conversions and copies


@lowering(prims.convert_element_type.default)
def convert_element_type(ctx: LoweringContext, x: TensorValue, dtype: torch.dtype) -> TensorValue:
    return converted(ctx, x, dtype)


@lowering(aten._to_copy.default)
def to_copy(
    ctx: LoweringContext,
    x: TensorValue,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> TensorValue:
    if device is not None and torch.device(device) != x.device:
        raise Unsupported("copy between devices")
    if pin_memory or layout not in (None, torch.strided):
        raise Unsupported("a copy to pinned memory or another layout")
    return converted(ctx, x, dtype) if dtype is not None else x


@lowering(aten.clone.default, aten.lift_fresh_copy.default)
def clone(
    ctx: LoweringContext, x: TensorValue, memory_format: torch.memory_format | None = None
) -> TensorValue:
    return ctx.copy_of(x)


@lowering(aten.alias.default, aten.detach.default, aten.lift_fresh.default, aten.lift.default)
def alias(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    return x


@lowering(aten.copy.default)
def copy(
    ctx: LoweringContext, x: TensorValue, source: TensorValue, non_blocking: bool = False
) -> TensorValue:
    if source.device != x.device:
        raise Unsupported("copy between devices")
    return expanded(ctx, converted(ctx, source, x.dtype), x.size)


@lowering(aten.fill.Scalar, aten.fill.Tensor)
def fill(ctx: LoweringContext, x: TensorValue, value: Operand) -> TensorValue:
    if not isinstance(value, TensorValue):
        return full(ctx, x.size, value, x.dtype, x.device)
    if value.device != x.device:
        raise Unsupported("copy between devices")
    return expanded(ctx, converted(ctx, value, x.dtype), x.size)
