"""In-place reuse: may a kernel write a buffer into the memory of another one, which dies in it?

At a point of the kernel's loops, every load of the old buffer must come before the store of the new one, and
go to the same element. Then vectors, blocks, tiles and threads may run the points in any order. What is
asked here of the schedule is asked again of the finished kernel plan (codegen/merge.py).
The real compiler: SchedulerNode.decide_inplace_update in torch/_inductor/scheduler.py.
"""

from __future__ import annotations

import torch

from minicompile.scheduling.nodes import (
    ExternKernelSchedulerNode,
    FusedSchedulerNode,
    ScheduledNode,
)

SUMS = {torch.ops.aten.addmm.default, torch.ops.aten.addmm.dtype}
"""Products that are added to their first operand, whose memory they may write."""


def sum_refusal(node: ExternKernelSchedulerNode, old: str, new: str) -> str | None:
    """Why a product that is added to a matrix can't write its result where that lies."""
    views, (result,) = node.kernel.views(), node.kernel.outputs
    if [view.buffer for view in views].count(old) > 1 or views[0].buffer != old:
        return f"{old} is a factor"
    if result is None or views[0].layout != result.layout:
        return f"{old} and {new} lie differently in memory"
    return None


def refusal(node: ScheduledNode, old: str, new: str) -> str | None:
    """Why `node` can't write `new` where `old` lies, whose last reader it is; None if it can."""
    if not isinstance(node, FusedSchedulerNode):
        return sum_refusal(node, old, new)
    numbered = list(enumerate(node.bodies))
    loads = [(k, v) for k, body in numbered for v in body.loads if v.buffer == old]
    ((writer, store),) = [(k, v) for k, body in numbered for v in body.stores if v.buffer == new]
    if store.kind != "store" or store.indirect or store.index is None:
        return f"{new} is scattered"
    if not loads or any(v.indirect for _, v in loads):
        return f"{old} is read at positions known only at run time"
    other = next((v for _, v in loads if v.index != store.index), None)
    if other is not None:
        return f"{old} is read at {other.index}, but {new} is written at {store.index}"
    if any(v.mask is not None for _, v in loads):
        return f"{old} is read under a mask"
    along_row = not store.index.free_symbols.isdisjoint(node.reduction_ranges)
    loops = {**node.ranges, **(node.reduction_ranges if along_row else {})}
    if any(size != 1 and loop not in store.index.free_symbols for loop, size in loops.items()):
        return f"several points of the loops share an element of {new}"
    if any(body.scans for body in node.bodies):
        return "the kernel scans: its loops pass over a row more than once"
    # what doesn't vary along the row is read once, before the first loop over it
    passes = row_passes(node)
    if along_row and passes[writer] < max(passes):
        return f"{old} may be read again by a later loop over the row"
    if min(k for k, _ in loads) > writer:
        return f"{old} is first read after {new} is written"
    return None


def row_passes(node: FusedSchedulerNode) -> list[int]:
    """For each body, how many loops over the row have run before its own: reductions that it needs."""
    passes: list[int] = []
    complete: dict[str, int] = {}
    for part, body in zip(node.nodes, node.bodies, strict=True):
        passes.append(max((complete.get(v.buffer, 0) for v in body.loads), default=0))
        complete[part.name] = passes[-1] + bool(body.reductions)
    return passes
