"""`schedule`: from a `LoopGraph` to kernels in running order.

    nodes         one per buffer, its loop body recorded; what nothing needs is dropped
    dependencies  a reader runs after the writer, a scatter after everybody else who reads its target
    fusion        pairs that save memory traffic become one kernel (fusion.py)
    order         as in the graph, or one with a lower peak of memory
    memory        what is allocated, freed and handed on (memory.py)

The real compiler: Scheduler in torch/_inductor/scheduler.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import torch

from minicompile.errors import Unsupported, VerifyError
from minicompile.lowering.ir import (
    ComputedBuffer,
    ConstantBuffer,
    ExternKernel,
    InputBuffer,
    LoopGraph,
    Scatter,
    View,
    written_by,
)
from minicompile.options import Options
from minicompile.scheduling.body import record
from minicompile.scheduling.body import verify as verify_body
from minicompile.scheduling.dependencies import dependencies
from minicompile.scheduling.fusion import AnyNode, Fuser, FusionContext
from minicompile.scheduling.memory import kept_buffers, plan_memory
from minicompile.scheduling.nest import finished
from minicompile.scheduling.nodes import (
    Dependency,
    ExternKernelSchedulerNode,
    FusedSchedulerNode,
    MemoryPlan,
    Schedule,
    ScheduledNode,
    SchedulerNode,
)


def schedule(graph: LoopGraph, options: Options) -> Schedule:
    """Kernels, extern calls, their order and the memory plan of a graph.

    Raises Unsupported for a scatter into memory that the caller owns.
    """
    nodes = live_nodes(graph, make_nodes(graph))
    before = dependency_graph(nodes)
    context = fusion_context(graph, options, nodes)
    fuser = Fuser(nodes, before, context)
    if options.fusion:
        fuser.run()
    groups: dict[int, ScheduledNode] = {}
    for i, node in enumerate(nodes):
        if isinstance(node, ExternKernelSchedulerNode):
            groups[i] = node
        elif i in fuser.nests:
            groups[i] = finished(fuser.nests[i])
    ordered, memory = best_order(graph, groups, fuser.mask, fuser.ancestors)
    result = Schedule(graph, nodes, ordered, fuser.decisions, memory)
    if options.verify:
        verify(result)
    return result


# -- nodes and dependencies


def make_nodes(graph: LoopGraph) -> list[AnyNode]:
    """One node per operation: loop bodies recorded, dependencies read off."""
    dtypes = {name: buffer.layout.dtype for name, buffer in graph.buffers.items()}
    owned = {b.name for b in graph.constants} | {
        b.name for b in graph.inputs if isinstance(b, InputBuffer)
    }
    nodes: list[AnyNode] = []
    for operation in graph.operations:
        if isinstance(operation, ExternKernel):
            reads = dict.fromkeys(Dependency(view.buffer, None) for view in operation.views())
            writes = [Dependency(b.name, None) for b in written_by(operation)]
            nodes.append(ExternKernelSchedulerNode(operation, tuple(reads), tuple(writes)))
        else:
            if isinstance(operation.loops, Scatter) and operation.loops.target in owned:
                raise Unsupported(
                    f"{operation.name} would update {operation.loops.target}, which the caller owns",
                    hint="lowering must copy it first",
                )
            nodes.append(scheduler_node(operation, dtypes))
    return nodes


def scheduler_node(buffer: ComputedBuffer, dtypes: Mapping[str, torch.dtype]) -> SchedulerNode:
    """A buffer's loop nest as a node."""
    body = record(buffer, dtypes)
    reads, writes = dependencies(body)
    return SchedulerNode(buffer, body, reads, writes)


def live_nodes(graph: LoopGraph, nodes: Sequence[AnyNode]) -> list[AnyNode]:
    """The nodes that outputs need, and library calls with effects (random numbers, checks)."""
    needed = {output.buffer for output in graph.outputs if isinstance(output, View)}
    live: list[AnyNode] = []
    for node in reversed(nodes):
        if has_effect(node) or any(d.buffer in needed for d in node.writes):
            live.append(node)
            needed.update(d.buffer for d in node.reads)
            needed.update(_scatter_target(node))
    return live[::-1]


def has_effect(node: AnyNode) -> bool:
    """Whether eager would behave differently without the call, even if nobody reads its result."""
    if not isinstance(node, ExternKernelSchedulerNode):
        return False
    op = node.kernel.op
    random = torch.Tag.nondeterministic_seeded in op.tags
    return random or op._schema.is_mutable or not node.writes


def _scatter_target(node: AnyNode) -> tuple[str, ...]:
    if isinstance(node, SchedulerNode) and isinstance(node.buffer.loops, Scatter):
        return (node.buffer.loops.target,)
    return ()


