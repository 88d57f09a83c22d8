"""Common loops: when do two loop nests walk the same space, and how must their loops be split for it?

Nests that share a buffer are matched by the strides with which they walk it: a loop of 64 with stride 1
meets a loop of 4096 with stride 1, so the latter becomes 64 x 64. What no shared buffer decides (broadcast
dimensions) is matched by size. A nest without reductions joins one with loops (x, r) either once per x
("row") or for every (x, r) ("elem").
The real compiler does part of this in torch/_inductor/scheduler.py (reorder_loops_by_dep_pair).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import sympy

from minicompile.scheduling.dependencies import Hints, Part, StridedIndex, divide, times
from minicompile.scheduling.nest import POSITION, Access, Level, LoopNest, Member, split
from minicompile.shapes.expr import ZERO, Size, product, same, size_hint

MAX_HINTS = 6
"""Most shared reads that are tried as a hint for how loops correspond."""


@dataclass(frozen=True)
class Refusal:
    """Why two nests can't run as one kernel. `final`: growing the kernels won't change it."""

    reason: str
    final: bool = False


@dataclass(eq=False, slots=True)
class Digit:
    """Part of a loop: it counts to `size` with `weight` in the loop's value."""

    loop: sympy.Symbol
    kind: Literal["x", "r"]
    weight: Size
    size: Size
    partner: Digit | None = None


class Matching:
    """Which digits of nest a's loops are which digits of nest b's."""

    def __init__(self, a: LoopNest, b: LoopNest) -> None:
        self.a, self.b = a, b
        self.digits: dict[sympy.Symbol, list[Digit]] = {}
        for nest in (a, b):
            for v, size in nest.x.items():
                self.digits[v] = [Digit(v, "x", 1, size)]
            for v, size in nest.r.items():
                self.digits[v] = [Digit(v, "r", 1, size)]
        self.kinds_must_agree = a.is_reduction and b.is_reduction

    def copy(self) -> Matching:
        """For trying something that may fail."""
        out = Matching.__new__(Matching)
        out.a, out.b, out.kinds_must_agree = self.a, self.b, self.kinds_must_agree
        new = {d: replace(d) for digits in self.digits.values() for d in digits}
        for copy in new.values():
            copy.partner = new[copy.partner] if copy.partner is not None else None
        out.digits = {v: [new[d] for d in digits] for v, digits in self.digits.items()}
        return out

    def free(self, loops: Iterable[sympy.Symbol]) -> list[Digit]:
        """Digits without a partner, outermost first."""
        return [d for v in loops for d in reversed(self.digits[v]) if d.partner is None]

    def split(self, digit: Digit, size: Size) -> None:
        """Cut a digit (and its partner): the inner part has `size`."""
        upper: list[Digit] = []
        pair = [digit] if digit.partner is None else [digit, digit.partner]
        for d in pair:
            rest = divide(d.size, size)
            assert rest is not None
            upper.append(replace(d, weight=times(d.weight, size), size=rest, partner=None))
            d.size = size
            digits = self.digits[d.loop]
            digits.insert(digits.index(d) + 1, upper[-1])
        if len(upper) == 2:
            upper[0].partner, upper[1].partner = upper[1], upper[0]

    def pair(self, d: Digit, e: Digit) -> bool:
        """Make two digits one loop, cutting the larger one where the smaller ends."""
        if self.kinds_must_agree and d.kind != e.kind:
            return False
        if not same(d.size, e.size):
            if divide(e.size, d.size) is not None:
                self.split(e, d.size)
            elif divide(d.size, e.size) is not None:
                self.split(d, e.size)
            else:
                return False
        d.partner, e.partner = e, d
        return True

    def match(self, mine: StridedIndex, theirs: StridedIndex) -> bool:
        """Pair digits so that an index of nest a and one of nest b touch the same element."""
        if mine.rest is not ZERO or theirs.rest is not ZERO or not same(mine.offset, theirs.offset):
            return False
        while True:
            ours = self._strides(mine)
            others = self._strides(theirs)
            for d, stride in ours.items():
                if d.partner is not None and not (
                    d.partner in others and same(stride, others[d.partner])
                ):
                    return False
            if any(e.partner is not None and e.partner not in ours for e in others):
                return False
            open_ours = {d: s for d, s in ours.items() if d.partner is None}
            open_others = {e: s for e, s in others.items() if e.partner is None}
            if not open_ours or not open_others:
                return not open_ours and not open_others
            found = next(
                (
                    (d, e)
                    for d, s in open_ours.items()
                    for e, t in open_others.items()
                    if same(s, t)
                ),
                None,
            )
            if found is None or not self.pair(*found):
                return False

    def _strides(self, index: StridedIndex) -> dict[Digit, Size]:
        return {
            d: times(stride, d.weight)
            for loop, stride in index.strides.items()
            for d in self.digits[loop]
        }

    def pair_by_size(self, mine: Sequence[Digit], theirs: Sequence[Digit]) -> bool:
        """Pair what is left, from the innermost outwards: any correspondence is right here."""
        a, b = list(mine), list(theirs)
        while a and b:
            d, e = a[-1], b[-1]
            before = {id(x) for v in (d.loop, e.loop) for x in self.digits[v]}
            if not self.pair(d, e):
                return False
            a.pop()
            b.pop()
            for found in (d, e):  # a digit that was cut: its upper part comes next
                for upper in self.digits[found.loop]:
                    if id(upper) not in before:
                        (a if found is d else b).append(upper)
        return not a and not b


