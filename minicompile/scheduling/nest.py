"""`LoopNest`: loop bodies over common loops, while the scheduler is still splitting, merging and reordering.

A nest starts as one node with its own loops. Joining two nests (align.py) splits loops until both have the
same ones; `finished` merges what can be merged again, orders the loops by strides and rewrites the bodies.
Only strides change on the way, so trying a fusion costs little.
The real compiler: SchedulerNode.apply_new_loop_order in torch/_inductor/scheduler.py, sizevars.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import sympy

from minicompile.ops.handler import Index
from minicompile.scheduling.body import LoopBody, iterate_indices
from minicompile.scheduling.dependencies import (
    Footprint,
    Hints,
    Part,
    StridedIndex,
    divide,
    footprint,
    times,
)
from minicompile.scheduling.nodes import FusedSchedulerNode, SchedulerNode
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
)

Level = Literal["row", "elem"]
Loops = dict[sympy.Symbol, Size]
POSITION = sympy.Symbol("position")
"""Key of an argmax's own index: where in the reduced row an element stands."""
MAX_SPLITS = 8
"""Rounds of splitting loops at divisions: each makes at least one index simpler."""


@dataclass(frozen=True)
class Access:
    """One place where a node touches a buffer. `index` is None where it depends on loaded values."""

    node: SchedulerNode
    buffer: str
    index: StridedIndex | None
    footprint: Footprint | None
    own: Index
    """The index in the node's own loops, as its body shows it."""


@dataclass(eq=False)
class Member:
    """A node in a nest: its indices over the nest's loops, by their formula in the node's own body."""

    node: SchedulerNode
    order: int
    """Position in the graph: members run in this order."""
    level: Level
    indices: dict[Index, StridedIndex]
    footprints: dict[Index, Footprint | None]

    def accesses(self, op: Literal["load", "store"]) -> Iterator[Access]:
        seen: set[tuple[str, Index | None]] = set()
        for value in self.node.body.values:
            if value.op != op or (value.buffer, value.index) in seen:
                continue
            assert value.index is not None
            seen.add((value.buffer, value.index))
            index = None if value.indirect else self.indices[value.index]
            where = None if value.indirect else self.footprints[value.index]
            yield Access(self.node, value.buffer, index, where, value.index)


@dataclass(eq=False)
class LoopNest:
    """Nodes over common loops `x` (parallel) and `r` (reduction), outermost first."""

    members: list[Member]
    x: Loops
    r: Loops
    hints: Hints

    @functools.cached_property
    def reads(self) -> list[Access]:
        return [a for m in self.members for a in m.accesses("load")]

    @functools.cached_property
    def writes(self) -> list[Access]:
        return [a for m in self.members for a in m.accesses("store")]

    @functools.cached_property
    def written(self) -> frozenset[str]:
        return frozenset(a.buffer for a in self.writes)

    @functools.cached_property
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
        return {**self.x, **self.r} if self.r else self.x

    @property
    def numel(self) -> Size:
        return product(self.x.values())

    @property
    def reduction_numel(self) -> Size:
        return product(self.r.values())

    def space(self) -> str:
        """`[8, 64]` or `[8] over [64]`."""
        x = f"[{', '.join(map(str, self.x.values()))}]"
        return f"{x} over [{', '.join(map(str, self.r.values()))}]" if self.r else x

    def indices(self) -> Iterator[StridedIndex]:
        for member in self.members:
            yield from member.indices.values()

    def substituted(
        self, parts: Mapping[sympy.Symbol, Sequence[Part]], x: Loops, r: Loops
    ) -> LoopNest:
        """Every index over new loops x and r."""
        ranges = {**x, **r}
        members = [
            Member(
                m.node,
                m.order,
                m.level,
                {k: index.substituted(parts, ranges) for k, index in m.indices.items()},
                m.footprints,
            )
            for m in self.members
        ]
        return LoopNest(members, x, r, self.hints)


