"""Reading and writing at loaded positions: index, gather, embedding; index_put, scatter.

An index out of range is an error, unless `options.assert_indirect_indexing` is False. What is written goes
into a fresh copy. Of several writes to one element the last stays, as in eager; where eager's order depends
on strides, its kernels are called. So they are for half types that accumulate: each atomic addition would
round; and where deterministic algorithms are asked for, since atomic additions come in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from minicompile.errors import Unsupported
from minicompile.lowering import views
from minicompile.lowering.context import LoweringContext, OutputIndex, lowering
from minicompile.lowering.rules.common import Operand, aten, broadcast_size, common_device, constant
from minicompile.lowering.value import Scope, TensorValue
from minicompile.ops.dtypes import is_int
from minicompile.ops.handler import Index, Ops, V
from minicompile.ops.origin import union
from minicompile.shapes.expr import ZERO, Size, is_nonnegative, product, same


def integer_index(index: TensorValue, x: TensorValue) -> None:
    """Refuse masks (uint8 is one too) and indices on another device."""
    if not is_int(index.dtype) or index.dtype is torch.uint8:
        raise Unsupported(
            f"indexing with a mask ({index.dtype}): the result's size depends on data"
        )
    common_device(index, x)


def loaded_index(
    ctx: LoweringContext, ops: Ops, tensor: TensorValue, at: Sequence[Index], extent: Size,
    wrap: bool, ordered: bool
) -> Index:  # fmt: skip
    """The integer at `at` as an index into a dimension, checked if options say so; no load where it is known
    to fit.

    `ordered`: it stays one that loops can't share between threads, since the last of several writes stays.
    """
    known = tensor.known_positions if not ordered else None
    if known is not None and is_nonnegative(known.low) and is_nonnegative(extent - 1 - known.high):
        return known.formula(at)
    value = tensor.load_as(ops, at, torch.int64)
    return ops.indirect_indexing(value, extent, ctx.options.assert_indirect_indexing, wrap)


def advanced_index(
    ctx: LoweringContext,
    x: TensorValue,
    indices: Sequence[TensorValue | None],
    wrap: bool = True,
    ordered: bool = False,
) -> tuple[tuple[Size, ...], OutputIndex]:
    """The size of `x[i, :, j]`, and the position in x of each of its elements.

    The index tensors' common shape stands where they do, or first if they aren't neighbours. With `wrap`,
    negative indices count from the end.
    """
    every = (*indices, *[None] * (x.dim - len(indices)))
    used = [d for d, tensor in enumerate(every) if tensor is not None]
    tensors = [tensor for tensor in every if tensor is not None]
    for tensor in tensors:
        integer_index(tensor, x)
    shape = broadcast_size(*tensors)
    start = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    end = start + len(shape)

    def position(ops: Ops, index: Sequence[Index]) -> list[Index]:
        kept = iter([*index[:start], *index[end:]])
        out: list[Index] = []
        for extent, tensor in zip(x.size, every, strict=True):
            if tensor is None:
                out.append(next(kept))
            else:
                at = views.broadcast_index(index[start:end], tensor.size, shape)
                out.append(loaded_index(ctx, ops, tensor, at, extent, wrap, ordered))
        return out

    kept = [extent for extent, tensor in zip(x.size, every, strict=True) if tensor is None]
    return (*kept[:start], *shape, *kept[start:]), position


def along(
    ctx: LoweringContext, x: TensorValue, dim: int, index: TensorValue, ordered: bool = False
) -> OutputIndex:
    """The positions in x that `index` gives: each element's own, but in dimension `dim` the loaded one."""
    if x.dim == 0:
        raise Unsupported("gather or scatter of a 0-d tensor")
    dim = views.wrap_dim(dim, x.dim)
    integer_index(index, x)

    def position(ops: Ops, i: Sequence[Index]) -> list[Index]:
        at = loaded_index(ctx, ops, index, i, x.size[dim], False, ordered)
        return [*i[:dim], at, *i[dim + 1 :]]

    return position


# -- reading


def read(
    ctx: LoweringContext,
    x: TensorValue,
    indices: Sequence[TensorValue | None],
    size: Sequence[Size],
    position: OutputIndex,
) -> TensorValue:
    """x's elements at positions that index tensors gave: the loads carry their origins too."""
    origins = union(i.storage.origins | i.origins for i in indices if i is not None)

    def body(ops: Ops, i: Sequence[Index]) -> V:
        return x.load(Scope.over(ops).through(origins), position(ops, i))

    return ctx.pointwise(size, x.device, body)


@lowering(aten.index.Tensor)
def index(
    ctx: LoweringContext, x: TensorValue, indices: Sequence[TensorValue | None]
) -> TensorValue:
    return read(ctx, x, indices, *advanced_index(ctx, x, indices))


