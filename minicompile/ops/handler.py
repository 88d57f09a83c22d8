"""`Ops`: the one protocol in which loop bodies are written, and which every analysis and printer implements.

    def inner_fn(ops, index):                     # a loop body: a function of a handler and an index
        x = ops.load("buf0", 64 * index[0] + index[1])
        return ops.maximum(x, ops.constant(0.0, torch.float32))

What a value is depends on the handler: a node of a loop body, a line of C++, a number in the reference
interpreter, a count of loads. Pointwise operations (`ops.add`, ...) are the rows of `ops/table.py`: a
handler implements `pointwise(name, *values)` once and gets all of them. Nothing here is ambient: the
handler is an argument (the real compiler's `V.ops` is a thread-local: torch/_inductor/virtualized.py).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import sympy
import torch

from minicompile.ops.origin import Origins
from minicompile.ops.table import POINTWISE, ReductionKind, ScanKind

V: TypeAlias = Any
"""A handler's own kind of value."""

Index: TypeAlias = sympy.Expr
StoreMode = Literal["store", "atomic_add"]


class Ops(abc.ABC):
    """Base of all handlers. `ops.add(a, b)` is `ops.pointwise("add", a, b)` for each row of the table."""

    @abc.abstractmethod
    def load(self, buffer: str, index: Index) -> V:
        """The element of `buffer` at a linear index (in elements)."""

    def store(self, buffer: str, index: Index, value: V, mode: StoreMode = "store") -> V:
        """Write an element; "atomic_add" adds to what is there. Only for handlers of whole bodies."""
        raise NotImplementedError

    @abc.abstractmethod
    def constant(self, value: float | int | bool, dtype: torch.dtype) -> V: ...

    @abc.abstractmethod
    def index_expr(self, expr: Index, dtype: torch.dtype) -> V:
        """An index expression as a value of `dtype` (computed wide enough not to overflow); also a float
        that is known at run time, `f0` or `-f0`.
        """

    @abc.abstractmethod
    def to_dtype(self, value: V, dtype: torch.dtype) -> V:
        """Convert as eager does: float to int truncates, to bool compares with 0."""

    @abc.abstractmethod
    def masked(self, mask: V, body: Callable[[Ops], V], other: float | int | bool) -> V:
        """`body` where mask holds, else `other`; loads inside happen only where the mask holds."""

    @abc.abstractmethod
    def indirect_indexing(
        self, value: V, size: sympy.Expr | int, check: bool = True, wrap_negative: bool = True
    ) -> Index:
        """A loaded integer as an index into a dimension of `size`; negative values count from the end.

        With `check`, a value out of range is an error at run time, as in eager.
        """

    def reduction(self, kind: ReductionKind, dtype: torch.dtype, value: V) -> V:
        """Reduce `value` over the reduction variables; argmax/argmin give the linear position as int64."""
        raise NotImplementedError

    def scan(self, kind: ScanKind, value: V) -> V:
        """`value` combined with all before it along r0."""
        raise NotImplementedError

    @abc.abstractmethod
    def pointwise(self, name: str, *values: V) -> V:
        """One operation of the table."""

    def at(self, origins: Origins) -> Ops:
        """A handler whose values carry `origins`. Handlers that keep no provenance return themselves."""
        return self

    def __getattr__(self, name: str) -> Callable[..., V]:
        if name in POINTWISE:
            return lambda *values: self.pointwise(name, *values)
        raise AttributeError(f"no loop operation {name!r}")


InnerFn = Callable[[Ops, Sequence[Index]], V]
"""A pointwise loop body: the value at an index."""

ReductionFn = Callable[[Ops, Sequence[Index], Sequence[Index]], V]
"""A reduction's loop body: the value at an index and a reduction index."""