def nest_of(node: SchedulerNode, order: int, hints: Hints) -> LoopNest:
    """A node alone: loops of size 1 dropped, split where an index divides, merged where all allow it."""
    names = {v: loop_symbol(f"{v}_{order}") for v in node.body.all_ranges}
    x = {names[v]: size for v, size in node.body.ranges.items()}
    r = {names[v]: size for v, size in node.body.reduction_ranges.items()}
    ranges = {**x, **r}
    own = node.body.all_ranges
    parts: dict[sympy.Symbol, list[Part]] = {v: [(names[v], 1)] for v in own}
    plain = {index: StridedIndex.of(index, own) for index in iterate_indices(node.body)}
    marks = {k: footprint(index, own, hints) for k, index in plain.items()}
    indices = {k: index.substituted(parts, ranges) for k, index in plain.items()}
    if any(v.kind in ("argmax", "argmin") for v in node.body.reductions):
        strides = contiguous_strides(tuple(r.values()))
        indices[POSITION] = StridedIndex(ZERO, dict(zip(r, strides, strict=True)))
    level: Level = "elem" if r else "row"
    nest = LoopNest([Member(node, order, level, indices, marks)], x, r, hints)
    return merged(_split_at_divisions(_without_units(nest)))


def _without_units(nest: LoopNest) -> LoopNest:
    """Without loops of size 1; a reduction keeps one, so that it stays a reduction."""
    x = {v: size for v, size in nest.x.items() if size != 1}
    r = {v: size for v, size in nest.r.items() if size != 1}
    if nest.r and not r:
        r = dict([next(iter(nest.r.items()))])
    gone: dict[sympy.Symbol, list[Part]] = {v: [] for v, size in nest.loops.items() if size == 1}
    return nest.substituted(gone, x, r) if gone else nest


def _split_at_divisions(nest: LoopNest) -> LoopNest:
    """`p // 64` and `p % 64` need no division when p is split into `64*a + b`."""
    for _ in range(MAX_SPLITS):
        cut = next(_cuts(nest), None)
        if cut is None:
            break
        loop, step = cut
        nest = split(nest, {loop: [step]})
    return nest


def _cuts(nest: LoopNest) -> Iterator[tuple[sympy.Symbol, Size]]:
    """Loops to split, and the size of the inner part, that take a division apart."""
    loops = nest.loops
    for index in nest.indices():
        if index.rest is ZERO:
            continue
        for call in sorted(index.rest.atoms(FloorDiv, ModularIndexing), key=str):
            base = StridedIndex.of(sympy.expand(call.args[0]), loops)
            if base.rest is not ZERO:
                continue
            cuts = [call.args[1]]
            if isinstance(call, ModularIndexing):
                cuts.append(call.args[1] * call.args[2])
            for cut in cuts:
                for loop, stride in base.strides.items():
                    inner = divide(int(cut) if cut.is_Integer else cut, stride)
                    if inner is None or inner == 1 or same(inner, loops[loop]):
                        continue
                    if divide(loops[loop], inner) is not None:
                        yield loop, inner


def split(nest: LoopNest, cuts: Mapping[sympy.Symbol, Sequence[Size]]) -> LoopNest:
    """Split loops: for each, the sizes of its inner parts from the innermost on; the rest is outermost."""
    parts: dict[sympy.Symbol, list[Part]] = {}
    fresh: dict[sympy.Symbol, Loops] = {}
    for loop, inner in cuts.items():
        weight: Size = 1
        found: list[tuple[sympy.Symbol, Size, Size]] = []
        rest = nest.loops[loop]
        for k, size in enumerate(inner):
            found.append((loop_symbol(f"{loop}_{k}"), weight, size))
            weight = times(weight, size)
            left = divide(rest, size)
            assert left is not None, f"{rest} / {size}"
            rest = left
        found.append((loop_symbol(f"{loop}_{len(inner)}"), weight, rest))
        found.reverse()
        parts[loop] = [(v, w) for v, w, _ in found]
        fresh[loop] = {v: size for v, _, size in found}

    def renewed(loops: Loops) -> Loops:
        out: Loops = {}
        for loop, size in loops.items():
            out.update(fresh.get(loop, {loop: size}))
        return out

    return nest.substituted(parts, renewed(nest.x), renewed(nest.r))


