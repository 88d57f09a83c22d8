"""Philox4x32-10: random numbers without a state. A number is a function of a seed and its own place.

So any thread computes any element's number, in the kernel that needs it, and computes it again in the
backward pass. Ten rounds mix a counter of four 32-bit words (the place) with a key of two (the seed), each a
pair of multiplications. Here in torch operators, as the measure for what kernels do: the numbers are those
of Triton's `tl.rand` and `tl.randn` (triton/language/random.py).

Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
"""The bits of a word; words are kept in int64."""
MULTIPLIERS, KEY_STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)


def words(seed: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """The first two words of place `offset` (int64) in the sequence of `seed` (int64)."""
    c0, c1 = offset & WORD, offset >> 32 & WORD
    c2 = c3 = torch.zeros_like(c0)
    k0, k1 = seed & WORD, seed >> 32 & WORD
    for _ in range(10):
        a, b = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (b >> 32 & WORD) ^ c1 ^ k0, b & WORD, (a >> 32 & WORD) ^ c3 ^ k1, a & WORD
        k0, k1 = k0 + KEY_STEPS[0] & WORD, k1 + KEY_STEPS[1] & WORD
    return c0, c1


def uniform(word: Tensor) -> Tensor:
    """A float32 from 0 to below 1: the word as a signed number, folded, in steps of a little under 2^-31."""
    return torch.where(word <= WORD >> 1, word, WORD - word).float() * 4.6566127342e-10


def rand(seed: Tensor, offset: Tensor) -> Tensor:
    return uniform(words(seed, offset)[0])


def randn(seed: Tensor, offset: Tensor) -> Tensor:
    """Normally distributed, by Box and Muller: a random direction, and how far to go there."""
    first, second = map(uniform, words(seed, offset))
    return torch.sqrt(-2.0 * torch.log(first.clamp_min(1e-7))) * torch.cos(2 * math.pi * second)


_library = torch.library.Library("minicompile", "FRAGMENT")
_library.define("philox(Tensor seeds, int number, SymInt[] size, str kind) -> Tensor")


@torch.library.impl(_library, "philox", "CompositeExplicitAutograd")
def _philox(seeds: Tensor, number: int, size: Sequence[int], kind: str) -> Tensor:
    places = torch.arange(math.prod(size), device=seeds.device).view(size)
    return (rand if kind == "rand" else randn)(seeds[number], places)


@torch.library.impl(_library, "philox", "Meta")
def _philox_fake(seeds: Tensor, number: int, size: Sequence[int], kind: str) -> Tensor:
    return seeds.new_empty(size, dtype=torch.float32)


PHILOX = torch.ops.minicompile.philox.default
"""float32 numbers from the `number`-th seed, each by its position; `kind` is "rand" or "randn". A second call
gives the same: it may be moved, and computed again."""
