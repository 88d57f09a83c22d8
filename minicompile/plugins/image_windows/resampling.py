"""Resampling, padding, and windows as columns: each result is a sum of some elements, times weights.

Along each dimension a table, made when compiling, says which elements and weights: its rows are the results'
positions. The gradient reads the turned table, so nothing is scattered. The real compiler: upsample_nearest2d
and its like in torch/_inductor/lowering.py, and decompositions that index with computed positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from minicompile.errors import Unsupported
from minicompile.lowering import views
from minicompile.lowering.context import LoweringContext, Rule, lowering
from minicompile.lowering.rules.common import aten, converted
from minicompile.lowering.value import TensorValue
from minicompile.ops.dtypes import computation_dtype
from minicompile.ops.handler import Index, Ops, V
from minicompile.plugins.image_windows.windows import (
    Table,
    Tabled,
    folded,
    known,
    summation_dtype,
    unfolded,
)
from minicompile.shapes.expr import Size

CUBIC = -0.75
"""The free parameter of eager's cubic weights."""


def nearest(extent: int, count: int, scale: float | None, exact: bool) -> Table:
    at = torch.arange(count, dtype=torch.float32)
    ratio = torch.tensor(1 / scale if scale else extent / count, dtype=torch.float32)
    if count in (extent, 2 * extent) and not exact:
        ratio = torch.tensor(extent / count)
    at = torch.floor((at + 0.5 * exact) * ratio).long().clamp(max=extent - 1)
    return Table(at.unsqueeze(1), extent)


def interpolated(
    extent: int, count: int, scale: float | None, corners: bool, cubic: bool, dtype: torch.dtype
) -> Table:
    """Linear or cubic weights; `corners`: the corner elements' centres stay where they are."""
    at = torch.arange(count, dtype=dtype)
    if corners:
        at = at * (torch.tensor(extent - 1, dtype=dtype) / max(count - 1, 1) * (count > 1))
    else:
        whole = torch.tensor(extent, dtype=dtype) / count
        copied = count == extent and not cubic  # whatever the scale
        ratio = torch.tensor(1 / scale, dtype=dtype) if scale and not copied else whole
        at = (at + 0.5) * ratio - 0.5
    at = at if cubic else at.clamp(min=0)
    before = at.floor()
    part = (at - before).unsqueeze(1)
    taps = torch.arange(-1, 3) if cubic else torch.arange(0, 2)
    places = (before.long().unsqueeze(1) + taps).clamp(0, extent - 1)
    if not cubic:
        places = places[:, :1].expand(-1, 2) if count == extent else places
        return Table(places, extent, torch.cat([1 - part, part], 1))
    far = (part - taps).abs()
    inner = ((CUBIC + 2) * far - (CUBIC + 3)) * far * far + 1
    outer = ((CUBIC * far - 5 * CUBIC) * far + 8 * CUBIC) * far - 4 * CUBIC
    return Table(places, extent, torch.where(taps.bool() & (taps != 1), outer, inner))


def windows(extent: int, size: int, step: int, padding: int = 0, dilation: int = 1) -> Table:
    """All first elements of the windows, all second ones, ...: size * count results."""
    count = (extent + 2 * padding - (size - 1) * dilation - 1) // step + 1
    at = torch.arange(size).unsqueeze(1) * dilation + torch.arange(count) * step - padding
    return Table(torch.where((at >= 0) & (at < extent), at, -1).reshape(-1, 1), extent)


def by_tables(
    ctx: LoweringContext, x: TensorValue, tables: Sequence[Table], dtype: torch.dtype | None = None
) -> TensorValue:
    """Sums of elements of x along its last dimensions, in `dtype` (the computation dtype)."""
    dims, dtype = len(tables), dtype or computation_dtype(x.dtype)
    axes = [Tabled(ctx, x, table, f"axis{k}") for k, table in enumerate(tables)]
    terms = unfolded(ctx, converted(ctx, x, dtype), axes)

    def weighted(ops: Ops, index: Sequence[Index]) -> V:
        at = zip(index[-2 * dims : -dims], index[-dims:], strict=True)
        pairs = [(a.weights, i) for a, i in zip(axes, at, strict=True)]
        factors = [weights.load_as(ops, i, dtype) for weights, i in pairs if weights is not None]
        return ops.mul(terms.load(ops, index), functools.reduce(ops.mul, factors))

    if axes[0].weights is not None:
        found = ctx.pointwise(terms.size, x.device, weighted, dtype)
        return converted(ctx, folded(ctx, "sum", found, dims), x.dtype)
    return converted(ctx, folded(ctx, "sum", terms, dims), x.dtype)


def turned(tables: Sequence[Table]) -> list[Table]:
    return [table.turned() for table in tables]


# -- upsampling


