"""Reasons in plain words, with numbers: what a learner reads about two loop nests that aren't one kernel.

Index formulas are given in each node's own loops: p0, p1, ... parallel, r0, r1, ... reduced.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from minicompile.scheduling.nest import Access, LoopNest
from minicompile.scheduling.nodes import Cause
from minicompile.shapes.strided import Hints, elements


class Verdict(NamedTuple):
    """An answer about two nests, and why."""

    fuse: bool
    reason: str
    cause: Cause = "policy"
    between: tuple[str, ...] = ()
    """Of a cycle: the nodes that must run between the two."""


def refused(reason: str, cause: Cause) -> Verdict:
    """The two can't run as one kernel."""
    return Verdict(False, reason, cause)


def listed(names: Iterable[str], most: int = 3) -> str:
    """`buf0, buf1 and buf2`, sorted; the rest is counted."""
    told = sorted(names)
    if len(told) > most:
        told = [*told[:most], f"{len(told) - most} more"]
    return " and ".join(filter(None, (", ".join(told[:-1]), *told[-1:])))


def index_mismatch(write: Access, read: Access, hints: Hints) -> Verdict:
    """`buf0 is written at 64*p0 + p1 but buf1 reads it at p0 + 64*p1: 4096 elements of 4096`."""
    written, used = ("?" if a.key is None else a.key[1] for a in (write, read))
    told = f"{write.buffer} is written at {written} but {read.node} reads it at {used}"
    if write.footprint is not None and read.footprint is not None:
        part, whole = (elements(place, hints) for place in (read.footprint, write.footprint))
        told += f": {part} elements of {whole}"
    return refused(told, "index_mismatch")


def loop_mismatch(a: LoopNest, b: LoopNest) -> Verdict:
    """`loops [128] over [64] and [64] over [128] don't match`."""
    return refused(f"loops {a.space()} and {b.space()} don't match", "loop_mismatch")
