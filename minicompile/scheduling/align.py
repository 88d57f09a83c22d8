"""Finds common loops for two nests that are to share a kernel: which loops to split, merge or reorder.

Nests that share a buffer are matched by the strides with which they walk it: a loop of 64 with stride 1
meets a loop of 4096 with stride 1, so the latter becomes 64 x 64. What no shared
buffer decides (broadcast dimensions) is matched by size. A nest without
reductions joins one with loops (x, r) either once per x ("row") or for every (x, r) ("elem").
The real compiler does part of this in torch/_inductor/scheduler.py (reorder_loops_by_dep_pair).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter

from sympy import Symbol

from minicompile.scheduling.nest import (
    POSITION,
    Access,
    Level,
    LoopNest,
    Loops,
    split,
)
from minicompile.scheduling.reasons import Verdict, index_mismatch, loop_mismatch, refused
from minicompile.shapes.expr import product, same
from minicompile.shapes.strided import divide, elements

MAX_HINTS = 6
"""Most shared reads that are tried as a hint for how loops correspond."""


class Matching:
    """Which loops of nest a are which loops of nest b. Both nests are split on the way."""

    def __init__(self, a: LoopNest, b: LoopNest, partners: Mapping[Symbol, Symbol]) -> None:
        self.a, self.b = a, b
        self.partners = dict(partners)
        """Each matched loop's partner, both ways."""

    def free(self, loops: Iterable[Symbol]) -> list[Symbol]:
        """Loops without a partner, outermost first."""
        return [v for v in loops if v not in self.partners]

    def pair(self, mine: Symbol, theirs: Symbol) -> bool:
        """Make two loops one, splitting the larger one where the smaller ends."""
        a, b = self.a, self.b
        if a.is_reduction and b.is_reduction and (mine in a.x) != (theirs in b.x):
            return False
        size, other = a.loops[mine], b.loops[theirs]
        if not same(size, other):
            if divide(other, size) is not None:
                self.b, theirs = split(b, theirs, size)
            elif divide(size, other) is not None:
                self.a, mine = split(a, mine, other)
            else:
                return False
        self.partners.update({mine: theirs, theirs: mine})
        return True

    def match(self, mine: Access, theirs: Access) -> bool:
        """Pair loops so that an access of nest a and one of nest b touch the same element."""
        while True:
            one, other = self.a.at(mine), self.b.at(theirs)
            assert one is not None and other is not None
            ours, others = self.free(one.strides), self.free(other.strides)
            if not ours or not others:
                return not ours and not others and same(one.offset, other.offset)
            walks = ((v, w) for v in ours for w in others if same(one.strides[v], other.strides[w]))
            walk = next(walks, None)
            if walk is None or not self.pair(*walk):
                return False

    def pair_by_size(
        self, of_a: Callable[[LoopNest], Loops], of_b: Callable[[LoopNest], Loops]
    ) -> bool:
        """Pair what is left, from the innermost outwards: any correspondence is right here."""
        while True:
            ours, others = self.free(of_a(self.a)), self.free(of_b(self.b))
            if not ours or not others:
                return not ours and not others
            if not self.pair(ours[-1], others[-1]):
                return False


def flows(a: LoopNest, b: LoopNest) -> Iterator[tuple[Access, Access, bool]]:
    """(write, read, a writes) for every read in one nest of what the other writes."""
    for writer, reader in ((a, b), (b, a)):
        for read in reader.reads:
            for write in writer.writes:
                if read.buffer == write.buffer:
                    yield write, read, writer is a


def align(a: LoopNest, b: LoopNest) -> LoopNest | Verdict:
    """Both nests over common loops, or why there are none.

    Right by construction: whatever one nest reads of the other's, it reads at the point where it is written.
    """
    matching = Matching(a, b, {})
    for write, read, forwards in flows(a, b):
        if write.key is None or read.key is None:
            told = f"{read.node} reads {read.buffer} at a position known only at run time"
            return refused(f"{told}: all of it must be there", "unknown_index")
        if not (matching.match(write, read) if forwards else matching.match(read, write)):
            return index_mismatch(write, read, a.hints)
    matching = _with_shared_reads(matching)
    level = _complete(matching)
    return level if isinstance(level, Verdict) else joined(matching, level)


def _with_shared_reads(matching: Matching) -> Matching:
    """Let buffers that both nests read decide how the remaining loops correspond."""
    a, b = matching.a, matching.b
    theirs: dict[object, list[Access]] = {}
    for access in b.reads:
        theirs.setdefault((access.buffer, access.footprint), []).append(access)
    shared = [
        (elements(mine.footprint, a.hints), mine, other)
        for mine in a.reads
        if mine.footprint is not None
        for other in theirs.get((mine.buffer, mine.footprint), ())
    ]
    for _, mine, other in sorted(shared, key=lambda found: -found[0])[:MAX_HINTS]:
        trial = Matching(matching.a, matching.b, matching.partners)
        if trial.match(mine, other):
            matching = trial
    return matching


def _complete(matching: Matching) -> Level | Verdict | None:
    """Pair what no index decided. Of a nest that joins a reduction, the level of its bodies."""
    a, b = matching.a, matching.b
    x, r, every = attrgetter("x"), attrgetter("r"), attrgetter("loops")
    if a.is_reduction == b.is_reduction:
        paired = matching.pair_by_size(x, x) and matching.pair_by_size(r, r)
        return None if paired else loop_mismatch(a, b)
    reduction, plain = (a, b) if a.is_reduction else (b, a)
    rows, places = (
        product(nest.x[v] for v in matching.free(nest.x)) for nest in (reduction, plain)
    )
    row = len(matching.free(reduction.r)) == len(reduction.r) and same(rows, places)
    target = x if row else every
    if not matching.pair_by_size(*((target, x) if a.is_reduction else (x, target))):
        return loop_mismatch(a, b)
    return "row" if row else "elem"


def joined(matching: Matching, level: Level | None) -> LoopNest | Verdict:
    """Both nests over the loops of one, and a check that nothing is read where it isn't yet written."""
    a, b = matching.a, matching.b
    lead, other = (b, a) if b.is_reduction and not a.is_reduction else (a, b)
    parts = {v: [(matching.partners[v], 1)] for v in other.loops}
    moved = other.substituted(parts, lead.x, lead.r)
    members = [*lead.members, *(replace(m, level=level or m.level) for m in moved.members)]
    members.sort(key=lambda m: m.order)
    nest = LoopNest(members, lead.x, lead.r, {**lead.indices, **moved.indices}, a.hints)
    return _flaw(nest) or nest


def _flaw(nest: LoopNest) -> Verdict | None:
    """The soundness of a fused kernel, checked on the result whatever way it was found."""
    positions = [i for (_, formula), i in nest.indices.items() if formula is POSITION]
    if any(not p.equals(positions[0]) for p in positions):
        return refused("they run over the row in different orders", "order")
    writes = {a.buffer: a for a in nest.writes}
    for read in nest.reads:
        write = writes.get(read.buffer)
        if write is None:
            continue
        written, used = nest.at(write), nest.at(read)
        if written is None or used is None or not written.equals(used):
            return index_mismatch(write, read, nest.hints)
    return None
