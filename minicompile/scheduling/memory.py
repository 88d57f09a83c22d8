"""The memory plan: when each buffer is allocated, when it dies, and whose memory it can take over.

Liveness is a walk over the kernels in running order. A buffer that only one kernel touches never reaches
memory; one that dies hands its memory to another of the same device, dtype and size: to one that the last
reader writes, where that is right (in_place.py), or to a later one. Memory that the caller sees (graph
inputs, constants, outputs) is never handed on; but an input's new contents can be written into it at once.
The real compiler: torch/_inductor/codegen/memory_planning.py, AllocateLine in codegen/wrapper.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from minicompile.lowering.ir import (
    PRODUCTS,
    ComputedBuffer,
    InputBuffer,
    LoopGraph,
    Scatter,
    View,
)
from minicompile.scheduling import in_place
from minicompile.scheduling.nodes import (
    Allocation,
    Block,
    FusedSchedulerNode,
    InPlaceDecision,
    MemoryPlan,
    ScheduledNode,
)
from minicompile.shapes.expr import size_hint

aten = torch.ops.aten

FRESH = PRODUCTS | {aten.convolution.default, aten.convolution_backward.default}
"""Library operators whose results are never views of what they read."""

ALIGNMENT = 64
"""Bytes of which offsets are multiples: a cache line, the widest vector."""


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
    """The wrapper allocates it (products take `out=`), not a library operator."""
    lent: bool
    """A library operator made or read it whose results may be views of what it read."""


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
        calls = [None if isinstance(n, FusedSchedulerNode) else n.kernel.op for n in nodes]
        self.lent = {
            name
            for names, op in zip(touched, calls, strict=True)
            if op is not None and op not in FRESH
            for name in names
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
                    planned=calls[born] is None or calls[born] in PRODUCTS,
                    lent=name in self.lent,
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
    into_inputs = written_back(graph, alive, nodes)
    home = {d.new: d for d in into_inputs if d.done}
    alive.lives = [life for life in alive.lives if life.name not in home]
    decisions = in_place_decisions(alive, nodes)
    taken = {d.new: d.old for d in decisions if d.done}
    live, sizes = alive.live_bytes(), {life.name: life.bytes for life in alive.lives}
    for decision in decisions:
        live[decision.step] -= sizes[decision.new] * decision.done
    reused = taken | _handed_on(alive.lives, live, taken)
    plan = MemoryPlan([[] for _ in nodes], [[] for _ in nodes], alive.aliases, alive.internal, live)
    for life in alive.lives:
        if life.planned:
            made = Allocation(life.name, reused.get(life.name), life.name in taken)
            plan.allocate[life.born].append(made)
    for d in home.values():
        plan.allocate[d.step].append(Allocation(d.new, d.old, alive.last.get(d.old) == d.step))
    for name, step in sorted(alive.last.items()):
        if step < len(nodes):
            plan.free[step].append(name)
    plan.decisions, plan.buffer_bytes = into_inputs + decisions, sum(sizes.values())
    plan.blocks = blocks(alive.lives, reused, len(nodes))
    plan.eager_bytes = graph.eager_bytes
    return plan


def in_place_decisions(alive: Liveness, nodes: Sequence[ScheduledNode]) -> list[InPlaceDecision]:
    """For each buffer that dies in a kernel, largest first, the first one that can take its memory."""
    shared = {*alive.aliases.values()}
    dying: dict[int, list[Life]] = {}
    made: dict[int, list[Life]] = {}
    for life in sorted(alive.lives, key=lambda life: (-life.bytes, life.name)):
        if life.dies > life.born and not life.lent and life.name not in shared:
            dying.setdefault(life.dies, []).append(life)
        if life.planned:
            made.setdefault(life.born, []).append(life)
    found: list[InPlaceDecision] = []
    for step, node in enumerate(nodes):
        if not isinstance(node, FusedSchedulerNode):
            continue
        left = made.get(step, [])
        for old in dying.get(step, ()):
            for new in [life for life in left if life.key == old.key]:
                why = in_place.refusal(node, old.name, new.name)
                reason = why or "each element is read where it is written, and never after"
                found.append(InPlaceDecision(step, old.name, new.name, why is None, reason))
                if why is None:
                    left.remove(new)
                    break
    return found


def written_back(
    graph: LoopGraph, alive: Liveness, nodes: Sequence[ScheduledNode]
) -> list[InPlaceDecision]:
    """For each result that becomes an input's contents, whether its kernel can write it there at once."""
    found, lives = [], {life.name: life for life in alive.lives}
    bodies = [
        body for node in nodes if isinstance(node, FusedSchedulerNode) for body in node.bodies
    ]
    fails = any(v.op == "indirect" and v.check for body in bodies for v in body.values)
    for output_number, number in graph.written_back.items():
        output, old = graph.outputs[output_number], graph.inputs[number]
        if not isinstance(output, View) or not isinstance(old, InputBuffer):
            continue
        life, last = lives.get(output.buffer), alive.last.get(old.name, -1)
        if life is None:
            continue
        node, layout, why = nodes[life.born], graph.buffers[life.name].layout, None
        if not isinstance(node, FusedSchedulerNode):
            why = f"a library makes {life.name}"
        elif last > life.born or graph.returned.count(life.name) > 1 or old.name in alive.lent:
            why = f"{old.name} is read later, or {life.name} is another result too"
        elif not layout == old.layout == output.layout:
            why = f"{old.name} and {life.name} lie differently in memory"
        elif fails:
            why = "an index out of range would leave it half written"
        elif last == life.born:
            why = in_place.refusal(node, old.name, life.name)
        reason = why or "each element is read where it is written, and never after"
        found.append(InPlaceDecision(life.born, old.name, life.name, why is None, reason))
    return found


