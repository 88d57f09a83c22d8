"""What a kernel or an extern call moves and computes, at the size hints.

    bytes    every element that is read or written, once: a slice counts what it touches, a broadcast row its
             own length, a gather at most its table; what stays inside a kernel counts nothing
    flops    by ops/table.py for loops, by torch's public formulas for products, convolutions and attention;
             other library operators count as traffic alone

The real compiler: SchedulerNode.get_read_write_buffers_sizes in torch/_inductor/scheduler.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.utils.flop_counter import flop_registry

from minicompile import compat
from minicompile.lowering.ir import Buffer, ExternKernel, Layout, View
from minicompile.ops.device import DeviceSpec
from minicompile.ops.display import bytes_text
from minicompile.ops.table import POINTWISE
from minicompile.scheduling.body import LoopBody, Value, loop_level
from minicompile.scheduling.nodes import FusedSchedulerNode, Schedule, ScheduledNode
from minicompile.shapes.expr import bounds, size_hint

Hints = Mapping[sympy.Symbol, int]


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

    def seconds(self, spec: DeviceSpec) -> float:
        """The larger of the times that the traffic and the arithmetic need at least."""
        return max(self.bytes / spec.bytes_per_second, self.flops / spec.flops_per_second)

    def __str__(self) -> str:
        read, written = bytes_text(self.bytes_read), bytes_text(self.bytes_written)
        return f"reads {read}, writes {written}, {self.flops} operations"


@dataclass(frozen=True)
class Touched:
    """Elements of a buffer: how many, and where the first and the last lie (None: somewhere in it)."""

    count: int
    first: int | None = None
    last: int | None = None
    shape: object = None
    """Equal for equal sets of elements."""


Places = dict[str, set[Touched]]
"""What is touched in each buffer."""


def costs_of(schedule: Schedule) -> list[Cost]:
    """What each node of a schedule moves and computes, in running order."""
    return [cost_of(node, schedule) for node in schedule.nodes]


def cost_of(node: ScheduledNode, schedule: Schedule) -> Cost:
    """What one scheduled node moves and computes."""
    hints, layouts = schedule.graph.size_hints, schedule.layouts
    if isinstance(node, FusedSchedulerNode):
        flops = loop_flops(node, hints)
        read, written = touched_by_loops(node.bodies, hints, schedule.memory.internal)
    else:
        flops, read, written = library_flops(node.kernel, hints), {}, {}
        for view in node.kernel.views():
            read.setdefault(view.buffer, set()).add(touched_by_view(view.layout, hints))
        for output in filter(None, node.kernel.outputs):
            written[output.name] = {touched_by_view(output.layout, hints)}
    bytes_read, bytes_written = (
        sum(bytes_of(found, layouts[name], hints) for name, found in places.items())
        for places in (read, written)
    )
    return Cost(bytes_read, bytes_written, flops)


def touched_by_loops(
    bodies: Sequence[LoopBody], hints: Hints, internal: Collection[str] = ()
) -> tuple[Places, Places]:
    """What the loops of one kernel read and write in memory."""
    read: Places = {}
    written: Places = {}
    stored = {v.buffer for body in bodies for v in body.stores if v.kind == "store"}
    for body in bodies:
        ranges = {v: size_hint(size, hints) for v, size in body.all_ranges.items()}
        for value in (*body.loads, *body.stores):
            handed_over = value.op == "load" and value.buffer in stored
            if value.buffer in internal or handed_over:
                continue
            place = touched_by(value, ranges, hints)
            if value.op == "load" or value.kind != "store":  # an addition reads, too
                read.setdefault(value.buffer, set()).add(place)
            if value.op == "store":
                written.setdefault(value.buffer, set()).add(place)
    return read, written


def bytes_of(places: set[Touched], layout: Layout, hints: Hints) -> int:
    """At most what the places have together, and what there is."""
    there = (size_hint(size, hints) for size in (layout.numel, layout.storage_size))
    return min(*there, together(places)) * layout.dtype.itemsize


def together(places: set[Touched]) -> int:
    """At most so many elements of a buffer: those of all places, and what lies between their ends."""
    count = sum(place.count for place in places)
    firsts, lasts = [p.first for p in places], [p.last for p in places]
    if count and None not in firsts:
        count = min(count, max(lasts) - min(firsts) + 1)  # type: ignore[type-var, operator]
    return count


def touched_by_view(layout: Layout, hints: Hints) -> Touched:
    size, stride = ([size_hint(n, hints) for n in part] for part in (layout.size, layout.stride))
    return strided(zip(stride, size, strict=True), size_hint(layout.offset, hints))


def touched_by(value: Value, ranges: Mapping[sympy.Symbol, int], hints: Hints) -> Touched:
    """The elements of a load or store, over all iterations of its loops."""
    assert value.index is not None
    index = value.index.xreplace(hints)
    terms = sympy.expand(index).as_coefficients_dict()
    offset = int(terms.pop(sympy.S.One, 0))
    if terms.keys() <= ranges.keys():
        return strided(((int(step), ranges[loop]) for loop, step in terms.items()), offset)
    iterations = math.prod(ranges[loop] for loop in loops_of(value) & ranges.keys())
    ends = bounds(index, ranges)
    if ends is None or 0 in ranges.values():
        return Touched(iterations, shape=value)
    first, last = map(int, ends)
    return Touched(min(iterations, last - first + 1), first, last, index)


def strided(steps: Iterable[tuple[int, int]], offset: int) -> Touched:
    """The elements `offset + sum(stride * i)`, 0 <= i < size, for (stride, size) pairs."""
    steps = [(stride, size) for stride, size in steps if size != 1]
    if any(size == 0 for _, size in steps):
        return Touched(0, offset, offset)
    count, length, unit = 1, 0, 0
    shape: list[tuple[int, int]] = []
    for stride, size in sorted((abs(stride), size) for stride, size in steps if stride):
        unit, length = math.gcd(unit, stride), length + stride * (size - 1)
        count = min(count * size, length // unit + 1)  # the second where windows overlap
        if shape and math.prod(shape[-1]) == stride:
            stride, size = shape[-1][0], shape.pop()[1] * size
        shape.append((stride, size))
    first = offset + sum(stride * (size - 1) for stride, size in steps if stride < 0)
    return Touched(count, first, first + length, tuple(shape))


def loops_of(value: Value) -> set[sympy.Symbol]:
    """The symbols that decide where a load or store goes, through loaded indices too."""
    found = set(value.index.free_symbols) if value.index is not None else set()
    return found.union(*map(loops_of, value.indirect if value.index is not None else value.inputs))


def loop_flops(node: FusedSchedulerNode, hints: Hints) -> int:
    """Operations of a kernel; what several of its bodies compute alike counts once."""
    known: dict[object, Value] = {}
    stored: dict[str, Value] = {}
    flops = 0
    for body in node.bodies:
        rows, every = (
            math.prod(size_hint(size, hints) for size in ranges.values())
            for ranges in (body.ranges, body.all_ranges)
        )
        new: dict[Value, Value] = {}
        elements = loop_level(body).union(body.reductions)
        for value in body.values:
            copy = stored.get(value.buffer) if value.op == "load" else None
            copy = copy or value.copy(new)
            new[value] = known.setdefault(copy.key, copy)
            if value.op == "store" and value.kind == "store":
                stored[value.buffer] = new[value.inputs[0]]
            elif new[value] is copy:
                flops += operations(value) * (every if value in elements else rows)
    return flops


def operations(value: Value) -> int:
    """For one element. Moving and converting is free."""
    if value.op in POINTWISE:
        return POINTWISE[value.op].flops
    return int(value.op in ("reduction", "scan") or value.kind == "atomic_add")


def library_flops(kernel: ExternKernel, hints: Hints) -> int:
    """By torch's formula for the operator; 0 where it has none."""
    name = str(kernel.op.overloadpacket).rpartition(".")[2].removesuffix("_for_cpu")
    packet = getattr(torch.ops.aten, name, None)
    formula: Callable[..., int] | None = flop_registry.get(packet)
    if formula is None:
        return 0

    def shape(argument: Any) -> Any:
        if isinstance(argument, View | Buffer):
            return [size_hint(size, hints) for size in argument.layout.size]
        return argument

    given = kernel.args, kernel.kwargs, list(kernel.outputs)
    args, kwargs, outputs = compat.tree_map(shape, given)
    return formula(*args, **kwargs, out_val=outputs[0] if len(outputs) == 1 else outputs)
