"""Reasons in plain words, with numbers: what a learner reads about two loop nests that aren't one kernel.

Index formulas are given in each node's own loops: p0, p1, ... parallel, r0, r1, ... reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minicompile.scheduling.nest import Access, LoopNest
from minicompile.scheduling.nodes import Cause, SingleNode
from minicompile.shapes.expr import product, same, size_hint
from minicompile.shapes.strided import Footprint, StridedIndex, elements, footprint


@dataclass(frozen=True)
class Refusal:
    """Why two nests can't run as one kernel. `final`: growing the kernels won't change it."""

    reason: str
    cause: Cause
    final: bool = False
    between: tuple[str, ...] = ()
    """Of a cycle: who must run between the two."""


def listed(names: Iterable[str], most: int = 3) -> str:
    """`buf0, buf1 and buf2`, sorted; the rest is counted."""
    told = sorted(names)
    if len(told) > most:
        told = [*told[:most], f"{len(told) - most} more"]
    return " and ".join(filter(None, (", ".join(told[:-1]), *told[-1:])))


def short_name(nodes: Sequence[SingleNode]) -> str:
    """`buf0`, or `buf0 + 6 more`."""
    return nodes[0].name + (f" + {len(nodes) - 1} more" if len(nodes) > 1 else "")


def index_mismatch(write: Access, read: Access, writer: LoopNest, reader: LoopNest) -> Refusal:
    """`buf0 is written at 64*p0 + p1 but buf1 reads it at p0 + 64*p1, in another order`."""
    written, used = ("?" if a.key is None else a.key[1] for a in (write, read))
    told = f"{write.buffer} is written at {written} but {read.node} reads it at {used}"
    also = next((a for a in reader.reads if _differ(a, read, reader)), None)
    if write.footprint is None or read.footprint is None:
        how = ", which depends on the data"
    elif any(
        not s.is_positive for a in (write.footprint, read.footprint) for s in a[0].free_symbols
    ):
        how = ", which isn't a sum of strides"
    elif (part := elements(read.footprint, reader.hints)) < elements(write.footprint, writer.hints):
        how = f", only {part} of its {elements(write.footprint, writer.hints)} elements"
    elif not same(write.footprint[0], read.footprint[0]):
        how = ", from another start"
    elif also is not None and also.key is not None:
        at = f"at {also.key[1]}" if also.node == read.node else f"{also.node} at {also.key[1]}"
        how = f" and {at}: two elements at once that are written one after the other"
    else:
        how = _rounds(write, read, writer, reader)
    return Refusal(told + how, "index_mismatch")


def _differ(one: Access, other: Access, nest: LoopNest) -> bool:
    """Do two reads of a nest touch different elements of a buffer in one iteration?"""
    first, second = nest.at(one), nest.at(other)
    if one.buffer != other.buffer or first is None or second is None:
        return False
    return not first.equals(second)


def _rounds(write: Access, read: Access, writer: LoopNest, reader: LoopNest) -> str:
    """What one round of the parallel loops makes and takes, where both kernels have other loops inside."""
    made, taken = (_each(nest, a) for nest, a in ((writer, write), (reader, read)))
    if not (writer.r and reader.r) or made is None or taken is None or made[1] == taken[1]:
        return ", in an order that doesn't suit what else they share"
    row, part = (elements(where, writer.hints) for where in (made, taken))
    takes = f"takes {part}" + (" others" if part == row else "")
    who = short_name(reader.nodes)
    return f": each round of its parallel loops makes {row} of them, each round of {who} {takes}"


def _each(nest: LoopNest, access: Access) -> Footprint | None:
    """The elements that a nest touches in one iteration of its parallel loops, wherever they start."""
    index = nest.at(access)
    if index is None:
        return None
    strides = {loop: stride for loop, stride in index.strides.items() if loop in nest.r}
    return footprint(StridedIndex(strides=strides, rest=index.rest), nest.r, nest.hints)


def loop_mismatch(a: LoopNest, b: LoopNest) -> Refusal:
    """`loops [128] over [64] and [64] over [128] don't match: ...`, with what each of them does."""
    does = []
    for nest in (a, b):
        rows, row = (size_hint(product(g.values()), nest.hints) for g in (nest.x, nest.r))
        over = f"goes over {row} elements" if nest.r else "runs"
        does.append(f"{short_name(nest.nodes)} {over} {rows} times")
    return Refusal(
        f"loops {a.space()} and {b.space()} don't match: {' but '.join(does)}", "loop_mismatch"
    )
