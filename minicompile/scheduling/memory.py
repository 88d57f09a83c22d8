"""The memory plan: when each buffer is allocated and freed, and which freed memory a later buffer reuses.

Liveness is a walk over the kernels in running order. A buffer that only one kernel touches never reaches
memory; one that dies hands its memory to another of the same device, dtype and size: to one that the last
reader writes, where that is right (in_place.py), or to a later one. Memory that the caller sees (graph
inputs, constants, outputs) is never handed on; but an input's new contents can be written into it at once.
The real compiler: torch/_inductor/codegen/memory_planning.py, AllocateLine in codegen/wrapper.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from minicompile.lowering.ir import (
    LIBRARY_PRODUCTS,
    PRODUCTS,
    ComputedBuffer,
    InputBuffer,
    LoopGraph,
    Scatter,
    View,
)
from minicompile.ops.gates import REFUSED, allowed
from minicompile.ops.origin import NO_ORIGINS, Origins
from minicompile.scheduling import in_place
from minicompile.scheduling.nodes import (
    Allocation,
    Block,
    FusedSchedulerNode,
    Home,
    InPlaceDecision,
    MemoryPlan,
    ScheduledNode,
)
from minicompile.shapes.expr import Size, size_hint

aten = torch.ops.aten

FRESH = LIBRARY_PRODUCTS | {aten.convolution.default, aten.convolution_backward.default}
"""Library operators whose results are never views of what they read."""


MemoryKey: TypeAlias = tuple[torch.device, torch.dtype, Size]


@dataclass(frozen=True)
class Life:
    """The memory of one buffer: alive in the steps `born` to `dies`."""

    name: str
    key: MemoryKey
    """Device, dtype, elements: memory of equal keys is interchangeable."""
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


def last_uses(touched: Sequence[Iterable[str]]) -> dict[str, int]:
    """The last step that touches each buffer; `touched` has the buffers of each step."""
    return {name: step for step, names in enumerate(touched) for name in names}


class Liveness:
    """When each buffer of a schedule is alive."""

    def __init__(self, graph: LoopGraph, nodes: Sequence[ScheduledNode]) -> None:
        self.steps = len(nodes)
        touched = [dict.fromkeys(d.buffer for d in (*n.reads, *n.writes)) for n in nodes]
        born_at = {d.buffer: step for step, node in enumerate(nodes) for d in node.writes}
        calls = [None if isinstance(n, FusedSchedulerNode) else n.kernel.op for n in nodes]
        last, kept = last_uses(touched), kept_buffers(graph)
        self.internal = frozenset(
            name
            for name, born in born_at.items()
            if calls[born] is None and last[name] == born and name not in kept
        )
        """Buffers that one kernel writes and only that kernel reads."""
        self.last = {name: step for name, step in last.items() if name not in self.internal}
        """The step after which each buffer is dead; outputs never are."""
        self.last.update(dict.fromkeys(graph.returned, self.steps))
        self.aliases = {s: t for s, t in scatter_targets(graph).items() if s in born_at}
        libraries = (step for step, op in enumerate(calls) if op is not None and op not in FRESH)
        self.lent = {name for step in libraries for name in touched[step]}
        dies = dict(self.last)
        for name, target in reversed(self.aliases.items()):
            dies[target] = max(dies[target], dies[name])
        self.lives: list[Life] = []
        """Memory of our own, in the order in which it is allocated."""
        buffers = graph.buffers
        for name, born in born_at.items():
            if name in self.internal or name in self.aliases:
                continue
            layout, planned = buffers[name].layout, calls[born] in (None, *PRODUCTS)
            key = layout.device, layout.dtype, layout.storage_size
            size = size_hint(layout.storage_size, graph.size_hints) * layout.dtype.itemsize
            self.lives.append(Life(name, key, size, born, dies[name], planned, name in self.lent))

    def live_bytes(self) -> list[int]:
        """Bytes of our own memory alive while each step runs."""
        live = [0] * self.steps
        for life in self.lives:
            for step in range(life.born, min(life.dies + 1, self.steps)):
                live[step] += life.bytes
        return live


def plan_memory(graph: LoopGraph, nodes: Sequence[ScheduledNode]) -> MemoryPlan:
    """Decide where each buffer is allocated and freed. There are three ways to need no memory of one's own:
    an output that becomes an input's contents is written into it; a kernel writes in place of what it is the
    last to read; memory that is dead already is used again, unless keeping it would raise the peak."""
    alive = Liveness(graph, nodes)
    into_inputs = written_back(graph, alive, nodes)
    updates = {d.new: d for d in into_inputs if d.done}
    alive.lives = [life for life in alive.lives if life.name not in updates]
    decisions = in_place_decisions(alive, nodes)
    taken = {d.new: d.old for d in decisions if d.done}
    live, sizes = alive.live_bytes(), {life.name: life.bytes for life in alive.lives}
    for decision in decisions:
        live[decision.step] -= sizes[decision.new] * decision.done
    reused = taken | _used_again(alive.lives, live, taken)
    plan = MemoryPlan([[] for _ in nodes], [[] for _ in nodes], alive.aliases, alive.internal, live)
    plan.decisions, plan.buffer_bytes = into_inputs + decisions, sum(sizes.values())
    blocks: dict[str, Block] = {}
    """Each piece of memory, by the last buffer in it so far."""
    for life in alive.lives:  # a buffer comes after the one whose memory it takes
        home: Home = "own" if life.planned else "library"
        block = Block((), life.born, 0, life.bytes, home)
        if life.name in reused:
            block = blocks.pop(reused[life.name])
        home = "output" if life.dies == len(nodes) else block.home
        ends = min(life.dies, len(nodes) - 1)
        blocks[life.name] = replace(
            block, buffers=(*block.buffers, life.name), dies=ends, home=home
        )
        if life.planned:
            new = Allocation(life.name, reused.get(life.name), life.name in taken)
            plan.allocate[life.born].append(new)
    plan.blocks = sorted(blocks.values(), key=lambda block: block.born)
    for d in updates.values():
        plan.allocate[d.step].append(Allocation(d.new, d.old, alive.last.get(d.old) == d.step))
    for name, step in sorted(alive.last.items()):
        if step < len(nodes):
            plan.free[step].append(name)
    return plan


def in_place_decision(
    node: ScheduledNode, step: int, old: str, new: str, why_not: str | None = None
) -> InPlaceDecision:
    """May a kernel write `new` where `old` lies, which it is the last to read?"""
    why_not = why_not or in_place.refusal(node, old, new)
    if why_not is None and not may_share(f"{new} in place of {old}", new, node.origins):
        why_not = REFUSED
    reason = why_not or "each element is read where it is written, and never after"
    return InPlaceDecision(step, old, new, why_not is None, reason)


def may_share(how: str, new: str, origins: Origins = NO_ORIGINS) -> bool:
    """Do gates let a buffer have memory that others have too?"""
    before, after = (f"{new}: {where}" for where in ("memory of its own", how))
    return allowed("memory", how, lambda: before, lambda: after, lambda: origins)


def in_place_decisions(alive: Liveness, nodes: Sequence[ScheduledNode]) -> list[InPlaceDecision]:
    """For each buffer that a kernel writes, the first one that dies there and whose memory it can take."""
    shared = {*alive.aliases.values()}
    dying: dict[tuple[int, MemoryKey], list[str]] = defaultdict(list)
    for life in alive.lives:
        if life.dies > life.born and not life.lent and life.name not in shared:
            dying[life.dies, life.key].append(life.name)
    decisions: list[InPlaceDecision] = []
    for life in alive.lives:
        node, candidates = nodes[life.born], dying[life.born, life.key]
        if not isinstance(node, FusedSchedulerNode) and node.kernel.op not in in_place.SUMS:
            continue
        for old in list(candidates):
            decisions.append(in_place_decision(node, life.born, old, life.name))
            if decisions[-1].done:
                candidates.remove(old)
                break
    return decisions


def written_back(
    graph: LoopGraph, alive: Liveness, nodes: Sequence[ScheduledNode]
) -> list[InPlaceDecision]:
    """For each result that becomes an input's contents, whether its kernel can write it there at once."""
    decisions, lives = list[InPlaceDecision](), {life.name: life for life in alive.lives}
    last_error = max((step for step, node in enumerate(nodes) if may_raise(node)), default=-1)
    for output_number, number in graph.written_back.items():
        output, old = graph.outputs[output_number], graph.inputs[number]
        if not isinstance(output, View) or not isinstance(old, InputBuffer):
            continue
        new, last = output.buffer, alive.last.get(old.name, -1)
        step = lives[new].born if new in lives else -1
        node, why = nodes[step], None
        if step < 0 or not isinstance(node, FusedSchedulerNode):
            continue
        if last > step or graph.returned.count(new) > 1 or old.name in alive.lent:
            why = f"{old.name} is read later, or {new} is another result too"
        elif not graph.buffers[new].layout == old.layout == output.layout:
            why = f"{old.name} and {new} lie differently in memory"
        elif last_error >= step:
            why = f"{nodes[last_error].name} may raise an error, and would leave it written"
        if why is None and last < step:
            reason = f"nobody reads {old.name} after it"
            decisions.append(InPlaceDecision(step, old.name, new, True, reason))
        else:
            decisions.append(in_place_decision(node, step, old.name, new, why))
    return decisions


