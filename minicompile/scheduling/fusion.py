"""Which loop nests become one kernel: greedy by bytes saved, to a fixed point, every question recorded.

What is *wise* is policy: the registry `fusion` holds the rules "can_fuse" and "score", and a rule registered
under the same key replaces the built-in one. What is *right* (no cycles, every value read where it was
written, no reading of memory that the same kernel updates) is checked here whatever the policy says.
The real compiler: Scheduler.fuse_nodes and can_fuse_vertical in torch/_inductor/scheduler.py.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from minicompile.lowering.ir import LoopGraph
from minicompile.ops.registry import Registry
from minicompile.options import Options
from minicompile.scheduling.align import Refusal, align
from minicompile.scheduling.memory import kept_buffers, scatter_targets
from minicompile.scheduling.nest import LoopNest, elements, nest_of
from minicompile.scheduling.nodes import (
    ExternKernelSchedulerNode,
    FusionDecision,
    FusionKind,
    SchedulerNode,
)

AnyNode = SchedulerNode | ExternKernelSchedulerNode
MAX_NEIGHBOURS = 16
"""Of the groups that only read what another reads, at most this many are asked about."""

fusion_rule: Registry[Any] = Registry(
    "fusion",
    "fusion policy: can_fuse(producer, consumer, context) -> (bool, reason), score(...) -> bytes saved",
)


class FusionContext:
    """What a policy can ask about the graph: the facts that fusion decisions rest on."""

    def __init__(self, graph: LoopGraph, options: Options, nodes: Sequence[AnyNode]) -> None:
        self.graph, self.options, self.hints = graph, options, graph.size_hints
        self.readers: dict[str, set[str]] = {name: set() for name in graph.buffers}
        """Names of the nodes that read each buffer."""
        for node in nodes:
            for dependency in node.reads:
                self.readers[dependency.buffer].add(node.name)
        self.kept = kept_buffers(graph)
        """Buffers that must reach memory whoever reads them: graph outputs, scatter targets and results."""
        self.itemsize = {name: b.layout.dtype.itemsize for name, b in graph.buffers.items()}

    def flows(self, producer: LoopNest, consumer: LoopNest) -> frozenset[str]:
        """Buffers that one writes and the other reads."""
        return (producer.written & consumer.touched) | (consumer.written & producer.touched)

    def saved(self, producer: LoopNest, consumer: LoopNest) -> Counter[str]:
        """Bytes of memory traffic that one kernel saves, by buffer."""
        flowing = self.flows(producer, consumer)
        one, other = (
            {(a.buffer, a.footprint) for a in nest.reads} for nest in (producer, consumer)
        )
        read = {place for place in one | other if place[0] in flowing} | (one & other)
        inside = {node.name for nest in (producer, consumer) for node in nest.nodes}
        never_written = [
            (a.buffer, a.footprint)
            for a in (*producer.writes, *consumer.writes)
            if a.buffer in flowing - self.kept and self.readers[a.buffer] <= inside
        ]
        found: Counter[str] = Counter()
        for buffer, where in (*read, *never_written):
            if where is not None:
                found[buffer] += elements(where, self.hints) * self.itemsize[buffer]
        return found


@fusion_rule("can_fuse")
def can_fuse(producer: LoopNest, consumer: LoopNest, context: FusionContext) -> tuple[bool, str]:
    """The built-in policy: fuse whatever saves memory traffic, within limits on a kernel's size."""
    count = len(producer.members) + len(consumer.members)
    limit = context.options.max_fusion_nodes
    if count > limit:
        return False, f"{count} loop nests would exceed options.max_fusion_nodes = {limit}"
    passed = sorted(context.flows(producer, consumer))
    if passed:
        verb = "is" if len(passed) == 1 else "are"
        return True, f"{', '.join(passed)} {verb} handed over without a trip through memory"
    saved = context.saved(producer, consumer)
    if not any(saved.values()):
        return False, "no memory traffic would be saved"
    return True, f"both read {', '.join(sorted(saved))}"


@fusion_rule("score")
def score(producer: LoopNest, consumer: LoopNest, context: FusionContext) -> int:
    """Bytes of memory traffic saved, at the size hints."""
    return context.saved(producer, consumer).total()


