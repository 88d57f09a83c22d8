"""The memory plan: when each buffer is allocated, when it dies, and whose memory it can take over.

Liveness is a walk over the kernels in running order. A buffer that only one kernel touches never reaches
memory; one that dies hands its memory to a later one of the same device, dtype and size. Memory that the
caller sees (graph inputs, constants, outputs) is never handed on.
The real compiler: torch/_inductor/codegen/memory_planning.py, AllocateLine in codegen/wrapper.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from minicompile.lowering.ir import Buffer, ExternKernel, LoopGraph, Scatter, View
from minicompile.scheduling.nodes import (
    Allocation,
    ExternKernelSchedulerNode,
    FusedSchedulerNode,
    MemoryPlan,
    ScheduledNode,
)
from minicompile.shapes.expr import size_hint

WRITES_INTO = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.baddbmm.default,
    }
)
"""Library operators that take `out=`: their results go into memory that the plan provides."""


def internal_buffers(graph: LoopGraph, nodes: Sequence[ScheduledNode]) -> frozenset[str]:
    """Buffers that one kernel writes and only that kernel reads."""
    kept = kept_buffers(graph)
    readers: dict[str, set[int]] = {}
    for position, node in enumerate(nodes):
        for buffer in _read_by(node):
            readers.setdefault(buffer, set()).add(position)
    return frozenset(
        d.buffer
        for position, node in enumerate(nodes)
        if isinstance(node, FusedSchedulerNode)
        for d in node.writes
        if d.buffer not in kept and readers.get(d.buffer, set()) <= {position}
    )


def kept_buffers(graph: LoopGraph) -> frozenset[str]:
    """Buffers that need memory whoever reads them: outputs, and what scatters update."""
    kept = {output.buffer for output in graph.outputs if isinstance(output, View)}
    for name, target in scatter_targets(graph).items():
        kept |= {name, target}
    return frozenset(kept)


def scatter_targets(graph: LoopGraph) -> dict[str, str]:
    """Scatter results and the buffer whose memory each takes over."""
    return {
        op.name: op.loops.target
        for op in graph.operations
        if not isinstance(op, ExternKernel) and isinstance(op.loops, Scatter)
    }


def plan_memory(graph: LoopGraph, nodes: Sequence[ScheduledNode]) -> MemoryPlan:
    """Who is allocated and freed where; dead memory is handed on unless keeping it would raise the peak."""
    return _Planner(graph, nodes).plan()


def _read_by(node: ScheduledNode) -> list[str]:
    """Buffers a node reads, in memory or within itself; a scatter reads its target."""
    if isinstance(node, ExternKernelSchedulerNode):
        return [d.buffer for d in node.reads]
    found = [d.buffer for member in node.nodes for d in member.reads]
    return found + [
        m.buffer.loops.target for m in node.nodes if isinstance(m.buffer.loops, Scatter)
    ]


class _Planner:
    def __init__(self, graph: LoopGraph, nodes: Sequence[ScheduledNode]) -> None:
        self.graph, self.nodes = graph, nodes
        self.buffers: Mapping[str, Buffer] = graph.buffers
        self.internal = internal_buffers(graph, nodes)
        written = {d.buffer for node in nodes for d in node.writes}
        self.aliases = {s: t for s, t in scatter_targets(graph).items() if s in written}
        self.outputs = {o.buffer for o in graph.outputs if isinstance(o, View)}
        self.last = self._last_uses()
        self.holds = self._memory_lives()
        self.lent = self._lent()
        self.born = {
            d.buffer: step
            for step, node in enumerate(nodes)
            for d in node.writes
            if self._owns(d.buffer)
        }
        layouts = {name: self.buffers[name].layout for name in self.born}
        self.keys = {n: (lay.device, lay.dtype, lay.storage_size) for n, lay in layouts.items()}
        """Memory of equal keys is interchangeable."""
        hints = graph.size_hints
        self.bytes = {
            n: size_hint(size, hints) * d.itemsize for n, (_, d, size) in self.keys.items()
        }

    def _last_uses(self) -> dict[str, int]:
        """The step after which each buffer is dead; outputs never are."""
        last: dict[str, int] = {}
        for step, node in enumerate(self.nodes):
            for name in [*_read_by(node), *(d.buffer for d in node.writes)]:
                if name not in self.internal:
                    last[name] = step
        for name in self.outputs:
            last[name] = len(self.nodes)
        return last

    def _memory_lives(self) -> dict[str, int]:
        """The step after which each piece of memory is dead: a scatter's result keeps its target's."""
        holds = dict(self.last)
        for name in reversed(self.aliases):
            target = self.aliases[name]
            holds[target] = max(holds.get(target, -1), holds.get(name, -1))
        return holds

    def _lent(self) -> frozenset[str]:
        """Buffers that a library read: its results may be views of them. Products never are."""
        return frozenset(
            d.buffer
            for node in self.nodes
            if isinstance(node, ExternKernelSchedulerNode) and node.kernel.op not in WRITES_INTO
            for d in (*node.reads, *node.writes)
        )

    def plan(self) -> MemoryPlan:
        live = self._live_bytes()
        reused = self._reused(live)
        held = {old: new for new, old in reused.items()}
        dead: dict[int, list[str]] = {}
        for name, step in sorted(self.last.items()):
            dead.setdefault(step, []).append(name)
        plan = MemoryPlan(internal=self.internal, aliases=self.aliases)
        for step, node in enumerate(self.nodes):
            new = self._allocated(node)
            plan.allocate.append([Allocation(name, reused.get(name)) for name in new])
            plan.free.append(dead.get(step, []))
        plan.live_bytes = live
        for old, new_name in held.items():
            for step in range(self.holds[old] + 1, self.born[new_name]):
                plan.live_bytes[step] += self.bytes[old]
        return plan

    def _live_bytes(self) -> list[int]:
        """Bytes of our own memory alive while each step runs."""
        live = [0] * len(self.nodes)
        for name, start in self.born.items():
            size = self.bytes[name]
            for step in range(start, min(self.holds[name] + 1, len(live))):
                live[step] += size
        return live

    def _reused(self, live: list[int]) -> dict[str, str]:
        """For each buffer that takes over a dead one's memory, the dead one.

        Between the two the memory lies idle: that must not raise the peak.
        """
        peak = max(live, default=0)
        spare = [peak - used for used in live]
        waiting: dict[object, list[str]] = {}
        for node in self.nodes:
            for name in self._allocated(node):
                waiting.setdefault(self.keys[name], []).append(name)
        found: dict[str, str] = {}
        for old in sorted(self.born, key=lambda name: (self.holds[name], name)):
            if old in self.lent:
                continue
            end, size = self.holds[old], self.bytes[old]
            later = [n for n in waiting.get(self.keys[old], ()) if self.born[n] > end]
            if later and all(spare[step] >= size for step in range(end + 1, self.born[later[0]])):
                found[later[0]] = old
                waiting[self.keys[old]].remove(later[0])
                for step in range(end + 1, self.born[later[0]]):
                    spare[step] -= size
        return found

    def _owns(self, name: str) -> bool:
        """It has memory of its own: neither inside a kernel nor in another buffer's."""
        return name not in self.internal and name not in self.aliases

    def _allocated(self, node: ScheduledNode) -> list[str]:
        """Buffers that the wrapper must allocate before the node runs."""
        if isinstance(node, ExternKernelSchedulerNode) and node.kernel.op not in WRITES_INTO:
            return []
        return [d.buffer for d in node.writes if self._owns(d.buffer)]
