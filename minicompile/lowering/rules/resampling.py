"""Resampling, padding, and windows as columns: each result is a sum of some elements, times weights.

Along each dimension a table, made when compiling, says which elements and weights: its rows are the results'
positions. The gradient reads the turned table, so nothing is scattered. The real compiler: upsample_nearest2d
and its like in torch/_inductor/lowering.py, and decompositions that index with computed positions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minicompile.errors import Unsupported
from minicompile.lowering import views
from minicompile.lowering.context import LoweringContext, Rule, lowering
from minicompile.lowering.rules.common import aten, converted
from minicompile.lowering.rules.creation import only_where
from minicompile.lowering.rules.pooling import MOST_TAPS, rounds
from minicompile.lowering.value import TensorValue
from minicompile.ops.dtypes import computation_dtype
from minicompile.ops.handler import Index, Ops, V
from minicompile.shapes.expr import Size

CUBIC = -0.75
"""The free parameter of eager's cubic weights."""


@dataclass
class Table:
    """`places[i]`: the elements, of `extent`, that result i is made of; -1 where there are fewer."""

    places: torch.Tensor
    extent: int
    weights: torch.Tensor | None = None

    def turned(self) -> Table:
        """For each element the results that it goes into, in order."""
        rows, taps = self.places.shape
        elements, order = self.places.reshape(-1).sort(stable=True)
        order = order[elements >= 0]
        elements = elements[elements >= 0]
        counts = torch.bincount(elements, minlength=self.extent)
        column = torch.arange(len(order)) - (counts.cumsum(0) - counts)[elements]
        places = torch.full((self.extent, max(int(counts.max()), 1)), -1)
        places[elements, column] = order // taps
        if self.weights is None:
            return Table(places, rows)
        weights = self.weights.new_zeros(places.shape)
        weights[elements, column] = self.weights.reshape(-1)[order]
        return Table(places, rows, weights)


def known(*sizes: Size) -> None:
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise Unsupported("a table of positions for sizes that are only known at run time, or 0")


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
        ratio = torch.tensor(1 / scale, dtype=dtype) if scale else whole
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
    ctx: LoweringContext, x: TensorValue, tables: Mapping[int, Table], narrow: bool = False
) -> TensorValue:
    """x with the dimensions of `tables` replaced by their results; `narrow`: sums are rounded one by one."""
    dtype = computation_dtype(x.dtype)
    taps = [range(table.places.shape[1]) for table in tables.values()]
    many = math.prod(map(len, taps)) > MOST_TAPS
    size = [tables[d].places.shape[0] if d in tables else n for d, n in enumerate(x.size)]
    if many and narrow:
        raise Unsupported("many additions that eager rounds one by one")
    assert ctx.node is not None

    def constant(values: torch.Tensor, name: str) -> TensorValue:
        return ctx.constant(values.to(x.device).contiguous(), f"{ctx.node}_{name}")

    held = {
        d: (
            constant(table.places, f"places{d}"),
            constant(table.weights, f"weights{d}") if table.weights is not None else None,
        )
        for d, table in tables.items()
    }

    def term(ops: Ops, index: Sequence[Index], tap: Sequence[Any]) -> V:
        where, mask, factor = list(index), None, None
        for (d, (places, weights)), k in zip(held.items(), tap, strict=True):
            place = places.load(ops, [index[d], k])
            where[d] = ops.indirect_indexing(place, tables[d].extent, False, False)
            column = tables[d].places[:, k] if isinstance(k, int) else tables[d].places
            if bool((column < 0).any()):
                found = ops.ge(place, ops.constant(0, torch.int64))
                mask = found if mask is None else ops.logical_and(mask, found)
            if weights is not None:
                weight = weights.load_as(ops, [index[d], k], dtype)
                factor = weight if factor is None else ops.mul(factor, weight)
        value = only_where(ops, mask, lambda inner: x.load_as(inner, where, dtype))
        return value if factor is None else ops.mul(value, factor)

    if many:
        sizes = [len(part) for part in taps]
        return converted(ctx, ctx.reduction("sum", size, sizes, dtype, x.device, term), x.dtype)

    def body(ops: Ops, index: Sequence[Index]) -> V:
        total, *others = (term(ops, index, tap) for tap in itertools.product(*taps))
        for value in others:
            total = ops.add(total, value)
            total = ops.to_dtype(ops.to_dtype(total, x.dtype), dtype) if narrow else total
        return ops.to_dtype(total, x.dtype)

    return ctx.pointwise(size, x.device, body, x.dtype)


