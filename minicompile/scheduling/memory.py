"""The memory plan: when each buffer is allocated and freed, and which freed memory a later buffer reuses.

Liveness is a walk over the kernels in running order. A buffer that only one kernel touches never reaches
memory; one that dies hands its memory to another of the same device, dtype and size: to one that the last
reader writes, where that is right (in_place.py), or to a later one. Memory that the caller sees (graph
inputs, constants, outputs) is never handed on; but an input's new contents can be written into it at once.
The real compiler: torch/_inductor/codegen/memory_planning.py, AllocateLine in codegen/wrapper.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

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
from minicompile.ops.dtypes import is_int
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

DIVISIONS = ("floordiv", "truncdiv", "remainder", "fmod")


@dataclass(frozen=True)
class Life:
    """The memory of one buffer: alive in the steps `born` to `dies`."""

    name: str
    key: tuple[torch.device, torch.dtype, Size]
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
        self.last = last_uses(touched)
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
            layout, planned = buffers[name].layout, calls[born] is None or calls[born] in PRODUCTS
            key = layout.device, layout.dtype, layout.storage_size
            size = size_hint(layout.storage_size, hints) * layout.dtype.itemsize
            self.lives.append(Life(name, key, size, born, dies[name], planned, name in self.lent))

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
    updates = {d.new: d for d in into_inputs if d.done}
    alive.lives = [life for life in alive.lives if life.name not in updates]
    decisions = in_place_decisions(alive, nodes)
    taken = {d.new: d.old for d in decisions if d.done}
    live, sizes = alive.live_bytes(), {life.name: life.bytes for life in alive.lives}
    for decision in decisions:
        live[decision.step] -= sizes[decision.new] * decision.done
    reused = taken | _handed_on(alive.lives, live, taken)
    plan = MemoryPlan([[] for _ in nodes], [[] for _ in nodes], alive.aliases, alive.internal, live)
    plan.decisions, plan.buffer_bytes = into_inputs + decisions, sum(sizes.values())
    plan.eager_bytes = graph.eager_bytes
    chains: dict[str, list[str]] = {}
    pieces: dict[str, Life] = {}
    """Memory that buffers live in one after the other, as one life, by the first of them."""
    for life in alive.lives:  # those that take over come after those that they take over from
        chain = chains[life.name] = chains[reused[life.name]] if life.name in reused else []
        chain.append(life.name)
        pieces[chain[0]] = replace(pieces.get(chain[0], life), dies=life.dies)
    for p in pieces.values():
        home: Home = "output" if p.dies == len(nodes) else "own" if p.planned else "library"
        dies = min(p.dies, len(nodes) - 1)
        plan.blocks.append(Block(tuple(chains[p.name]), p.born, dies, p.bytes, home))
    for life in alive.lives:
        if life.planned:
            made = Allocation(life.name, reused.get(life.name), life.name in taken)
            plan.allocate[life.born].append(made)
    for d in updates.values():
        plan.allocate[d.step].append(Allocation(d.new, d.old, alive.last.get(d.old) == d.step))
    for name, step in sorted(alive.last.items()):
        if step < len(nodes):
            plan.free[step].append(name)
    return plan


def in_place_refusal(node: ScheduledNode, old: str, new: str) -> str | None:
    """Why a kernel can't write `new` where `old` lies, be it that a gate forbids it."""
    if (why := in_place.refusal(node, old, new)) is not None:
        return why
    allowed_here = may_share(f"{new} in place of {old}", new, lambda: node.origins)
    return None if allowed_here else REFUSED


def may_share(how: str, new: str, origins: Callable[[], Origins] = lambda: NO_ORIGINS) -> bool:
    """Do gates let a buffer have memory that others have too?"""
    before, after = (f"{new}: {where}" for where in ("memory of its own", how))
    return allowed("memory", how, lambda: before, lambda: after, origins)


def decided(step: int, old: str, new: str, why_not: str | None) -> InPlaceDecision:
    reason = why_not or "each element is read where it is written, and never after"
    return InPlaceDecision(step, old, new, why_not is None, reason)


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
        if not isinstance(node, FusedSchedulerNode) and node.kernel.op not in in_place.SUMS:
            continue
        left = made.get(step, [])
        for old in dying.get(step, ()):
            for new in [life for life in left if life.key == old.key]:
                why = in_place_refusal(node, old.name, new.name)
                found.append(decided(step, old.name, new.name, why))
                if why is None:
                    left.remove(new)
                    break
    return found


def written_back(
    graph: LoopGraph, alive: Liveness, nodes: Sequence[ScheduledNode]
) -> list[InPlaceDecision]:
    """For each result that becomes an input's contents, whether its kernel can write it there at once."""
    found, lives, buffers = [], {life.name: life for life in alive.lives}, graph.buffers
    fails = [step for step, node in enumerate(nodes) if may_raise(node)]
    for output_number, number in graph.written_back.items():
        output, old = graph.outputs[output_number], graph.inputs[number]
        if not isinstance(output, View) or not isinstance(old, InputBuffer):
            continue
        life, last = lives.get(output.buffer), alive.last.get(old.name, -1)
        if life is None:
            continue
        node, layout, why = nodes[life.born], buffers[life.name].layout, None
        if not isinstance(node, FusedSchedulerNode):
            why = f"a library makes {life.name}"
        elif last > life.born or graph.returned.count(life.name) > 1 or old.name in alive.lent:
            why = f"{old.name} is read later, or {life.name} is another result too"
        elif not layout == old.layout == output.layout:
            why = f"{old.name} and {life.name} lie differently in memory"
        elif fails and fails[-1] >= life.born:
            why = f"{nodes[fails[-1]].name} may raise an error, and would leave it written"
        elif last == life.born:
            why = in_place_refusal(node, old.name, life.name)
        found.append(decided(life.born, old.name, life.name, why))
    return found


def may_raise(node: ScheduledNode) -> bool:
    """Whether a node can find its data unfit: an index out of range, a zero divisor, a library's check."""
    if not isinstance(node, FusedSchedulerNode):
        return node.kernel.op not in FRESH
    values = (value for body in node.bodies for value in body.values)
    return any(
        value.check if value.op == "indirect" else value.op in DIVISIONS and is_int(value.dtype)
        for value in values
    )


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
        fits = all(live[step] + old.bytes <= peak for step in idle)
        told = f"{later[0].name} where {old.name} was"
        if fits and may_share(told, later[0].name):
            found[later[0].name] = old.name
            waiting[old.key].remove(later[0])
            for step in idle:
                live[step] += old.bytes
    return found
