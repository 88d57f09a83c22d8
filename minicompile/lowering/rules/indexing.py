"""Reading and writing at loaded positions: index, gather, embedding; index_put, scatter.

An index out of range is an error. What is written goes into a fresh copy. Where two writes to one element
could differ, their order would matter: those stay with eager's kernels. So do half types that accumulate:
each atomic addition would round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minicompile.errors import Unsupported
from minicompile.lowering import views
from minicompile.lowering.context import LoweringContext
from minicompile.lowering.registry import lowering
from minicompile.lowering.rules.common import (
    Scalar,
    aten,
    broadcast_index,
    broadcast_size,
    common_device,
    constant,
)
from minicompile.lowering.value import Scope, TensorValue
from minicompile.ops.dtypes import is_int
from minicompile.ops.handler import Index, InnerFn, Ops, StoreMode, V
from minicompile.ops.origin import union
from minicompile.shapes.expr import Size, is_nonnegative, product


def integer_index(index: TensorValue, x: TensorValue) -> None:
    """Refuse masks (uint8 is one too) and indices on another device."""
    if not is_int(index.dtype) or index.dtype is torch.uint8:
        raise Unsupported(
            f"indexing with a mask ({index.dtype}): the result's size depends on data"
        )
    common_device(index, x)


def loaded_index(
    ops: Ops, tensor: TensorValue, at: Sequence[Index], extent: Size, wrap: bool
) -> Index:
    """The integer at `at` as a checked index into a dimension; no load where it is known to fit."""
    known = tensor.known_positions
    if known is not None and is_nonnegative(known.low) and is_nonnegative(extent - 1 - known.high):
        return known.formula(at)
    value = tensor.load_as(ops, at, torch.int64)
    return ops.indirect_indexing(value, extent, check=True, wrap_negative=wrap)


def load_through(ops: Ops, x: TensorValue, at: Sequence[Index], *indices: TensorValue) -> V:
    """x's element at an index that tensors gave: the load carries their origins too."""
    origins = union(i.storage.origins | i.origins for i in indices)
    return x.load(Scope.over(ops).through(origins), at)


@dataclass(frozen=True)
class AdvancedIndex:
    """`x[i, :, j]`: which dimensions tensors index, and where their common shape goes in the result."""

    base: TensorValue
    indices: tuple[TensorValue | None, ...]
    shape: tuple[Size, ...]
    """The index tensors' broadcast shape."""
    at: int
    """Position of `shape` among the result's dimensions."""
    wrap: bool
    """Whether negative indices count from the end."""

    @staticmethod
    def of(
        x: TensorValue, indices: Sequence[TensorValue | None], wrap: bool = True
    ) -> AdvancedIndex:
        every = (*indices, *[None] * (x.dim - len(indices)))
        used = [d for d, i in enumerate(every) if i is not None]
        if not used:
            raise Unsupported("indexing without index tensors")
        tensors = [i for i in every if i is not None]
        for index in tensors:
            integer_index(index, x)
        adjacent = used == list(range(used[0], used[-1] + 1))
        return AdvancedIndex(x, every, broadcast_size(*tensors), used[0] if adjacent else 0, wrap)

    @property
    def size(self) -> tuple[Size, ...]:
        kept = [s for s, i in zip(self.base.size, self.indices, strict=True) if i is None]
        return (*kept[: self.at], *self.shape, *kept[self.at :])

    def position(self, ops: Ops, index: Sequence[Index]) -> list[Index]:
        """The element of the base that the result's element `index` reads."""
        count = len(self.shape)
        chosen = index[self.at : self.at + count]
        kept = iter([*index[: self.at], *index[self.at + count :]])
        out: list[Index] = []
        for extent, tensor in zip(self.base.size, self.indices, strict=True):
            if tensor is None:
                out.append(next(kept))
            else:
                at = broadcast_index(tensor, chosen, self.shape)
                out.append(loaded_index(ops, tensor, at, extent, self.wrap))
        return out

    def read(self, ctx: LoweringContext) -> TensorValue:
        x, used = self.base, [i for i in self.indices if i is not None]

        def body(ops: Ops, i: Sequence[Index]) -> V:
            return load_through(ops, x, self.position(ops, i), *used)

        return ctx.pointwise(self.size, x.device, body, x.dtype)


