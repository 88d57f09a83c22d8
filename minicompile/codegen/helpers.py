"""Functions that kernels call by name: blocks of `helpers.h` and `helpers.triton`.

A kernel's prelude holds the blocks that its text needs, directly or for one another, in the order of the
file. Blocks are separated by empty lines, and use earlier blocks only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path


class Helpers:
    """The blocks of a file; `names` finds the names that a block defines."""

    def __init__(self, file: str, names: str) -> None:
        text = Path(__file__).with_name(file).read_text(encoding="utf-8").rstrip("\n")
        _about, self.head, *self.blocks = text.split("\n\n")
        self.names = re.compile(names, re.I | re.M)

    def needed(self, text: str, edit: Callable[[str], str] = str) -> list[str]:
        """The blocks that `text` needs, each changed by `edit`."""
        words, blocks = words_of(text), list[str]()
        for block in reversed(self.blocks):
            if not words.keys().isdisjoint(self.names.findall(block)):
                blocks.append(edit(block))
                words += words_of(blocks[-1])
        return blocks[::-1]


def words_of(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text))


C_HELPERS = Helpers(
    "helpers.h", r"^(?:#define |typedef \w+ |(?:static inline|MC_INLINE) [\w*]+ )(mc_\w+)"
)
TRITON_HELPERS = Helpers("helpers.triton", r"^def (\w+)")

HEADERS = C_HELPERS.head
"""What every file of C kernels begins with."""

MOST_COPIES = 8
"""A C function that a file calls more often is not inlined. A kernel of 200 tanh compiles in a thirtieth of
the time then, and runs 4 % slower."""

_INLINED = re.compile(r"^MC_INLINE(?= (?:float|double) (mc_\w+)\((?:float|double) )", re.M)


def c_prelude(text: str) -> str:
    """Headers and the functions that C kernels need."""
    calls = words_of(text)

    def edit(block: str) -> str:
        return _INLINED.sub(lambda m: "MC_CALLED" if calls[m[1]] > MOST_COPIES else m[0], block)

    return "\n\n".join([HEADERS, *C_HELPERS.needed(text, edit)]) + "\n"


def triton_prelude(text: str) -> str:
    """Imports and the functions that Triton kernels need."""
    return "\n\n\n".join([TRITON_HELPERS.head, *TRITON_HELPERS.needed(text)]) + "\n\n\n"
