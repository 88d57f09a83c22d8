"""Real text that is on every machine: the source of standard-library modules, as characters.

The text differs a little between Python versions; within one it is always the same.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

VOCABULARY = "\n" + "".join(map(chr, range(32, 127)))
"""Newline and printable ASCII; every other character is read as `UNKNOWN`."""

UNKNOWN = "?"

MODULES = """argparse ast bisect calendar cmd codecs colorsys configparser contextlib copy csv dataclasses
    difflib dis enum fractions functools glob graphlib heapq inspect ipaddress json.decoder json.encoder
    keyword linecache numbers operator pprint queue random sched shlex statistics string textwrap tokenize
    trace types uuid""".split()  # noqa: SIM905 (a table of words)

LEAST_CHARACTERS = 100_000

CODES = {character: number for number, character in enumerate(VOCABULARY)}


def module_source(name: str) -> str:
    """Source text of a module, found without importing it; "" where only bytecode was shipped."""
    try:
        spec = importlib.util.find_spec(name)
        get_source = getattr(spec and spec.loader, "get_source", lambda _: "")
        return get_source(name) or ""
    except (ImportError, OSError, ValueError):
        return ""


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


def read_text(modules: Sequence[str] = MODULES, least: int = LEAST_CHARACTERS) -> str:
    """The modules' sources, in order. Modules without source are left out.

    Raises RuntimeError if fewer than `least` characters remain.
    """
    text = "\n".join(filter(None, map(module_source, modules)))
    if len(text) < least:
        raise RuntimeError(
            f"only {len(text)} characters of text, {least} needed: this Python was installed without the "
            "source of its standard library"
        )
    return text


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
