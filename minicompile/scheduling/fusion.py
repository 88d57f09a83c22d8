"""Which loop nests become one kernel: greedy by score, to a fixed point, every question recorded.

What is *wise* is policy, an object: `FusionPolicy`, or the one that a rule "policy" in the registry `fusion`
makes. What is *right* (no cycles, every value read where it was written, no reading of memory that the same
kernel updates) is checked here whatever the policy or a learner's wishes say.

The real compiler: Scheduler.fuse_nodes, can_fuse_vertical and choices.py (score_fusion) in torch/_inductor.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from minicompile.lowering.ir import LoopGraph, Template
from minicompile.ops import plugins
from minicompile.ops.gates import REFUSED, allowed
from minicompile.ops.registry import Registry
from minicompile.options import Options
from minicompile.scheduling.align import align
from minicompile.scheduling.memory import kept_buffers, scatter_targets
from minicompile.scheduling.nest import LoopNest, nest_of
from minicompile.scheduling.nodes import (
    ExternKernelSchedulerNode,
    FusionDecision,
    FusionKind,
    Pair,
    SchedulerNode,
    SingleNode,
)
from minicompile.scheduling.reasons import Verdict, listed, refused
from minicompile.shapes.strided import elements

FINAL = ("device", "hazard", "index_mismatch", "unknown_index")
"""Causes of a refusal that hold however the two kernels grow."""
MAX_NEIGHBOURS = 16
"""Of the groups that only read what another reads, at most this many are asked about."""


class FusionContext:
    """What a policy can ask about the graph: the facts that fusion decisions rest on."""

    def __init__(self, graph: LoopGraph, options: Options, nodes: Sequence[SingleNode]) -> None:
        self.graph, self.options, self.hints = graph, options, graph.size_hints
        self.buffers = graph.buffers
        self.readers: dict[str, set[str]] = {name: set() for name in self.buffers}
        """Names of the nodes that read each buffer."""
        for node in nodes:
            for dependency in node.reads:
                self.readers[dependency.buffer].add(node.name)
        self.kept = kept_buffers(graph)
        """Buffers that must reach memory whoever reads them: graph outputs, scatter targets and results."""
        self.itemsize = {name: b.layout.dtype.itemsize for name, b in self.buffers.items()}
        self.operations = {
            n.name: sum(v.op not in ("constant", "store") for v in n.body.values)
            for n in nodes
            if isinstance(n, SchedulerNode)
        }
        """How many operations each body has."""
        self.saved = cache(self._saved)

    def flows(self, producer: LoopNest, consumer: LoopNest) -> frozenset[str]:
        """Buffers that one writes and the other reads."""
        return (producer.written & consumer.touched) | (consumer.written & producer.touched)

    def _saved(self, producer: LoopNest, consumer: LoopNest) -> Counter[str]:
        """Bytes of memory traffic that one kernel saves, by buffer; 0 where only the data tells which."""
        one, other = ({a.place for a in nest.reads} for nest in (producer, consumer))
        flowing, never = self.flows(producer, consumer), self.never_written(producer, consumer)
        gone = [p for p in one | other if p.buffer in flowing or (p in one and p in other)]
        gone += [a.place for a in (*producer.writes, *consumer.writes) if a.buffer in never]
        found: Counter[str] = Counter()
        for buffer, where in gone:
            if where is not None:
                found[buffer] += elements(where, self.hints) * self.itemsize[buffer]
        return +found

    def never_written(self, producer: LoopNest, consumer: LoopNest) -> set[str]:
        """Buffers that one kernel would write and only that kernel would read."""
        flowing = self.flows(producer, consumer) - self.kept
        if not flowing:
            return set()
        inside = {m.node.name for nest in (producer, consumer) for m in nest.members}
        return {buffer for buffer in flowing if self.readers[buffer] <= inside}

    def handed_over(self, producer: LoopNest, consumer: LoopNest) -> str:
        """Which buffers need not even be written to memory, else which need not be read from it."""
        if never := self.never_written(producer, consumer):
            return f"one kernel has no need to write {listed(never)} to memory"
        flowing = listed(self.flows(producer, consumer))
        return f"one kernel has no need to read {flowing} back from memory"

    def distance(self, producer: LoopNest, consumer: LoopNest) -> int:
        """How many nodes of the graph lie from the first of one to the first of the other."""
        return abs(producer.members[0].order - consumer.members[0].order)

    def size(self, *nests: LoopNest) -> int:
        """How many operations one kernel of these nests would have."""
        return sum(self.operations[m.node.name] for nest in nests for m in nest.members)


class FusionPolicy:
    """The built-in policy: fuse whatever saves memory traffic, the most first, within limits on a kernel."""

    wishes: tuple[Pair, ...] = ()
    """Pairs of nodes that it is asked about even if they share no buffer."""

    def can_fuse(
        self, producer: LoopNest, consumer: LoopNest, context: FusionContext
    ) -> Verdict | tuple[bool, str]:
        """Are two nests better off as one kernel?"""
        size, options = context.size(producer, consumer), context.options
        if size > options.max_kernel_operations:
            limit = f"options.max_kernel_operations = {options.max_kernel_operations}"
            told = f"one kernel would have {size} operations, more than {limit}"
            return Verdict(False, told, "size_limit")
        if context.flows(producer, consumer):
            return Verdict(True, context.handed_over(producer, consumer), "handed_over")
        if saved := context.saved(producer, consumer):
            return Verdict(True, f"both read {listed(saved)}: one load serves both", "shared_read")
        common = listed(producer.touched & consumer.touched)
        told = f"read {common} at different places" if common else "have no buffer in common"
        return Verdict(False, f"they {told}: one kernel would save no memory traffic", "no_saving")

    def score(
        self, producer: LoopNest, consumer: LoopNest, context: FusionContext
    ) -> int | tuple[int, ...]:
        """What is fused first: the pair with the most bytes saved; of equals, what follows a template's
        tiles, then the nearest."""
        saved = context.saved(producer, consumer).total()
        follows = template_of(producer) is not None
        return saved, int(follows), -context.distance(producer, consumer)


class NoPolicy(FusionPolicy):
    """What stands in where the rule is taken away."""

    def can_fuse(
        self, producer: LoopNest, consumer: LoopNest, context: FusionContext
    ) -> Verdict | tuple[bool, str]:
        return False, "there is no fusion policy: its rule has been taken away"


fusion_rule: Registry[Callable[[], FusionPolicy]] = Registry(
    "fusion", 'fusion policy: "policy" -> FusionPolicy, or a function that makes one'
)
fusion_rule("policy")(FusionPolicy)

align_rule: Registry[Callable[[LoopNest, LoopNest, Fuser], LoopNest | Verdict | None]] = Registry(
    "align",
    "name -> rule(producer, consumer, fuser) that gives common loops, or why there are none; None for others",
)


class Fuser:
    """The state of one run: the nests so far, who must run before whom, and the decisions."""

    def __init__(
        self,
        nodes: Sequence[SingleNode],
        before: Mapping[int, set[int]],
        context: FusionContext,
        policy: FusionPolicy | None = None,
    ) -> None:
        self.context, self.nodes, self.before = context, nodes, before
        self.policy = policy or fusion_rule.get("policy", NoPolicy)()
        self.align_rules = plugins.rules(align_rule, context.options.plugins).values()
        self.place = {node.name: i for i, node in enumerate(nodes)}
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
        self.apart = dict.fromkeys(self.nests, 0)
        """The nodes that each group can never share a kernel with, as bits."""
        self.queue: list[tuple[tuple[int, ...], int, int, int]] = []

    def run(self) -> None:
        """Fuse the pair with the highest score, until no pair can be fused."""
        self._note_externs()
        for i in self.nests:
            for j in self._neighbours(i):
                if i < j:
                    self._push(i, j)
        while self.queue:
            _, a, b, version = heapq.heappop(self.queue)
            if a in self.nests and b in self.nests and version == self._version(a, b):
                self._ask(a, b)

    def group(self, name: str) -> int:
        """The group that a node is in."""
        bit = 1 << self.place[name]
        return next(i for i, mask in self.mask.items() if mask & bit)

    def _note_externs(self) -> None:
        """The boundary of fusion: what a library writes or reads goes through memory."""
        writers = {d.buffer: node for node in self.nodes for d in node.writes}
        for node in self.nodes:
            for producer in dict.fromkeys(writers.get(d.buffer, node) for d in node.reads):
                kinds = {type(producer), type(node)}
                if producer is not node and ExternKernelSchedulerNode in kinds:
                    self.decisions.append(self.boundary([producer], [node]))

    def boundary(self, one: Sequence[SingleNode], other: Sequence[SingleNode]) -> FusionDecision:
        """Why a library call shares no kernel. `one` and `other` are groups, at least one of them a call."""
        extern = next(n for n in (*one, *other) if isinstance(n, ExternKernelSchedulerNode))
        written = {d.buffer for node in one for d in node.writes}
        passed = any(d.buffer in written for node in other for d in node.reads)
        kind: FusionKind = "vertical" if passed else "horizontal"
        why = f"{extern.kernel.op} runs in a library ({extern.kernel.reason})"
        reason = f"{why}, which reads and writes whole buffers in memory"
        apart = abs(self.place[one[0].name] - self.place[other[0].name])
        return FusionDecision(tuple(one), tuple(other), kind, False, "extern", reason, (), apart)

    # -- candidates

    def _neighbours(self, group: int) -> list[int]:
        """Groups that may save traffic: all that hand a buffer over, and the nearest that share a read."""
        nest = self.nests[group]
        pairs = ({*map(self.group, pair)} for pair in self.policy.wishes)
        wished = {i for pair in pairs if group in pair for i in pair & self.nests.keys()}
        sharing = {i for buffer in nest.touched for i in self.users[buffer]} | wished
        near = sorted(sharing - {group}, key=lambda i: (abs(i - group), i))
        tied = [i for i in near if i in wished or self.context.flows(nest, self.nests[i])]
        return tied + [i for i in near if i not in tied][:MAX_NEIGHBOURS]

    def _push(self, a: int, b: int) -> None:
        a, b = sorted((a, b))
        if not (self.apart[a] & self.mask[b] or self.apart[b] & self.mask[a]):
            score = self.policy.score(self.nests[a], self.nests[b], self.context)
            falling = tuple(-n for n in (score if isinstance(score, tuple) else (score,)))
            heapq.heappush(self.queue, (falling, a, b, self._version(a, b)))

    def _version(self, a: int, b: int) -> int:
        """Groups only grow: a question is out of date when the number of nodes has changed."""
        return len(self.nests[a].members) + len(self.nests[b].members)

    # -- one question

    def _ask(self, a: int, b: int) -> None:
        """Fuse two groups or not, and record why."""
        decision, joined = self.decide(a, b)
        if joined is not None and not may_fuse(decision):
            decision, joined = replace(decision, fused=False, cause="gate", reason=REFUSED), None
        self.decisions.append(decision)
        if joined is not None:
            self._fuse(a, b, joined)
        elif decision.cause in FINAL:
            self.apart[a] |= self.mask[b]

    def decide(self, a: int, b: int) -> tuple[FusionDecision, LoopNest | None]:
        """The answer about two groups, and the nest that they would be."""
        if self.ancestors[a] & self.mask[b]:
            a, b = b, a
        producer, consumer = self.nests[a], self.nests[b]
        verdict, joined = self._judge(a, b)
        saved = self.context.saved(producer, consumer).items()
        decision = FusionDecision(
            tuple(producer.nodes),
            tuple(consumer.nodes),
            self._kind(producer, consumer),
            verdict.fuse,
            verdict.cause,
            verdict.reason,
            tuple(sorted(saved, key=lambda item: (-item[1], item[0]))),
            self.context.distance(producer, consumer),
            self.context.size(producer, consumer),
            verdict.between,
        )
        return decision, joined

    def _judge(self, a: int, b: int) -> tuple[Verdict, LoopNest | None]:
        """Ask what is right, then what is wise, then whether there are common loops."""
        producer, consumer = self.nests[a], self.nests[b]
        verdict = (
            self._device(producer, consumer)
            or self._hazard(producer, consumer)
            or self._cycle(a, b)
            or Verdict(*self.policy.can_fuse(producer, consumer, self.context))
        )
        if not verdict.fuse:
            return verdict, None
        ways = (rule(producer, consumer, self) for rule in self.align_rules)
        joined = next((way for way in ways if way is not None), None) or align(producer, consumer)
        if isinstance(joined, Verdict):
            return joined, None
        flows = verdict.cause == "wish" or self.context.flows(producer, consumer)
        if not (flows or _meet(joined, producer, consumer)):
            common = listed(producer.touched & consumer.touched)
            told = f"they read {common} in different orders: one load can't serve both"
            return refused(told, "no_saving"), None
        return verdict, joined

    def _device(self, producer: LoopNest, consumer: LoopNest) -> Verdict | None:
        one, other = (nest.nodes[0].buffer.layout.device for nest in (producer, consumer))
        told = f"different devices: {one} and {other}"
        return None if one == other else refused(told, "device")

    def _hazard(self, producer: LoopNest, consumer: LoopNest) -> Verdict | None:
        """A scatter updates memory in any order: nothing else in its kernel may touch that memory."""
        for nest, other in ((producer, consumer), (consumer, producer)):
            for name in sorted(nest.written & self.scatters.keys()):
                if used := {name, self.scatters[name]} & other.touched:
                    told = f"{name} scatters into memory of {listed(used)}, which others use"
                    return refused(told, "hazard")
        return None

    def _cycle(self, a: int, b: int) -> Verdict | None:
        """Is there a third node that must run after one and before the other?"""
        first, earlier = self.mask[a], self.ancestors[b] & ~(self.mask[a] | self.mask[b])
        third = [i for i, m in self.mask.items() if m & earlier and self.ancestors[i] & first]
        if not third:
            return None
        between = min(third, key=self.nests.__contains__)  # a call, if there is one
        names = [n.name for i, n in enumerate(self.nodes) if self.mask[between] >> i & 1]
        told = f"cycle: {names[0]} must run between them"
        return Verdict(False, told, "cycle", tuple(names))

    def _kind(self, producer: LoopNest, consumer: LoopNest) -> FusionKind:
        if not self.context.flows(producer, consumer):
            return "horizontal"
        if template_of(producer) is not None:
            return "template_epilogue"
        if template_of(consumer) is not None:
            return "template_prologue"
        if any(node.is_reduction for node in producer.nodes):
            return "reduction_epilogue"
        reduces = any(node.is_reduction for node in consumer.nodes)
        return "reduction_prologue" if reduces else "vertical"

    # -- fusing

    def _fuse(self, a: int, b: int, joined: LoopNest) -> None:
        keep, drop = sorted((a, b))
        self.join(keep, drop)
        self.nests[keep] = joined
        for buffer in joined.touched:
            self.users[buffer].add(keep)
            self.users[buffer].discard(drop)
        for i in self._neighbours(keep):
            self._push(keep, i)

    def join(self, keep: int, drop: int) -> None:
        """Two groups are one from now on, which runs after all that either must run after."""
        both = self.mask[keep] | self.mask.pop(drop)
        before = (self.ancestors[keep] | self.ancestors.pop(drop)) & ~both
        self.mask[keep], self.ancestors[keep] = both, before
        del self.nests[drop]
        self.apart[keep] |= self.apart.pop(drop)
        for i, ancestors in self.ancestors.items():
            if ancestors & both:
                self.ancestors[i] = ancestors | both | before


def template_of(nest: LoopNest) -> str | None:
    """The node of a nest that a template computes."""
    made = (node for node in nest.nodes if isinstance(node.buffer.loops, Template))
    return next((node.name for node in made), None)


def may_fuse(decision: FusionDecision) -> bool:
    """Do gates let two groups become one kernel?"""
    one, other = decision.producer, decision.consumer
    before, after = f"two kernels, {one} and {other}", f"one kernel: {decision.reason}"
    name = f"{one} and {other}"
    return allowed("fusion", name, lambda: before, lambda: after, lambda: decision.origins)


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
