"""The memory plan: when each buffer is allocated, when it dies, and whose memory it can take over.

Liveness is a walk over the kernels in running order. A buffer that only one kernel touches never reaches
memory; one that dies hands its memory to a later one of the same device, dtype and size. Memory that the
caller sees (graph inputs, constants, outputs) is never handed on.
The real compiler: torch/_inductor/codegen/memory_planning.py, AllocateLine in codegen/wrapper.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minicompile.lowering.ir import PRODUCTS, ComputedBuffer, LoopGraph, Scatter
from minicompile.scheduling.nodes import Allocation, FusedSchedulerNode, MemoryPlan, ScheduledNode
from minicompile.shapes.expr import size_hint


@dataclass(frozen=True)
class Life:
    """The memory of one buffer: alive in the steps `born` to `dies`."""

    name: str
    key: object
    """Memory of equal keys is interchangeable."""
    bytes: int
    born: int
    dies: int
    planned: bool
    """The wrapper allocates it, not a library operator."""
    lent: bool
    """A library operator made or read it: its results may be views of it. Products never are."""


def scatter_targets(graph: LoopGraph) -> dict[str, str]:
    """Scatter results and the buffer whose memory each takes over."""
    return {
        op.name: op.loops.target
        for op in graph.operations
        if isinstance(op, ComputedBuffer) and isinstance(op.loops, Scatter)
    }


def kept_buffers(graph: LoopGraph) -> frozenset[str]:
    """Buffers that need memory whoever reads them: outputs, and what scatters update."""
    targets = scatter_targets(graph)
    return frozenset({*graph.returned, *targets, *targets.values()})


class Liveness:
    """When each buffer of a schedule is alive."""

    def __init__(self, graph: LoopGraph, nodes: Sequence[ScheduledNode]) -> None:
        self.steps = len(nodes)
        touched = [dict.fromkeys(d.buffer for d in (*n.reads, *n.writes)) for n in nodes]
        born_at = {d.buffer: step for step, node in enumerate(nodes) for d in node.writes}
        self.last = {name: step for step, names in enumerate(touched) for name in names}
        """The step after which each buffer is dead; outputs never are."""
        kept = kept_buffers(graph)
        self.internal = frozenset(
            d.buffer
            for step, node in enumerate(nodes)
            if isinstance(node, FusedSchedulerNode)
            for d in node.writes
            if self.last[d.buffer] == step and d.buffer not in kept
        )
        """Buffers that one kernel writes and only that kernel reads."""
        for name in self.internal:
            del self.last[name]
        self.last.update(dict.fromkeys(graph.returned, self.steps))
        self.aliases = {s: t for s, t in scatter_targets(graph).items() if s in born_at}
        library = [  # the plan provides the memory of products: they take `out=`
            not isinstance(node, FusedSchedulerNode) and node.kernel.op not in PRODUCTS
            for node in nodes
        ]
        lent = {
            name for names, calls in zip(touched, library, strict=True) if calls for name in names
        }
        dies = dict(self.last)
        for name, target in reversed(self.aliases.items()):
            dies[target] = max(dies[target], dies[name])
        self.lives: list[Life] = []
        """Memory of our own, in the order in which it is allocated."""
        buffers, hints = graph.buffers, graph.size_hints
        for name, born in born_at.items():
            if name in self.internal or name in self.aliases:
                continue
            layout = buffers[name].layout
            size = layout.storage_size
            self.lives.append(
                Life(
                    name=name,
                    key=(layout.device, layout.dtype, size),
                    bytes=size_hint(size, hints) * layout.dtype.itemsize,
                    born=born,
                    dies=dies[name],
                    planned=not library[born],
                    lent=name in lent,
                )
            )

    def live_bytes(self) -> list[int]:
        """Bytes of our own memory alive while each step runs."""
        live = [0] * self.steps
        for life in self.lives:
            for step in range(life.born, min(life.dies + 1, self.steps)):
                live[step] += life.bytes
        return live


def plan_memory(graph: LoopGraph, nodes: Sequence[ScheduledNode]) -> MemoryPlan:
    """Who is allocated and freed where; dead memory is handed on unless keeping it would raise the peak."""
    alive = Liveness(graph, nodes)
    live = alive.live_bytes()
    reused = _handed_on(alive.lives, live)
    plan = MemoryPlan([[] for _ in nodes], [[] for _ in nodes], alive.aliases, alive.internal, live)
    for life in alive.lives:
        if life.planned:
            plan.allocate[life.born].append(Allocation(life.name, reused.get(life.name)))
    for name, step in sorted(alive.last.items()):
        if step < len(nodes):
            plan.free[step].append(name)
    return plan


def _handed_on(lives: Sequence[Life], live: list[int]) -> dict[str, str]:
    """For each buffer that takes over a dead one's memory, the dead one.

    Between the two the memory lies idle, which must not raise the peak; it is added to `live`.
    """
    peak = max(live, default=0)
    waiting: dict[object, list[Life]] = {}
    for life in lives:
        if life.planned:
            waiting.setdefault(life.key, []).append(life)
    found: dict[str, str] = {}
    for old in sorted(lives, key=lambda life: (life.dies, life.name)):
        later = [new for new in waiting.get(old.key, ()) if new.born > old.dies]
        if old.lent or not later:
            continue
        idle = range(old.dies + 1, later[0].born)
        if all(live[step] + old.bytes <= peak for step in idle):
            found[later[0].name] = old.name
            waiting[old.key].remove(later[0])
            for step in idle:
                live[step] += old.bytes
    return found
