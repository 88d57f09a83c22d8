"""`LoopNest`: the nodes of one future kernel and their loops, which can be split, merged and reordered.

A nest starts as one node with its own loops. Joining two nests (align.py) splits loops until both have the
same ones; `finished` merges what can be merged again, orders the loops by strides and rewrites the bodies.
Every step is a substitution of loops in the nodes' indices.

Those are taken apart into strides until then (shapes/strided.py). Two nodes touch a buffer in the same order
when their strides match, a loop can be split or merged when every index allows it: trying a fusion costs
little.
The real compiler: torch/_inductor/dependencies.py (MemoryDep, extract_read_writes),
SchedulerNode.apply_new_loop_order in torch/_inductor/scheduler.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import sympy

from minicompile.ops.handler import Index
from minicompile.ops.table import POSITIONS
from minicompile.scheduling.body import LoopBody, Value, iterate_indices
from minicompile.scheduling.nodes import Dependency, FusedSchedulerNode, SchedulerNode
from minicompile.shapes.expr import (
    ZERO,
    FloorDiv,
    ModularIndexing,
    Size,
    contiguous_strides,
    loop_symbol,
    product,
    same,
    simplify_index,
    size_hint,
    to_size,
)
from minicompile.shapes.strided import (
    Footprint,
    Hints,
    Part,
    StridedIndex,
    divide,
    footprint,
    times,
)

Level = Literal["row", "elem"]
Loops = dict[sympy.Symbol, Size]
Key = tuple[int, Index]
"""An index: the number of its node, and its formula in the node's own loops."""
POSITION = sympy.Symbol("position")
"""Formula of an argmax's or a scan's own index: where in the row an element stands."""


def dependencies(body: LoopBody) -> tuple[tuple[Dependency, ...], tuple[Dependency, ...]]:
    """What a body reads and writes, each place once, in order."""

    def dependency(value: Value) -> Dependency:
        if value.indirect or value.index is None:
            return Dependency(value.buffer, None)
        used = value.index.free_symbols
        ranges = tuple((loop, size) for loop, size in body.all_ranges.items() if loop in used)
        return Dependency(value.buffer, value.index, ranges)

    reads, writes = (dict.fromkeys(map(dependency, group)) for group in (body.loads, body.stores))
    return tuple(reads), tuple(writes)


@dataclass(frozen=True)
class Access:
    """One place where a node touches a buffer. Without key and footprint if it depends on loaded values."""

    node: str
    buffer: str
    key: Key | None
    footprint: Footprint | None

    @property
    def place(self) -> tuple[str, Footprint | None]:
        """The elements; without a footprint, those that the data tells."""
        return self.buffer, self.footprint


@dataclass(frozen=True)
class Member:
    """A node in a nest. Members run in the order of their numbers, which is the graph's."""

    node: SchedulerNode
    order: int
    level: Level
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]


@dataclass(eq=False)
class LoopNest:
    """Nodes over common loops `x` (parallel) and `r` (of a reduction or scan), outermost first."""

    members: list[Member]
    x: Loops
    r: Loops
    indices: dict[Key, StridedIndex]
    hints: Hints

    @cached_property
    def reads(self) -> list[Access]:
        return [a for m in self.members for a in m.reads]

    @cached_property
    def writes(self) -> list[Access]:
        return [a for m in self.members for a in m.writes]

    @cached_property
    def written(self) -> frozenset[str]:
        return frozenset(a.buffer for a in self.writes)

    @cached_property
    def touched(self) -> frozenset[str]:
        return self.written | {a.buffer for a in self.reads}

    @property
    def name(self) -> str:
        return "_".join(m.node.name for m in self.members)

    @property
    def nodes(self) -> list[SchedulerNode]:
        return [m.node for m in self.members]

    @property
    def is_reduction(self) -> bool:
        return bool(self.r)

    @property
    def loops(self) -> Loops:
        return {**self.x, **self.r}

    def at(self, access: Access) -> StridedIndex | None:
        """The index of an access over the nest's loops; None where it depends on loaded values."""
        return self.indices[access.key] if access.key is not None else None

    def space(self) -> str:
        """`[8, 64]` or `[8] over [64]`."""
        x = f"[{', '.join(map(str, self.x.values()))}]"
        return f"{x} over [{', '.join(map(str, self.r.values()))}]" if self.r else x

    def substituted(
        self, parts: Mapping[sympy.Symbol, Sequence[Part]], x: Loops, r: Loops
    ) -> LoopNest:
        """The same nodes over new loops x and r: each old loop in `parts` is the sum of its parts."""
        ranges = {**x, **r}
        indices = {key: index.substituted(parts, ranges) for key, index in self.indices.items()}
        return LoopNest(self.members, x, r, indices, self.hints)


