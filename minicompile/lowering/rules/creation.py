"""New tensors: computed where they are read, from numbers and indices.

Integers are computed as integers: `arange(11) * 1_000_000_000` must be right in int64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch

from minicompile.errors import Unsupported
from minicompile.lowering.context import LoweringContext
from minicompile.lowering.promotion import Scalar, scalar_dtype
from minicompile.lowering.registry import Rule, lowering
from minicompile.lowering.rules.common import aten, constant, full, prims
from minicompile.lowering.value import Positions, TensorValue
from minicompile.ops.dtypes import computation_dtype, is_int
from minicompile.ops.handler import Index, Ops, V
from minicompile.shapes.expr import Size, to_size


def target_device(device: Any) -> torch.device:
    """The device of a new tensor, with its index as eager reports it."""
    if device is None:
        return torch.get_default_device()
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _plain(layout: torch.layout | None, pin_memory: bool | None) -> None:
    if pin_memory or layout not in (None, torch.strided):
        raise Unsupported("a tensor in pinned memory or another layout")


@lowering(aten.full.default)
def full_(
    ctx: LoweringContext,
    size: Sequence[Size],
    fill_value: Scalar,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: Any = None,
    pin_memory: bool | None = None,
) -> TensorValue:
    _plain(layout, pin_memory)
    chosen = dtype or scalar_dtype(fill_value)
    return full(ctx, size, fill_value, chosen, target_device(device))


@lowering(aten.scalar_tensor.default)
def scalar_tensor(
    ctx: LoweringContext,
    value: Scalar,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: Any = None,
    pin_memory: bool | None = None,
) -> TensorValue:
    _plain(layout, pin_memory)
    return full(ctx, (), value, dtype or torch.get_default_dtype(), target_device(device))


def filled(number: int) -> Rule:
    """zeros, ones; also empty, whose contents nobody may rely on."""

    def rule(
        ctx: LoweringContext,
        size: Sequence[Size],
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: Any = None,
        pin_memory: bool | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> TensorValue:
        _plain(layout, pin_memory)
        chosen = dtype or torch.get_default_dtype()
        return full(ctx, size, number, chosen, target_device(device))

    return rule


lowering(aten.zeros.default, aten.empty.memory_format)(filled(0))
lowering(aten.ones.default)(filled(1))


@lowering(aten.empty_strided.default, aten.empty_permuted.default)
def empty_strided(
    ctx: LoweringContext,
    size: Sequence[Size],
    stride: Sequence[Size],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: Any = None,
    pin_memory: bool | None = None,
) -> TensorValue:
    _plain(layout, pin_memory)
    return full(ctx, size, 0, dtype or torch.get_default_dtype(), target_device(device))


@lowering(aten.full_like.default)
def full_like(
    ctx: LoweringContext,
    x: TensorValue,
    fill_value: Scalar,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: Any = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> TensorValue:
    _plain(layout, pin_memory)
    where = x.device if device is None else target_device(device)
    return full(ctx, x.size, fill_value, dtype or x.dtype, where)


def filled_like(number: int) -> Rule:
    def rule(ctx: LoweringContext, x: TensorValue, **options: Any) -> TensorValue:
        return full_like(ctx, x, number, **options)

    return rule


lowering(aten.zeros_like.default, aten.empty_like.default)(filled_like(0))
lowering(aten.ones_like.default)(filled_like(1))


def new_filled(number: int) -> Rule:
    def rule(
        ctx: LoweringContext, x: TensorValue, size: Sequence[Size], **options: Any
    ) -> TensorValue:
        return new_full(ctx, x, size, number, **options)

    return rule


@lowering(aten.new_full.default)
def new_full(
    ctx: LoweringContext,
    x: TensorValue,
    size: Sequence[Size],
    fill_value: Scalar,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: Any = None,
    pin_memory: bool | None = None,
) -> TensorValue:
    _plain(layout, pin_memory)
    where = x.device if device is None else target_device(device)
    return full(ctx, size, fill_value, dtype or x.dtype, where)


lowering(aten.new_zeros.default, aten.new_empty.default)(new_filled(0))
lowering(aten.new_ones.default)(new_filled(1))


@lowering(aten.new_empty_strided.default)
def new_empty_strided(
    ctx: LoweringContext,
    x: TensorValue,
    size: Sequence[Size],
    stride: Sequence[Size],
    **options: Any,
) -> TensorValue:
    return new_full(ctx, x, size, 0, **options)


# -- sequences


def sequence(
    ctx: LoweringContext,
    length: Size,
    start: Scalar,
    step: Scalar,
    dtype: torch.dtype,
    device: torch.device,
) -> TensorValue:
    """start + i * step."""
    whole = all(isinstance(n, int | sympy.Expr) and not isinstance(n, bool) for n in (start, step))
    if dtype is torch.bool:
        raise Unsupported("a sequence of bools")
    if whole and (is_int(dtype) or dtype in (torch.float32, torch.float64)):
        found = ctx.pointwise(
            (length,), device, lambda ops, i: ops.index_expr(i[0] * step + start, dtype), dtype
        )
        if is_int(dtype):
            last = to_size(start + step * (length - 1))
            low, high = (last, start) if isinstance(step, int) and step < 0 else (start, last)
            found.positions = Positions(lambda i: i[0] * step + start, low, high)
        return found
    if is_int(dtype):
        raise Unsupported("an integer sequence with a fractional start or step")
    wide = computation_dtype(dtype)

    def body(ops: Ops, index: Sequence[Index]) -> V:
        steps = ops.mul(ops.index_expr(index[0], wide), constant(ops, step, wide))
        found = ops.add(constant(ops, start, wide), steps)
        return found if wide is dtype else ops.to_dtype(found, dtype)

    return ctx.pointwise((length,), device, body, dtype)


@lowering(prims.iota.default)
def iota(
    ctx: LoweringContext,
    length: Size,
    *,
    start: Size,
    step: Size,
    dtype: torch.dtype,
    device: Any,
    requires_grad: bool = False,
) -> TensorValue:
    return sequence(ctx, length, start, step, dtype, target_device(device))


@lowering(aten.arange.start_step)
def arange(
    ctx: LoweringContext,
    start: Scalar,
    end: Scalar,
    step: Scalar = 1,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: Any = None,
    pin_memory: bool | None = None,
) -> TensorValue:
    _plain(layout, pin_memory)
    numbers = (start, end, step)
    integral = all(isinstance(n, int | sympy.Expr) for n in numbers)
    if dtype is None:
        dtype = torch.int64 if integral else torch.get_default_dtype()
    length: Size
    if integral and isinstance(step, int):
        whole = (end - start + step - 1) // step if step > 0 else (start - end - step - 1) // -step
        length = max(whole, 0) if isinstance(whole, int) else _symbolic_length(start, end, step)
    elif any(isinstance(n, sympy.Expr) for n in numbers):
        raise Unsupported("arange with a symbolic step or fractional bounds")
    else:
        length = max(math.ceil((end - start) / step), 0)
    return sequence(ctx, length, start, step, dtype, target_device(device))


def _symbolic_length(start: Scalar, end: Scalar, step: int) -> Size:
    if step != 1:
        raise Unsupported("arange with symbolic bounds and a step")
    return to_size(end - start)


@lowering(aten.arange.start)
def arange_start(ctx: LoweringContext, start: Scalar, end: Scalar, **options: Any) -> TensorValue:
    return arange(ctx, start, end, 1, **options)


@lowering(aten.arange.default)
def arange_end(ctx: LoweringContext, end: Scalar, **options: Any) -> TensorValue:
    return arange(ctx, 0, end, 1, **options)


# -- masks


@lowering(aten.eye.default, aten.eye.m)
def eye(
    ctx: LoweringContext,
    rows: Size,
    columns: Size | None = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: Any = None,
    pin_memory: bool | None = None,
) -> TensorValue:
    _plain(layout, pin_memory)
    chosen = dtype or torch.get_default_dtype()
    size = (rows, rows if columns is None else columns)

    def body(ops: Ops, index: Sequence[Index]) -> V:
        on = ops.eq(ops.index_expr(index[0], torch.int64), ops.index_expr(index[1], torch.int64))
        return ops.to_dtype(on, chosen)

    return ctx.pointwise(size, target_device(device), body, chosen)


def triangle(lower: bool) -> Rule:
    def rule(ctx: LoweringContext, x: TensorValue, diagonal: int = 0) -> TensorValue:
        def body(ops: Ops, index: Sequence[Index]) -> V:
            column = ops.index_expr(index[-1], torch.int64)
            edge = ops.index_expr(index[-2] + diagonal, torch.int64)
            inside = ops.le(column, edge) if lower else ops.ge(column, edge)
            return ops.where(inside, x.load(ops, index), constant(ops, 0, x.dtype))

        return ctx.pointwise(x.size, x.device, body, x.dtype)

    return rule


lowering(aten.tril.default)(triangle(lower=True))
lowering(aten.triu.default)(triangle(lower=False))
