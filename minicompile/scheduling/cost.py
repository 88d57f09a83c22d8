"""What a kernel moves and computes, at the size hints. (Of extern calls: debug/roofline.py.)

    bytes    every element that is read or written, once: a slice counts what it touches, a broadcast row its
             own length, a gather at most its table, several slices at most the buffer; what stays inside a
             kernel counts nothing
    flops    by ops/table.py

The real compiler: SchedulerNode.get_read_write_buffers_sizes in torch/_inductor/scheduler.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import sympy

from minicompile.lowering.ir import Layout
from minicompile.ops.display import bytes_text
from minicompile.ops.table import POINTWISE
from minicompile.scheduling.body import LoopBody, Value, loop_level
from minicompile.scheduling.nodes import Schedule
from minicompile.shapes.expr import size_hint
from minicompile.shapes.strided import Footprint, Hints, StridedIndex, elements, footprint


@dataclass(frozen=True)
class Cost:
    """Bytes of memory traffic, and operations: a fused multiply-add is two."""

    bytes_read: int
    bytes_written: int
    flops: int

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.flops / max(self.bytes, 1)

    def __str__(self) -> str:
        read, written = bytes_text(self.bytes_read), bytes_text(self.bytes_written)
        return f"reads {read}, writes {written}, {self.flops} operations"


Places = dict[str, set[Footprint]]
"""What is touched in each buffer."""


def cost_of(body: LoopBody, every: Collection[Value], schedule: Schedule) -> Cost:
    """What one kernel moves and computes. `every`: stores that run for all r though their index has no r."""
    hints = schedule.graph.size_hints
    rows, points = (
        math.prod(size_hint(size, hints) for size in ranges.values())
        for ranges in (body.ranges, body.all_ranges)
    )
    along_rows = loop_level(body, every).union(body.reductions)
    flops = sum(operations(v) * (points if v in along_rows else rows) for v in body.values)
    return cost_at(flops, *touched_by_loops(body, hints), schedule)


def cost_at(flops: int, read: Places, written: Places, schedule: Schedule) -> Cost:
    """The cost of operations, and of reading and writing these places."""
    hints, layouts = schedule.graph.size_hints, schedule.layouts
    bytes_read, bytes_written = (
        sum(bytes_of(found, layouts[name], hints) for name, found in places.items())
        for places in (read, written)
    )
    return Cost(bytes_read, bytes_written, flops)


def touched_by_loops(body: LoopBody, hints: Hints) -> tuple[Places, Places]:
    """What the loops of one kernel read and write in memory."""
    read: Places = {}
    written: Places = {}
    for value in (*body.loads, *body.stores):
        place = touched_by(value, body, hints)
        if value.op == "load" or value.kind != "store":  # an addition reads, too
            read.setdefault(value.buffer, set()).add(place)
        if value.op == "store":
            written.setdefault(value.buffer, set()).add(place)
    return read, written


def bytes_of(places: Iterable[Footprint], layout: Layout, hints: Hints) -> int:
    """At most what the places have together, and what there is."""
    there = (size_hint(size, hints) for size in (layout.numel, layout.storage_size))
    together = sum(elements(place, hints) for place in places)
    return min(*there, together) * layout.dtype.itemsize


def touched_by(value: Value, body: LoopBody, hints: Hints) -> Footprint:
    """The elements of a load or store, over all iterations of its loops."""
    assert value.index is not None
    ranges = body.all_ranges
    if value.indirect:
        loops = sorted(loops_of(value) & ranges.keys(), key=str)
        return sympy.Dummy(), tuple((loop, ranges[loop]) for loop in loops)
    return footprint(StridedIndex.of(value.index, ranges), ranges, hints)


def loops_of(value: Value) -> set[sympy.Symbol]:
    """The symbols that decide where a load or store goes, through loaded indices too."""
    found = set(value.index.free_symbols) if value.index is not None else set()
    return found.union(*map(loops_of, value.indirect if value.index is not None else value.inputs))


def operations(value: Value) -> int:
    """For one element. Moving and converting is free."""
    if value.op in POINTWISE:
        return POINTWISE[value.op].flops
    return int(value.op in ("reduction", "scan") or value.kind == "atomic_add")
