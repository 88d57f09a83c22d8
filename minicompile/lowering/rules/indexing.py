"""Reading at loaded positions: index, gather, embedding, index_select. Out of range is an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minicompile.errors import Unsupported
from minicompile.lowering import views
from minicompile.lowering.context import LoweringContext
from minicompile.lowering.registry import lowering
from minicompile.lowering.rules.common import aten, broadcast_index, broadcast_size
from minicompile.lowering.value import Scope, TensorValue, positions_of
from minicompile.ops.dtypes import is_int
from minicompile.ops.handler import Index, Ops, V
from minicompile.ops.origin import union
from minicompile.shapes.expr import Size, is_nonnegative


def integer_index(index: TensorValue, device: torch.device) -> None:
    """Refuse masks (uint8 is one too) and indices on another device."""
    if not is_int(index.dtype) or index.dtype is torch.uint8:
        raise Unsupported(
            f"indexing with a mask ({index.dtype}): the result's size depends on data"
        )
    if index.device != device:
        raise Unsupported("indices on another device")


@dataclass(frozen=True)
class AdvancedIndex:
    """`x[i, :, j]`: which dimensions tensors index, and where their common shape goes in the result."""

    base: tuple[Size, ...]
    indices: tuple[TensorValue | None, ...]
    shape: tuple[Size, ...]
    """The index tensors' broadcast shape."""
    at: int
    """Position of `shape` among the result's dimensions."""

    @staticmethod
    def of(x: TensorValue, indices: Sequence[TensorValue | None]) -> AdvancedIndex:
        every = (*indices, *[None] * (x.dim - len(indices)))
        used = [d for d, i in enumerate(every) if i is not None]
        if not used:
            raise Unsupported("indexing without index tensors")
        for index in every:
            if index is not None:
                integer_index(index, x.device)
        adjacent = used == list(range(used[0], used[-1] + 1))
        shape = broadcast_size(*[i for i in every if i is not None])
        return AdvancedIndex(x.size, every, shape, used[0] if adjacent else 0)

    @property
    def size(self) -> tuple[Size, ...]:
        kept = [s for s, i in zip(self.base, self.indices, strict=True) if i is None]
        return (*kept[: self.at], *self.shape, *kept[self.at :])

    def position(self, ops: Ops, index: Sequence[Index]) -> list[Index]:
        """The element of the base that the result's element `index` reads."""
        count = len(self.shape)
        chosen = index[self.at : self.at + count]
        kept = iter([*index[: self.at], *index[self.at + count :]])
        out: list[Index] = []
        for extent, tensor in zip(self.base, self.indices, strict=True):
            if tensor is None:
                out.append(next(kept))
            else:
                at = broadcast_index(tensor, chosen, self.shape)
                out.append(loaded_index(ops, tensor, at, extent, wrap=True))
        return out


def loaded_index(
    ops: Ops, tensor: TensorValue, at: Sequence[Index], extent: Size, wrap: bool
) -> Index:
    """The integer at `at` as a checked index into a dimension; no load where it is known to fit."""
    known = positions_of(tensor)
    if known is not None and is_nonnegative(known.low) and is_nonnegative(extent - 1 - known.high):
        return known.formula(at)
    value = tensor.load(ops, at)
    wide = value if tensor.dtype is torch.int64 else ops.to_dtype(value, torch.int64)
    return ops.indirect_indexing(wide, extent, check=True, wrap_negative=wrap)


def load_through(ops: Ops, x: TensorValue, at: Sequence[Index], *indices: TensorValue) -> V:
    """x's element at an index that tensors gave: the load carries their origins too."""
    return x.load(Scope.over(ops).through(union(i.origins for i in indices)), at)


@lowering(aten.index.Tensor)
def index(
    ctx: LoweringContext, x: TensorValue, indices: Sequence[TensorValue | None]
) -> TensorValue:
    chosen = AdvancedIndex.of(x, indices)
    used = [i for i in indices if i is not None]
    return ctx.pointwise(
        chosen.size,
        x.device,
        lambda ops, i: load_through(ops, x, chosen.position(ops, i), *used),
        x.dtype,
    )


@lowering(aten.gather.default)
def gather(
    ctx: LoweringContext,
    x: TensorValue,
    dim: int,
    index: TensorValue,
    sparse_grad: bool = False,
) -> TensorValue:
    integer_index(index, x.device)
    if x.dim == 0 or index.dim == 0:
        raise Unsupported("gather of a 0-d tensor")
    dim = views.wrap_dim(dim, x.dim)

    def body(ops: Ops, i: Sequence[Index]) -> V:
        at = list(i)
        at[dim] = loaded_index(ops, index, i, x.size[dim], wrap=False)
        return load_through(ops, x, at, index)

    return ctx.pointwise(index.size, x.device, body, x.dtype)


@lowering(aten.index_select.default)
def index_select(ctx: LoweringContext, x: TensorValue, dim: int, index: TensorValue) -> TensorValue:
    integer_index(index, x.device)
    if x.dim == 0 or index.dim == 0:
        raise Unsupported("index_select of a 0-d tensor")
    dim = views.wrap_dim(dim, x.dim)

    def body(ops: Ops, i: Sequence[Index]) -> V:
        at = list(i)
        at[dim] = loaded_index(ops, index, [i[dim]], x.size[dim], wrap=False)
        return load_through(ops, x, at, index)

    size = (*x.size[:dim], index.size[0], *x.size[dim + 1 :])
    return ctx.pointwise(size, x.device, body, x.dtype)


@lowering(aten.embedding.default)
def embedding(
    ctx: LoweringContext,
    weight: TensorValue,
    indices: TensorValue,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> TensorValue:
    integer_index(indices, weight.device)

    def body(ops: Ops, i: Sequence[Index]) -> V:
        row = loaded_index(ops, indices, i[:-1], weight.size[0], wrap=False)
        return load_through(ops, weight, [row, i[-1]], indices)

    return ctx.pointwise((*indices.size, weight.size[1]), weight.device, body, weight.dtype)