def _handed_on(lives: Sequence[Life], live: list[int], taken: Mapping[str, str]) -> dict[str, str]:
    """For each buffer that takes over the memory of one that died before, that one.

    Between the two the memory lies idle, which must not raise the peak; it is added to `live`. `taken` is
    given away already.
    """
    peak = max(live, default=0)
    gone = set(taken.values())
    waiting: dict[object, list[Life]] = {}
    for life in lives:
        if life.planned and life.name not in taken:
            waiting.setdefault(life.key, []).append(life)
    found: dict[str, str] = {}
    for old in sorted(lives, key=lambda life: (life.dies, life.name)):
        later = [new for new in waiting.get(old.key, ()) if new.born > old.dies]
        if old.lent or old.name in gone or not later:
            continue
        idle = range(old.dies + 1, later[0].born)
        if all(live[step] + old.bytes <= peak for step in idle):
            found[later[0].name] = old.name
            waiting[old.key].remove(later[0])
            for step in idle:
                live[step] += old.bytes
    return found


def blocks(lives: Sequence[Life], reused: Mapping[str, str], steps: int) -> list[Block]:
    """The pieces of memory behind the buffers, laid out side by side."""
    chains: dict[str, list[Life]] = {}
    for life in lives:  # those that take over come after those they take over from
        chain = chains[reused[life.name]] if life.name in reused else []
        chain.append(life)
        chains[life.name] = chain
    found = [c for name, c in chains.items() if c[0].name == name]
    offsets = place([(c[0].born, c[-1].dies, c[0].bytes) for c in found])
    out = []
    for chain, offset in zip(found, offsets, strict=True):
        first, last = chain[0], chain[-1]
        home: Literal["own", "library", "output"] = "own" if first.planned else "library"
        home = "output" if last.dies == steps else home
        names = tuple(life.name for life in chain)
        out.append(Block(names, first.born, min(last.dies, steps - 1), first.bytes, home, offset))
    return out


def place(pieces: Sequence[tuple[int, int, int]]) -> list[int]:
    """Offsets for pieces (born, dies, bytes), such that those alive at the same time lie apart.

    The largest first, each at the lowest place that is free all its life.
    """
    offsets = [0] * len(pieces)
    placed: list[tuple[int, int, int, int]] = []
    for i in sorted(range(len(pieces)), key=lambda i: (-pieces[i][2], i)):
        born, dies, size = pieces[i]
        start = 0
        for low, high, other_born, other_dies in sorted(placed):
            if other_born <= dies and born <= other_dies and low < start + size:
                start = max(start, -(-high // ALIGNMENT) * ALIGNMENT)
        offsets[i] = start
        placed.append((start, start + size, born, dies))
    return offsets