def turned(tables: Mapping[int, Table]) -> dict[int, Table]:
    return {dim: table.turned() for dim, table in tables.items()}


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
        if not plain and not backward and rounds(x) and (kind == "cubic" or len(size) != 2):
            raise Unsupported("eager rounds the weights, and sums along each dimension")
        corners = not plain and rest.pop(0)
        tables = {}
        for k, (extent, count) in enumerate(zip(extents, size, strict=True)):
            scale = rest[k] if k < len(rest) else None
            if plain:
                tables[k + 2] = nearest(extent, count, scale, kind == "exact")
            else:
                tables[k + 2] = interpolated(extent, count, scale, corners, kind == "cubic", dtype)
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


def mirrored(at: torch.Tensor, last: int) -> torch.Tensor:
    return last - (last - at.abs()).abs()


def padded(place: Callable[[torch.Tensor, int], torch.Tensor], x: Sequence[Size], pad: Any) -> Any:
    """Tables of the last dimensions: `place(position, last)` is the element that a position repeats."""
    tables = {}
    for k in range(len(pad) // 2):
        dim, (before, after) = len(x) - 1 - k, pad[2 * k : 2 * k + 2]
        known(x[dim])
        at = torch.arange(-before, x[dim] + after)
        tables[dim] = Table(place(at, x[dim] - 1).unsqueeze(1), x[dim])
    return dict(sorted(tables.items()))


def padding(place: Callable[[torch.Tensor, int], torch.Tensor]) -> tuple[Rule, Rule]:
    def forward(ctx: LoweringContext, x: TensorValue, pad: Sequence[Size]) -> TensorValue:
        return by_tables(ctx, x, padded(place, x.size, pad))

    def backward(
        ctx: LoweringContext, grad: TensorValue, x: TensorValue, pad: Sequence[Size]
    ) -> TensorValue:
        return by_tables(ctx, grad, turned(padded(place, x.size, pad)), rounds(grad))

    return forward, backward


for _name, _rules in {
    "reflection": padding(mirrored),
    "replication": padding(lambda at, last: at.clamp(0, last)),
}.items():
    for _dims in (1, 2, 3):
        for _suffix, _rule in zip(("", "_backward"), _rules, strict=True):
            lowering(getattr(aten, f"{_name}_pad{_dims}d{_suffix}").default)(_rule)


# -- windows


@lowering(aten.unfold_backward.default)
def unfold_backward(
    ctx: LoweringContext, grad: TensorValue, size: Sequence[Size], dim: int, length: int, step: int
) -> TensorValue:
    if not size:
        raise Unsupported("windows of a number")
    dim = views.wrap_dim(dim, len(size))
    known(size[dim])
    order = [*range(dim + 1), grad.dim - 1, *range(dim + 1, grad.dim - 1)]
    lined = ctx.view(grad, views.permute(grad.size, order))
    table = windows(size[dim], length, step)
    table.places = (
        table.places.view(length, -1).t().reshape(-1, 1)
    )  # window after window, as eager adds
    flat = (*size[:dim], table.places.shape[0], *size[dim + 1 :])
    return by_tables(
        ctx, ctx.view(lined, views.reshape(lined.size, flat)), {dim: table.turned()}, rounds(grad)
    )


def image_windows(size: Sequence[Size], *given: Sequence[int]) -> dict[int, Table]:
    known(*size[-2:])
    numbers = zip(size[-2:], *given, strict=True)
    return {
        len(size) - 2 + k: windows(extent, kernel, step, pad, dilation)
        for k, (extent, kernel, dilation, pad, step) in enumerate(numbers)
    }


@lowering(aten.im2col.default)
def im2col(ctx: LoweringContext, x: TensorValue, kernel: Any, *others: Any) -> TensorValue:
    found = by_tables(ctx, x, image_windows(x.size, kernel, *others))
    *lead, height, width = found.size
    parts = (*lead, kernel[0], height // kernel[0], kernel[1], width // kernel[1])
    split, n = ctx.view(found, views.reshape(found.size, parts)), len(lead)
    turn = views.permute(split.size, [*range(n), n, n + 2, n + 1, n + 3])
    columns = ctx.view(split, turn)
    return ctx.view(columns, views.reshape(columns.size, ctx.result_size))


@lowering(aten.col2im.default)
def col2im(
    ctx: LoweringContext, x: TensorValue, size: Sequence[Size], kernel: Any, *others: Any
) -> TensorValue:
    lead = ctx.result_size[:-2]
    tables = image_windows((*lead, *size), kernel, *others)
    sides = [t.places.shape[0] // k for t, k in zip(tables.values(), kernel, strict=True)]
    split = ctx.view(x, views.reshape(x.size, (*lead, *kernel, *sides)))
    n = len(lead)
    turn = ctx.view(split, views.permute(split.size, [*range(n), n, n + 2, n + 1, n + 3]))
    flat = (*lead, *(t.places.shape[0] for t in tables.values()))
    return by_tables(ctx, ctx.view(turn, views.reshape(turn.size, flat)), turned(tables), rounds(x))
