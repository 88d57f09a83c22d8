"""Registers the lowering of view operators: each is an index map (lowering/views.py), never a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minicompile.errors import Unsupported
from minicompile.lowering import views
from minicompile.lowering.context import LoweringContext, Rule, lowering
from minicompile.lowering.ir import Buffer, Layout
from minicompile.lowering.rules.common import aten
from minicompile.lowering.value import TensorValue
from minicompile.shapes.expr import Size, to_size


def through(make: Callable[..., views.ViewMap]) -> Rule:
    """The rule of an operator whose map is `make(x.size, *arguments)`."""

    def rule(ctx: LoweringContext, x: TensorValue, *args: Any, **kwargs: Any) -> TensorValue:
        return ctx.view(x, make(x.size, *args, **kwargs))

    return rule


lowering(aten.permute.default)(through(views.permute))
lowering(aten.expand.default)(through(views.expand))
lowering(aten.select.int)(through(views.select))
lowering(aten.unsqueeze.default)(through(views.unsqueeze))
lowering(aten.squeeze.dim, aten.squeeze.dims)(through(views.squeeze))
lowering(aten.flip.default)(through(views.flip))


@lowering(aten.detach.default, aten.alias.default)
def alias(ctx: LoweringContext, x: TensorValue) -> TensorValue:
    return x


@lowering(aten.view.default)
def view(ctx: LoweringContext, x: TensorValue, size: Sequence[Size]) -> TensorValue:
    return ctx.view(x, views.reshape(x.size, ctx.result_size))


@lowering(aten.slice.Tensor)
def slice_(
    ctx: LoweringContext,
    x: TensorValue,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: int = 1,
) -> TensorValue:
    return ctx.view(x, views.slice_(x.size, dim, start, step, ctx.result_size[dim]))


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
    buffer = ctx.settle(x.storage, "")
    offset = memory.layout.offset
    if storage_offset is not None:
        offset = to_size(storage_offset - ctx.input_offsets.get(buffer.name, 0))
    layout = Layout(x.device, x.dtype, tuple(size), tuple(stride), offset)
    ends = (offset, layout.storage_size, buffer.layout.storage_size)
    if not all(isinstance(e, int) for e in ends) or offset < 0 or ends[1] > ends[2]:
        raise Unsupported("as_strided beyond its tensor's own elements")
    return ctx.in_memory(Buffer(buffer.name, layout), x.origins | ctx.origins)
