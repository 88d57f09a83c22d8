"""Real text that is on every machine: the source of standard-library modules, as characters.

The text differs a little between Python versions; within one it is always the same.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

VOCABULARY = "\n" + "".join(map(chr, range(32, 127)))
"""Newline and printable ASCII; every other character is read as `UNKNOWN`."""

UNKNOWN = "?"

MODULES = """argparse ast bisect calendar cmd codecs colorsys configparser contextlib copy csv dataclasses
    difflib dis enum fractions functools glob graphlib heapq inspect ipaddress json.decoder json.encoder
    keyword linecache numbers operator pprint queue random sched shlex statistics string textwrap tokenize
    trace types uuid""".split()  # noqa: SIM905 (a table of words)

CODES = {character: number for number, character in enumerate(VOCABULARY)}


def encode(text: str) -> Tensor:
    """Characters to numbers below len(VOCABULARY), int64. A tab counts as four spaces."""
    unknown = CODES[UNKNOWN]
    return torch.tensor(
        [CODES.get(c, unknown) for c in text.replace("\t", "    ")], dtype=torch.int64
    )


def decode(numbers: Tensor | Sequence[int]) -> str:
    """Numbers back to characters."""
    codes = numbers.tolist() if isinstance(numbers, Tensor) else numbers
    return "".join(VOCABULARY[code] for code in codes)


def read_text() -> str:
    """The modules' sources, in order, without importing them; a frozen module has none."""
    specs: Any = [importlib.util.find_spec(name) for name in MODULES]
    return "\n".join(filter(None, (spec.loader.get_source(spec.name) for spec in specs)))


@cache
def corpus() -> Tensor:
    """The whole text as numbers, int64; read once a process."""
    return encode(read_text())


def batches(
    batch_size: int, block_size: int, seed: int = 0, text: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (inputs, targets), each (batch_size, block_size) int64.

    Targets are the inputs one character later. The same seed gives the same batches, whatever else draws
    random numbers.
    """
    text = corpus() if text is None else text
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(block_size + 1)
    while True:
        starts = torch.randint(len(text) - block_size, (batch_size, 1), generator=generator)
        rows = text[starts + offsets]
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
