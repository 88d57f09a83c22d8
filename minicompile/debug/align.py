"""Which thing of one listing is which of another: by what they compute, not by what they are called.

    Item := piece, name, form (its text without names), uses: where each of these names was defined

Two items are the same if their forms are equal and their names lead to items that are matched: numbers that
shifted are no change. What has no such partner is paired with what bears its name or came from the same
operations, and has changed. Graph nodes, buffers and lines of code are all compared like this.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any

from minicompile.codegen.plan import CodeLine
from minicompile.lowering.ir import ComputedBuffer, ExternKernel, written_by
from minicompile.ops.origin import Origins
from minicompile.provenance import Piece

WORD = re.compile(r"(?<![\w.'\"])[A-Za-z_]\w*(?!\w|=[^=])")
NUMBERED = re.compile(r"(?!u?int\d|b?float\d|complex\d)\w*[A-Za-z_]\d+(_[a-z]+)?")
"""Names that generated code numbers: `tmp3`, `in_ptr0`, `tmp4_row`."""


@dataclass(frozen=True)
class Item:
    """A line of a listing. `uses`: for each name in it, the item that has it first, as the how-manieth."""

    piece: Piece
    name: str
    """"" for a line of code."""
    form: str
    uses: tuple[tuple[int, int], ...]

    @cached_property
    def call(self) -> str:
        """The form up to the first operand, or to an input's type; code without its numbers."""
        return (
            re.split("[(:]", self.form, maxsplit=1)[0]
            if self.name
            else re.sub(r"\d+", "", self.form)
        )


def items_of(pieces: Sequence[Piece]) -> list[Item]:
    """A listing with its names resolved. In code a name is what the last assignment above made it."""
    names = {p.name for p in pieces if not isinstance(p.subject, CodeLine | str)}
    for piece in pieces:
        if isinstance(piece.subject, ComputedBuffer | ExternKernel):
            names.update(buffer.name for buffer in written_by(piece.subject))
    defined: dict[tuple[str, str], tuple[int, int]] = {}
    items = []
    for place, piece in enumerate(pieces):
        code, text = isinstance(piece.subject, CodeLine), piece.text
        function = piece.name.partition(":")[0] if code else ""
        form, end, uses = "", 0, list[tuple[int, int]]()
        for found in WORD.finditer(text):
            word, numbered = found.group(), code and NUMBERED.fullmatch(found.group())
            called = text.startswith("(", found.end())
            if not (word == function if called else numbered or word in names):
                continue
            key = function, word
            if key not in defined or (code and text.startswith(" = ", found.end())):
                defined[key] = place, len(uses)
            uses.append(defined[key])
            form, end = f"{form}{text[end : found.start()]}\0", found.end()
        form, named = form + text[end:], not isinstance(piece.subject, CodeLine | str)
        form += f"  {piece.detail}" * named
        items.append(Item(piece, piece.name * named, form, tuple(uses)))
    return items


class Alignment:
    """Two listings, and `found`: places before -> places after."""

    def __init__(self, before: list[Item], after: list[Item], found: dict[int, int]) -> None:
        self.before, self.after, self.found = before, after, found
        self.made = [(x.form, resolved(j, x, lambda d: d)) for j, x in enumerate(after)]
        """What each item after computes, and from what."""

    def meant(self, i: int) -> tuple[Any, ...]:
        """What item i before would be after."""
        item = self.before[i]
        return item.form, resolved(i, item, lambda d: self.found.get(d, -1))

    def is_same(self, i: int, j: int) -> bool:
        """Do they compute the same from the same?"""
        return self.meant(i) == self.made[j]

    def in_order(self) -> set[int]:
        """Places after of most of what stands in the same order; the rest has moved."""
        places = [self.found[i] for i in sorted(self.found)]
        blocks = SequenceMatcher(None, places, sorted(places), False).get_matching_blocks()
        return {place for at, _, size in blocks for place in places[at : at + size]}


def resolved(place: int, item: Item, of: Callable[[int], int]) -> tuple[Any, ...]:
    return tuple((None if made == place else of(made), number) for made, number in item.uses)