def flows(a: LoopNest, b: LoopNest) -> Iterator[tuple[Access, Access, Access, Access]]:
    """(write, read, a's access, b's access) for every read in one nest of what the other writes."""
    for read in b.reads:
        for write in a.writes:
            if read.buffer == write.buffer:
                yield write, read, write, read
    for read in a.reads:
        for write in b.writes:
            if read.buffer == write.buffer:
                yield write, read, read, write


def align(a: LoopNest, b: LoopNest) -> LoopNest | Refusal:
    """Both nests over common loops, or why there are none.

    Right by construction: whatever one nest reads of the other's, it reads at the point where it is written.
    """
    matching = Matching(a, b)
    for write, read, mine, theirs in flows(a, b):
        if write.index is None or read.index is None:
            return Refusal(
                f"{read.node.name} reads {read.buffer} at a position known only at run time", True
            )
        assert mine.index is not None and theirs.index is not None
        if not matching.match(mine.index, theirs.index):
            return Refusal(mismatch(write, read, a.hints), final=True)
    matching = _with_shared_reads(matching)
    level = _complete(matching)
    if isinstance(level, Refusal):
        return level
    return _joined(matching, *level)


def mismatch(write: Access, read: Access, hints: Hints) -> str:
    """`buf0 is written at 64*p0 + p1 but buf1 reads it at another index, p0 + 64*p1`."""
    written, used = (elements(a, hints) for a in (write, read))
    if written is not None and used is not None and used < written:
        part = f"only {used} of its {written} elements, at {read.own}"
        return f"{write.buffer} is written at {write.own} but {read.node.name} reads {part}"
    shifted = (
        write.index is not None
        and read.index is not None
        and not same(write.index.offset, read.index.offset)
    )
    kind = "a shifted index" if shifted else "another index"
    return f"{write.buffer} is written at {write.own} but {read.node.name} reads it at {kind}, {read.own}"


def elements(access: Access, hints: Hints) -> int | None:
    """How many elements an access touches, at the size hints; None where unknown."""
    if access.footprint is None:
        return None
    return size_hint(product(size for _, size in access.footprint[1]), hints)