def upsample(kind: str, backward: bool) -> Rule:
    def rule(
        ctx: LoweringContext, x: TensorValue, size: Sequence[Size], *given: Any
    ) -> TensorValue:
        rest = list(given)
        extents = rest.pop(0)[2:] if backward else x.size[2:]
        known(*size, *extents)
        dtype = torch.promote_types(computation_dtype(x.dtype), torch.float32)
        plain = kind in ("nearest", "exact")
        if not plain and not x.dtype.is_floating_point:
            raise Unsupported("interpolation between integers")
        exact = plain or backward or (kind == "linear" and len(size) == 2)
        if not exact and summation_dtype(x) is not dtype:
            raise Unsupported("eager rounds the weights, and sums along each dimension")
        corners = not plain and rest.pop(0)
        scales = [*rest, *[None] * (len(size) - len(rest))]
        if plain:
            make = functools.partial(nearest, exact=kind == "exact")
        else:
            make = functools.partial(
                interpolated, corners=corners, cubic=kind == "cubic", dtype=dtype
            )
        tables = [*map(make, extents, size, scales)]
        return by_tables(ctx, x, turned(tables) if backward else tables)

    return rule


UPSAMPLING = {
    "nearest": "upsample_nearest1d upsample_nearest2d upsample_nearest3d",
    "exact": "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d",
    "linear": "upsample_linear1d upsample_bilinear2d upsample_trilinear3d",
    "cubic": "upsample_bicubic2d",
}
for _kind, _names in UPSAMPLING.items():
    for _name in _names.split():
        lowering(getattr(aten, _name).default)(upsample(_kind, backward=False))
        lowering(getattr(aten, f"{_name}_backward").default)(upsample(_kind, backward=True))


# -- padding


def padding(place: Callable[[torch.Tensor, int], torch.Tensor], backward: bool) -> Rule:
    """`place(position, last)` is the element that a position repeats."""

    def table(extent: Size, before: int, after: int) -> Table:
        known(extent)
        at = torch.arange(-before, extent + after)
        return Table(place(at, extent - 1).unsqueeze(1), int(extent))

    def tables(x: TensorValue, pad: Sequence[Any]) -> list[Table]:
        ends = [*zip(pad[::2], pad[1::2], strict=True)][::-1]
        return [table(n, *both) for n, both in zip(x.size[-len(ends) :], ends, strict=True)]

    if backward:
        return lambda ctx, grad, x, pad: by_tables(
            ctx, grad, turned(tables(x, pad)), summation_dtype(grad)
        )
    return lambda ctx, x, pad: by_tables(ctx, x, tables(x, pad))


for _name, _place in {
    "reflection": lambda at, last: last - (last - at.abs()).abs(),
    "replication": lambda at, last: at.clamp(0, last),
}.items():
    for _dims in (1, 2, 3):
        _op, _back = (
            getattr(aten, f"{_name}_pad{_dims}d{end}").default for end in ("", "_backward")
        )
        lowering(_op)(padding(_place, backward=False))
        lowering(_back)(padding(_place, backward=True))


# -- windows


@lowering(aten.unfold_backward.default)
def unfold_backward(
    ctx: LoweringContext, grad: TensorValue, size: Sequence[Size], dim: int, length: int, step: int
) -> TensorValue:
    if not size:
        raise Unsupported("windows of a number")
    dim, last = views.wrap_dim(dim, len(size)), len(size) - 1
    known(size[dim])
    table = windows(int(size[dim]), length, step)
    table.places = (
        table.places.view(length, -1).t().reshape(-1, 1)
    )  # window by window, as eager adds
    rest = [d for d in range(last + 1) if d != dim]
    lined = ctx.view(grad, views.permute(grad.size, [*rest, dim, last + 1]))
    flat = views.reshape(lined.size, (*(size[d] for d in rest), table.places.shape[0]))
    found = by_tables(ctx, ctx.view(lined, flat), [table.turned()], summation_dtype(grad))
    back = [*range(dim), last, *range(dim, last)]
    return ctx.view(found, views.permute(found.size, back))


def regrouped(
    ctx: LoweringContext, x: TensorValue, lead: Sequence[Size], *sides: Size
) -> TensorValue:
    """x with four `sides` after its leading dimensions, those in the middle exchanged."""
    split, n = ctx.view(x, views.reshape(x.size, (*lead, *sides))), len(lead)
    return ctx.view(split, views.permute(split.size, [*range(n), n, n + 2, n + 1, n + 3]))


def image_windows(size: Sequence[Size], *given: Sequence[int]) -> list[Table]:
    known(*size)
    numbers = zip(size, *given, strict=True)
    return [windows(extent, size, step, pad, gap) for extent, size, gap, pad, step in numbers]


@lowering(aten.im2col.default)
def im2col(ctx: LoweringContext, x: TensorValue, kernel: Any, *others: Any) -> TensorValue:
    found = by_tables(ctx, x, image_windows(x.size[-2:], kernel, *others))
    rows, columns = (n // k for n, k in zip(found.size[-2:], kernel, strict=True))
    turn = regrouped(ctx, found, found.size[:-2], kernel[0], rows, kernel[1], columns)
    return ctx.view(turn, views.reshape(turn.size, ctx.result_size))


@lowering(aten.col2im.default)
def col2im(
    ctx: LoweringContext, x: TensorValue, size: Sequence[Size], kernel: Any, *others: Any
) -> TensorValue:
    tables, lead = image_windows(size, kernel, *others), ctx.result_size[:-2]
    lengths = [table.places.shape[0] for table in tables]
    rows, columns = (n // k for n, k in zip(lengths, kernel, strict=True))
    turn = regrouped(ctx, x, lead, *kernel, rows, columns)
    flat = ctx.view(turn, views.reshape(turn.size, (*lead, *lengths)))
    return by_tables(ctx, flat, turned(tables), summation_dtype(x))