@lowering(aten.index_select.default)
def index_select(ctx: LoweringContext, x: TensorValue, dim: int, index: TensorValue) -> TensorValue:
    if x.dim == 0 or index.dim == 0:
        raise Unsupported("index_select of a 0-d tensor")
    indices = [*[None] * views.wrap_dim(dim, x.dim), index]
    return read(ctx, x, indices, *advanced_index(ctx, x, indices, wrap=False))


@lowering(aten.embedding.default)
def embedding(
    ctx: LoweringContext, weight: TensorValue, indices: TensorValue, *_: Any, **__: Any
) -> TensorValue:
    """Rows of `weight`; the other arguments matter to gradients only."""
    return read(ctx, weight, [indices], *advanced_index(ctx, weight, [indices], wrap=False))


@lowering(aten.gather.default)
def gather(
    ctx: LoweringContext, x: TensorValue, dim: int, index: TensorValue, sparse_grad: bool = False
) -> TensorValue:
    return read(ctx, x, [index], index.size, along(ctx, x, dim, index))


# -- writing


def can_accumulate(ctx: LoweringContext, x: TensorValue) -> None:
    if x.dtype.is_floating_point:
        in_any_order(ctx, x)


def in_any_order(ctx: LoweringContext, x: TensorValue) -> None:
    """Writes to x may meet in any order on a GPU, as in eager's kernels; C++ loops keep theirs.
    Guards tell when `torch.use_deterministic_algorithms` changes (compat/settings.py)."""
    parallel = x.device.type != "cpu" or ctx.options.device_codegen == "triton"
    if parallel and torch.are_deterministic_algorithms_enabled():
        raise Unsupported("deterministic algorithms are asked for, and threads write in any order")


def chosen(
    ctx: LoweringContext, x: TensorValue, mask: TensorValue, value: TensorValue
) -> TensorValue:
    """One value wherever a mask of the first dimensions holds."""
    corner = [ZERO] * value.dim

    def body(ops: Ops, i: Sequence[Index]) -> V:
        holds = mask.load(ops, i[: mask.dim])
        return ops.where(holds, value.load(ops, corner), x.load(ops, i))

    return ctx.pointwise(x.size, x.device, body)


@lowering(aten.index_put.default)
def index_put(
    ctx: LoweringContext,
    x: TensorValue,
    indices: Sequence[TensorValue | None],
    values: TensorValue,
    accumulate: bool = False,
) -> TensorValue:
    one, mask = product(values.size) == 1, indices[0]
    if one and not accumulate and len(indices) == 1 and mask and mask.dtype is torch.bool:
        return chosen(ctx, x, mask, values)
    size, position = advanced_index(ctx, x, indices, ordered=not one)
    common_device(x, values)
    pairs = zip(reversed(values.size), reversed(size), strict=False)
    fits = all(have == 1 or same(*map(ctx.simplified, (have, place))) for have, place in pairs)
    if values.dtype is not x.dtype or values.dim > len(size) or not fits:
        raise Unsupported(f"index_put of {values.dtype} {values.size} into {x.dtype} {size}")
    if accumulate:
        can_accumulate(ctx, x)
    elif not one:
        in_any_order(ctx, x)
        shape = broadcast_size(*[index for index in indices if index is not None])
        if sum(extent != 1 for extent in shape) > 1:  # eager's order depends on strides
            raise Unsupported("writes whose order matters where indices repeat")

    def body(ops: Ops, index: Sequence[Index]) -> V:
        return values.load(ops, views.broadcast_index(index, values.size, size))

    return ctx.scatter(x, size, position, body, "atomic_add" if accumulate else "store")


@lowering(aten.scatter_add.default)
def scatter_add(
    ctx: LoweringContext, x: TensorValue, dim: int, index: TensorValue, src: TensorValue
) -> TensorValue:
    can_accumulate(ctx, x)
    return ctx.scatter(x, index.size, along(ctx, x, dim, index), src.load, "atomic_add")


@lowering(aten.scatter.src, aten.scatter.value)
def scatter(
    ctx: LoweringContext, x: TensorValue, dim: int, index: TensorValue, src: Operand
) -> TensorValue:
    """Two writes that meet differ in `dim` alone: loops and eager both take these in order."""
    ordered = isinstance(src, TensorValue)
    if ordered:
        in_any_order(ctx, x)

    def body(ops: Ops, i: Sequence[Index]) -> V:
        return src.load(ops, i) if isinstance(src, TensorValue) else constant(ops, src, x.dtype)

    return ctx.scatter(x, index.size, along(ctx, x, dim, index, ordered), body, "store")
