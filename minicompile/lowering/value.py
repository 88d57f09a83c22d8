"""Lowered values: what a graph's nodes become while it is lowered.

    TensorValue := BufferValue(buffer, layout)      memory, seen with some strides
                 | LazyValue(fn)                    not computed yet: a formula for the element at an index
                 | ViewValue(base, map)             a lazy value seen through an index map

Every value answers `load(ops, index)`: the element at an index, in any handler. A lazy value that is never
realized is computed again inside each loop body that reads it (inlining); realizing it (context.py) gives
it memory, and bodies emitted later load from there.
The real compiler: TensorBox, StorageBox, BaseView in torch/_inductor/ir.py.
"""

from __future__ import annotations

import abc
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch

from minicompile.lowering.ir import Buffer, Layout
from minicompile.lowering.views import ViewMap
from minicompile.ops.handler import Index, InnerFn, Ops, StoreMode, V
from minicompile.ops.origin import NO_ORIGINS, Origins
from minicompile.ops.table import POINTWISE, ReductionKind, result_dtype
from minicompile.shapes.expr import Expr, Size, loop_symbol

NEVER = 1 << 60
"""A position after every operation."""


class TensorValue(abc.ABC):
    """A tensor in the making: size, dtype, device, and the element at each index."""

    size: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    origins: Origins

    @abc.abstractmethod
    def load(self, ops: Ops, index: Sequence[Index]) -> V:
        """The element at `index` (one expression per dimension)."""

    @property
    def dim(self) -> int:
        return len(self.size)


class BufferValue(TensorValue):
    """A buffer in memory, or a strided view of it. `origins` are those of the views between."""

    def __init__(self, buffer: Buffer, layout: Layout, origins: Origins = NO_ORIGINS) -> None:
        self.buffer, self.layout, self.origins = buffer, layout, origins
        self.size, self.dtype, self.device = layout.size, layout.dtype, layout.device

    def load(self, ops: Ops, index: Sequence[Index]) -> V:
        scope = Scope.over(ops)
        if self.origins:
            scope = scope.through(self.origins)
        return scope.load_element(self.buffer, self.layout, index)


@dataclass(frozen=True)
class Positions:
    """Integers that are known without loading: `formula(index)`, from `low` to `high` inclusive."""

    formula: Callable[[Sequence[Index]], Index]
    low: Size
    high: Size


class LazyValue(TensorValue):
    """An elementwise formula, with what a probe of it found.

    `flops` is one element's arithmetic with everything inlined, `weight` the size of the formula written out
    as a tree, `depth` how many values it nests, `stride` eager's for this tensor: the layout it takes when it
    is realized. `positions` is set where the value is an index by formula.
    """

    positions: Positions | None = None

    def __init__(
        self,
        size: Sequence[Size],
        device: torch.device,
        fn: InnerFn,
        dtype: torch.dtype,
        probe: Probe,
        weight: int,
        origins: Origins,
        stride: tuple[Size, ...],
    ) -> None:
        self.size, self.dtype, self.device = tuple(size), dtype, device
        self.fn, self.origins, self.stride = fn, origins, stride
        self.inputs = probe.inputs
        self.flops, self.depth = probe.flops, probe.depth
        self.weight = weight + probe.indirect_weight
        self.memory: BufferValue | None = None
        self.position = NEVER

    def load(self, ops: Ops, index: Sequence[Index]) -> V:
        return Scope.over(ops).load_lazy(self, index)


class ViewValue(TensorValue):
    """A lazy value seen through an index map. Nothing is copied or computed by it."""

    def __init__(self, base: LazyValue, view: ViewMap, origins: Origins) -> None:
        self.base, self.view, self.origins = base, view, origins
        self.size, self.dtype, self.device = view.size, base.dtype, base.device

    def load(self, ops: Ops, index: Sequence[Index]) -> V:
        scope = Scope.over(ops)
        if scope.sees(self.base):
            memory = self.strided
            if memory is not None:
                return memory.load(scope, index)
        return self.base.load(scope.through(self.origins), self.view.index(index))

    @functools.cached_property
    def strided(self) -> BufferValue | None:
        """The view over its realized base's memory, or None where it isn't strided."""
        memory = self.base.memory
        assert memory is not None
        layout = self.view.over(memory.layout)
        if layout is None:
            return None
        return BufferValue(memory.buffer, layout, memory.origins | self.origins)