# -- reading


@lowering(aten.index.Tensor)
def index(
    ctx: LoweringContext, x: TensorValue, indices: Sequence[TensorValue | None]
) -> TensorValue:
    return AdvancedIndex.of(x, indices).read(ctx)


@lowering(aten.index_select.default)
def index_select(ctx: LoweringContext, x: TensorValue, dim: int, index: TensorValue) -> TensorValue:
    if x.dim == 0 or index.dim == 0:
        raise Unsupported("index_select of a 0-d tensor")
    before = [None] * views.wrap_dim(dim, x.dim)
    return AdvancedIndex.of(x, [*before, index], wrap=False).read(ctx)


@lowering(aten.embedding.default)
def embedding(
    ctx: LoweringContext, weight: TensorValue, indices: TensorValue, *_: Any, **__: Any
) -> TensorValue:
    """Rows of `weight`; the other arguments matter to gradients only."""
    return AdvancedIndex.of(weight, [indices], wrap=False).read(ctx)


def along(
    x: TensorValue, dim: int, index: TensorValue, ops: Ops, i: Sequence[Index]
) -> list[Index]:
    """`i` with its place in dimension `dim` of x taken from an index tensor."""
    at = list(i)
    dim = views.wrap_dim(dim, x.dim)
    at[dim] = loaded_index(ops, index, i, x.size[dim], wrap=False)
    return at


def check_along(x: TensorValue, index: TensorValue) -> None:
    integer_index(index, x)
    if x.dim == 0 or index.dim == 0:
        raise Unsupported("gather or scatter of a 0-d tensor")


@lowering(aten.gather.default)
def gather(
    ctx: LoweringContext, x: TensorValue, dim: int, index: TensorValue, sparse_grad: bool = False
) -> TensorValue:
    check_along(x, index)

    def body(ops: Ops, i: Sequence[Index]) -> V:
        return load_through(ops, x, along(x, dim, index, ops, i), index)

    return ctx.pointwise(index.size, x.device, body, x.dtype)


# -- writing

ADDABLE = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})
"""What can be added atomically and exactly."""


def can_accumulate(dtype: torch.dtype) -> None:
    if dtype not in ADDABLE:
        raise Unsupported(f"accumulating {dtype}: each addition would round or isn't atomic")


@lowering(aten.index_put.default)
def index_put(
    ctx: LoweringContext,
    x: TensorValue,
    indices: Sequence[TensorValue | None],
    values: TensorValue,
    accumulate: bool = False,
) -> TensorValue:
    chosen = AdvancedIndex.of(x, indices)
    common_device(x, values)
    if accumulate:
        can_accumulate(x.dtype)
    elif product(values.size) != 1:
        raise Unsupported("writes whose order matters where indices repeat")
    size = chosen.size

    def body(ops: Ops, index: Sequence[Index]) -> V:
        return values.load(ops, broadcast_index(values, index, size))

    mode: StoreMode = "atomic_add" if accumulate else "store"
    return ctx.scatter(x, size, chosen.position, body, mode)


def scatter_along(
    ctx: LoweringContext,
    x: TensorValue,
    dim: int,
    index: TensorValue,
    body: InnerFn,
    mode: StoreMode,
) -> TensorValue:
    """For each element of `index`, write to x at that position of dimension `dim`."""
    check_along(x, index)
    return ctx.scatter(x, index.size, lambda ops, i: along(x, dim, index, ops, i), body, mode)


@lowering(aten.scatter_add.default)
def scatter_add(
    ctx: LoweringContext, x: TensorValue, dim: int, index: TensorValue, src: TensorValue
) -> TensorValue:
    can_accumulate(x.dtype)
    return scatter_along(ctx, x, dim, index, src.load, "atomic_add")


@lowering(aten.scatter.value)
def scatter_value(
    ctx: LoweringContext, x: TensorValue, dim: int, index: TensorValue, value: Scalar
) -> TensorValue:
    return scatter_along(ctx, x, dim, index, lambda ops, _: constant(ops, value, x.dtype), "store")
