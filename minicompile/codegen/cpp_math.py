"""The C functions that kernels call, out of `helpers.h`: a kernel's source contains only what it uses.

The float32 functions have no branches, so that gcc and clang vectorise the loops they stand in; their
coefficients come from `tests/codegen/minimax.py`. Errors, over all exponents: exp and log under 1 ulp, erf
under 1.2, tanh under 1.5, sigmoid under 2. NaN, infinities, zeros and denormals behave as in the C library.
"""

from __future__ import annotations

import re
from pathlib import Path

_DEFINITION = re.compile(r"^(?:#define |typedef \w+ |static inline [\w*]+ )(mc_\w+)", re.I | re.M)
_WORD = re.compile(r"\bmc_\w+", re.I)

_ABOUT, HEADERS, *_BLOCKS = Path(__file__).with_name("helpers.h").read_text().split("\n\n")

HELPERS: dict[str, str] = {name: block for block in _BLOCKS for name in _DEFINITION.findall(block)}
"""Name -> the block of `helpers.h` that defines it."""


def prelude(text: str) -> str:
    """Headers and the blocks that `text` needs, directly or for one another, in the order of the file."""
    words = set(_WORD.findall(text))
    found: list[str] = []
    for block in reversed(_BLOCKS):  # a block uses earlier ones only
        if not words.isdisjoint(_DEFINITION.findall(block)):
            found.append(block.strip("\n"))
            words.update(_WORD.findall(block))
    return "\n\n".join([HEADERS, *reversed(found)]) + "\n"