class Inputs:
    """What a formula reads directly: buffers by name, and lazy values with the number of times."""

    def __init__(self) -> None:
        self.buffers: dict[str, Buffer] = {}
        self.lazy: Counter[LazyValue] = Counter()
        self.view_origins: Origins = NO_ORIGINS

    def reached(self) -> tuple[dict[str, Buffer], Origins]:
        """Buffers a body made now would load from, and the origins of all that it would inline."""
        buffers: dict[str, Buffer] = {}
        origins: set[Any] = set()
        seen: set[LazyValue] = set()
        waiting = [self]
        while waiting:
            inputs = waiting.pop()
            buffers.update(inputs.buffers)
            origins |= inputs.view_origins
            for value in inputs.lazy:
                if value.memory is not None:
                    buffers[value.memory.buffer.name] = value.memory.buffer
                elif value not in seen:
                    seen.add(value)
                    origins |= value.origins
                    waiting.append(value.inputs)
        return buffers, frozenset(origins)


class Scope(Ops):
    """The handler that values see while one loop body is evaluated; the real handler is inside.

    It remembers lazy values by index, so that a diamond in the graph is evaluated once, and it keeps whose
    origins the next operations carry. `position` is that of the body's buffer among the operations: values
    realized later are still inlined.
    """

    def __init__(
        self,
        inner: Ops,
        position: int = NEVER,
        origins: Origins = NO_ORIGINS,
        views: Origins = NO_ORIGINS,
        memo: dict[Any, V] | None = None,
    ) -> None:
        self.inner, self.position, self.origins, self.views = inner, position, origins, views
        self.memo: dict[Any, V] = {} if memo is None else memo
        self.arithmetic = inner.at(origins)
        self.addressing = inner.at(origins | views) if views else self.arithmetic

    @staticmethod
    def over(ops: Ops) -> Scope:
        return ops if isinstance(ops, Scope) else Scope(ops)

    def at(self, origins: Origins) -> Scope:
        return Scope(self.inner, self.position, origins, self.views, self.memo)

    def through(self, views: Origins) -> Scope:
        """Indices computed from here on also depend on these views (a slice's bounds, say)."""
        return Scope(self.inner, self.position, self.origins, self.views | views, self.memo)

    def sees(self, value: LazyValue) -> bool:
        """Whether the value's memory is written before this body runs."""
        return value.memory is not None and value.position < self.position

    def load_lazy(self, value: LazyValue, index: Sequence[Index]) -> V:
        if value.memory is not None and self.sees(value):
            return value.memory.load(self, index)
        key = (value, *index)
        if key not in self.memo:
            self.memo[key] = value.fn(self.at(value.origins), index)
        return self.memo[key]

    def load_element(self, buffer: Buffer, layout: Layout, index: Sequence[Index]) -> V:
        return self.load(buffer.name, layout.index(index))

    def load(self, buffer: str, index: Index) -> V:
        return self.addressing.load(buffer, index)

    def store(self, buffer: str, index: Index, value: V, mode: StoreMode = "store") -> V:
        return self.addressing.store(buffer, index, value, mode)

    def constant(self, value: float | int | bool, dtype: torch.dtype) -> V:
        return self.arithmetic.constant(value, dtype)

    def index_expr(self, expr: Index, dtype: torch.dtype) -> V:
        return self.addressing.index_expr(sympy.sympify(expr), dtype)

    def to_dtype(self, value: V, dtype: torch.dtype) -> V:
        return self.arithmetic.to_dtype(value, dtype)

    def bitcast(self, value: V, dtype: torch.dtype) -> V:
        return self.arithmetic.bitcast(value, dtype)

    def masked(self, mask: V, body: Callable[[Ops], V], other: float | int | bool) -> V:
        # values of the body exist only where the mask holds: they are remembered apart
        def inside(inner: Ops) -> V:
            return body(Scope(inner, self.position, self.origins, self.views))

        return self.arithmetic.masked(mask, inside, other)

    def indirect_indexing(
        self, value: V, size: Expr | int, check: bool = True, wrap_negative: bool = True
    ) -> Index:
        return self.addressing.indirect_indexing(value, size, check, wrap_negative)

    def reduction(self, kind: ReductionKind, dtype: torch.dtype, value: V) -> V:
        return self.arithmetic.reduction(kind, dtype, value)

    def pointwise(self, name: str, *values: V) -> V:
        return self.arithmetic.pointwise(name, *values)


