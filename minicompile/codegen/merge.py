"""The bodies of a fused node become one body.

A value stored by one body and loaded by a later one at the same index is handed over directly; a buffer
that lives inside the kernel alone loses its store; equal values are computed once, with the origins of
all their uses. What the real compiler does with its CSE and store caches while it prints
(torch/_inductor/codegen/common.py) happens here once, on data, by the rules of the table `MERGE`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import sympy
import torch

from minicompile.codegen.rewrite import Rewriter, Rules
from minicompile.errors import VerifyError
from minicompile.ops.handler import Index
from minicompile.scheduling.body import LoopBody, Value, drop_dead
from minicompile.scheduling.nodes import FusedSchedulerNode
from minicompile.shapes.expr import loop_symbol, same


def merge(
    node: FusedSchedulerNode, internal: Collection[str], dtypes: Mapping[str, torch.dtype]
) -> tuple[LoopBody, set[Value]]:
    """All bodies of `node` as one, and its stores that run for every (x, r) although their index has no r.

    `internal` names the buffers that never reach memory.
    Raises VerifyError if a body loads an element of a fused buffer other than the one just stored.
    """
    merger = Merger(node, internal, dtypes)
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


MERGE = Rules("merge", "name -> rewrite of a loop operation where bodies become one")


class Merger(Rewriter):
    """Applies `MERGE` to the bodies of a node, one after the other."""

    def __init__(
        self, node: FusedSchedulerNode, internal: Collection[str], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        super().__init__(MERGE, node.name, node.ranges, node.reduction_ranges, dtypes)
        self.internal = internal
        self.stored: dict[str, tuple[Index | None, Value]] = {}
        """The value that each buffer got, and where."""
        self.renamed: dict[sympy.Symbol, Index] = {}
        """Symbols of loaded indices in the body at hand, and those that stand for them in the new one."""
        self.symbols: set[sympy.Symbol] = set()

    def renewed(self, value: Value) -> Value:
        index = value.index
        return value.copy(self.new, None if index is None else index.xreplace(self.renamed))


@MERGE.rule("indirect", why="a symbol means one loaded index, whatever body it comes from")
def shared_symbol(ops: Merger, value: Value) -> Value:
    "the same index, by a symbol of its own"
    copy = ops.again(value, symbol=loop_symbol(f"i{len(ops.symbols)}"))
    assert value.symbol is not None and copy.symbol is not None
    ops.symbols.add(copy.symbol)
    ops.renamed[value.symbol] = copy.symbol
    return copy


def just_stored(ops: Merger, value: Value) -> bool:
    "the kernel has stored to the buffer"
    return value.buffer in ops.stored


@MERGE.rule("load", when=just_stored, why="the value is at hand")
def handed_over(ops: Merger, value: Value) -> Value:
    "the stored value"
    where, source = ops.stored[value.buffer]
    if not same(where, value.index):
        raise VerifyError(
            f"{ops.body.name}: loads {value.buffer}[{value.index}] where {value.buffer}[{where}] was "
            "just stored: these loops can't share a kernel"
        )
    return ops.to_dtype(source, value.dtype)


def plain(ops: Merger, value: Value) -> bool:
    "it isn't added to what is there"
    return value.kind == "store"


@MERGE.rule("store", when=plain, why="later bodies load it; of an internal buffer nobody else does")
def remembered(ops: Merger, value: Value) -> Value:
    "the store, unless the buffer is internal"
    (source,) = value.inputs
    ops.stored[value.buffer] = value.index, ops.to_dtype(source, ops.dtypes[value.buffer])
    return source if value.buffer in ops.internal else ops.again(value)