def _with_shared_reads(matching: Matching) -> Matching:
    """Let buffers that both nests read decide how the remaining loops correspond."""
    a, b = matching.a, matching.b
    theirs: dict[str, list[Access]] = {}
    for access in b.reads:
        theirs.setdefault(access.buffer, []).append(access)
    shared = [
        (mine, other)
        for mine in a.reads
        if mine.index is not None
        for other in theirs.get(mine.buffer, ())
        if other.index is not None
        and mine.footprint is not None
        and mine.footprint == other.footprint
    ]

    for mine, other in sorted(shared, key=lambda pair: -(elements(pair[0], a.hints) or 0))[
        :MAX_HINTS
    ]:
        assert mine.index is not None and other.index is not None
        trial = matching.copy()
        if trial.match(mine.index, other.index):
            matching = trial
    return matching


def _complete(matching: Matching) -> tuple[Level | None, Level | None] | Refusal:
    """Pair what no index decided. Gives the level of each side's bodies where joining changes it."""
    a, b = matching.a, matching.b
    apart = Refusal(f"loops {a.space()} and {b.space()} don't match")
    if a.is_reduction == b.is_reduction:
        matched = matching.pair_by_size(matching.free(a.x), matching.free(b.x))
        matched = matched and matching.pair_by_size(matching.free(a.r), matching.free(b.r))
        return (None, None) if matched else apart
    reduction, plain = (a, b) if a.is_reduction else (b, a)
    rows = [d for v in reduction.r for d in matching.digits[v] if d.partner is not None]
    mine = matching.free(plain.x)
    row = not rows and same(
        product(d.size for d in mine), product(d.size for d in matching.free(reduction.x))
    )
    target = matching.free(reduction.x) if row else matching.free([*reduction.x, *reduction.r])
    ordered = (target, mine) if a.is_reduction else (mine, target)
    if not matching.pair_by_size(*ordered):
        return apart
    level: Level = "row" if row else "elem"
    return (None, level) if a.is_reduction else (level, None)


def _joined(matching: Matching, level_a: Level | None, level_b: Level | None) -> LoopNest | Refusal:
    """Rewrite both nests to the common loops, and check that nothing is read where it isn't yet written."""
    a, b = matching.a, matching.b
    lead, other = (b, a) if b.is_reduction and not a.is_reduction else (a, b)
    cuts = {
        v: [d.size for d in digits[:-1]] for v, digits in matching.digits.items() if len(digits) > 1
    }
    lead_nest = split(lead, {v: c for v, c in cuts.items() if v in lead.loops})
    names: dict[Digit, sympy.Symbol] = {}
    fresh = iter(lead_nest.loops)
    for v in lead.loops:
        for digit in reversed(matching.digits[v]):
            names[digit] = next(fresh)
    parts: dict[sympy.Symbol, list[Part]] = {}
    for v in other.loops:
        parts[v] = []
        for digit in reversed(matching.digits[v]):
            assert digit.partner is not None
            parts[v].append((names[digit.partner], digit.weight))
    moved = other.substituted(parts, lead_nest.x, lead_nest.r)
    levels = {id(a): level_a, id(b): level_b}
    members = [
        *_with_level(lead_nest.members, levels[id(lead)]),
        *_with_level(moved.members, levels[id(other)]),
    ]
    members.sort(key=lambda m: m.order)
    nest = LoopNest(members, lead_nest.x, lead_nest.r, a.hints)
    return _flaw(nest) or nest


def _with_level(members: Sequence[Member], level: Level | None) -> list[Member]:
    return [m if level is None else replace(m, level=level) for m in members]


def _flaw(nest: LoopNest) -> Refusal | None:
    """The soundness of a fused kernel, checked on the result whatever way it was found."""
    positions = [m.indices[POSITION] for m in nest.members if POSITION in m.indices]
    if any(not p.equals(positions[0]) for p in positions):
        return Refusal("two argmax run over the loops in different orders")
    writes = {a.buffer: a for a in nest.writes}
    for read in nest.reads:
        write = writes.get(read.buffer)
        if write is None:
            continue
        if write.index is None or read.index is None or not write.index.equals(read.index):
            return Refusal(mismatch(write, read, nest.hints))
    return None