class Fuser:
    """The state of one run: the nests so far, who must run before whom, and the decisions."""

    def __init__(
        self, nodes: Sequence[AnyNode], before: Mapping[int, set[int]], context: FusionContext
    ) -> None:
        self.context, self.nodes = context, nodes
        self.decisions: list[FusionDecision] = []
        self.nests: dict[int, LoopNest] = {
            i: nest_of(node, i, context.hints)
            for i, node in enumerate(nodes)
            if isinstance(node, SchedulerNode)
        }
        self.users: dict[str, set[int]] = {}
        """The groups that touch each buffer."""
        for i, nest in self.nests.items():
            for buffer in nest.touched:
                self.users.setdefault(buffer, set()).add(i)
        self.mask = {i: 1 << i for i in range(len(nodes))}
        """The nodes of each group, as bits. A group is known by its first node's number."""
        self.ancestors = _transitive(before)
        """All nodes that must run before each group, as bits."""
        self.scatters = scatter_targets(context.graph)
        self.vetoed = [0] * len(nodes)
        """For each node, later ones it can never share a kernel with, as bits."""
        self.queue: list[tuple[int, int, int, int, int]] = []

    def run(self) -> None:
        """Fuse the pair that saves most, until no pair can be fused."""
        self._note_externs()
        for i in self.nests:
            for j in self._neighbours(i):
                if i < j:
                    self._push(i, j)
        while self.queue:
            _, _, a, b, version = heapq.heappop(self.queue)
            if a in self.nests and b in self.nests and version == self._version(a, b):
                self._ask(a, b)

    def _note_externs(self) -> None:
        """The boundary of fusion: what a library writes or reads goes through memory."""
        writers = {d.buffer: node for node in self.nodes for d in node.writes}
        for node in self.nodes:
            for buffer in dict.fromkeys(d.buffer for d in node.reads):
                producer = writers.get(buffer, node)
                extern = next(
                    (n for n in (producer, node) if isinstance(n, ExternKernelSchedulerNode)), None
                )
                if producer is not node and extern is not None:
                    reason = f"{extern.kernel.op} runs in a library ({extern.kernel.reason})"
                    self.decisions.append(
                        FusionDecision(producer.name, node.name, "vertical", 0, False, reason)
                    )

    # -- candidates

    def _neighbours(self, group: int) -> list[int]:
        """Groups that share a buffer, nobody else saves anything: all that hand one over, and the nearest."""
        nest = self.nests[group]
        sharing = {i for buffer in nest.touched for i in self.users[buffer]} - {group}
        near = sorted(sharing, key=lambda i: (abs(i - group), i))
        tied = [i for i in near if self.context.flows(nest, self.nests[i])]
        return tied + [i for i in near if i not in tied][:MAX_NEIGHBOURS]

    def _push(self, a: int, b: int) -> None:
        a, b = sorted((a, b))
        if not self._known_veto(a, b):
            saved = self._score(self.nests[a], self.nests[b])
            heapq.heappush(self.queue, (-saved, b - a, a, b, self._version(a, b)))

    def _known_veto(self, a: int, b: int) -> bool:
        """Two of their nodes can never share a kernel; that decision is already recorded."""
        return any(
            self.vetoed[m.order] & self.mask[other]
            for group, other in ((a, b), (b, a))
            for m in self.nests[group].members
        )

    def _version(self, a: int, b: int) -> int:
        """Groups only grow: a question is out of date when the number of nodes has changed."""
        return len(self.nests[a].members) + len(self.nests[b].members)

    def _score(self, producer: LoopNest, consumer: LoopNest) -> int:
        rule = fusion_rule.get("score")
        return int(rule(producer, consumer, self.context)) if rule is not None else 0

    # -- one question

    def _ask(self, a: int, b: int) -> None:
        """Fuse two groups or not, and record why."""
        if self.ancestors[a] & self.mask[b]:
            a, b = b, a
        producer, consumer = self.nests[a], self.nests[b]
        found = self._judge(a, b)
        fused = not isinstance(found, Refusal)
        reason = found.reason if isinstance(found, Refusal) else found[1]
        kind, saved = self._kind(producer, consumer), self._score(producer, consumer)
        self.decisions.append(
            FusionDecision(producer.name, consumer.name, kind, saved, fused, reason)
        )
        if not isinstance(found, Refusal):
            self._fuse(a, b, found[0])
        elif found.final:
            self.vetoed[min(a, b)] |= 1 << max(a, b)

    def _judge(self, a: int, b: int) -> tuple[LoopNest, str] | Refusal:
        """The joined nest and the policy's reason, or the refusal."""
        producer, consumer = self.nests[a], self.nests[b]
        flaw = self._device(producer, consumer) or self._hazard(producer, consumer)
        flaw = flaw or self._cycle(a, b)
        if flaw is not None:
            return flaw
        rule = fusion_rule.get("can_fuse")
        if rule is None:
            return Refusal("there is no can_fuse rule")
        wanted, reason = rule(producer, consumer, self.context)
        if not wanted:
            return Refusal(reason)
        joined = align(producer, consumer)
        if isinstance(joined, Refusal):
            return joined
        if not self.context.flows(producer, consumer) and not _meet(joined, producer, consumer):
            return Refusal("they read no buffer in the same order")
        return joined, reason

    def _device(self, producer: LoopNest, consumer: LoopNest) -> Refusal | None:
        one, other = (nest.nodes[0].buffer.layout.device for nest in (producer, consumer))
        return None if one == other else Refusal(f"different devices: {one} and {other}", True)

    def _hazard(self, producer: LoopNest, consumer: LoopNest) -> Refusal | None:
        """A scatter updates memory in any order: nothing else in its kernel may touch that memory."""
        for nest, other in ((producer, consumer), (consumer, producer)):
            others = {self.scatters[name] for name in other.written & self.scatters.keys()}
            for name in sorted(nest.written & self.scatters.keys()):
                target = self.scatters[name]
                if name in other.touched:
                    return Refusal(f"{name} is complete only when all of its scatter has run", True)
                if target in other.touched:
                    return Refusal(
                        f"{name} updates the memory of {target}, which the other uses", True
                    )
                if target in others:
                    return Refusal(f"both update the memory of {target}", True)
        return None

    def _cycle(self, a: int, b: int) -> Refusal | None:
        """Is there a third node that must run after one and before the other?"""
        first, earlier = self.mask[a], self.ancestors[b] & ~(self.mask[a] | self.mask[b])
        between = [i for i, m in self.mask.items() if m & earlier and self.ancestors[i] & first]
        for i in between:
            node = self.nodes[i]
            if isinstance(node, ExternKernelSchedulerNode):
                reason = f"cycle: {node.kernel.op} ({node.name}) runs between them"
                return Refusal(reason, final=True)
        if between:
            return Refusal(f"cycle: {self.nests[between[0]].name} must run between them")
        return None

    def _kind(self, producer: LoopNest, consumer: LoopNest) -> FusionKind:
        if not self.context.flows(producer, consumer):
            return "horizontal"
        if any(node.is_reduction for node in producer.nodes):
            return "reduction_epilogue"
        reduces = any(node.is_reduction for node in consumer.nodes)
        return "reduction_prologue" if reduces else "vertical"

    # -- fusing

    def _fuse(self, a: int, b: int, joined: LoopNest) -> None:
        merged = self.mask[a] | self.mask[b]
        before = (self.ancestors[a] | self.ancestors[b]) & ~merged
        keep, drop = sorted((a, b))
        del self.nests[drop], self.mask[drop], self.ancestors[drop]
        self.nests[keep], self.mask[keep], self.ancestors[keep] = joined, merged, before
        for buffer in joined.touched:
            self.users[buffer].add(keep)
            self.users[buffer].discard(drop)
        for i, ancestors in self.ancestors.items():
            if ancestors & merged:
                self.ancestors[i] = ancestors | merged | before
        for i in self._neighbours(keep):
            self._push(keep, i)


def _meet(joined: LoopNest, producer: LoopNest, consumer: LoopNest) -> bool:
    """Do the two read at least one element of a common buffer at the same time?"""
    return any(
        joined.indices[one.key].equals(joined.indices[other.key])
        for one in producer.reads
        for other in consumer.reads
        if one.buffer == other.buffer and one.key is not None and other.key is not None
    )


def _transitive(before: Mapping[int, set[int]]) -> dict[int, int]:
    """Bits of everything that must run before each node; nodes come in an order that runs."""
    found: dict[int, int] = {}
    for i, nodes in before.items():
        found[i] = 0
        for j in nodes:
            found[i] |= (1 << j) | found[j]
    return found
