"""Lowered values: what a graph's nodes become while it is lowered.

    TensorValue := a Storage, seen through an index map or as it is
    Storage     := a formula for the element at an index; once it is realized, a buffer in memory

Every value answers `load(ops, index)`: the element at an index, in any handler. A formula that is never
realized is computed again inside each loop body that reads it (inlining); realizing it (context.py) gives
it memory, and bodies emitted later load from there.
The real compiler: TensorBox, StorageBox, BaseView in torch/_inductor/ir.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from minicompile.lowering.ir import Buffer, FormulaOps, Layout
from minicompile.lowering.views import ViewMap
from minicompile.ops.handler import Index, InnerFn, Ops, V
from minicompile.ops.origin import NO_ORIGINS, Origins
from minicompile.ops.table import POINTWISE, result_dtype
from minicompile.shapes.expr import Expr, Size, loop_symbol

NEVER = 1 << 60
"""A position after every operation."""


@dataclass(frozen=True)
class Positions:
    """Integers that are known without loading: `formula(index)`, from `low` to `high` inclusive."""

    formula: Callable[[Sequence[Index]], Index]
    low: Size
    high: Size


@dataclass(eq=False)
class Storage:
    """All elements of a new tensor, a graph input or an operator's result."""

    layout: Layout
    """How its elements lie in memory, or are going to if it is realized."""
    origins: Origins = NO_ORIGINS
    buffer: Buffer | None = None
    """Its memory, once it has some."""
    position: int = -1
    """That of the operation which fills the buffer among all; -1 for inputs."""
    fn: InnerFn | None = None
    cost: Probe = field(default_factory=lambda: Probe())
    """What a dry run of the formula told."""
    positions: Positions | None = None
    """Set where the value is an index by formula."""


class TensorValue:
    """A tensor in the making: size, dtype, device, and the element at each index.

    `origins` are those of the views between it and its storage.
    """

    def __init__(
        self,
        storage: Storage,
        view: ViewMap | None = None,
        origins: Origins = NO_ORIGINS,
        layout: Layout | None = None,
    ) -> None:
        self.storage, self.view, self.origins = storage, view, origins
        self.size = storage.layout.size if view is None else view.size
        self.dtype, self.device = storage.layout.dtype, storage.layout.device
        self._layout, self._settled = layout, layout is not None

    @property
    def dim(self) -> int:
        return len(self.size)

    @property
    def layout(self) -> Layout | None:
        """How it lies in its storage's memory; None without memory, or if the view isn't strided there."""
        buffer = self.storage.buffer
        if not self._settled and buffer is not None:
            self._layout = buffer.layout if self.view is None else self.view.over(buffer.layout)
            self._settled = True
        return self._layout

    def through(self, view: ViewMap, origins: Origins) -> TensorValue:
        """This value seen through one more view."""
        layout = view.over(self.layout) if self.layout is not None else None
        whole = view if self.view is None else view.after(self.view)
        return TensorValue(self.storage, whole, self.origins | origins, layout)

    def load(self, ops: Ops, index: Sequence[Index]) -> V:
        """The element at `index` (one expression per dimension)."""
        return Scope.over(ops).through(self.origins).element(self, index)

    def load_as(self, ops: Ops, index: Sequence[Index], dtype: torch.dtype) -> V:
        """The element converted to `dtype`."""
        value = self.load(ops, index)
        return value if self.dtype is dtype else ops.to_dtype(value, dtype)

    @property
    def known_positions(self) -> Positions | None:
        """The value's integers where no load is needed to know them."""
        found, view = self.storage.positions, self.view
        if found is None or view is None:
            return found
        return Positions(lambda i: found.formula(view.index(i)), found.low, found.high)


