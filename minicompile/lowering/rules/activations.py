"""Composite elementwise functions that eager runs as one kernel: computed wide, rounded once.

The AOT room decomposes most of them; these rules lower graphs that still hold them. Constants and the order
of operations are eager's (aten/src/ATen/native/cpu/Activation.cpp, BinaryOpsKernel.cpp).
"""

from __future__ import annotations

import math

import torch

from minicompile.errors import Unsupported
from minicompile.lowering.context import LoweringContext
from minicompile.lowering.promotion import Scalar, promote, promote_float
from minicompile.lowering.registry import lowering
from minicompile.lowering.rules.common import aten, constant, elementwise
from minicompile.lowering.value import TensorValue
from minicompile.ops.dtypes import computation_dtype
from minicompile.ops.handler import Ops, V


def _wide(*operands: TensorValue) -> torch.dtype:
    return computation_dtype(promote(*operands))


def _floats_only(x: TensorValue, name: str) -> None:
    if not x.dtype.is_floating_point:
        raise Unsupported(f"{name} of {x.dtype}")


@lowering(aten.relu.default)
def relu(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    if x.dtype is torch.bool:
        raise Unsupported("relu of bools")
    return elementwise(ctx, lambda ops, v: ops.maximum(v, constant(ops, 0, x.dtype)), x, wide=False)


@lowering(aten.silu.default)
def silu(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    _floats_only(x, "silu")
    wide = _wide(x)

    def formula(ops: Ops, v: V) -> V:
        return ops.truediv(v, ops.add(ops.constant(1.0, wide), ops.exp(ops.neg(v))))

    return elementwise(ctx, formula, x)


@lowering(aten.silu_backward.default)
def silu_backward(ctx: LoweringContext, grad: TensorValue, x: TensorValue) -> TensorValue:
    wide = _wide(grad, x)

    def formula(ops: Ops, g: V, v: V) -> V:
        one, s = ops.constant(1.0, wide), ops.sigmoid(v)
        return ops.mul(ops.mul(g, s), ops.add(one, ops.mul(v, ops.sub(one, s))))

    return elementwise(ctx, formula, grad, x)


@lowering(aten.gelu.default)
def gelu(ctx: LoweringContext, x: TensorValue, approximate: str = "none") -> TensorValue:
    _floats_only(x, "gelu")
    wide = _wide(x)

    def formula(ops: Ops, v: V) -> V:
        half, one = ops.constant(0.5, wide), ops.constant(1.0, wide)
        return ops.mul(ops.mul(half, v), ops.add(one, _gelu_curve(ops, v, approximate, wide)))

    return elementwise(ctx, formula, x)


def _gelu_curve(ops: Ops, v: V, approximate: str, wide: torch.dtype) -> V:
    """erf(v / sqrt 2), or the tanh that approximates it."""
    if approximate == "none":
        return ops.erf(ops.mul(v, ops.constant(math.sqrt(0.5), wide)))
    return ops.tanh(_gelu_inner(ops, v, wide))


def _gelu_inner(ops: Ops, v: V, wide: torch.dtype) -> V:
    cube = ops.mul(ops.mul(v, v), v)
    bent = ops.add(v, ops.mul(ops.constant(0.044715, wide), cube))
    return ops.mul(ops.constant(math.sqrt(2 / math.pi), wide), bent)


@lowering(aten.gelu_backward.default)
def gelu_backward(
    ctx: LoweringContext, grad: TensorValue, x: TensorValue, approximate: str = "none"
) -> TensorValue:
    wide = _wide(grad, x)

    def formula(ops: Ops, g: V, v: V) -> V:
        half, one = ops.constant(0.5, wide), ops.constant(1.0, wide)
        curve = _gelu_curve(ops, v, approximate, wide)
        left = ops.mul(half, ops.add(one, curve))
        if approximate == "none":
            density = ops.exp(ops.mul(ops.mul(v, v), ops.constant(-0.5, wide)))
            slope = ops.mul(density, ops.constant(1 / math.sqrt(2 * math.pi), wide))
            return ops.mul(g, ops.add(left, ops.mul(v, slope)))
        inner = ops.add(one, ops.mul(ops.constant(3 * 0.044715, wide), ops.mul(v, v)))
        bend = ops.mul(ops.constant(math.sqrt(2 / math.pi), wide), inner)
        flat = ops.sub(one, ops.mul(curve, curve))
        return ops.mul(g, ops.add(left, ops.mul(ops.mul(ops.mul(half, v), flat), bend)))

    return elementwise(ctx, formula, grad, x)


@lowering(aten.sigmoid_backward.default)
def sigmoid_backward(ctx: LoweringContext, grad: TensorValue, y: TensorValue) -> TensorValue:
    wide = _wide(grad, y)

    def formula(ops: Ops, g: V, v: V) -> V:
        return ops.mul(ops.mul(g, ops.sub(ops.constant(1.0, wide), v)), v)

    return elementwise(ctx, formula, grad, y)


@lowering(aten.tanh_backward.default)
def tanh_backward(ctx: LoweringContext, grad: TensorValue, y: TensorValue) -> TensorValue:
    wide = _wide(grad, y)

    def formula(ops: Ops, g: V, v: V) -> V:
        return ops.mul(g, ops.sub(ops.constant(1.0, wide), ops.mul(v, v)))

    return elementwise(ctx, formula, grad, y)


@lowering(aten.threshold_backward.default)
def threshold_backward(
    ctx: LoweringContext, grad: TensorValue, x: TensorValue, threshold: Scalar
) -> TensorValue:
    dtype = promote(grad, x)

    def formula(ops: Ops, g: V, v: V) -> V:
        closed = ops.le(v, constant(ops, threshold, dtype))
        return ops.where(closed, constant(ops, 0, dtype), g)

    return elementwise(ctx, formula, grad, x, wide=False)


@lowering(aten.leaky_relu.default)
def leaky_relu(ctx: LoweringContext, x: TensorValue, negative_slope: Scalar = 0.01) -> TensorValue:
    _floats_only(x, "leaky_relu")
    wide = _wide(x)

    def formula(ops: Ops, v: V) -> V:
        bent = ops.mul(v, constant(ops, negative_slope, wide))
        return ops.where(ops.gt(v, ops.constant(0.0, wide)), v, bent)

    return elementwise(ctx, formula, x)


@lowering(aten.leaky_relu_backward.default)
def leaky_relu_backward(
    ctx: LoweringContext,
    grad: TensorValue,
    x: TensorValue,
    negative_slope: Scalar,
    self_is_result: bool,
) -> TensorValue:
    wide = _wide(grad, x)

    def formula(ops: Ops, g: V, v: V) -> V:
        bent = ops.mul(g, constant(ops, negative_slope, wide))
        return ops.where(ops.gt(v, ops.constant(0.0, wide)), g, bent)

    return elementwise(ctx, formula, grad, x)


@lowering(aten.elu.default)
def elu(
    ctx: LoweringContext,
    x: TensorValue,
    alpha: Scalar = 1,
    scale: Scalar = 1,
    input_scale: Scalar = 1,
) -> TensorValue:
    _floats_only(x, "elu")
    wide = _wide(x)

    def formula(ops: Ops, v: V) -> V:
        grown = ops.expm1(ops.mul(v, constant(ops, input_scale, wide)))
        below = ops.mul(grown, ops.mul(constant(ops, alpha, wide), constant(ops, scale, wide)))
        above = ops.mul(v, constant(ops, scale, wide))
        return ops.where(ops.le(v, ops.constant(0.0, wide)), below, above)

    return elementwise(ctx, formula, x)


def _hard_step(ops: Ops, v: V, wide: torch.dtype) -> V:
    """min(max(v + 3, 0), 6)."""
    shifted = ops.add(v, ops.constant(3.0, wide))
    return ops.minimum(ops.maximum(shifted, ops.constant(0.0, wide)), ops.constant(6.0, wide))


@lowering(aten.hardsigmoid.default)
def hardsigmoid(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    _floats_only(x, "hardsigmoid")
    wide = _wide(x)
    return elementwise(
        ctx, lambda ops, v: ops.truediv(_hard_step(ops, v, wide), ops.constant(6.0, wide)), x
    )


@lowering(aten.hardswish.default)
def hardswish(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    _floats_only(x, "hardswish")
    wide = _wide(x)

    def formula(ops: Ops, v: V) -> V:
        return ops.truediv(ops.mul(v, _hard_step(ops, v, wide)), ops.constant(6.0, wide))

    return elementwise(ctx, formula, x)


@lowering(aten.hardtanh.default)
def hardtanh(
    ctx: LoweringContext, x: TensorValue, min_val: Scalar = -1, max_val: Scalar = 1
) -> TensorValue:
    _floats_only(x, "hardtanh")

    def formula(ops: Ops, v: V) -> V:
        low = ops.maximum(v, constant(ops, min_val, x.dtype))
        return ops.minimum(low, constant(ops, max_val, x.dtype))

    return elementwise(ctx, formula, x, wide=False)


@lowering(aten.softplus.default)
def softplus(
    ctx: LoweringContext, x: TensorValue, beta: Scalar = 1, threshold: Scalar = 20
) -> TensorValue:
    _floats_only(x, "softplus")
    wide = _wide(x)

    def formula(ops: Ops, v: V) -> V:
        scaled = ops.mul(v, constant(ops, beta, wide))
        soft = ops.truediv(ops.log1p(ops.exp(scaled)), constant(ops, beta, wide))
        return ops.where(ops.gt(scaled, constant(ops, threshold, wide)), v, soft)

    return elementwise(ctx, formula, x)


@lowering(aten.nan_to_num.default)
def nan_to_num(
    ctx: LoweringContext,
    x: TensorValue,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> TensorValue:
    if not x.dtype.is_floating_point:
        return x
    limits = torch.finfo(x.dtype)
    high = limits.max if posinf is None else posinf
    low = limits.min if neginf is None else neginf

    def formula(ops: Ops, v: V) -> V:
        infinity = ops.constant(math.inf, x.dtype)
        out = ops.where(ops.isnan(v), constant(ops, nan or 0.0, x.dtype), v)
        out = ops.where(ops.eq(v, infinity), constant(ops, high, x.dtype), out)
        return ops.where(ops.eq(v, ops.neg(infinity)), constant(ops, low, x.dtype), out)

    return elementwise(ctx, formula, x, wide=False)


@lowering(aten.frac.default)
def frac(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    _floats_only(x, "frac")
    return elementwise(ctx, lambda ops, v: ops.sub(v, ops.trunc(v)), x)


@lowering(aten.deg2rad.default)
def deg2rad(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    dtype = promote_float(x)
    wide = computation_dtype(dtype)
    return elementwise(
        ctx, lambda ops, v: ops.mul(v, ops.constant(math.pi / 180, wide)), x, dtype=dtype
    )