def merged(nest: LoopNest) -> LoopNest:
    """Loops that every index walks as one become one: `64*a + b` with b < 64 everywhere."""
    while (pair := _mergeable(nest)) is not None:
        outer, inner = pair
        size = times(nest.loops[outer], nest.loops[inner])
        # the new loop has the inner one's stride and the outer one's place
        x = {
            inner if v is outer else v: size if v is outer else n
            for v, n in nest.x.items()
            if v is not inner
        }
        r = {
            inner if v is outer else v: size if v is outer else n
            for v, n in nest.r.items()
            if v is not inner
        }
        nest = nest.substituted({outer: []}, x, r)
    return nest


def _mergeable(nest: LoopNest) -> tuple[sympy.Symbol, sympy.Symbol] | None:
    indices = list(nest.indices())
    for loops in (nest.x, nest.r):
        free = [v for v in loops if not any(index.blocks(v) for index in indices)]
        for outer in free:
            for inner in free:
                if outer is inner or loops[inner] == 0 or loops[outer] == 0:
                    continue
                if all(_walks_as_one(i, outer, inner, loops[inner]) for i in indices):
                    return outer, inner
    return None


def _walks_as_one(
    index: StridedIndex, outer: sympy.Symbol, inner: sympy.Symbol, size: Size
) -> bool:
    if inner not in index.strides:
        return outer not in index.strides
    return outer in index.strides and same(index.strides[outer], times(index.strides[inner], size))


def finished(nest: LoopNest) -> FusedSchedulerNode:
    """The kernel: as few loops as possible, in the best order, named x0.. and r0.., bodies rewritten."""
    nest = merged(nest)
    names: dict[sympy.Symbol, sympy.Symbol] = {}
    for prefix, loops in (("x", nest.x), ("r", nest.r)):
        for k, loop in enumerate(loop_order(nest, loops)):
            names[loop] = loop_symbol(f"{prefix}{k}")
    ranges = {name: nest.x[v] for v, name in names.items() if v in nest.x}
    reduction_ranges = {name: nest.r[v] for v, name in names.items() if v in nest.r}
    every = {**ranges, **reduction_ranges}
    parts = {v: [(name, 1)] for v, name in names.items()}
    bodies: list[LoopBody] = []
    for member in nest.members:
        indices = {
            old: simplify_index(index.substituted(parts, every).expr, every)
            for old, index in member.indices.items()
        }
        inner = reduction_ranges if member.level == "elem" else {}
        bodies.append(member.node.body.with_indices(indices, dict(ranges), dict(inner)))
    levels = [m.level for m in nest.members]
    return FusedSchedulerNode(nest.nodes, bodies, levels, ranges, reduction_ranges)


def loop_order(nest: LoopNest, loops: Iterable[sympy.Symbol]) -> list[sympy.Symbol]:
    """Outermost first: by falling stride of the largest write, then of the other accesses.

    The innermost loop is the one that most accesses walk with stride 1, writes before reads.
    Loops that an argmax runs over keep the order in which it counts.
    """
    chosen = list(loops)
    if len(chosen) < 2:
        return chosen
    hints = nest.hints
    for member in nest.members:
        position = member.indices.get(POSITION)
        if position is not None and chosen[0] in position.strides:
            return sorted(chosen, key=lambda v: -size_hint(position.strides[v], hints))

    def weight(access: Access) -> int:
        assert access.index is not None
        return size_hint(
            product(nest.loops[v] for v in access.index.strides if v in nest.loops), hints
        )

    known = [
        [a for a in accesses if a.index is not None and a.index.rest is ZERO]
        for accesses in (nest.writes, nest.reads)
    ]
    ranked = [
        a.index.strides
        for group in known
        for a in sorted(group, key=weight, reverse=True)
        if a.index
    ]
    position_of = {v: k for k, v in enumerate(chosen)}

    def strides(v: sympy.Symbol) -> tuple[int, ...]:
        for found in ranked:
            if v in found:
                return (-size_hint(found[v], hints), position_of[v])
        return (0, position_of[v])

    def contiguous(v: sympy.Symbol) -> tuple[int, int]:
        writes, reads = (
            sum(weight(a) for a in group if a.index and a.index.strides.get(v) == 1)
            for group in known
        )
        return writes, reads

    order = sorted(chosen, key=strides)
    innermost = max(order, key=lambda v: (contiguous(v), order.index(v)))
    if contiguous(innermost) > contiguous(order[-1]):
        order.remove(innermost)
        order.append(innermost)
    return order
