"""Views as index maps: where an element of the view lies in the tensor it looks at.

A map is all that a lazy value needs. Over memory the same map also says whether the view is strided: then
the linear index is `offset + sum(stride * variable)`, and a library can be handed the view without a copy.
The real compiler: View, PermuteView, ExpandView, SliceView, ReinterpretView in torch/_inductor/ir.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sympy

from minicompile.errors import Unsupported
from minicompile.lowering.ir import Layout, loop_index
from minicompile.ops.handler import Index
from minicompile.shapes.expr import (
    ZERO,
    Expr,
    FloorDiv,
    ModularIndexing,
    Size,
    contiguous_strides,
    exact_quotient,
    is_nonnegative,
    linear_index,
    same,
    simplify_index,
    to_size,
)
from minicompile.shapes.strided import StridedIndex

IndexMap = Callable[[Sequence[Index]], list[Index]]


@dataclass(frozen=True)
class ViewMap:
    """`index` takes an index of the view (of `size`) to one of the base.

    `relayout`, where given, finds the strided layout directly; otherwise it is read off the map.
    """

    size: tuple[Size, ...]
    index: IndexMap
    relayout: Callable[[Layout], Layout | None] | None = None

    def over(self, layout: Layout) -> Layout | None:
        """The view's own layout over memory that lies like `layout`; None if it isn't strided."""
        if self.relayout is not None:
            return self.relayout(layout)
        variables = loop_index(len(self.size), "v")
        expr = layout.index(self.index(variables))
        if expr.has(FloorDiv, ModularIndexing):
            expr = simplify_index(expr, dict(zip(variables, self.size, strict=True)))
        found = affine(expr, variables)
        if found is None:
            return None
        stride, offset = found
        return Layout(layout.device, layout.dtype, self.size, stride, offset)

    def after(self, first: ViewMap) -> ViewMap:
        """This view of the view `first`."""
        return ViewMap(self.size, lambda index: first.index(self.index(index)))


def affine(expr: Expr, variables: Sequence[sympy.Symbol]) -> tuple[tuple[Size, ...], Size] | None:
    """(coefficient of each variable, rest) of an index; None if not affine, or a coefficient is negative."""
    found = StridedIndex.of(sympy.expand(expr), dict.fromkeys(variables, 1))
    if found.rest is not ZERO or not all(map(is_nonnegative, found.strides.values())):
        return None
    return tuple(found.strides.get(v, 0) for v in variables), to_size(found.offset)


def wrap_dim(dim: int, count: int) -> int:
    """A dimension counted from the end, as one from the start (0-d tensors have one)."""
    return dim % max(count, 1)


def placed(rank: int, places: Sequence[int]) -> IndexMap:
    """The k-th index of the view goes to dimension `places[k]` of a base of `rank`; the others are 0."""

    def index(i: Sequence[Index]) -> list[Index]:
        out = [ZERO] * rank
        for at, dim in zip(i, places, strict=True):
            out[dim] = at
        return out

    return index


def permute(size: Sequence[Size], dims: Sequence[int]) -> ViewMap:
    order = [wrap_dim(d, len(size)) for d in dims]
    return ViewMap(tuple(size[d] for d in order), placed(len(size), order))


def expand(size: Sequence[Size], target: tuple[Size, ...]) -> ViewMap:
    """Broadcast to `target`."""
    return ViewMap(target, lambda i: broadcast_index(i, size, target))


def broadcast_index(
    index: Sequence[Index], size: Sequence[Size], target: Sequence[Size]
) -> list[Index]:
    """The element of a tensor of `size` at an index of the `target` that it is broadcast to."""
    added = len(target) - len(size)
    pairs = zip(size, target[added:], index[added:], strict=True)
    return [ZERO if have == 1 and want != 1 else i for have, want, i in pairs]


def from_start(extent: Size, at: Size) -> Size:
    """A position in a dimension, which counts from the end if it is negative."""
    return to_size(extent + at) if isinstance(at, int) and at < 0 else at


def slice_start(extent: Size, start: Size | None) -> Size:
    """The first element of a slice as eager reads `start`: from the end if negative, cut to the dimension.

    One beyond the dimension's end is left as it is where sizes are symbolic: no element is taken.
    """
    start = from_start(extent, start or 0)
    if isinstance(start, int) and isinstance(extent, int):
        return min(max(start, 0), extent)
    if not is_nonnegative(start):
        raise Unsupported(f"slice from {start} of a dimension of size {extent}")
    return start


def slice_(size: Sequence[Size], dim: int, start: Size | None, step: int, length: Size) -> ViewMap:
    """The `length` elements start, start + step, ... of a dimension."""
    dim = wrap_dim(dim, len(size))
    low = slice_start(size[dim], start)
    sliced = (*size[:dim], length, *size[dim + 1 :])
    return ViewMap(sliced, lambda i: [*i[:dim], i[dim] * step + low, *i[dim + 1 :]])


def select(size: Sequence[Size], dim: int, at: Size) -> ViewMap:
    dim = wrap_dim(dim, len(size))
    position = sympy.sympify(from_start(size[dim], at))
    return ViewMap((*size[:dim], *size[dim + 1 :]), lambda i: [*i[:dim], position, *i[dim:]])


def unsqueeze(size: Sequence[Size], dim: int) -> ViewMap:
    dim = dim % (len(size) + 1)
    return ViewMap((*size[:dim], 1, *size[dim:]), lambda i: [*i[:dim], *i[dim + 1 :]])


def squeeze(size: Sequence[Size], dims: int | Sequence[int]) -> ViewMap:
    chosen = [wrap_dim(d, len(size)) for d in ([dims] if isinstance(dims, int) else dims)]
    kept = [d for d in range(len(size)) if d not in chosen or size[d] != 1]
    return ViewMap(tuple(size[d] for d in kept), placed(len(size), kept))


def flip(size: Sequence[Size], dims: Sequence[int]) -> ViewMap:
    turned = {wrap_dim(d, len(size)) for d in dims}
    return ViewMap(
        tuple(size), lambda i: [size[d] - 1 - v if d in turned else v for d, v in enumerate(i)]
    )


Group = tuple[list[int], list[int]]
"""Dimensions of the base and of the view that hold the same elements."""


def reshape_groups(old: Sequence[Size], new: Sequence[Size]) -> list[Group]:
    """Match dimensions by their products, in groups as small as possible, without dimensions of size 1."""
    a = [d for d, extent in enumerate(old) if extent != 1]
    b = [d for d, extent in enumerate(new) if extent != 1]
    groups: list[Group] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start = i, j
        left, right = old[a[i]], new[b[j]]
        i, j = i + 1, j + 1
        while not same(left, right):
            if _divides(left, right) and i < len(a):
                left, i = to_size(left * old[a[i]]), i + 1
            elif _divides(right, left) and j < len(b):
                right, j = to_size(right * new[b[j]]), j + 1
            else:  # no telling: all that remains is one group
                i, j = len(a), len(b)
                break
        groups.append((a[start[0] : i], b[start[1] : j]))
    if i < len(a) or j < len(b):
        raise Unsupported(f"view of {tuple(old)} as {tuple(new)}: element counts differ")
    return groups


def _divides(a: Size, b: Size) -> bool:
    """Whether the group of `a` is the one to grow."""
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    return exact_quotient(sympy.sympify(b), sympy.sympify(a)) is not None


def reshape(old: Sequence[Size], new: Sequence[Size]) -> ViewMap:
    """The same elements in row-major order, as `new`: divisions only inside groups that merge dimensions."""
    new = tuple(map(to_size, new))
    groups = reshape_groups(old, new)

    def index(i: Sequence[Index]) -> list[Index]:
        out: list[Index] = [ZERO] * len(old)
        for base_dims, view_dims in groups:
            sizes = [new[d] for d in view_dims]
            linear = linear_index([i[d] for d in view_dims], contiguous_strides(sizes))
            for dim, digit in zip(
                base_dims, digits(linear, [old[d] for d in base_dims]), strict=True
            ):
                out[dim] = digit
        return out

    return ViewMap(new, index, lambda layout: _reshape_layout(layout, new, groups))


def digits(linear: Expr, sizes: Sequence[Size]) -> list[Expr]:
    """The index whose row-major position in `sizes` is `linear`."""
    out = []
    for k, (extent, step) in enumerate(zip(sizes, contiguous_strides(sizes), strict=True)):
        step = sympy.sympify(step)
        if k == 0:
            out.append(FloorDiv(linear, step))
        else:
            out.append(ModularIndexing(linear, step, sympy.sympify(extent)))
    return out


def _reshape_layout(
    layout: Layout, new: tuple[Size, ...], groups: Sequence[Group]
) -> Layout | None:
    stride = list(contiguous_strides(new))  # of dimensions of size 1 too: libraries look at them
    for base_dims, view_dims in groups:
        for outer, inner in itertools.pairwise(base_dims):
            merged = to_size(layout.stride[inner] * layout.size[inner])
            if not same(layout.stride[outer], merged):
                return None
        step = layout.stride[base_dims[-1]]
        for dim in reversed(view_dims):
            stride[dim] = step
            step = to_size(step * new[dim])
    return Layout(layout.device, layout.dtype, new, tuple(stride), layout.offset)
