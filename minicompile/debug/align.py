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

    @property
    def call(self) -> str:
        """The form up to the first operand, or to an input's type; code without its numbers."""
        return (
            re.split("[(:]", self.form, maxsplit=1)[0]
            if self.name
            else re.sub(r"\d+", "", self.form)
        )


def items_of(pieces: Sequence[Piece]) -> list[Item]:
    """A listing with its names resolved."""
    names = {p.name for p in pieces if not isinstance(p.subject, CodeLine | str)}
    for piece in pieces:
        if isinstance(piece.subject, ComputedBuffer | ExternKernel):
            names.update(buffer.name for buffer in written_by(piece.subject))
    functions = [p.name.partition(":")[0] for p in pieces]
    defined: dict[tuple[str, str], tuple[int, int]] = {}
    items = []
    for place, piece in enumerate(pieces):
        uses: list[tuple[int, int]] = []

        def resolve(found: re.Match[str], place: int = place, uses: list[Any] = uses) -> str:
            word, called = found.group(), found.string.startswith("(", found.end())
            known = word in names or (not names and NUMBERED.fullmatch(word))
            if not (word in functions if called else known):
                return word
            key, here = ("" if names else functions[place], word), (place, len(uses))
            again = not names and found.string.startswith(" = ", found.end())
            defined[key] = here if again else defined.get(key, here)
            uses.append(defined[key])
            return "\0"

        form, named = WORD.sub(resolve, piece.text), not isinstance(piece.subject, CodeLine | str)
        form += f"  {piece.detail}" * named
        items.append(Item(piece, piece.name * named, form, tuple(uses)))
    return items


class Alignment:
    """Two listings, and `found`: places before -> places after."""

    def __init__(self, before: list[Item], after: list[Item], found: dict[int, int]) -> None:
        self.before, self.after, self.found = before, after, found

    def is_same(self, i: int, j: int) -> bool:
        """Do they compute the same from the same?"""
        old, new = self.before[i], self.after[j]
        return old.form == new.form and all(
            m == n and e == (j if d == i else self.found.get(d))
            for (d, m), (e, n) in zip(old.uses, new.uses, strict=True)
        )

    def in_order(self) -> set[int]:
        """Places after of most of what stands in the same order; the rest has moved."""
        places = [self.found[i] for i in sorted(self.found)]
        blocks = SequenceMatcher(None, places, sorted(places), False).get_matching_blocks()
        return {place for at, _, size in blocks for place in places[at : at + size]}


class Search(Alignment):
    """Finds what is what; `key` says what of the origins counts."""

    def __init__(
        self, before: list[Item], after: list[Item], key: Callable[[Origins], Hashable]
    ) -> None:
        super().__init__(before, after, {})
        self.key, self.free = key, dict.fromkeys(range(len(after)))
        self.users, self.by_form = (
            defaultdict[int, list[int]](list),
            defaultdict[str, list[int]](list),
        )
        for i, item in enumerate(before):
            for made in {made for made, _ in item.uses} - {i}:
                self.users[made].append(i)
        for j, item in enumerate(after):
            self.by_form[item.form].append(j)
        by_name = {item.name: j for j, item in enumerate(after) if item.name}
        self.try_pairs((i, by_name[x.name]) for i, x in enumerate(before) if x.name in by_name)
        old, new = self.rest, list(self.free)
        forms = [before[i].form for i in old], [after[j].form for j in new]
        for i, j, size in SequenceMatcher(None, *forms).get_matching_blocks():
            self.try_pairs(zip(old[i : i + size], new[j : j + size]))
        self.grow(self.rest)
        self.pair_changed()

    @property
    def rest(self) -> list[int]:
        return [i for i in range(len(self.before)) if i not in self.found]

    def pair(self, i: int, j: int) -> None:
        self.found[i] = j
        del self.free[j]

    def try_pairs(self, pairs: Iterable[tuple[int, int]]) -> None:
        for i, j in pairs:
            if self.is_same(i, j):
                self.pair(i, j)

    def grow(self, waiting: list[int]) -> None:
        """Pair what is the same wherever it stands, from the operands to the users."""
        for i in waiting:  # which grows
            alike = self.by_form[self.before[i].form] if i not in self.found else ()
            j = next((j for j in alike if j in self.free and self.is_same(i, j)), None)
            if j is not None:
                self.pair(i, j)
                waiting += self.users[i]

    def pair_changed(self) -> None:
        """Pair what changed, the surest first; the users of such a pair may be the same again."""
        joint = any(map(is_gradient, self.after))

        def source(x: Item) -> Hashable:
            return self.key(x.piece.origins), joint and is_gradient(x)

        likeness: tuple[Callable[[Item], Hashable], ...] = (
            lambda x: x.name and (x.name, x.call, source(x)),
            lambda x: (x.call, x.piece.detail * bool(x.name), source(x)),
            lambda x: x.name and (x.piece.detail, source(x)),
            lambda x: x.name and (x.name, x.call),
            lambda x: (x.call, source(x)),
            lambda x: x.name and (verb(x), x.piece.detail, x.piece.lines[-1:]),
            lambda x: x.name and (x.piece.detail, x.piece.lines[-1:], joint and is_gradient(x)),
            lambda x: not x.name and x.piece.origins and source(x),
        )
        for like in likeness:
            alike = defaultdict[Hashable, tuple[list[int], list[int]]](lambda: ([], []))
            for i in self.rest:
                alike[like(self.before[i])][0].append(i)
            for j in self.free:
                alike[like(self.after[j])][1].append(j)
            for i in self.rest:
                kind = like(self.before[i])
                left = [k for k in alike[kind][0] if k >= i and k not in self.found]
                free = [j for j in alike[kind][1] if j in self.free]
                if kind and left[:1] == [i] and len(left) <= len(free):
                    self.pair(i, free[-len(left)])  # of several the last: it is the result
                    self.grow(list(self.users[i]))


def verb(item: Item) -> str:
    """`exp` for `exp = aten.exp.default(sub)` and for `buf1[p0] = exp(buf0[p0])`."""
    found = re.search(r" = (?:aten\.)?(\w+)", item.piece.text)
    return found.group(1) if found else ""


def is_gradient(item: Item) -> bool:
    """Gradients have the origins of the values that they are gradients of."""
    return any(why.startswith("backward:") for why in item.piece.why)
