"""The bodies of a fused node become one body.

A value stored by one body and loaded by a later one at the same index is handed over directly; a buffer
that lives inside the kernel alone loses its store; equal values are computed once, with the origins of
all their uses. What the real compiler does with its CSE and store caches while it prints
(torch/_inductor/codegen/common.py) happens here once, on data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import sympy
import torch

from minicompile.errors import VerifyError
from minicompile.ops.handler import Index
from minicompile.scheduling.body import LoopBody, Recorder, Rewriter, Value, drop_dead
from minicompile.scheduling.nodes import FusedSchedulerNode
from minicompile.shapes.expr import loop_symbol, same


def merge(
    node: FusedSchedulerNode, internal: Collection[str], dtypes: Mapping[str, torch.dtype]
) -> tuple[LoopBody, set[Value]]:
    """All bodies of `node` as one, and its stores that run for every (x, r) although their index has no r.

    `internal` names the buffers that never reach memory.
    Raises VerifyError if a body loads an element of a fused buffer other than the one just stored.
    """
    merger = _Merger(node, internal, dtypes)
    every: set[Value] = set()
    for body, level in zip(node.bodies, node.levels, strict=True):
        merger.renamed = {}
        merger.rewrite(body)
        if level == "elem":
            every.update(merger.new[store] for store in body.stores if store.kind != "store")
    drop_dead(merger.body)
    return merger.body, every


def take_over(body: LoopBody, memory: Mapping[str, str]) -> None:
    """Loads of a buffer that dies become loads of the one written in its place; `memory`: new to old."""
    new = {old: new for new, old in memory.items()}
    for load in body.loads:
        load.buffer = new.get(load.buffer, load.buffer)


def check_in_place(name: str, order: Iterable[Value], buffers: Collection[str]) -> None:
    """Raises VerifyError where the values, as they are executed, overwrite what is still to be read."""
    places: dict[str, Index | None] = {}
    written: set[str] = set()
    for value in order:
        if value.buffer in buffers:
            moved = places.setdefault(value.buffer, value.index) != value.index
            if moved or value.buffer in written:
                raise VerifyError(
                    f"{name}: {value.buffer} is written over what is still to be read"
                )
            written.update([value.buffer] if value.op == "store" else [])


class _Merger(Rewriter):
    def __init__(
        self, node: FusedSchedulerNode, internal: Collection[str], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        super().__init__(node.name, node.ranges, node.reduction_ranges)
        self.internal, self.dtypes = internal, dtypes
        self.stored: dict[str, tuple[Index, Value]] = {}
        self.renamed: dict[sympy.Symbol, Index] = {}
        """Symbols of loaded indices in the body at hand, and those that stand for them in the new one."""
        self.symbols: set[sympy.Symbol] = set()

    def moved(self, value: Value) -> Index | None:
        """A value's index by the new symbols."""
        return None if value.index is None else value.index.xreplace(self.renamed)

    def visit_other(self, ops: Recorder, value: Value) -> Value:
        return self.again(value, index=self.moved(value))

    def visit_indirect(self, ops: Recorder, value: Value) -> Value:
        """Equal indices share a symbol; different ones get different symbols across bodies."""
        copy = self.again(value, symbol=loop_symbol(f"i{len(self.symbols)}"))
        assert value.symbol is not None and copy.symbol is not None
        self.symbols.add(copy.symbol)
        self.renamed[value.symbol] = copy.symbol
        return copy

    def visit_load(self, ops: Recorder, value: Value) -> Value:
        index = self.moved(value)
        if value.buffer not in self.stored:
            return self.again(value, index=index)
        where, source = self.stored[value.buffer]
        if not same(where, index):
            raise VerifyError(
                f"{self.body.name}: loads {value.buffer}[{index}] where {value.buffer}[{where}] was "
                "just stored: these loops can't share a kernel"
            )
        found: Value = ops.to_dtype(source, value.dtype)
        if value.mask is not None:
            zero = ops.constant(0, value.dtype)
            found = ops.pointwise("where", self.new[value.mask], found, zero)
        return found

    def visit_store(self, ops: Recorder, value: Value) -> Value:
        index = self.moved(value)
        if value.kind == "store":
            source = self.new[value.inputs[0]]
            found = ops.to_dtype(source, self.dtypes[value.buffer])
            self.stored[value.buffer] = (index, found)
            if value.buffer in self.internal:
                return source
        return self.again(value, index=index)
