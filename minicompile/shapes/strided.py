"""`StridedIndex`: an index taken apart into strides, and `Footprint`: the set of elements that it touches.

`64*p0 + p1 + 3` has offset 3 and strides {p0: 64, p1: 1}. Loops can be split, merged and reordered by
arithmetic on a few integers, and two indices over different loops compared by what they touch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import sympy

from minicompile.shapes.expr import (
    ZERO,
    Expr,
    Ranges,
    Size,
    exact_quotient,
    is_nonnegative,
    product,
    same,
    simplify_index,
    size_hint,
    to_size,
)

Hints = Mapping[sympy.Symbol, int]
Part = tuple[sympy.Symbol, Size]
"""A new loop and its weight in the old one: `p0 = 64*a + b` has the parts (a, 64), (b, 1)."""


@dataclass(frozen=True, slots=True)
class StridedIndex:
    """`offset + sum(stride * loop) + rest`; `rest` is what isn't linear in the loops (usually 0)."""

    offset: Expr = ZERO
    strides: dict[sympy.Symbol, Size] = field(default_factory=dict)
    rest: Expr = ZERO

    @staticmethod
    def of(index: Expr, ranges: Ranges) -> StridedIndex:
        """Take an index over the loops of `ranges` apart. Size and indirect symbols are constants."""
        offset: list[Expr] = []
        rest: list[Expr] = []
        strides: dict[sympy.Symbol, Size] = {}
        for term in sympy.Add.make_args(index):
            loops = [s for s in term.free_symbols if s in ranges]
            if not loops:
                offset.append(term)
            elif len(loops) == 1 and (stride := _stride(term, loops[0])) is not None:
                strides[loops[0]] = to_size(strides.get(loops[0], 0) + stride)
            else:
                rest.append(term)
        return StridedIndex(sympy.Add(*offset), strides, sympy.Add(*rest))

    @property
    def expr(self) -> Expr:
        """The index put together again."""
        terms = [sympy.sympify(stride) * loop for loop, stride in self.strides.items()]
        return sympy.Add(self.offset, self.rest, *terms)

    def blocks(self, loop: sympy.Symbol) -> bool:
        """Whether the index is not linear in `loop`."""
        return self.rest is not ZERO and loop in self.rest.free_symbols

    def substituted(
        self, parts: Mapping[sympy.Symbol, Sequence[Part]], ranges: Ranges
    ) -> StridedIndex:
        """The index over new loops: each old one in `parts` is the weighted sum of its parts."""
        strides: dict[sympy.Symbol, Size] = {}
        for loop, stride in self.strides.items():
            for new, weight in parts.get(loop, ((loop, 1),)):
                strides[new] = times(stride, weight)
        sums = {
            loop: sympy.Add(*[sympy.sympify(weight) * new for new, weight in parts[loop]])
            for loop in self.rest.free_symbols & parts.keys()
        }
        if not sums:
            return StridedIndex(self.offset, strides, self.rest)
        rest = StridedIndex.of(simplify_index(self.rest.xreplace(sums), ranges), ranges)
        for loop, stride in rest.strides.items():
            strides[loop] = to_size(strides.get(loop, 0) + stride)
        kept = {loop: stride for loop, stride in strides.items() if stride != 0}
        return StridedIndex(self.offset + rest.offset, kept, rest.rest)

    def equals(self, other: StridedIndex) -> bool:
        """The same element at every point of the loops."""
        return (
            self.strides.keys() == other.strides.keys()
            and all(same(stride, other.strides[loop]) for loop, stride in self.strides.items())
            and same(self.offset, other.offset)
            and (self.rest == other.rest or same(self.rest, other.rest))
        )


def _stride(term: Expr, loop: sympy.Symbol) -> Size | None:
    """The coefficient in a term like `64*s0*loop`; None if the term is something else."""
    if term == loop:
        return 1
    if not term.is_Mul:
        return None
    factors = [a for a in term.args if a != loop]
    if len(factors) != len(term.args) - 1:
        return None
    if any(not s.is_positive or s == loop for a in factors for s in a.free_symbols):
        return None  # a loop or a loaded value in the stride: not linear
    return to_size(sympy.Mul(*factors))


def divide(a: Size, b: Size) -> Size | None:
    """a / b if it is exact and positive, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b > 0 and a > 0 and a % b == 0 else None
    if b == 0:
        return None
    quotient = exact_quotient(sympy.sympify(a), sympy.sympify(b))
    return None if quotient is None or not is_nonnegative(quotient - 1) else to_size(quotient)


def times(a: Size, b: Size) -> Size:
    """a * b, written out."""
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    return to_size(sympy.expand(sympy.sympify(a) * sympy.sympify(b)))


Footprint = tuple[Expr, tuple[tuple[Size, Size], ...]]
"""Offset and (stride, size) pairs, merged where contiguous: equal for equal sets of elements.

What isn't linear stands in the offset, its loops beside their sizes.
"""


def footprint(index: StridedIndex, sizes: Ranges, hints: Hints) -> Footprint:
    """The elements an index touches, whatever the order and split of the loops that it is linear in."""
    pairs = [(stride, sizes[loop]) for loop, stride in index.strides.items()]
    pairs.sort(key=lambda p: (size_hint(p[0], hints), size_hint(p[1], hints)))
    merged: list[tuple[Size, Size]] = []
    for stride, size in pairs:
        if merged and same(times(*merged[-1]), stride):
            merged[-1] = (merged[-1][0], times(merged[-1][1], size))
        else:
            merged.append((stride, size))
    others = sorted(index.rest.free_symbols & sizes.keys(), key=str)
    return index.offset + index.rest, (*merged, *((loop, sizes[loop]) for loop in others))


def elements(where: Footprint, hints: Hints) -> int:
    """How many elements a footprint has, at the size hints."""
    return size_hint(product(size for _, size in where[1]), hints)
