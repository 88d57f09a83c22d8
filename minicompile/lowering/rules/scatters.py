"""Writing at loaded positions, into a fresh copy: index_put, scatter, scatter_add.

Where two writes to one element could differ, their order would matter: those stay with eager's kernels.
So do half types that accumulate: each atomic addition would round.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minicompile.errors import Unsupported
from minicompile.lowering import views
from minicompile.lowering.context import LoweringContext
from minicompile.lowering.promotion import Scalar
from minicompile.lowering.registry import lowering
from minicompile.lowering.rules.common import aten, broadcast_index, constant, on_device
from minicompile.lowering.rules.indexing import AdvancedIndex, integer_index, loaded_index
from minicompile.lowering.value import TensorValue
from minicompile.ops.handler import Index, InnerFn, Ops, StoreMode, V
from minicompile.shapes.expr import product

ADDABLE = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})
"""What can be added atomically and exactly."""


def can_accumulate(dtype: torch.dtype) -> None:
    if dtype not in ADDABLE:
        raise Unsupported(f"accumulating {dtype}: each addition would round or isn't atomic")


def same_everywhere(value: TensorValue) -> None:
    """Refuse to write different values without accumulating: duplicate indices would race."""
    if product(value.size) != 1:
        raise Unsupported("writes whose order matters where indices repeat")


@lowering(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    ctx: LoweringContext,
    x: TensorValue,
    indices: Sequence[TensorValue | None],
    values: TensorValue,
    accumulate: bool = False,
) -> TensorValue:
    chosen = AdvancedIndex.of(x, indices)
    if accumulate:
        can_accumulate(x.dtype)
    else:
        same_everywhere(values)
    source = on_device(ctx, values, x.device)
    size = chosen.size

    def body(ops: Ops, index: Sequence[Index]) -> V:
        return source.load(ops, broadcast_index(source, index, size))

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
    integer_index(index, x.device)
    if x.dim == 0 or index.dim == 0:
        raise Unsupported("scatter of a 0-d tensor")
    dim = views.wrap_dim(dim, x.dim)

    def target(ops: Ops, i: Sequence[Index]) -> list[Index]:
        at = list(i)
        at[dim] = loaded_index(ops, index, i, x.size[dim], wrap=False)
        return at

    return ctx.scatter(x, index.size, target, body, mode)


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
