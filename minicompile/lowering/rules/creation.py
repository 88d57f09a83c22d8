"""New tensors: from numbers and indices; put together of others (cat), or partly replaced.

Nothing is written for them: they are computed where they are read. Integers are computed as integers:
`arange(11) * 1_000_000_000` must be right in int64. Joined tensors have one idea: where an index lies within
some bounds its element comes from another tensor, which is read only there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from minicompile.errors import Unsupported
from minicompile.lowering import views
from minicompile.lowering.context import LoweringContext, lowering
from minicompile.lowering.rules.common import Scalar, aten, constant, number, prims
from minicompile.lowering.value import Positions, TensorValue
from minicompile.ops.dtypes import is_int, promote
from minicompile.ops.handler import Index, Ops, V
from minicompile.shapes.expr import (
    Size,
    same,
    to_size,
)

MAX_JOINED = 16
"""Most tensors joined by selects; beyond, copying each in turn is faster."""

Bounds = Mapping[int, tuple[Size, Size]]
"""By dimension: the first index that counts, and the first one after it that doesn't."""


@lowering(aten.full.default)
def full(ctx: LoweringContext, size: Sequence[Size], value: Scalar, **_: Any) -> TensorValue:
    """One number everywhere."""
    dtype, device = ctx.result.dtype, ctx.result.device
    return ctx.pointwise(size, device, lambda ops, _: constant(ops, value, dtype))


@lowering(prims.iota.default)
def iota(
    ctx: LoweringContext,
    length: Size,
    *,
    start: Size,
    step: Size,
    dtype: torch.dtype,
    **_: Any,
) -> TensorValue:
    """start + i * step, in integers. What indexes with it needs no load."""
    if not is_int(dtype):
        raise Unsupported(f"an integer sequence of {dtype}")

    def body(ops: Ops, index: Sequence[Index]) -> V:
        return ops.index_expr(index[0] * step + start, dtype)

    found = ctx.pointwise((length,), ctx.result.device, body)
    last = to_size(start + step * (length - 1))
    low, high = (last, start) if isinstance(step, int) and step < 0 else (start, last)
    found.storage.positions = Positions(lambda i: i[0] * step + start, low, high)
    return found


# -- joining


def inside(ops: Ops, index: Sequence[Index], size: Sequence[Size], bounds: Bounds) -> V | None:
    """Whether an index of a tensor of `size` lies within the bounds; None if it can't be outside."""
    checks = []
    for dim, (low, high) in bounds.items():
        position = ops.index_expr(index[dim], torch.int64)
        if same(high, low + 1):
            checks.append(ops.eq(position, constant(ops, low, torch.int64)))
            continue
        if low != 0:
            checks.append(ops.ge(position, constant(ops, low, torch.int64)))
        if not same(high, size[dim]):
            checks.append(ops.lt(position, constant(ops, high, torch.int64)))
    return functools.reduce(ops.logical_and, checks) if checks else None


def only_where(
    ops: Ops, mask: V | None, element: Callable[[Ops], V], other: float | int | bool = 0
) -> V:
    """An element that is read only where `mask` holds; everywhere without one."""
    return element(ops) if mask is None else ops.masked(mask, element, other)


@lowering(aten.cat.default)
def cat(ctx: LoweringContext, tensors: Sequence[TensorValue], dim: int = 0) -> TensorValue:
    dtype = promote(t.dtype for t in tensors)
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
    size = (*first.size[:dim], starts[-1], *first.size[dim + 1 :])

    def body(ops: Ops, index: Sequence[Index]) -> V:
        def element(part: TensorValue, start: Size, inner: Ops) -> V:
            at = [*index[:dim], index[dim] - start, *index[dim + 1 :]]
            return part.load_as(inner, at, dtype)

        found: V = None
        for part, start, end in reversed(list(zip(parts, starts, starts[1:], strict=False))):
            mask = inside(ops, index, size, {dim: (start, end)})
            value = only_where(ops, mask, functools.partial(element, part, start))
            found = value if mask is None or found is None else ops.where(mask, value, found)
        return found

    return ctx.pointwise(size, first.device, body)


@lowering(aten.constant_pad_nd.default)
def constant_pad_nd(
    ctx: LoweringContext, x: TensorValue, pad: Sequence[Size], value: Scalar = 0
) -> TensorValue:
    """`pad` is (before, after) of the last dimension, then of the one before; negative cuts."""
    before: list[Size] = [0] * x.dim
    size = list(x.size)
    bounds: dict[int, tuple[Size, Size]] = {}
    for k in range(len(pad) // 2):
        dim = x.dim - 1 - k
        before[dim] = pad[2 * k]
        bounds[dim] = before[dim], to_size(before[dim] + x.size[dim])
        size[dim] = to_size(bounds[dim][1] + pad[2 * k + 1])
    filler = number(value, x.dtype)

    def body(ops: Ops, index: Sequence[Index]) -> V:
        at = [i - b for i, b in zip(index, before, strict=True)]
        mask = inside(ops, index, size, bounds)
        return only_where(ops, mask, lambda inner: x.load(inner, at), filler)

    return ctx.pointwise(size, x.device, body)


@lowering(aten.select_scatter.default)
def select_scatter(
    ctx: LoweringContext, x: TensorValue, src: TensorValue, dim: int, index: Size
) -> TensorValue:
    dim = views.wrap_dim(dim, x.dim)
    if isinstance(index, int) and index < 0:
        index = to_size(index + x.size[dim])
    thin = ctx.view(src, views.unsqueeze(src.size, dim))
    return slice_scatter(ctx, x, thin, dim, index, to_size(index + 1))


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
    if step != 1:
        raise Unsupported("a write to every other element")
    dim = views.wrap_dim(dim, x.dim)
    low = views.slice_start(x.size[dim], start)
    high = to_size(low + src.size[dim])

    def body(ops: Ops, i: Sequence[Index]) -> V:
        at = [*i[:dim], i[dim] - low, *i[dim + 1 :]]
        mask = inside(ops, i, x.size, {dim: (low, high)})
        new = only_where(ops, mask, lambda inner: src.load_as(inner, at, x.dtype))
        return new if mask is None else ops.where(mask, new, x.load(ops, i))

    return ctx.pointwise(x.size, x.device, body)
