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
from minicompile.debug.provenance import Piece
from minicompile.lowering.ir import ComputedBuffer, ExternKernel, written_by
from minicompile.ops.origin import Origins

WORD = re.compile(r"(?<![\w.'\"])[A-Za-z_]\w*(?!\w|=[^=])")
NUMBERED = re.compile(r"(?!u?int\d|b?float\d|complex\d)\w*[A-Za-z_]\d+(_[a-z]+)?")
"""Names that generated code numbers: `tmp3`, `in_ptr0`, `tmp4_row`."""


Key = Callable[[Origins], Hashable]


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
        return re.sub(r"[(:].*" if self.name else r"\d+", "", self.form)


def items_of(pieces: Sequence[Piece]) -> list[Item]:
    """A listing with its names resolved. In code a name is what the last assignment above made it."""
    named = [piece for piece in pieces if not isinstance(piece.subject, CodeLine | str)]
    made = [p.subject for p in named if isinstance(p.subject, ComputedBuffer | ExternKernel)]
    names = {p.name for p in named} | {b.name for operation in made for b in written_by(operation)}
    defined: dict[tuple[str, str], tuple[int, int]] = {}
    items = []
    for place, piece in enumerate(pieces):
        code, text = isinstance(piece.subject, CodeLine), piece.text
        function = piece.name.partition(":")[0] if code else ""
        form, end, uses = "", 0, list[tuple[int, int]]()
        for found in WORD.finditer(text):
            word, follows = found.group(), text[found.end() :]
            known = word in names or (code and NUMBERED.fullmatch(word))
            if not (word == function if follows.startswith("(") else known):
                continue
            if (function, word) not in defined or (code and follows.startswith(" = ")):
                defined[function, word] = place, len(uses)
            uses.append(defined[function, word])
            form, end = f"{form}{text[end : found.start()]}\0", found.end()
        is_named = bool(names) and not code
        form += text[end:] + f"  {piece.detail}" * is_named
        items.append(Item(piece, piece.name * is_named, form, tuple(uses)))
    return items


class Alignment:
    """`found`: places before -> places after, searched for if not given; `free`: places after without one.
    `key` says what of the origins counts."""

    def __init__(self, before: list[Item], after: list[Item], key: Key, found: Any = None) -> None:
        self.before, self.after, self.key, self.found = before, after, key, found or {}
        self.made = [(x.form, resolved(j, x, lambda d: d)) for j, x in enumerate(after)]
        """What each item after computes, and from what."""
        self.free = dict.fromkeys(range(len(after)))
        if found is None:
            self.search()

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

    def search(self) -> None:
        """What has the same name, then what stands in the same order, then anywhere; then what changed."""
        self.users, self.index = (
            defaultdict[int, list[int]](list),
            defaultdict[Any, list[int]](list),
        )
        for i, item in enumerate(self.before):
            for made in {made for made, _ in item.uses} - {i}:
                self.users[made].append(i)
        for j, meant in enumerate(self.made):
            self.index[meant].append(j)
        names = {item.name: j for j, item in enumerate(self.after) if item.name}
        self.pair_same((i, names[x.name]) for i, x in enumerate(self.before) if x.name in names)
        old, new = self.rest, list(self.free)
        forms = [self.before[i].form for i in old], [self.after[j].form for j in new]
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
            pairs = list[tuple[int, int]]()
            for kind, (old, new) in alike.items():
                if kind:  # of several the last ones: they are the results
                    pairs += zip(reversed(old), reversed(new))
            for i, j in sorted(pairs):
                if i not in self.found and j in self.free:
                    self.pair(i, j)
                    self.grow(list(self.users[i]))


def resolved(place: int, item: Item, of: Callable[[int], int]) -> tuple[Any, ...]:
    """The names of an item as places after, its own as None."""
    return tuple((None if made == place else of(made), number) for made, number in item.uses)


def verb(item: Item) -> str:
    """`exp` for `exp = aten.exp.default(sub)` and for `buf1[p0] = exp(buf0[p0])`."""
    found = re.search(r" = (?:aten\.)?(\w+)", item.piece.text)
    return found.group(1) if found else ""


def is_gradient(item: Item) -> bool:
    """Gradients have the origins of the values that they are gradients of."""
    return any(why.startswith("backward:") for why in item.piece.why)
