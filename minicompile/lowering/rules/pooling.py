"""Pooling: a result is computed from the elements of its window, a gradient from the windows that hold its
element. Nothing is scattered.

Both are sums or maxima over extra dimensions, the taps: few are written out, many are a reduction. Terms are
added in eager's order, and on a CPU a half type's gradient is rounded after each addition, as eager does.
The real compiler: the pooling rules in torch/_inductor/lowering.py, which leave large windows to eager.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from minicompile.errors import Unsupported
from minicompile.lowering.context import LoweringContext, Rule, lowering
from minicompile.lowering.rules.common import aten, constant, converted
from minicompile.lowering.rules.creation import only_where
from minicompile.lowering.value import TensorValue
from minicompile.ops.dtypes import computation_dtype
from minicompile.ops.handler import Index, Ops, V
from minicompile.ops.table import ReductionKind, reduction_identity
from minicompile.shapes.expr import FloorDiv, Size, bounds, is_nonnegative, loop_symbol
from minicompile.shapes.expr import simplify_index as simplified

MOST_TAPS = 25
"""Most terms that are written out."""

INT = torch.int64
Place = tuple[Index, list[Index]]
"""A position, and expressions of which one is negative where there is none."""


@dataclass
class Strided:
    """A dimension of `extent` elements in `count` windows. They begin `step` apart, the first one `padding`
    before the dimension, and have `taps` elements, `dilation` apart. An element lies in up to `holders`.
    """

    extent: Size
    count: Size
    taps: int
    step: int
    padding: int
    dilation: int = 1
    padded: bool = True
    """Whether the padding counts in a window's length."""

    def __post_init__(self) -> None:
        if not all(isinstance(n, int) for n in (self.taps, self.step, self.padding, self.dilation)):
            raise Unsupported("windows whose size is only known at run time")
        self.reach = (self.taps - 1) * self.dilation
        self.holders = self.reach // self.step + 1

    def element(self, window: Index, tap: Index) -> Place:
        """A window's tap-th element."""
        at = window * self.step - self.padding + tap * self.dilation
        return at, [at, self.extent - 1 - at]

    def window(self, element: Index, tap: Index) -> Place:
        """The tap-th window that holds an element."""
        back = self.holders - 1 - tap
        at = FloorDiv(element + self.padding, sympy.Integer(self.step)) - back
        left, found = element - self.element(at, 0)[0], [at, self.count - 1 - at]
        farthest = back if back.is_Integer else self.holders - 1
        return at, [*found, self.reach - left] if (
            farthest + 1
        ) * self.step > self.reach + 1 else found

    def first(self, ops: Ops, window: Index) -> V:
        """The position of a window's first element."""
        start, zero = self.element(window, 0)[0], ops.constant(0, INT)
        begin, step = ops.index_expr(start, INT), sympy.Integer(self.dilation)
        inside = ops.index_expr(start + FloorDiv(step - 1 - start, step) * step, INT)
        return ops.where(ops.lt(begin, zero), inside, begin) if self.padding else begin

    def length(self, ops: Ops, window: Index) -> V:
        """How many elements a window has."""
        beyond, start = self.padding if self.padded else 0, self.element(window, 0)[0]
        begin, stop = (ops.index_expr(i, INT) for i in (start, start + self.taps))
        if not self.padded and self.padding:
            begin = ops.maximum(begin, ops.constant(0, INT))
        last = (self.count - 1) * self.step - self.padding + self.taps
        if not is_nonnegative(self.extent + beyond - last):
            stop = ops.minimum(stop, constant(ops, self.extent + beyond, INT))
        return ops.sub(stop, begin)


