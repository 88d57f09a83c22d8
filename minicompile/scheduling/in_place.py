"""In-place reuse: may a kernel write a buffer into the memory of another one, which dies in it?

At a point of the kernel's loops, every load of the old buffer must come before the store of the new one, and
go to the same element; no other point may touch that element. Then vectors, blocks, tiles and threads may
run the points in any order. What is asked here, of the schedule, is asked again of the finished kernel plan
(codegen/merge.py). The real compiler: SchedulerNode.decide_inplace_update in torch/_inductor/scheduler.py.
"""

from __future__ import annotations

import sympy

from minicompile.scheduling.body import Value
from minicompile.scheduling.nest import StridedIndex, times
from minicompile.scheduling.nodes import FusedSchedulerNode
from minicompile.shapes.expr import ZERO, Size, same, size_hint


def refusal(node: FusedSchedulerNode, old: str, new: str) -> str | None:
    """Why `node` can't write `new` where `old` lies, whose last reader it is; None if it can."""
    loads = [(k, v) for k, body in enumerate(node.bodies) for v in body.loads if v.buffer == old]
    stores = [(k, v) for k, body in enumerate(node.bodies) for v in body.stores if v.buffer == new]
    if len(stores) != 1 or not loads:
        return f"{new} is not written by one store, or {old} is not read by a load"
    ((writer, store),) = stores
    if store.kind != "store" or store.indirect:
        return f"{new} is scattered"
    if any(v.indirect for _, v in loads):
        return f"{old} is read at positions known only at run time"
    other = next((v for _, v in loads if v.index != store.index), None)
    if other is not None:
        return f"{old} is read at {other.index}, but {new} is written at {store.index}"
    if any(v.mask is not None for _, v in loads):
        return f"{old} is read under a mask"
    if not _once(store, node):
        return f"several points of the loops share an element of {new}"
    if any(v.op == "scan" for body in node.bodies for v in body.values):
        return "the kernel scans: its loops pass over a row more than once"
    begins, ends = _sweeps(node)
    # what doesn't vary along the row is read once, before the first loop over it
    if _in_loop(store, node) and max(ends[k] for k, _ in loads) > begins[writer]:
        return f"{old} is read again by a later loop over the row"
    if min(k for k, _ in loads) > writer:
        return f"{old} is first read after {new} is written"
    return None


def _in_loop(store: Value, node: FusedSchedulerNode) -> bool:
    assert store.index is not None
    return not store.index.free_symbols.isdisjoint(node.reduction_ranges)


def _once(store: Value, node: FusedSchedulerNode) -> bool:
    """Whether no two points write one element: each loop steps beyond what the inner ones reach."""
    assert store.index is not None
    loops = {**node.ranges, **(node.reduction_ranges if _in_loop(store, node) else {})}
    index = StridedIndex.of(store.index, loops)
    steps = [(index.strides.get(v, 0), size) for v, size in loops.items() if size != 1]
    symbols = {s for pair in steps for n in pair for s in sympy.sympify(n).free_symbols}
    steps.sort(key=lambda step: size_hint(step[0], dict.fromkeys(symbols, 64)))
    reach: Size = 1
    for stride, size in steps:
        known = isinstance(stride, int) and isinstance(reach, int)
        if not (stride >= reach if known else same(stride, reach)):
            return False
        reach = times(stride, size)
    return index.rest is ZERO


def _sweeps(node: FusedSchedulerNode) -> tuple[list[int], list[int]]:
    """For each body, how many loops over the row have run before it, first and last.

    A value that isn't kept is computed again, from its loads on, by whoever needs it later.
    """
    bodies, names = node.bodies, [part.name for part in node.nodes]
    read = [{v.buffer for v in body.loads} for body in bodies]
    begins: list[int] = []
    known: dict[str, int] = {}
    for name, body, buffers in zip(names, bodies, read, strict=True):
        begins.append(max((known.get(b, 0) for b in buffers), default=0))
        known[name] = begins[-1] + bool(body.reductions)
    ends = list(begins)
    for k in reversed(range(len(bodies))):
        if not bodies[k].reductions:
            ends[k] = max([ends[k], *(end for end, used in zip(ends, read) if names[k] in used)])
    return begins, ends
