"""Groups of a backward graph's results, each handed out as soon as its last member is finished.

DistributedDataParallel sums gradients over processes a bucket at a time; a bucket can be on its way while the
rest of the backward still runs, if it needn't wait for all gradients. The schedule's order decides which
gradients are finished first, buckets' sizes where groups end. The real compiler cuts the forward graph into
one graph for each bucket instead: DDPOptimizer in torch/_dynamo/backends/distributed.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from minicompile import compat
from minicompile.aot.result import AotResult, OutputGroup
from minicompile.dynamo.result import Capture
from minicompile.lowering.ir import InputBuffer, LoopGraph, View
from minicompile.ops.display import bytes_text, count_text
from minicompile.pipeline import Grouping, output_groups
from minicompile.scheduling.memory import FRESH
from minicompile.scheduling.nodes import ExternKernelSchedulerNode, Schedule


@dataclass(frozen=True)
class Buckets:
    """What is summed at once: the bytes that fill the first bucket and later ones."""

    first: int
    rest: int
    bytes: Sequence[int]
    """What each result of the graph adds to them."""
    same: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Inputs that hold what a result is the gradient of: who gets that may overwrite them."""


@output_groups("ddp")
def by_buckets(
    capture: Capture, aot: AotResult, forward: LoopGraph, takes: Sequence[int]
) -> Grouping | None:
    """Group gradients by buckets, if the captured call is inside the forward of a DistributedDataParallel.

    Parts of a backward each give their gradients when they are done."""
    if (sums := compat.ddp_buckets()) is None or len(aot.metadata.parts) > 1:
        return None
    first, rest, parameters = sums
    sizes = {id(p): p.nbytes for p in parameters}
    learned, start = aot.metadata.differentiable_inputs, len(aot.metadata.result_requires_grad)
    reals = [given.real() if given.real is not None else None for given in capture.inputs]
    names = {b.name: i for i, b in enumerate(forward.inputs) if isinstance(b, InputBuffer)}
    same: dict[int, list[int]] = {}
    for number, saved in enumerate(forward.outputs[start:]):
        place = names.get(saved.buffer) if isinstance(saved, View) else None
        if place in learned:
            same.setdefault(learned.index(place), []).append(number)
    buckets = Buckets(first, rest, [sizes.get(id(reals[i]), 0) for i in learned], same)
    return partial(groups_of, buckets=buckets)


def groups_of(schedule: Schedule, buckets: Buckets) -> tuple[list[OutputGroup], str]:
    """The groups in order, none if one would be all; and why they are what they are."""
    finished = finished_steps(schedule, buckets)
    end, sizes = len(schedule.nodes) - 1, buckets.bytes
    members, found, filled = list[int](), list[tuple[int, list[int]]](), 0
    order = sorted(range(len(finished)), key=finished.__getitem__)
    for place, i in enumerate(order):
        members.append(i)
        filled += sizes[i]
        limit = buckets.rest if found else buckets.first
        last = place + 1 == len(order)
        if last or (filled >= limit and finished[order[place + 1]] > finished[i]):
            found.append((end if last else finished[i], members))
            members, filled = [], 0
    full = [bytes_text(sum(sizes[i] for i in members)) for _, members in found]
    if len(found) < 2:
        own, bucket = bytes_text(sum(sizes)), bytes_text(buckets.first)
        return [], f"gradients come out at its end: {own} of them, the first bucket takes {bucket}"
    groups = [OutputGroup(step, tuple(m), read_after(schedule, step)) for step, m in found]
    what = f"{count_text(len(groups), 'group')} of gradients ({', '.join(full)})"
    return groups, f"{what}, handed out while it runs, for DistributedDataParallel"


def finished_steps(schedule: Schedule, buckets: Buckets) -> list[int]:
    """The step after which nobody touches each result any more, nor what it is the gradient of."""
    graph, shared = schedule.graph, shared_memory(schedule)
    touched: dict[str, int] = {}
    for step, node in enumerate(schedule.nodes):
        for dependency in (*node.reads, *node.writes):
            touched[shared.get(dependency.buffer, dependency.buffer)] = step
    given = {buffer.name for buffer in graph.given}
    found = []
    for number, output in enumerate(graph.outputs):
        inputs = (graph.inputs[i] for i in buckets.same.get(number, ()))
        names = [buffer.name for buffer in inputs if hasattr(buffer, "name")]
        if isinstance(output, View):
            if output.buffer in given:  # the caller's memory: who knows who sees it
                touched[shared.get(output.buffer, output.buffer)] = len(schedule.nodes) - 1
            names.append(output.buffer)
        found.append(max((touched.get(shared.get(n, n), 0) for n in names), default=0))
    return found


def shared_memory(schedule: Schedule) -> dict[str, str]:
    """Buffers that may be views of one memory, each with one of them that stands for all."""
    groups: dict[str, set[str]] = {}
    pairs = [set(pair) for pair in schedule.memory.aliases.items()]
    for node in schedule.nodes:
        if isinstance(node, ExternKernelSchedulerNode) and node.kernel.op not in FRESH:
            pairs.append({d.buffer for d in (*node.reads, *node.writes)})
    for names in pairs:
        joined = names.union(*(groups.get(name, ()) for name in names))
        groups.update(dict.fromkeys(joined, joined))
    return {name: min(joined) for name, joined in groups.items()}


def read_after(schedule: Schedule, step: int) -> tuple[int, ...]:
    """The inputs, by number, that later steps read or that are results: those come last."""
    graph: LoopGraph = schedule.graph
    later = {d.buffer for node in schedule.nodes[step + 1 :] for d in node.reads}
    later |= {o.buffer for o in graph.outputs if isinstance(o, View)}
    return tuple(i for i, b in enumerate(graph.inputs) if getattr(b, "name", None) in later)