class Search(Alignment):
    """Finds what is what; `key` says what of the origins counts."""

    def __init__(
        self, before: list[Item], after: list[Item], key: Callable[[Origins], Hashable]
    ) -> None:
        super().__init__(before, after, {})
        self.key, self.free = key, dict.fromkeys(range(len(after)))
        self.users, self.index = (
            defaultdict[int, list[int]](list),
            defaultdict[Any, list[int]](list),
        )
        for i, item in enumerate(before):
            for made in {made for made, _ in item.uses} - {i}:
                self.users[made].append(i)
        for j, meant in enumerate(self.made):
            self.index[meant].append(j)
        named = {item.name: j for j, item in enumerate(after) if item.name}
        self.pair_same((i, named[x.name]) for i, x in enumerate(before) if x.name in named)
        old, new = self.rest, list(self.free)
        forms = [before[i].form for i in old], [after[j].form for j in new]
        for i, j, size in SequenceMatcher(None, *forms).get_matching_blocks():
            self.pair_same(zip(old[i : i + size], new[j : j + size]))
        self.grow(self.rest)
        self.pair_changed()

    @property
    def rest(self) -> list[int]:
        return [i for i in range(len(self.before)) if i not in self.found]

    def pair(self, i: int, j: int) -> None:
        self.found[i] = j
        del self.free[j]

    def pair_same(self, pairs: Iterable[tuple[int, int]]) -> None:
        for i, j in pairs:
            if self.is_same(i, j):
                self.pair(i, j)

    def grow(self, waiting: list[int]) -> None:
        """Pair what is the same wherever it stands, from the operands to the users."""
        for i in waiting:  # which grows
            same = () if i in self.found else self.index.get(self.meant(i), ())
            j = next((j for j in same if j in self.free), None)
            if j is not None:
                self.pair(i, j)
                waiting += self.users[i]

    def pair_changed(self) -> None:
        """Pair what changed, the surest first; the users of such a pair may be the same again."""
        joint = any(map(is_gradient, self.after))

        def source(x: Item) -> Hashable:
            return self.key(x.piece.origins), joint and is_gradient(x)

        likeness: tuple[Callable[[Item, Any], Hashable], ...] = (
            lambda x, of: x.name and (x.name, x.call, source(x)),
            lambda x, of: (x.call, x.piece.detail * bool(x.name), source(x)),
            lambda x, of: x.name and (x.piece.detail, source(x)),
            lambda x, of: x.name and (x.name, x.call),
            lambda x, of: (x.call, source(x)),
            lambda x, of: len(of) > 1 and (x.piece.detail * bool(x.name), of),
            lambda x, of: x.name and (verb(x), x.piece.detail, x.piece.lines[-1:]),
            lambda x, of: x.name and (x.piece.detail, x.piece.lines[-1:], joint and is_gradient(x)),
            lambda x, of: not x.name and x.piece.origins and source(x),
        )
        for like in likeness:
            alike = defaultdict[Any, tuple[list[int], list[int]]](lambda: ([], []))
            for i in self.rest:
                alike[like(self.before[i], self.meant(i)[1])][0].append(i)
            for j in self.free:
                alike[like(self.after[j], self.made[j][1])][1].append(j)
            # of several the last ones: they are the results
            last = (
                zip(a[-len(b) :], b[-len(a) :])
                for kind, (a, b) in alike.items()
                if kind and a and b
            )
            for i, j in sorted(pair for pairs in last for pair in pairs):
                if i not in self.found and j in self.free:
                    self.pair(i, j)
                    self.grow(list(self.users[i]))


def verb(item: Item) -> str:
    """`exp` for `exp = aten.exp.default(sub)` and for `buf1[p0] = exp(buf0[p0])`."""
    found = re.search(r" = (?:aten\.)?(\w+)", item.piece.text)
    return found.group(1) if found else ""


def is_gradient(item: Item) -> bool:
    """Gradients have the origins of the values that they are gradients of."""
    return any(why.startswith("backward:") for why in item.piece.why)