def nest_of(node: SchedulerNode, order: int, hints: Hints) -> LoopNest:
    """A node alone: loops of size 1 dropped, split where an index divides, merged where all allow it."""
    body, own = node.body, node.body.all_ranges
    indices = {(order, index): StridedIndex.of(index, own) for index in iterate_indices(body)}

    def access(place: Dependency) -> Access:
        if place.index is None:
            return Access(node.name, place.buffer, None, None)
        key = (order, place.index)
        return Access(node.name, place.buffer, key, footprint(indices[key], own, hints))

    reads, writes = (tuple(map(access, places)) for places in (node.reads, node.writes))
    if body.scans or any(v.kind in POSITIONS for v in body.reductions):
        strides = contiguous_strides(tuple(body.reduction_ranges.values()))
        counted = dict(zip(body.reduction_ranges, strides, strict=True))
        indices[order, POSITION] = StridedIndex(ZERO, counted)
    long = [v for v, size in own.items() if size != 1]
    if body.reduction_ranges.keys().isdisjoint(long):  # a reduction stays one
        long += [*body.reduction_ranges][:1]
    names = {v: loop_symbol(f"{v}_{order}") for v in long}
    x, r = (
        {names[v]: size for v, size in loops.items() if v in names}
        for loops in (body.ranges, body.reduction_ranges)
    )
    member = Member(node, order, "elem" if r else "row", reads, writes)
    nest = LoopNest([member], body.ranges, body.reduction_ranges, indices, hints)
    nest = nest.substituted({v: [(names[v], 1)] if v in names else [] for v in own}, x, r)
    return merged(_split_at_divisions(nest))


def split(nest: LoopNest, loop: sympy.Symbol, size: Size) -> tuple[LoopNest, sympy.Symbol]:
    """The nest with `loop = size*outer + inner`, and the inner loop."""
    outer, inner = loop_symbol(f"{loop}_1"), loop_symbol(f"{loop}_0")
    rest = divide(nest.loops[loop], size)
    assert rest is not None, f"{nest.loops[loop]} / {size}"
    x, r = (_replaced(loops, loop, {outer: rest, inner: size}) for loops in (nest.x, nest.r))
    return nest.substituted({loop: [(outer, size), (inner, 1)]}, x, r), inner


def _replaced(loops: Loops, old: sympy.Symbol, new: Loops) -> Loops:
    """The loops with others in the place of one."""
    out: Loops = {}
    for loop, size in loops.items():
        out.update(new if loop is old else {loop: size})
    return out


def _split_at_divisions(nest: LoopNest) -> LoopNest:
    """`p // 64` and `p % 64` need no division when p is split into `64*a + b`."""
    while cut := next(_cuts(nest), None):
        nest, _inner = split(nest, *cut)
    return nest


def _cuts(nest: LoopNest) -> Iterator[tuple[sympy.Symbol, Size]]:
    """Loops to split, and the size of the inner part, that take a division apart."""
    loops = nest.loops
    for index in nest.indices.values():
        for call in sorted(index.rest.atoms(FloorDiv, ModularIndexing), key=str):
            base = StridedIndex.of(sympy.expand(call.args[0]), loops)
            cuts = [call.args[1]]
            if isinstance(call, ModularIndexing):
                cuts.append(call.args[1] * call.args[2])
            for cut in map(to_size, cuts):
                for loop, stride in base.strides.items():
                    inner = divide(cut, stride)
                    if inner is None or inner == 1 or same(inner, loops[loop]):
                        continue
                    if divide(loops[loop], inner) is not None:
                        yield loop, inner