@dataclass
class Adaptive:
    """A dimension whose windows share it as evenly as can be: neighbours may have one element in common."""

    extent: Size
    count: Size
    dilation = 1

    def __post_init__(self) -> None:
        if not isinstance(self.extent, int) or not isinstance(self.count, int):
            raise Unsupported("adaptive pooling of sizes that are only known at run time")
        if 0 in (self.extent, self.count):
            raise Unsupported("adaptive pooling of nothing, or to nothing")
        self.taps, self.holders = (
            max(-(-(k + 1) * whole // parts) - k * whole // parts for k in range(parts))
            for parts, whole in ((self.count, self.extent), (self.extent, self.count))
        )

    @staticmethod
    def part(index: Index, parts: Size, whole: Size, tap: Index) -> Place:
        below = sympy.sympify(parts)
        at, end = FloorDiv(index * whole, below), FloorDiv((index + 1) * whole + parts - 1, below)
        return at + tap, [end - at - 1 - tap]

    def element(self, window: Index, tap: Index) -> Place:
        return self.part(window, self.count, self.extent, tap)

    def window(self, element: Index, tap: Index) -> Place:
        return self.part(element, self.extent, self.count, tap)

    def first(self, ops: Ops, window: Index) -> V:
        return ops.index_expr(self.element(window, sympy.Integer(0))[0], INT)

    def length(self, ops: Ops, window: Index) -> V:
        _, (rest,) = self.element(window, sympy.Integer(0))
        return ops.index_expr(rest + 1, INT)


Axes = Sequence[Strided | Adaptive]


def strided(x: TensorValue, counts: Sequence[Size], *given: Any, padded: bool = True) -> Axes:
    """The last dimensions of x. `given`: kernel, step, padding, dilation; one number is for all of them."""
    dims = len(counts)
    full = [
        v if len(v) == dims else [*v] * dims for v in (given[0], given[1] or given[0], *given[2:])
    ]
    if len(full) == 3:
        full.append([1] * dims)
    numbers = zip(x.size[-dims:], counts, *full, strict=True)
    return [*itertools.starmap(functools.partial(Strided, padded=padded), numbers)]


def adaptive(x: TensorValue, counts: Sequence[Size]) -> Axes:
    return [Adaptive(*both) for both in zip(x.size[-len(counts) :], counts, strict=True)]


def unfolded(
    ctx: LoweringContext, x: TensorValue, axes: Axes, other: float | int = 0, back: bool = False
) -> TensorValue:
    """The elements of each window of x, `other` where there are fewer, along new dimensions at the end.

    `back`: x has an element for each window, and the result those of the windows that hold an element.
    """
    dims = len(axes)
    ends = [(a.extent, a.holders) if back else (a.count, a.taps) for a in axes]

    @functools.cache
    def can_fail(k: int, tap: int | None) -> list[bool]:
        """Which conditions of a place, whatever the index."""
        outer, inner = loop_symbol("outer"), loop_symbol("inner")
        ranges = {outer: ends[k][0], inner: ends[k][1]}
        move = axes[k].window if back else axes[k].element
        _, conditions = move(outer, inner if tap is None else sympy.Integer(tap))
        found = [bounds(simplified(sympy.expand(c), ranges), ranges) for c in conditions]
        return [limits is None or not is_nonnegative(limits[0]) for limits in found]

    def body(ops: Ops, index: Sequence[Index]) -> V:
        where, checks = list(index[: -2 * dims]), []
        for k, (i, tap) in enumerate(zip(index[-2 * dims : -dims], index[-dims:], strict=True)):
            at, conditions = (axes[k].window if back else axes[k].element)(i, tap)
            where.append(at)
            known = can_fail(k, int(tap) if tap.is_Integer else None)
            for condition in itertools.compress(conditions, known):
                checks.append(ops.ge(ops.index_expr(condition, INT), ops.constant(0, INT)))
        mask = functools.reduce(ops.logical_and, checks) if checks else None
        return only_where(ops, mask, lambda inner: x.load(inner, where), other)

    size = (*x.size[:-dims], *(extent for extent, _ in ends), *(taps for _, taps in ends))
    return ctx.pointwise(size, x.device, body, x.dtype)


def all_taps(x: TensorValue, dims: int) -> list[tuple[Index, ...]]:
    """Every index of the last dimensions; none if they are too many to be written out."""
    if math.prod(x.size[-dims:]) > MOST_TAPS:
        return []
    return list(itertools.product(*(map(sympy.Integer, range(taps)) for taps in x.size[-dims:])))


def folded(
    ctx: LoweringContext, kind: ReductionKind, x: TensorValue, dims: int, narrow: bool = False
) -> TensorValue:
    """The sum or the maximum along the last dimensions; `narrow`: each sum is rounded to x's dtype."""
    size, wide, taps = x.size[:-dims], computation_dtype(x.dtype), all_taps(x, dims)
    if not taps and narrow:
        raise Unsupported("many additions that eager rounds one by one")
    if not taps:
        found = ctx.reduction(
            kind,
            size,
            x.size[-dims:],
            wide,
            x.device,
            lambda ops, i, r: x.load_as(ops, [*i, *r], wide),
        )
        return converted(ctx, found, x.dtype)

    def body(ops: Ops, index: Sequence[Index]) -> V:
        found, *others = (x.load_as(ops, [*index, *tap], wide) for tap in taps)
        for value in others:
            # the later one first: among equals eager keeps the earlier
            found = ops.pointwise("add" if kind == "sum" else "maximum", value, found)
            found = ops.to_dtype(ops.to_dtype(found, x.dtype), wide) if narrow else found
        return ops.to_dtype(found, x.dtype)

    return ctx.pointwise(size, x.device, body, x.dtype)


def rounds(x: TensorValue) -> bool:
    """Does eager round each sum?"""
    return computation_dtype(x.dtype) is not x.dtype and x.device.type == "cpu"


# -- averages


def divided(
    ctx: LoweringContext, x: TensorValue, axes: Axes, divisor: int | None, dtype: torch.dtype
) -> TensorValue:
    """Each window's element by the window's length, as `dtype`; adaptive windows by one side at a time."""
    wide = computation_dtype(x.dtype)
    quotient = "truediv" if wide.is_floating_point else "truncdiv"

    def body(ops: Ops, index: Sequence[Index]) -> V:
        value = x.load_as(ops, index, wide)
        pairs = zip(axes, index[-len(axes) :], strict=True)
        counts = [ops.constant(divisor, INT)] if divisor else [a.length(ops, i) for a, i in pairs]
        if isinstance(axes[0], Strided):
            counts = [functools.reduce(ops.mul, counts)]
        for count in counts:
            value = ops.pointwise(quotient, value, ops.to_dtype(count, wide))
            value = ops.to_dtype(ops.to_dtype(value, dtype), wide)
        return ops.to_dtype(value, dtype)

    return ctx.pointwise(x.size, x.device, body, dtype)


def average(
    ctx: LoweringContext, x: TensorValue, axes: Axes, divisor: int | None = None
) -> TensorValue:
    wide = converted(ctx, x, computation_dtype(x.dtype))
    total = folded(ctx, "sum", unfolded(ctx, wide, axes), len(axes))
    return converted(ctx, divided(ctx, total, axes, divisor, wide.dtype), x.dtype)


def average_gradient(
    ctx: LoweringContext, grad: TensorValue, axes: Axes, divisor: int | None = None
) -> TensorValue:
    narrow = rounds(grad)
    part = divided(
        ctx, grad, axes, divisor, grad.dtype if narrow else computation_dtype(grad.dtype)
    )
    found = folded(ctx, "sum", unfolded(ctx, part, axes, back=True), len(axes), narrow)
    return converted(ctx, found, grad.dtype)


def avg_pool(
    ctx: LoweringContext, x: TensorValue, kernel: Any, step: Any = (), padding: Any = (0,),
    ceil_mode: bool = False, padded: bool = True, divisor: int | None = None, *, dims: int,
) -> TensorValue:  # fmt: skip
    axes = strided(x, ctx.result_size[-dims:], kernel, step, padding, padded=padded)
    return average(ctx, x, axes, divisor)


def avg_pool_backward(
    ctx: LoweringContext, grad: TensorValue, x: TensorValue, kernel: Any, step: Any, padding: Any,
    ceil_mode: bool, padded: bool, divisor: int | None, dims: int,
) -> TensorValue:  # fmt: skip
    axes = strided(x, grad.size[-dims:], kernel, step, padding, padded=padded)
    return average_gradient(ctx, grad, axes, divisor)


# -- maxima


def flat(axes: Axes, places: Sequence[Any]) -> Any:
    """The number that stands for an element in the indices of maxima."""
    return functools.reduce(lambda a, b: a * b[0].extent + b[1], zip(axes, places, strict=True), 0)


def maximum(ctx: LoweringContext, x: TensorValue, axes: Axes) -> tuple[TensorValue, TensorValue]:
    """(the largest elements, where they are): the first of equals, but the last NaN."""
    dims, number = len(axes), x.dtype.is_floating_point
    windows = unfolded(ctx, x, axes, reduction_identity("max", x.dtype))
    size, sides, taps = windows.size[:-dims], windows.size[-dims:], all_taps(windows, dims)

    def place(ops: Ops, places: Sequence[V]) -> V:
        found = places[0]
        for axis, at in zip(axes[1:], places[1:], strict=True):
            found = ops.add(ops.mul(found, constant(ops, axis.extent, INT)), at)
        return found

    def first(ops: Ops, index: Sequence[Index]) -> list[V]:
        return [axis.first(ops, i) for axis, i in zip(axes, index[-dims:], strict=True)]

    def position(ops: Ops, index: Sequence[Index]) -> V:
        at, best = place(ops, first(ops, index)), windows.load(ops, [*index, *taps[0]])
        for tap in taps[1:]:
            value = windows.load(ops, [*index, *tap])
            better = ops.gt(value, best)
            better = ops.logical_or(better, ops.isnan(value)) if number else better
            here = [a.element(i, t)[0] for a, i, t in zip(axes, index[-dims:], tap, strict=True)]
            at = ops.where(better, ops.index_expr(flat(axes, here), INT), at)
            best = ops.maximum(value, best)
        return at

    values = folded(ctx, "max", windows, dims)
    if taps:
        return values, ctx.pointwise(size, x.device, position, INT)

    def last_nan(ops: Ops, index: Sequence[Index], tap: Sequence[Index]) -> V:
        order = functools.reduce(lambda a, b: a * b[0] + b[1], zip(sides, tap, strict=True), 0)
        found = ops.isnan(windows.load(ops, [*index, *tap]))
        return ops.where(found, ops.index_expr(order, INT), ops.constant(-1, INT))

    largest = ctx.reduction(
        "argmax", size, sides, INT, x.device, lambda ops, i, r: windows.load(ops, [*i, *r])
    )
    nan = ctx.reduction("max", size, sides, INT, x.device, last_nan)

    def found(ops: Ops, index: Sequence[Index]) -> V:
        zero, tap = ops.constant(0, INT), nan.load(ops, index)
        tap = ops.where(ops.lt(tap, zero), largest.load(ops, index), tap)
        places: list[V] = []
        for axis, i, begin in reversed([*zip(axes, index[-dims:], first(ops, index), strict=True)]):
            steps = ops.remainder(tap, ops.constant(axis.taps, INT))
            steps = ops.mul(steps, ops.constant(axis.dilation, INT))
            at = ops.add(ops.index_expr(axis.element(i, sympy.Integer(0))[0], INT), steps)
            tap = ops.floordiv(tap, ops.constant(axis.taps, INT))
            # in the padding: the window holds nothing but minus infinity
            places.insert(0, ops.where(ops.lt(at, zero), begin, at))
        return place(ops, places)

    return values, ctx.pointwise(size, x.device, found, INT)


def maximum_gradient(
    ctx: LoweringContext, grad: TensorValue, at: TensorValue, axes: Axes
) -> TensorValue:
    """Each window gives its gradient to its largest element."""
    dims, dtype = len(axes), grad.dtype if rounds(grad) else computation_dtype(grad.dtype)
    holders = unfolded(ctx, at, axes, -1, back=True)
    parts = unfolded(ctx, converted(ctx, grad, dtype), axes, back=True)

    def body(ops: Ops, index: Sequence[Index]) -> V:
        mine = ops.index_expr(flat(axes, index[-2 * dims : -dims]), INT)
        chosen = ops.eq(holders.load(ops, index), mine)
        return ops.where(chosen, parts.load(ops, index), ops.constant(0.0, dtype))

    terms = ctx.pointwise(parts.size, grad.device, body, dtype)
    return converted(ctx, folded(ctx, "sum", terms, dims, rounds(grad)), grad.dtype)


def max_pool(
    ctx: LoweringContext, x: TensorValue, kernel: Any, step: Any = (), padding: Any = (0,),
    dilation: Any = (1,), ceil_mode: bool = False, *, dims: int,
) -> tuple[TensorValue, TensorValue]:  # fmt: skip
    layout = ctx.layouts[0]
    assert layout is not None
    return maximum(ctx, x, strided(x, layout.size[-dims:], kernel, step, padding, dilation))


def max_pool_backward(
    ctx: LoweringContext, grad: TensorValue, x: TensorValue, kernel: Any, step: Any, padding: Any,
    dilation: Any, ceil_mode: bool, at: TensorValue, dims: int,
) -> TensorValue:  # fmt: skip
    axes = strided(x, grad.size[-dims:], kernel, step, padding, dilation)
    return maximum_gradient(ctx, grad, at, axes)


RULES: dict[str, Rule] = {
    "avg_pool{}d": avg_pool,
    "avg_pool{}d_backward": avg_pool_backward,
    "max_pool{}d_with_indices": max_pool,
    "max_pool{}d_with_indices_backward": max_pool_backward,
    "_adaptive_avg_pool{}d": lambda ctx, x, counts, dims: average(ctx, x, adaptive(x, counts)),
    "_adaptive_avg_pool{}d_backward": lambda ctx, grad, x, dims: average_gradient(
        ctx, grad, adaptive(x, grad.size[-dims:])
    ),
    "adaptive_max_pool{}d": lambda ctx, x, counts, dims: maximum(ctx, x, adaptive(x, counts)),
    "adaptive_max_pool{}d_backward": lambda ctx, grad, x, at, dims: maximum_gradient(
        ctx, grad, at, adaptive(x, grad.size[-dims:])
    ),
}
for _dims in (2, 3):
    for _name, _rule in RULES.items():
        _op = getattr(aten, _name.format(_dims)).default
        lowering(_op)(functools.partial(_rule, dims=_dims))