def may_raise(node: ScheduledNode) -> bool:
    """Whether a node can find its data unfit: an index out of range, a library's check."""
    if not isinstance(node, FusedSchedulerNode):
        return node.kernel.op not in FRESH
    values = (value for body in node.bodies for value in body.values)
    return any(value.check for value in values)


def _used_again(lives: Sequence[Life], live: list[int], taken: Mapping[str, str]) -> dict[str, str]:
    """For each buffer that takes over the memory of one that died before, that one.

    Between the two the memory lies idle, which must not raise the peak; it is added to `live`. `taken` is
    given away already.
    """
    peak, gone = max(live, default=0), set(taken.values())
    waiting = [life for life in lives if life.planned and life.name not in taken]
    reused: dict[str, str] = {}
    for old in sorted(lives, key=lambda life: (life.dies, life.name)):
        later = (new for new in waiting if new.key == old.key and new.born > old.dies)
        new = None if old.lent or old.name in gone else next(later, None)
        if new is None:
            continue
        idle = range(old.dies + 1, new.born)
        fits = all(live[step] + old.bytes <= peak for step in idle)
        if fits and may_share(f"{new.name} where {old.name} was", new.name):
            reused[new.name] = old.name
            waiting.remove(new)
            for step in idle:
                live[step] += old.bytes
    return reused
