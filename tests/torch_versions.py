"""Differences between versions of torch itself that tests must know: one table, each row with its reason.

A row tells from which version and before which one eager, or torch's own compiler, does what the name says.
Differences of private API are no rows: `minicompile.compat` hides them.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch


class Difference(NamedTuple):
    since: tuple[int, int]
    """The first version; (0, 0) for every older one."""
    before: tuple[int, int]
    """The first version without it; (99, 0) for every newer one. Older than `since`: from it to `since`."""
    reason: str

    def holds(self, version: str) -> bool:
        there = (self.since <= release(version), release(version) < self.before)
        return all(there) if self.since < self.before else any(there)


ALWAYS, NEVER = (0, 0), (99, 0)

DIFFERENCES: dict[str, Difference] = {
    "a row of NaN stays in its row": Difference(
        (2, 12),
        NEVER,
        "2.11's product of bfloat16 matrices on a CPU spreads NaN to the row before it",
    ),
    "bfloat16 batch_norm is precise near 0": Difference(
        (2, 12),
        NEVER,
        "2.11's kernel is off by 30 % of float64's values near 0, newer ones and ours by 10 %",
    ),
    "Inductor has a rule for stable sort": Difference(
        (2, 12), NEVER, "2.11 calls aten.sort.stable"
    ),
    "the fake of rfft has eager's strides": Difference(
        (2, 12),
        NEVER,
        "2.11's fake keeps the order of the dimensions; our results have its strides",
    ),
    "the encoder layer's fast path has a fake": Difference(
        (2, 12), NEVER, "2.11 has no fake of aten._transformer_encoder_layer_fwd"
    ),
    "a transform holds its inverse": Difference(
        (2, 12), NEVER, "2.11 keeps a weakref.ref to it, which is made in Python"
    ),
    "an argument that is written may be left out": Difference(
        (2, 12), NEVER, "in 2.11 a custom operator looks for it among its positions, in eager too"
    ),
    "a product with GELU fits on sm_80": Difference(
        (2, 15), (2, 14), "2.14's Triton 3.8 spills 136 bytes, 3.6 and 3.9 at most 64"
    ),
    "a saved tensor is had without the others": Difference(
        (2, 12), NEVER, "2.11 unpacks all saved tensors of a function, or none"
    ),
    "jacrev of several results has a fake": Difference(
        (2, 12),
        NEVER,
        "2.11's jacrev keeps positions in tensors, whose values a fake lacks: a break",
    ),
    "one_hot is checked where it is traced": Difference(
        (2, 12), NEVER, "2.11's one_hot of a fake tensor doesn't look whether there is such a class"
    ),
}


def release(version: str) -> tuple[int, int]:
    """Return (2, 15) for "2.15.0+cpu"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def needs(difference: str) -> pytest.MarkDecorator:
    """Return the mark that skips a test where the installed torch lacks what a row names."""
    reason = f"torch {torch.__version__}: {DIFFERENCES[difference].reason}"
    return pytest.mark.skipif(not torch_has(difference), reason=reason)


def torch_has(difference: str) -> bool:
    """Return whether a row of the table holds for the installed torch."""
    return DIFFERENCES[difference].holds(torch.__version__)