@dataclass(eq=False)
class Scope(Ops):
    """The handler that values see while one loop body is evaluated; the real handler is inside.

    It remembers formulas by index, so that a diamond in the graph is evaluated once, and it keeps whose
    origins the next operations carry. `position` is that of the body's buffer among the operations: storages
    realized later are still inlined.
    """

    inner: Ops
    position: int = NEVER
    origins: Origins = NO_ORIGINS
    views: Origins = NO_ORIGINS
    memo: dict[Any, V] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.arithmetic = self.inner.at(self.origins)
        seen = self.origins | self.views
        self.addressing = self.inner.at(seen) if self.views else self.arithmetic

    @staticmethod
    def over(ops: Ops) -> Scope:
        return ops if isinstance(ops, Scope) else Scope(ops)

    def at(self, origins: Origins) -> Scope:
        return Scope(self.inner, self.position, origins, self.views, self.memo)

    def through(self, views: Origins) -> Scope:
        """Indices computed from here on also depend on these views (a slice's bounds, say)."""
        if views <= self.views:
            return self
        return Scope(self.inner, self.position, self.origins, self.views | views, self.memo)

    def element(self, value: TensorValue, index: Sequence[Index]) -> V:
        """Load an element that is in memory before this body runs; compute any other by its formula."""
        storage, layout = value.storage, value.layout
        buffer = storage.buffer if storage.position < self.position else None
        if buffer is not None and layout is not None:
            return self.load(buffer.name, layout.index(index))
        index = index if value.view is None else value.view.index(index)
        if buffer is not None:
            return self.load(buffer.name, storage.layout.index(index))
        key = (storage, *index)
        if key not in self.memo:
            assert storage.fn is not None
            self.memo[key] = storage.fn(self.at(storage.origins), index)
        return self.memo[key]

    def load(self, buffer: str, index: Index) -> V:
        return self.addressing.load(buffer, index)

    def constant(self, value: float | int | bool, dtype: torch.dtype) -> V:
        return self.arithmetic.constant(value, dtype)

    def index_expr(self, expr: Index, dtype: torch.dtype) -> V:
        return self.addressing.index_expr(sympy.sympify(expr), dtype)

    def to_dtype(self, value: V, dtype: torch.dtype) -> V:
        return self.arithmetic.to_dtype(value, dtype)

    def masked(self, mask: V, body: Callable[[Ops], V], other: float | int | bool) -> V:
        # values of the body exist only where the mask holds: they are remembered apart
        def inside(inner: Ops) -> V:
            return body(Scope(inner, self.position, self.origins, self.views))

        return self.arithmetic.masked(mask, inside, other)

    def indirect_indexing(
        self, value: V, size: Expr | int, check: bool = True, wrap_negative: bool = True
    ) -> Index:
        return self.addressing.indirect_indexing(value, size, check, wrap_negative)

    def pointwise(self, name: str, *values: V) -> V:
        return self.arithmetic.pointwise(name, *values)


def scoped(fn: Callable[..., V], position: int, origins: Origins) -> Callable[..., V]:
    """A loop body as other rooms get it: `fn`, written for a Scope, for any handler."""
    return lambda ops, *indices: fn(Scope(ops, position, origins), *indices)


class Probe(Scope):
    """A dry run of one formula: notes its dtype, what it reads and how much it computes.

    A value is its dtype. Inlined formulas are not entered: what they read and cost is known. Raises TypeError
    where the formula mixes dtypes.
    """

    def __init__(self) -> None:
        super().__init__(FormulaOps())
        self.dtype: torch.dtype
        self.storages: set[Storage] = set()
        """What it reads directly."""
        self.view_origins = NO_ORIGINS
        """The origins of the views that it reads through."""
        self.flops, self.depth = 0, 1
        """One element's arithmetic, written out with everything inlined; how many formulas it nests."""
        self.indices = 0
        self.checks = False
        """Whether it looks itself whether an index is in range."""

    def reached(self) -> tuple[dict[str, Buffer], Origins]:
        """Buffers a body made now would load from, and the origins of all that it would inline."""
        buffers: dict[str, Buffer] = {}
        origins: set[Any] = set(self.view_origins)
        seen: set[Storage] = set()
        waiting = list(self.storages)
        while waiting:
            storage = waiting.pop()
            if storage.buffer is not None:
                buffers[storage.buffer.name] = storage.buffer
            elif storage not in seen:
                seen.add(storage)
                origins |= storage.origins | storage.cost.view_origins
                waiting.extend(storage.cost.storages)
        return buffers, frozenset(origins)

    def at(self, origins: Origins) -> Probe:
        return self

    def through(self, views: Origins) -> Probe:
        self.view_origins |= views
        return self

    def element(self, value: TensorValue, index: Sequence[Index]) -> torch.dtype:
        storage, cost = value.storage, value.storage.cost
        self.storages.add(storage)
        if storage.buffer is None:
            self.flops += cost.flops
            self.depth = max(self.depth, cost.depth + 1)
        return value.dtype

    def constant(self, value: float | int | bool, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def index_expr(self, expr: Index, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def to_dtype(self, value: torch.dtype, dtype: torch.dtype) -> torch.dtype:
        self.flops += 1
        return dtype

    def masked(self, mask: torch.dtype, body: Callable[[Ops], V], other: float | int | bool) -> V:
        self.flops += 1
        return body(self)

    def indirect_indexing(
        self, value: torch.dtype, size: Expr | int, check: bool = True, wrap_negative: bool = True
    ) -> Index:
        self.flops += 2
        self.indices += 1
        self.checks |= check
        return loop_symbol(f"indirect{self.indices}")

    def pointwise(self, name: str, *values: torch.dtype) -> torch.dtype:
        self.flops += POINTWISE[name].flops
        return result_dtype(name, values)
