"""Differences between versions of torch itself that tests must know: one table, each row with its reason.

A row tells from which version and before which one eager, or torch's own compiler, does what the name says.
Differences of private API are no rows: `minicompile.compat` hides them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Difference(NamedTuple):
    since: tuple[int, int]
    """The first version; (0, 0) for every older one."""
    before: tuple[int, int]
    """The first version without it; (99, 0) for every newer one."""
    reason: str

    def holds(self, version: str) -> bool:
        return self.since <= release(version) < self.before


ALWAYS, NEVER = (0, 0), (99, 0)

DIFFERENCES: dict[str, Difference] = {
    "all_gather takes transposed tensors": Difference(
        (2, 12), NEVER, "in 2.11 the functional collective fails in eager too"
    ),
}


def release(version: str) -> tuple[int, int]:
    """Return (2, 15) for "2.15.0+cpu"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def torch_has(difference: str) -> bool:
    """Return whether a row of the table holds for the installed torch."""
    return DIFFERENCES[difference].holds(torch.__version__)
