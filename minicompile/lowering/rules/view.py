"""Views: index maps (lowering/views.py), never copies."""

from __future__ import annotations

from collections.abc import Sequence

from minicompile.errors import Unsupported
from minicompile.lowering import views
from minicompile.lowering.context import LoweringContext
from minicompile.lowering.ir import Layout
from minicompile.lowering.registry import lowering
from minicompile.lowering.rules.common import aten
from minicompile.lowering.value import BufferValue, TensorValue
from minicompile.shapes.expr import Size, floor_div, to_size


@lowering(
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.view_copy.default
)
def view(ctx: LoweringContext, x: TensorValue, size: Sequence[Size]) -> TensorValue:
    return ctx.view(x, views.reshape(x.size, size))


@lowering(aten.permute.default, aten.permute_copy.default)
def permute(ctx: LoweringContext, x: TensorValue, dims: Sequence[int]) -> TensorValue:
    return ctx.view(x, views.permute(x.size, dims))


@lowering(aten.transpose.int, aten.transpose_copy.int)
def transpose(ctx: LoweringContext, x: TensorValue, dim0: int, dim1: int) -> TensorValue:
    dims = list(range(x.dim))
    if dims:
        dim0, dim1 = views.wrap_dim(dim0, x.dim), views.wrap_dim(dim1, x.dim)
        dims[dim0], dims[dim1] = dim1, dim0
    return ctx.view(x, views.permute(x.size, dims))


@lowering(aten.t.default, aten.t_copy.default)
def t(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    return ctx.view(x, views.permute(x.size, list(range(x.dim))[::-1]))


@lowering(aten.expand.default, aten.expand_copy.default)
def expand(
    ctx: LoweringContext, x: TensorValue, size: Sequence[Size], implicit: bool = False
) -> TensorValue:
    return ctx.view(x, views.expand(x.size, size))


@lowering(aten.slice.Tensor, aten.slice_copy.Tensor)
def slice_(
    ctx: LoweringContext,
    x: TensorValue,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: int = 1,
) -> TensorValue:
    known = ctx.result_size()
    length = known[views.wrap_dim(dim, x.dim)] if known is not None else None
    return ctx.view(x, views.slice_(x.size, dim, start, end, step, length))


@lowering(aten.select.int, aten.select_copy.int)
def select(ctx: LoweringContext, x: TensorValue, dim: int, index: Size) -> TensorValue:
    return ctx.view(x, views.select(x.size, dim, index))


@lowering(aten.unsqueeze.default, aten.unsqueeze_copy.default)
def unsqueeze(ctx: LoweringContext, x: TensorValue, dim: int) -> TensorValue:
    return ctx.view(x, views.unsqueeze(x.size, dim))


@lowering(aten.squeeze.default, aten.squeeze_copy.default)
def squeeze(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    return ctx.view(x, views.squeeze(x.size))


@lowering(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze_copy.dim, aten.squeeze_copy.dims)
def squeeze_dims(ctx: LoweringContext, x: TensorValue, dim: int | Sequence[int]) -> TensorValue:
    return ctx.view(x, views.squeeze(x.size, [dim] if isinstance(dim, int) else dim))


@lowering(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(
    ctx: LoweringContext, x: TensorValue, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> TensorValue:
    return ctx.view(x, views.diagonal(x.size, offset, dim1, dim2))


@lowering(aten.unfold.default, aten.unfold_copy.default)
def unfold(
    ctx: LoweringContext, x: TensorValue, dimension: int, size: int, step: int
) -> TensorValue:
    return ctx.view(x, views.unfold(x.size, dimension, size, step))


@lowering(aten.flip.default)
def flip(ctx: LoweringContext, x: TensorValue, dims: Sequence[int]) -> TensorValue:
    return ctx.view(x, views.flip(x.size, dims))


@lowering(aten.split.Tensor)
def split(
    ctx: LoweringContext, x: TensorValue, split_size: Size, dim: int = 0
) -> tuple[TensorValue, ...]:
    dim = views.wrap_dim(dim, x.dim)
    extent = x.size[dim]
    if isinstance(split_size, int) and split_size == 0:
        return (x,)
    count = floor_div(extent + split_size - 1, split_size)
    if not isinstance(count, int):
        raise Unsupported("a split into a number of parts known only at run time")
    starts = [to_size(i * split_size) for i in range(max(count, 1))]
    return tuple(ctx.view(x, views.slice_(x.size, dim, s, to_size(s + split_size))) for s in starts)


@lowering(aten.split_with_sizes.default)
def split_with_sizes(
    ctx: LoweringContext, x: TensorValue, split_sizes: Sequence[Size], dim: int = 0
) -> tuple[TensorValue, ...]:
    parts, start = [], 0
    for extent in split_sizes:
        end = to_size(start + extent)
        parts.append(ctx.view(x, views.slice_(x.size, dim, start, end)))
        start = end
    return tuple(parts)


@lowering(aten.unbind.int)
def unbind(ctx: LoweringContext, x: TensorValue, dim: int = 0) -> tuple[TensorValue, ...]:
    extent = x.size[views.wrap_dim(dim, x.dim)]
    if not isinstance(extent, int):
        raise Unsupported("unbind of a dimension of symbolic size")
    return tuple(ctx.view(x, views.select(x.size, dim, i)) for i in range(extent))


@lowering(aten.as_strided.default)
def as_strided(
    ctx: LoweringContext,
    x: TensorValue,
    size: Sequence[Size],
    stride: Sequence[Size],
    storage_offset: Size | None = None,
) -> TensorValue:
    """Any elements of the storage. Only where the storage is the very one that eager sees."""
    memory = ctx.realize(x, "seen through as_strided")
    whole = memory.buffer.layout
    if storage_offset is None:
        offset = memory.layout.offset
    else:
        offset = to_size(storage_offset - ctx.input_offsets.get(memory.buffer.name, 0))
    layout = Layout(x.device, x.dtype, tuple(size), tuple(stride), offset)
    ends = (offset, layout.storage_size, whole.storage_size)
    if not all(isinstance(e, int) for e in ends) or offset < 0 or ends[1] > ends[2]:
        raise Unsupported("as_strided beyond its tensor's own elements")
    return BufferValue(memory.buffer, layout, memory.origins | ctx.origins)