Term: TypeAlias = tuple[torch.dtype, int]
"""A probe's value: its dtype and how many operations its formula has when written out as a tree."""


class Probe(Scope):
    """A dry run of one formula: notes its dtype, what it reads and how much it computes.

    Inlined values are not entered: what they read and cost is known. Raises TypeError where the formula
    mixes dtypes.
    """

    def __init__(self) -> None:
        super().__init__(_NO_OPS)
        self.inputs = Inputs()
        self.flops = 0
        self.depth = 1
        self.indirect_weight = 0
        self.indirect = 0

    def at(self, origins: Origins) -> Probe:
        return self

    def through(self, views: Origins) -> Probe:
        self.inputs.view_origins |= views
        return self

    def load_lazy(self, value: LazyValue, index: Sequence[Index]) -> Term:
        if value.memory is not None:
            return self.load_element(value.memory.buffer, value.memory.layout, index)
        key = (value, *index)
        if key not in self.memo:
            self.memo[key] = True
            self.inputs.lazy[value] += 1
            self.flops += value.flops
            self.depth = max(self.depth, value.depth + 1)
        return value.dtype, value.weight

    def load_element(self, buffer: Buffer, layout: Layout, index: Sequence[Index]) -> Term:
        self.inputs.buffers[buffer.name] = buffer
        return layout.dtype, 1

    def constant(self, value: float | int | bool, dtype: torch.dtype) -> Term:
        return dtype, 1

    def index_expr(self, expr: Index, dtype: torch.dtype) -> Term:
        return dtype, 1

    def to_dtype(self, value: Term, dtype: torch.dtype) -> Term:
        self.flops += 1
        return dtype, value[1] + 1

    def bitcast(self, value: Term, dtype: torch.dtype) -> Term:
        if value[0].itemsize != dtype.itemsize:
            raise TypeError(f"bitcast needs dtypes of one width, got {value[0]} and {dtype}")
        return dtype, value[1] + 1

    def masked(self, mask: Term, body: Callable[[Ops], Term], other: float | int | bool) -> Term:
        if mask[0] is not torch.bool:
            raise TypeError(f"ops.masked needs a bool mask, got {mask[0]}")
        self.flops += 1
        inside = body(self)
        return inside[0], inside[1] + mask[1] + 1

    def indirect_indexing(
        self, value: Term, size: Expr | int, check: bool = True, wrap_negative: bool = True
    ) -> Index:
        self.flops += 2
        self.indirect += 1
        self.indirect_weight += value[1]
        return loop_symbol(f"indirect{self.indirect}")

    def pointwise(self, name: str, *values: Term) -> Term:
        self.flops += POINTWISE[name].flops
        dtype = result_dtype(name, tuple(value[0] for value in values))
        return dtype, 1 + sum(value[1] for value in values)


class _Nothing(Ops):
    """The end of a probe's chain of handlers: nothing is ever asked of it."""

    def _none(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a probe computes no values")

    load = store = constant = index_expr = to_dtype = bitcast = masked = _none
    indirect_indexing = reduction = pointwise = _none


_NO_OPS = _Nothing()


def positions_of(value: TensorValue) -> Positions | None:
    """The value's integers where no load is needed to know them."""
    if isinstance(value, LazyValue):
        return value.positions if value.memory is None else None
    if isinstance(value, ViewValue):
        found, view = positions_of(value.base), value.view
        if found is not None:
            return Positions(lambda i: found.formula(view.index(i)), found.low, found.high)
    return None


def base_of(value: TensorValue) -> TensorValue:
    """What a view looks at; other values themselves."""
    return value.base if isinstance(value, ViewValue) else value


def values_in(nested: Any) -> list[TensorValue]:
    """All tensor values in nested tuples, lists and dicts."""
    if isinstance(nested, TensorValue):
        return [nested]
    if isinstance(nested, tuple | list):
        return [value for item in nested for value in values_in(item)]
    if isinstance(nested, Mapping):
        return values_in(tuple(nested.values()))
    return []
