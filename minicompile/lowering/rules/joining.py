"""Tensors put together or partly replaced: cat, stack, pad, roll, select_scatter, slice_scatter.

Each element chooses its source by its index; a source is read only where it is chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import sympy
import torch

from minicompile.errors import Unsupported
from minicompile.lowering import views
from minicompile.lowering.context import LoweringContext
from minicompile.lowering.promotion import Scalar, promote
from minicompile.lowering.registry import lowering
from minicompile.lowering.rules.common import aten, constant, number, within
from minicompile.lowering.value import TensorValue
from minicompile.ops.handler import Index, Ops, V
from minicompile.shapes.expr import ONE, ModularIndexing, Size, floor_div, to_size

MAX_JOINED = 16
"""Most tensors joined by selects; beyond, copying each in turn is faster."""


def _load(ops: Ops, x: TensorValue, index: Sequence[Index], dtype: torch.dtype) -> V:
    value = x.load(ops, index)
    return value if x.dtype is dtype else ops.to_dtype(value, dtype)


@lowering(aten.cat.default)
def cat(ctx: LoweringContext, tensors: Sequence[TensorValue], dim: int = 0) -> TensorValue:
    dtype = promote(*tensors)
    parts = [t for t in tensors if not (t.dim == 1 and t.size[0] == 0)]  # eager's legacy exception
    if not parts:
        return ctx.copy_of(tensors[0])
    first = parts[0]
    if len(parts) > MAX_JOINED:
        raise Unsupported(f"cat of {len(parts)} tensors: copies are faster than selects")
    if any(t.device != first.device for t in parts):
        raise Unsupported("cat across devices")
    dim = views.wrap_dim(dim, first.dim)
    starts: list[Size] = [0]
    for part in parts:
        starts.append(to_size(starts[-1] + part.size[dim]))

    def body(ops: Ops, index: Sequence[Index]) -> V:
        def source(k: int, inner: Ops) -> V:
            at = list(index)
            at[dim] = at[dim] - starts[k]
            return _load(inner, parts[k], at, dtype)

        if len(parts) == 1:
            return source(0, ops)
        last = len(parts) - 1
        position = index[dim]
        found = ops.masked(
            within(ops, position, starts[last], None), functools.partial(source, last), 0
        )
        for k in reversed(range(last)):
            # the sources before k are chosen by the selects around this one
            mask = within(ops, position, 0, starts[k + 1])
            exact = within(ops, position, starts[k], starts[k + 1])
            value = ops.masked(exact, functools.partial(source, k), 0)
            found = ops.where(mask, value, found)
        return found

    size = (*first.size[:dim], starts[-1], *first.size[dim + 1 :])
    return ctx.pointwise(size, first.device, body, dtype)


@lowering(aten.stack.default)
def stack(ctx: LoweringContext, tensors: Sequence[TensorValue], dim: int = 0) -> TensorValue:
    return cat(ctx, [ctx.view(t, views.unsqueeze(t.size, dim)) for t in tensors], dim)


@lowering(aten.constant_pad_nd.default)
def constant_pad_nd(
    ctx: LoweringContext, x: TensorValue, pad: Sequence[Size], value: Scalar = 0
) -> TensorValue:
    """`pad` is (before, after) of the last dimension, then of the one before; negative cuts."""
    before: list[Size] = [0] * x.dim
    size = list(x.size)
    for k in range(len(pad) // 2):
        dim = x.dim - 1 - k
        before[dim] = pad[2 * k]
        size[dim] = to_size(size[dim] + pad[2 * k] + pad[2 * k + 1])
    filler = number(value, x.dtype)
    padded = [d for d in range(x.dim) if not (before[d] == 0 and size[d] == x.size[d])]

    def body(ops: Ops, index: Sequence[Index]) -> V:
        at = [i - b for i, b in zip(index, before, strict=True)]
        mask: V = None
        for d in padded:
            inside = within(ops, index[d], before[d], to_size(before[d] + x.size[d]))
            mask = inside if mask is None else ops.logical_and(mask, inside)
        if mask is None:
            return x.load(ops, at)
        return ops.masked(mask, lambda inner: x.load(inner, at), filler)

    return ctx.pointwise(size, x.device, body, x.dtype)


@lowering(aten.select_scatter.default)
def select_scatter(
    ctx: LoweringContext, x: TensorValue, src: TensorValue, dim: int, index: Size
) -> TensorValue:
    dim = views.wrap_dim(dim, x.dim)
    if isinstance(index, int) and index < 0:
        index = to_size(index + x.size[dim])

    def body(ops: Ops, i: Sequence[Index]) -> V:
        here = ops.eq(ops.index_expr(i[dim], torch.int64), constant(ops, index, torch.int64))
        rest = [*i[:dim], *i[dim + 1 :]]
        new = ops.masked(here, lambda inner: _load(inner, src, rest, x.dtype), 0)
        return ops.where(here, new, x.load(ops, i))

    return ctx.pointwise(x.size, x.device, body, x.dtype)


@lowering(aten.slice_scatter.default)
def slice_scatter(
    ctx: LoweringContext,
    x: TensorValue,
    src: TensorValue,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: int = 1,
) -> TensorValue:
    dim = views.wrap_dim(dim, x.dim)
    extent = x.size[dim]
    given = src.size[dim] if src.dim == x.dim else None
    low, high, length = views.slice_bounds(extent, start, end, step, given)
    whole = low == 0 and high == extent
    source = ctx.view(src, views.expand(src.size, (*x.size[:dim], length, *x.size[dim + 1 :])))

    def body(ops: Ops, i: Sequence[Index]) -> V:
        at = list(i)
        at[dim] = to_expr(floor_div(i[dim] - low, step)) if step != 1 else i[dim] - low
        if whole and step == 1:
            return _load(ops, source, at, x.dtype)
        mask = within(ops, i[dim], low, None if high == extent else high)
        if step != 1:
            offset = ops.index_expr(
                ModularIndexing(i[dim] - low, ONE, sympy.Integer(step)), torch.int64
            )
            mask = ops.logical_and(mask, ops.eq(offset, ops.constant(0, torch.int64)))
        new = ops.masked(mask, lambda inner: _load(inner, source, at, x.dtype), 0)
        return ops.where(mask, new, x.load(ops, i))

    return ctx.pointwise(x.size, x.device, body, x.dtype)


def to_expr(size: Size) -> Index:
    return sympy.sympify(size)


@lowering(aten.roll.default)
def roll(
    ctx: LoweringContext, x: TensorValue, shifts: Sequence[Size], dims: Sequence[int] = ()
) -> TensorValue:
    if not dims:
        if len(shifts) != 1:
            raise Unsupported("roll with several shifts and no dimensions")
        flat = ctx.view(x, views.reshape(x.size, (-1,)))
        return ctx.view(roll(ctx, flat, shifts, (0,)), views.reshape(flat.size, x.size))
    if any(isinstance(extent, int) and extent == 0 for extent in x.size):
        return ctx.copy_of(x)
    turned = {views.wrap_dim(d, x.dim): s for d, s in zip(dims, shifts, strict=True)}
    if len(turned) != len(dims) or not all(isinstance(s, int) for s in shifts):
        raise Unsupported("roll of one dimension twice, or by a symbolic shift")

    def body(ops: Ops, index: Sequence[Index]) -> V:
        at = list(index)
        for d, shift in turned.items():
            extent = x.size[d]
            back = -shift % extent if isinstance(extent, int) else -shift
            if back != 0:
                at[d] = ModularIndexing(at[d] + back, ONE, sympy.sympify(extent))
        return x.load(ops, at)

    return ctx.pointwise(x.size, x.device, body, x.dtype)


@lowering(aten.repeat.default)
def repeat(ctx: LoweringContext, x: TensorValue, repeats: Sequence[Size]) -> TensorValue:
    added = len(repeats) - x.dim
    inner = (*[1] * added, *x.size)
    size = tuple(to_size(s * r) for s, r in zip(inner, repeats, strict=True))

    def body(ops: Ops, index: Sequence[Index]) -> V:
        at = [
            i if r == 1 else ModularIndexing(i, ONE, sympy.sympify(s))
            for i, s, r in zip(index[added:], x.size, repeats[added:], strict=True)
        ]
        return x.load(ops, at)

    return ctx.pointwise(size, x.device, body, x.dtype)
