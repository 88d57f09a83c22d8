"""`schedule`: from a `LoopGraph` to kernels in running order.

    nodes         one per buffer, its loop body recorded
    dependencies  a reader runs after the writer, a scatter after everybody else who reads its target
    fusion        pairs that save memory traffic become one kernel (fusion.py)
    order         as in the graph, or one with a lower peak of memory
    memory        what is allocated, freed and handed on (memory.py)

The real compiler: Scheduler in torch/_inductor/scheduler.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from minicompile.errors import Unsupported, VerifyError
from minicompile.lowering.ir import ExternKernel, LoopGraph, Scatter, written_by
from minicompile.ops.display import Registered
from minicompile.options import Options
from minicompile.scheduling.body import record
from minicompile.scheduling.fusion import Fuser, FusionContext
from minicompile.scheduling.memory import plan_memory
from minicompile.scheduling.nest import dependencies, finished
from minicompile.scheduling.nodes import (
    Dependency,
    ExternKernelSchedulerNode,
    MemoryPlan,
    Schedule,
    ScheduledNode,
    SchedulerNode,
    SingleNode,
)


@dataclass
class Explained(Schedule):
    """A schedule that answers questions about the run of fusion that it is the end of."""

    fuser: Fuser = field(repr=False)

    why, steps, what_if = Registered(), Registered(), Registered()
    """Why two nodes are one kernel or not; every question in order; the schedule with wishes."""


def schedule(graph: LoopGraph, options: Options) -> Explained:
    """Kernels, extern calls, their order and the memory plan of a graph.

    Raises Unsupported for a scatter into memory that the caller owns.
    """
    nodes = make_nodes(graph)
    context = FusionContext(graph, options, nodes)
    return finish(Fuser(nodes, dependency_graph(nodes), context))


def finish(fuser: Fuser) -> Explained:
    """Fuse what is recorded, then order it and plan its memory."""
    graph, options = fuser.context.graph, fuser.context.options
    if options.fusion:
        fuser.run()
    ordered, memory = best_order(graph, fuser)
    result = Explained(graph, list(fuser.nodes), ordered, fuser.decisions, memory, fuser)
    if options.verify:
        result.verify()
    return result


# -- nodes and dependencies


def make_nodes(graph: LoopGraph) -> list[SingleNode]:
    """One node per operation: loop bodies recorded, dependencies read off.

    A scatter reads its target: what it leaves alone is part of its result.
    """
    dtypes = {name: buffer.layout.dtype for name, buffer in graph.buffers.items()}
    owned = {buffer.name for buffer in graph.given}
    nodes: list[SingleNode] = []
    for operation in graph.operations:
        if isinstance(operation, ExternKernel):
            used = tuple(Dependency(name, None) for name in operation.reads)
            made = tuple(Dependency(b.name, None) for b in written_by(operation))
            nodes.append(ExternKernelSchedulerNode(operation, used, made))
            continue
        body = record(operation, dtypes)
        reads, writes = dependencies(body)
        if isinstance(operation.loops, Scatter):
            target = operation.loops.target
            if target in owned:
                raise Unsupported(
                    f"{operation.name} would update {target}, which the caller owns",
                    hint="lowering must copy it first",
                )
            reads = (*reads, Dependency(target, None))
        nodes.append(SchedulerNode(operation, body, reads, writes))
    return nodes


def dependency_graph(nodes: Sequence[SingleNode]) -> dict[int, set[int]]:
    """For each node (by position), the nodes that must run before it."""
    writer = {d.buffer: i for i, node in enumerate(nodes) for d in node.writes}
    readers: dict[str, set[int]] = {}
    before: dict[int, set[int]] = {}
    last_effect: set[int] = set()
    for i, node in enumerate(nodes):
        buffers = {d.buffer for d in node.reads}
        before[i] = {writer[buffer] for buffer in buffers if buffer in writer}
        for buffer in buffers:
            readers.setdefault(buffer, set()).add(i)
        if isinstance(node, ExternKernelSchedulerNode) and node.kernel.has_effect:
            # effects keep their order
            before[i] |= last_effect
            last_effect = {i}
    for i, node in enumerate(nodes):
        if isinstance(node, SchedulerNode) and isinstance(node.buffer.loops, Scatter):
            before[i] |= readers[node.buffer.loops.target] - {i}
    return before


# -- order


def best_order(graph: LoopGraph, fuser: Fuser) -> tuple[list[ScheduledNode], MemoryPlan]:
    """The graph's own order, unless running kernels just before their first reader needs less memory."""
    groups: dict[int, ScheduledNode] = {}
    for i in fuser.mask:
        node = fuser.nodes[i]
        groups[i] = finished(fuser.nests[i]) if isinstance(node, SchedulerNode) else node
    late = {}
    for i in groups:
        users = [j for j in groups if fuser.ancestors[j] & fuser.mask[i]]
        late[i] = 2 * min(users) - 1 if users else 2 * i
    plans = []
    for urgency in ({i: i for i in groups}, late):
        order = [groups[i] for i in topological_order(fuser.mask, fuser.ancestors, urgency)]
        plans.append((order, plan_memory(graph, order)))
    return min(plans, key=lambda plan: plan[1].peak_bytes)


def topological_order(
    mask: Mapping[int, int], ancestors: Mapping[int, int], urgency: Mapping[int, int]
) -> list[int]:
    """Groups in an order that respects `ancestors`; of those that could run, the most urgent first."""
    waiting = sorted(mask, key=lambda i: (urgency[i], i))
    order: list[int] = []
    missing = sum(mask.values())
    while waiting:
        ready = next((i for i in waiting if not ancestors[i] & missing), None)
        if ready is None:
            raise VerifyError("the kernels depend on each other in a cycle")
        waiting.remove(ready)
        order.append(ready)
        missing &= ~mask[ready]
    return order