def dependency_graph(nodes: Sequence[AnyNode]) -> dict[int, set[int]]:
    """For each node (by position), the nodes that must run before it."""
    writer = {d.buffer: i for i, node in enumerate(nodes) for d in node.writes}
    readers: dict[str, list[int]] = {}
    before: dict[int, set[int]] = {i: set() for i in range(len(nodes))}
    last_effect: int | None = None
    for i, node in enumerate(nodes):
        for buffer in [*(d.buffer for d in node.reads), *_scatter_target(node)]:
            if buffer in writer:
                before[i].add(writer[buffer])
            readers.setdefault(buffer, []).append(i)
        if has_effect(node):  # effects keep their order
            if last_effect is not None:
                before[i].add(last_effect)
            last_effect = i
    for i, node in enumerate(nodes):
        for target in _scatter_target(node):
            before[i].update(j for j in readers[target] if j != i)
    return before


def fusion_context(graph: LoopGraph, options: Options, nodes: Sequence[AnyNode]) -> FusionContext:
    """The facts that fusion decisions rest on."""
    readers: dict[str, set[str]] = {name: set() for name in graph.buffers}
    for node in nodes:
        for dependency in node.reads:
            readers[dependency.buffer].add(node.name)
    sizes = {name: b.layout.dtype.itemsize for name, b in graph.buffers.items()}
    frozen = {name: frozenset(found) for name, found in readers.items()}
    return FusionContext(graph, options, frozen, kept_buffers(graph), sizes)


# -- order


def best_order(
    graph: LoopGraph,
    groups: Mapping[int, ScheduledNode],
    mask: Mapping[int, int],
    ancestors: Mapping[int, int],
) -> tuple[list[ScheduledNode], MemoryPlan]:
    """The graph's own order, unless running what frees most memory first needs less of it."""
    stable = topological_order(groups, mask, ancestors, {i: i for i in groups})
    kept = [groups[i] for i in stable]
    plan = plan_memory(graph, kept)
    late = topological_order(groups, mask, ancestors, _latest(groups, mask, ancestors))
    if late != stable:
        other = [groups[i] for i in late]
        other_plan = plan_memory(graph, other)
        if other_plan.peak_bytes < plan.peak_bytes:
            return other, other_plan
    return kept, plan


def _latest(
    groups: Mapping[int, ScheduledNode], mask: Mapping[int, int], ancestors: Mapping[int, int]
) -> dict[int, int]:
    """Run each group just before its first reader, and what nobody reads in its own place."""
    urgency: dict[int, int] = {}
    for i in groups:
        users = [j for j in groups if ancestors[j] & mask[i]]
        urgency[i] = 2 * min(users) - 1 if users else 2 * i
    return urgency


def topological_order(
    groups: Mapping[int, ScheduledNode],
    mask: Mapping[int, int],
    ancestors: Mapping[int, int],
    urgency: Mapping[int, int],
) -> list[int]:
    """Groups in an order that respects `ancestors`; of those that could run, the most urgent first."""
    waiting = {i: sum(1 for j in groups if j != i and ancestors[i] & mask[j]) for i in groups}
    ready = [(urgency[i], i) for i, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, i = heapq.heappop(ready)
        order.append(i)
        for j in groups:
            if j != i and ancestors[j] & mask[i]:
                waiting[j] -= 1
                if waiting[j] == 0:
                    heapq.heappush(ready, (urgency[j], j))
    if len(order) != len(groups):
        raise VerifyError("the kernels depend on each other in a cycle")
    return order


# -- verification


def verify(result: Schedule) -> None:
    """Raise VerifyError where a schedule breaks its promises: bodies, order, memory."""
    graph, memory = result.graph, result.memory
    written = {b.name for b in graph.inputs if isinstance(b, InputBuffer)}
    written |= {b.name for b in graph.constants if isinstance(b, ConstantBuffer)}
    lost: set[str] = set()
    for step, node in enumerate(result.nodes):
        if isinstance(node, FusedSchedulerNode):
            for body in node.bodies:
                verify_body(body)
        for dependency in node.reads:
            if dependency.buffer not in written:
                raise VerifyError(f"{node.name} reads {dependency.buffer} before it is written")
            if dependency.buffer in lost:
                raise VerifyError(
                    f"{node.name} reads {dependency.buffer} after its memory was reused"
                )
        for allocation in memory.allocate[step]:
            if allocation.reuses is not None:
                lost.add(allocation.reuses)
        written.update(d.buffer for d in node.writes)
        for name in memory.internal & {d.buffer for d in node.writes}:
            if any(d.buffer == name for n in result.nodes if n is not node for d in n.reads):
                raise VerifyError(f"{name} is internal to a kernel, but another reads it")
    for output in graph.outputs:
        if isinstance(output, View) and (output.buffer in lost or output.buffer not in written):
            raise VerifyError(f"output {output.buffer} is not in memory at the end")
