"""Which loop nests become one kernel: greedy by bytes saved, to a fixed point, every question recorded.

What is *wise* is policy: the registry `fusion` holds the rules "can_fuse" and "score", and a rule registered
under the same key replaces the built-in one. What is *right* (no cycles, every value read where it was
written, no reading of memory that the same kernel updates) is checked here whatever the policy says.
The real compiler: Scheduler.fuse_nodes and can_fuse_vertical in torch/_inductor/scheduler.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minicompile.lowering.ir import LoopGraph, Scatter
from minicompile.ops.registry import Registry
from minicompile.options import Options
from minicompile.scheduling.align import Refusal, align
from minicompile.scheduling.dependencies import Footprint, Hints
from minicompile.scheduling.nest import LoopNest, nest_of
from minicompile.scheduling.nodes import (
    ExternKernelSchedulerNode,
    FusionDecision,
    FusionKind,
    SchedulerNode,
)
from minicompile.shapes.expr import size_hint

AnyNode = SchedulerNode | ExternKernelSchedulerNode
MAX_NEIGHBOURS = 16
"""Of the readers of one buffer, each is asked about at most this many that follow it."""

fusion_rule: Registry[Any] = Registry(
    "fusion",
    "fusion policy: can_fuse(producer, consumer, context) -> (bool, reason), score(...) -> bytes saved",
)


@dataclass(frozen=True)
class FusionContext:
    """What a policy can ask about the graph."""

    graph: LoopGraph
    options: Options
    readers: Mapping[str, frozenset[str]]
    """Names of the nodes that read each buffer."""
    kept: frozenset[str]
    """Buffers that must reach memory whoever reads them: graph outputs, scatter targets and results."""
    itemsize: Mapping[str, int]

    @property
    def hints(self) -> Hints:
        return self.graph.size_hints

    def bytes_of(self, buffer: str, where: Footprint) -> int:
        """Bytes of the elements in a footprint, at the size hints."""
        count = 1
        for _, size in where[1]:
            count *= size_hint(size, self.hints)
        return count * self.itemsize[buffer]

    def flows(self, producer: LoopNest, consumer: LoopNest) -> frozenset[str]:
        """Buffers that one writes and the other reads."""
        return (producer.written & consumer.touched) | (consumer.written & producer.touched)

    def saved(self, producer: LoopNest, consumer: LoopNest) -> dict[str, int]:
        """Bytes of memory traffic that one kernel saves, by buffer."""
        found: dict[str, int] = {}
        inside = {node.name for nest in (producer, consumer) for node in nest.nodes}
        flowing = self.flows(producer, consumer)
        theirs = {(a.buffer, a.footprint) for a in consumer.reads if a.footprint is not None}
        mine = {(a.buffer, a.footprint) for a in producer.reads if a.footprint is not None}
        reads = (theirs | mine) if flowing else set()
        shared = {(b, f) for b, f in reads if b in flowing} | (theirs & mine)
        for buffer, where in shared:
            found[buffer] = found.get(buffer, 0) + self.bytes_of(buffer, where)
        for nest in (producer, consumer):
            for access in nest.writes:
                gone = access.buffer in flowing and access.buffer not in self.kept
                if gone and access.footprint and self.readers[access.buffer] <= inside:
                    write = self.bytes_of(access.buffer, access.footprint)
                    found[access.buffer] = found.get(access.buffer, 0) + write
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
    return sum(context.saved(producer, consumer).values())


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
        self.mask = {i: 1 << i for i in range(len(nodes))}
        """The nodes of each group, as bits. A group is known by its first node's number."""
        self.ancestors = _transitive(len(nodes), before)
        """All nodes that must run before each group, as bits."""
        self.scatters = {
            node.name: node.buffer.loops.target
            for node in nodes
            if isinstance(node, SchedulerNode) and isinstance(node.buffer.loops, Scatter)
        }
        self.vetoed = self._separated()
        """For each node, later ones it can never share a kernel with, as bits."""
        self.queue: list[tuple[int, int, int, int, int]] = []

    def run(self) -> None:
        """Fuse the pair that saves most, until no pair can be fused."""
        self._note_externs()
        for a, b in sorted(self._pairs()):
            library = self._library_between(a, b)
            if library is None:
                self._push(a, b)
            else:
                self._record(
                    a, b, Refusal(f"cycle: {library.kernel.op} ({library.name}) runs between them")
                )
        while self.queue:
            _, _, a, b, version = heapq.heappop(self.queue)
            if a in self.nests and b in self.nests and version == self._version(a, b):
                self._ask(a, b)

    def _separated(self) -> list[int]:
        """Nodes with a library call between them: whatever fuses, it stays between."""
        found = [0] * len(self.nodes)
        for i, node in enumerate(self.nodes):
            if isinstance(node, ExternKernelSchedulerNode):
                after = sum(1 << j for j in range(i, len(self.nodes)) if self.ancestors[j] >> i & 1)
                for j in range(i):
                    if self.ancestors[i] >> j & 1:
                        found[j] |= after
        return found

    def _library_between(self, a: int, b: int) -> ExternKernelSchedulerNode | None:
        if not self.vetoed[a] >> b & 1:
            return None
        for i in range(a, b):
            node = self.nodes[i]
            between = self.ancestors[b] >> i & 1 and self.ancestors[i] >> a & 1
            if between and isinstance(node, ExternKernelSchedulerNode):
                return node
        return None

    # -- candidates

    def _pairs(self) -> set[tuple[int, int]]:
        """Nodes that share a buffer: nobody else saves anything."""
        touching: dict[str, list[int]] = {}
        for i, nest in self.nests.items():
            for buffer in nest.touched:
                touching.setdefault(buffer, []).append(i)
        pairs: set[tuple[int, int]] = set()
        for buffer, users in touching.items():
            for k, a in enumerate(users):
                writes = buffer in self.nests[a].written
                pairs.update(
                    (a, b) for b in users[k + 1 : None if writes else k + 1 + MAX_NEIGHBOURS]
                )
        return pairs

    def _push(self, a: int, b: int) -> None:
        if self._known_veto(a, b):
            return
        a, b = sorted((a, b))
        saved = self._score(self.nests[a], self.nests[b])
        heapq.heappush(self.queue, (-saved, b - a, a, b, self._version(a, b)))

    def _version(self, a: int, b: int) -> int:
        """Groups only grow: a question is out of date when the number of nodes has changed."""
        return len(self.nests[a].members) + len(self.nests[b].members)

    def _score(self, producer: LoopNest, consumer: LoopNest) -> int:
        rule = fusion_rule.get("score")
        return int(rule(producer, consumer, self.context)) if rule is not None else 0

    def _note_externs(self) -> None:
        """The boundary of fusion: what a library writes or reads goes through memory."""
        by_output = {
            d.buffer: node
            for node in self.nodes
            if isinstance(node, ExternKernelSchedulerNode)
            for d in node.writes
        }
        written = {node.name: node for node in self.nodes if isinstance(node, SchedulerNode)}
        for node in self.nodes:
            for buffer in dict.fromkeys(d.buffer for d in node.reads):
                producer = by_output.get(buffer)
                if producer is None and isinstance(node, ExternKernelSchedulerNode):
                    self._note_extern(written.get(buffer), node, node)
                elif producer is not None and producer is not node:
                    self._note_extern(producer, node, producer)

    def _note_extern(
        self, producer: AnyNode | None, consumer: AnyNode, extern: ExternKernelSchedulerNode
    ) -> None:
        if producer is not None:
            reason = f"{extern.kernel.op} runs in a library ({extern.kernel.reason})"
            self.decisions.append(
                FusionDecision(producer.name, consumer.name, "vertical", 0, False, reason)
            )

    # -- one question

    def _ask(self, a: int, b: int) -> None:
        if self.ancestors[a] & self.mask[b]:
            a, b = b, a
        producer, consumer = self.nests[a], self.nests[b]
        found = self._judge(a, b)
        self._record(a, b, found)
        if not isinstance(found, Refusal):
            self._fuse(a, b, found[0])
        elif found.final and len(producer.members) == len(consumer.members) == 1:
            self.vetoed[min(a, b)] |= 1 << max(a, b)

    def _record(self, a: int, b: int, answer: tuple[LoopNest, str] | Refusal) -> None:
        producer, consumer = self.nests[a], self.nests[b]
        refused = isinstance(answer, Refusal)
        reason = answer.reason if isinstance(answer, Refusal) else answer[1]
        kind, saved = self._kind(producer, consumer), self._score(producer, consumer)
        self.decisions.append(
            FusionDecision(producer.name, consumer.name, kind, saved, not refused, reason)
        )

    def _known_veto(self, a: int, b: int) -> bool:
        """Two of their nodes can never share a kernel; that decision is already recorded."""
        return any(
            self.vetoed[m.order] & self.mask[other]
            for group, other in ((a, b), (b, a))
            for m in self.nests[group].members
        )

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
        return (
            None if one == other else Refusal(f"different devices: {one} and {other}", final=True)
        )

    def _hazard(self, producer: LoopNest, consumer: LoopNest) -> Refusal | None:
        """A scatter updates memory in any order: nothing else in its kernel may touch that memory."""
        for nest, other in ((producer, consumer), (consumer, producer)):
            for name in sorted(nest.written & self.scatters.keys()):
                if name in other.touched:
                    return Refusal(f"{name} is complete only when all of its scatter has run", True)
                target = self.scatters[name]
                if target in other.touched:
                    return Refusal(
                        f"{name} updates the memory of {target}, which the other uses", True
                    )
                if target in (self.scatters[n] for n in other.written & self.scatters.keys()):
                    return Refusal(f"both update the memory of {target}", True)
        return None

    def _cycle(self, a: int, b: int) -> Refusal | None:
        """Is there a third node that must run after one and before the other?"""
        between = self.ancestors[b] & ~(self.mask[a] | self.mask[b])
        for i, mask in self.mask.items():
            if mask & between and self.ancestors[i] & self.mask[a]:
                name = self.nests[i].name if i in self.nests else self.nodes[i].name
                return Refusal(f"cycle: {name} must run between them")
        return None

    def _kind(self, producer: LoopNest, consumer: LoopNest) -> FusionKind:
        if not self.context.flows(producer, consumer):
            return "horizontal"
        if producer.is_reduction:
            return "reduction_epilogue"
        return "reduction_prologue" if consumer.is_reduction else "vertical"

    # -- fusing

    def _fuse(self, a: int, b: int, joined: LoopNest) -> None:
        merged = self.mask[a] | self.mask[b]
        before = (self.ancestors[a] | self.ancestors[b]) & ~merged
        keep, drop = sorted((a, b))
        del self.nests[drop], self.mask[drop], self.ancestors[drop]
        self.nests[keep], self.mask[keep], self.ancestors[keep] = joined, merged, before
        for i, ancestors in self.ancestors.items():
            if ancestors & merged:
                self.ancestors[i] = ancestors | merged | before
        for i in self._neighbours(keep):
            self._push(keep, i)

    def _neighbours(self, group: int) -> Iterator[int]:
        nest = self.nests[group]
        near = [i for i, other in self.nests.items() if i != group and other.touched & nest.touched]
        near.sort(key=lambda i: abs(i - group))
        tied = [i for i in near if self.context.flows(nest, self.nests[i])]
        yield from tied
        yield from [i for i in near if i not in tied][:MAX_NEIGHBOURS]


def _meet(joined: LoopNest, producer: LoopNest, consumer: LoopNest) -> bool:
    """Do the two read at least one element of a common buffer at the same time?"""
    mine = {m.order for m in producer.members}
    first = [a for m in joined.members if m.order in mine for a in m.accesses("load")]
    other = [a for m in joined.members if m.order not in mine for a in m.accesses("load")]
    by_buffer: dict[str, list[Any]] = {}
    for access in first:
        if access.index is not None:
            by_buffer.setdefault(access.buffer, []).append(access.index)
    return any(
        access.index is not None
        and any(access.index.equals(index) for index in by_buffer.get(access.buffer, ()))
        for access in other
    )


def _transitive(count: int, before: Mapping[int, set[int]]) -> dict[int, int]:
    """Bits of everything that must run before each node; nodes come in an order that runs."""
    found: dict[int, int] = {}
    for i in range(count):
        bits = 0
        for j in before[i]:
            bits |= (1 << j) | found[j]
        found[i] = bits
    return found
