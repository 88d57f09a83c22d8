"""The bodies of a fused node become one body.

A value stored by one body and loaded by a later one at the same index is handed over directly; a buffer
that lives inside the kernel alone loses its store; equal values are computed once, with the origins of
all their uses. What the real compiler does with its CSE and store caches while it prints
(torch/_inductor/codegen/common.py) happens here once, on data.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from minicompile.errors import VerifyError
from minicompile.ops.handler import Index
from minicompile.scheduling.body import LoopBody, Recorder, Value, drop_dead
from minicompile.scheduling.nodes import FusedSchedulerNode
from minicompile.shapes.expr import loop_symbol, same


@dataclass(frozen=True)
class Merged:
    """One body, and the stores in it that run for every (x, r) although their index has no r."""

    body: LoopBody
    every: frozenset[Value]


def merge(
    node: FusedSchedulerNode, internal: Collection[str], dtypes: Mapping[str, torch.dtype]
) -> Merged:
    """All bodies of `node` as one. `internal` names the buffers that never reach memory.

    Raises VerifyError if a body loads an element of a fused buffer other than the one just stored.
    """
    merger = _Merger(node, internal, dtypes)
    every = [
        merger.copies[store]
        for body, level in zip(node.bodies, node.levels, strict=True)
        for store in merger.add(body)
        if store.kind != "store" and level == "elem"
    ]
    drop_dead(merger.body)
    return Merged(merger.body, frozenset(every))


class _Merger:
    def __init__(
        self, node: FusedSchedulerNode, internal: Collection[str], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        self.body = LoopBody(node.name, dict(node.ranges), dict(node.reduction_ranges))
        self.ops = Recorder(self.body)
        self.internal, self.dtypes = internal, dtypes
        self.copies: dict[Value, Value] = {}
        self.stored: dict[str, tuple[Index, Value]] = {}
        self.symbols: set[sympy.Symbol] = set()

    def add(self, body: LoopBody) -> list[Value]:
        """Copy a body's values; gives its stores."""
        renamed: dict[sympy.Symbol, Index] = {}
        for value in body.values:
            index = None if value.index is None else value.index.xreplace(renamed)
            if value.op == "load":
                copy = self._load(value, index)
            elif value.op == "store":
                copy = self._store(value, index)
            elif value.op == "indirect":
                # equal indices share a symbol; different ones get different symbols across bodies
                symbol = loop_symbol(f"i{len(self.symbols)}")
                copy = self._emit(value, None, symbol=symbol)
                assert value.symbol is not None and copy.symbol is not None
                self.symbols.add(copy.symbol)
                renamed[value.symbol] = copy.symbol
            else:
                copy = self._emit(value, index)
            self.copies[value] = copy
        return body.stores

    def _emit(self, value: Value, index: Index | None, **changed: Any) -> Value:
        return self.ops.append(replace(value.copy(self.copies, index), **changed))

    def _load(self, value: Value, index: Index | None) -> Value:
        if value.buffer not in self.stored:
            return self._emit(value, index)
        where, source = self.stored[value.buffer]
        if not same(where, index):
            raise VerifyError(
                f"{self.body.name}: loads {value.buffer}[{index}] where {value.buffer}[{where}] was "
                "just stored: these loops can't share a kernel"
            )
        ops = self.ops.at(value.origins)
        found: Value = ops.to_dtype(source, value.dtype)
        if value.mask is not None:
            zero = ops.constant(0, value.dtype)
            found = ops.pointwise("where", self.copies[value.mask], found, zero)
        return found

    def _store(self, value: Value, index: Index) -> Value:
        if value.kind == "store":
            source = self.copies[value.inputs[0]]
            found = self.ops.at(value.origins).to_dtype(source, self.dtypes[value.buffer])
            self.stored[value.buffer] = (index, found)
            if value.buffer in self.internal:
                return source
        return self._emit(value, index)