def merged(nest: LoopNest) -> LoopNest:
    """Loops that every index walks as one become one: `64*a + b` with b < 64 everywhere."""
    while (pair := _mergeable(nest)) is not None:
        outer, inner = pair
        size = times(nest.loops[outer], nest.loops[inner])
        # the new loop has the inner one's stride and the outer one's place
        x, r = (
            _replaced(_replaced(loops, inner, {}), outer, {inner: size})
            for loops in (nest.x, nest.r)
        )
        nest = nest.substituted({outer: []}, x, r)
    return nest


def _mergeable(nest: LoopNest) -> tuple[sympy.Symbol, sympy.Symbol] | None:
    indices = list(nest.indices.values())

    def as_one(outer: sympy.Symbol, inner: sympy.Symbol, size: Size) -> bool:
        for index in indices:
            far, near = index.strides.get(outer), index.strides.get(inner)
            if far is None and near is None:
                continue
            if far is None or near is None or not same(far, times(near, size)):
                return False
        return True

    for loops in (nest.x, nest.r):
        free = [
            v for v, size in loops.items() if size != 0 and not any(i.blocks(v) for i in indices)
        ]
        for outer in free:
            for inner in free:
                if outer is not inner and as_one(outer, inner, loops[inner]):
                    return outer, inner
    return None


def finished(nest: LoopNest) -> FusedSchedulerNode:
    """The kernel: as few loops as possible, in the best order, named x0.. and r0.., bodies rewritten."""
    nest = merged(nest)
    names = {
        loop: loop_symbol(f"{prefix}{k}")
        for prefix, loops in (("x", nest.x), ("r", nest.r))
        for k, loop in enumerate(loop_order(nest, loops))
    }
    x = {name: nest.x[v] for v, name in names.items() if v in nest.x}
    r = {name: nest.r[v] for v, name in names.items() if v in nest.r}
    nest = nest.substituted({v: [(name, 1)] for v, name in names.items()}, x, r)
    every = nest.loops

    def rewritten(order: int, index: Index) -> Index:
        return simplify_index(nest.indices[order, index].expr, every)

    bodies = [
        m.node.body.reindexed(partial(rewritten, m.order), x, r if m.level == "elem" else {})
        for m in nest.members
    ]
    return FusedSchedulerNode(nest.nodes, bodies, [m.level for m in nest.members], x, r)


def loop_order(nest: LoopNest, loops: Iterable[sympy.Symbol]) -> list[sympy.Symbol]:
    """Outermost first: by falling stride of the largest write, then of the other accesses.

    The innermost loop is the one that most accesses walk with stride 1, writes before reads.
    Loops that an argmax or a scan runs over keep the order in which it counts.
    """
    order = list(loops)
    if not order:
        return order
    for (_, formula), index in nest.indices.items():
        if formula is POSITION and order[0] in index.strides:
            return sorted(order, key=lambda v: -size_hint(index.strides[v], nest.hints))
    sizes = nest.loops

    def walked(strides: dict[sympy.Symbol, Size]) -> int:
        return size_hint(product(sizes[v] for v in strides), nest.hints)

    def linear(accesses: list[Access]) -> list[dict[sympy.Symbol, Size]]:
        found = [i.strides for i in map(nest.at, accesses) if i is not None and i.rest is ZERO]
        return sorted(found, key=walked, reverse=True)

    writes, reads = linear(nest.writes), linear(nest.reads)

    def stride(v: sympy.Symbol) -> int:
        return abs(size_hint(next((s[v] for s in (*writes, *reads) if v in s), 0), nest.hints))

    def contiguous(v: sympy.Symbol) -> tuple[int, int]:
        first, second = (sum(walked(s) for s in g if s.get(v) == 1) for g in (writes, reads))
        return first, second

    order.sort(key=stride, reverse=True)
    innermost = max(reversed(order), key=contiguous)
    order.remove(innermost)
    return [*order, innermost]
