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
from dataclasses import dataclass, replace
from functools import cache, partial

from minicompile.lowering.ir import LoopGraph, Template
from minicompile.ops import plugins
from minicompile.ops.gates import REFUSED, allowed
from minicompile.ops.origin import Origins, union
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
from minicompile.scheduling.reasons import Verdict, listed, refused, short_name
from minicompile.shapes.strided import elements

MAX_NEIGHBOURS = 16
"""Of the groups that only read what another reads, at most this many are asked about."""


@dataclass(frozen=True)
class Wishes:
    """Pairs of nodes that a learner wants in one kernel, or in two."""

    fuse: tuple[Pair, ...] = ()
    forbid: tuple[Pair, ...] = ()


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
        """Which buffers need not be read from memory, and which not even be written."""
        never = self.never_written(producer, consumer)
        told = [f"no need to write {listed(never)} to memory"] if never else []
        if still := self.flows(producer, consumer) - never:
            told.append(f"no need to read {listed(still)} back from memory")
        return f"one kernel has {' and '.join(told)}"

    def nothing_saved(self, producer: LoopNest, consumer: LoopNest) -> str:
        """Why reading a common buffer in one kernel would save nothing."""
        common = producer.touched & consumer.touched
        told = "they have no buffer in common"
        if common:
            reads = [a for nest in (producer, consumer) for a in nest.reads if a.buffer in common]
            loaded = any(a.footprint is None for a in reads)
            which = "which elements depends on the data" if loaded else "not at the same indices"
            told = f"both read {listed(common)}, but {which}"
        return f"{told}: one kernel would save no memory traffic"

    def distance(self, producer: LoopNest, consumer: LoopNest) -> int:
        """How many nodes of the graph lie from the first of one to the first of the other."""
        return abs(producer.members[0].order - consumer.members[0].order)

    def size(self, *nests: LoopNest) -> int:
        """How many operations one kernel of these nests would have."""
        return sum(self.operations[m.node.name] for nest in nests for m in nest.members)


NO_WISHES = Wishes()


class FusionPolicy:
    """The built-in policy: fuse whatever saves memory traffic, the most first, within limits on a kernel."""

    wishes = NO_WISHES
    """Pairs that are fused or kept apart whatever it says, unless that would be wrong."""

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
        saved = listed(b for b, count in context.saved(producer, consumer).items() if count)
        if not saved:
            return Verdict(False, context.nothing_saved(producer, consumer), "no_saving")
        return Verdict(True, f"both read {saved}: one load serves both", "shared_read")

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
        wishes: Wishes | None = None,
    ) -> None:
        self.context, self.nodes, self.before = context, nodes, before
        self.policy = policy or fusion_rule.get("policy", NoPolicy)()
        self.align_rules = plugins.rules(align_rule, context.options.plugins).values()
        self.wishes = self.policy.wishes if wishes is None else wishes
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
        self.vetoed = [0] * len(nodes)
        """For each node, later ones it can never share a kernel with, as bits."""
        self.queue: list[tuple[tuple[int, ...], int, int, int]] = []

    def run(self) -> None:
        """Fuse the pair with the highest score, until no pair can be fused; wishes come first."""
        self._note_externs()
        self._grant()
        for i in self.nests:
            for j in self._neighbours(i):
                if i < j:
                    self._push(i, j)
        while self.queue:
            _, a, b, version = heapq.heappop(self.queue)
            if a in self.nests and b in self.nests and version == self._version(a, b):
                self._ask(a, b)
            if not self.queue:  # what stood between two wished ones may have joined one of them
                self._grant()

    def group(self, name: str) -> int:
        """The group that a node is in."""
        bit = 1 << self.place[name]
        return next(i for i, mask in self.mask.items() if mask & bit)

    def _grant(self) -> None:
        """Fuse what is wished for, unless it would be wrong."""
        for a, b in (map(self.group, pair) for pair in self.wishes.fuse):
            if a != b and a in self.nests and b in self.nests:
                self._ask(a, b)

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
        passed = sorted({d.buffer for node in other for d in node.reads} & written)
        told = f"{extern.kernel.op} runs in a library ({extern.kernel.reason})"
        kind: FusionKind = "vertical" if passed else "horizontal"
        if not passed:
            told += " and loads what it reads by itself: no loop of ours can share the load"
        elif extern is one[0]:
            told += f", which has stored all of {listed(passed)} before anybody reads it"
        else:
            told += f", which needs all of {listed(passed)} in memory before it starts"
        apart = abs(self.place[one[0].name] - self.place[other[0].name])
        return FusionDecision(tuple(one), tuple(other), kind, False, "extern", told, (), apart)

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
            score = self.policy.score(self.nests[a], self.nests[b], self.context)
            falling = tuple(-n for n in (score if isinstance(score, tuple) else (score,)))
            heapq.heappush(self.queue, (falling, a, b, self._version(a, b)))

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

    # -- one question

    def _ask(self, a: int, b: int) -> None:
        """Fuse two groups or not, and record why."""
        decision, joined, final = self.decide(a, b)
        if joined is not None and not may_fuse(decision):
            decision, joined = replace(decision, fused=False, cause="gate", reason=REFUSED), None
        self.decisions.append(decision)
        if joined is not None:
            self._fuse(a, b, joined)
        elif final:
            self.vetoed[min(a, b)] |= 1 << max(a, b)

    def decide(self, a: int, b: int) -> tuple[FusionDecision, LoopNest | None, bool]:
        """The answer about two groups, the nest that they would be, and whether a refusal is final."""
        if self.ancestors[a] & self.mask[b]:
            a, b = b, a
        producer, consumer = self.nests[a], self.nests[b]
        verdict, joined = self._judge(a, b)
        decision = FusionDecision(
            tuple(producer.nodes),
            tuple(consumer.nodes),
            self._kind(producer, consumer),
            verdict.fuse,
            verdict.cause,
            verdict.reason,
            _most_first(self.context.saved(producer, consumer)),
            self.context.distance(producer, consumer),
            self.context.size(producer, consumer),
            verdict.between,
        )
        return decision, joined, verdict.final

    def _judge(self, a: int, b: int) -> tuple[Verdict, LoopNest | None]:
        """Ask what is right, then what is wished or else wise, then whether there are common loops."""
        producer, consumer = self.nests[a], self.nests[b]
        verdict = (
            self._device(producer, consumer)
            or self._hazard(producer, consumer)
            or self._cycle(a, b)
            or self._wish(a, b)
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

    def _wish(self, a: int, b: int) -> Verdict | None:
        """What `what_if` asks for: it overrules the policy."""
        for pairs, fuse in ((self.wishes.forbid, False), (self.wishes.fuse, True)):
            for pair in pairs:
                if {*map(self.group, pair)} == {a, b}:
                    kept_apart = f"what_if keeps {' and '.join(pair)} apart"
                    told = "what_if asks for it" if fuse else kept_apart
                    return Verdict(fuse, told, "wish", final=not fuse)
        return None

    def _device(self, producer: LoopNest, consumer: LoopNest) -> Verdict | None:
        one, other = (nest.nodes[0].buffer.layout.device for nest in (producer, consumer))
        told = f"different devices: {one} and {other}"
        return None if one == other else refused(told, "device", final=True)

    def _hazard(self, producer: LoopNest, consumer: LoopNest) -> Verdict | None:
        """A scatter updates memory in any order: nothing else in its kernel may touch that memory."""
        for nest, other in ((producer, consumer), (consumer, producer)):
            others = {self.scatters[name] for name in other.written & self.scatters.keys()}
            for name in sorted(nest.written & self.scatters.keys()):
                target = self.scatters[name]
                if name in other.touched:
                    told = f"{name} is complete only when all of its scatter has run"
                elif target in other.touched:
                    told = f"{name} scatters into memory of {target}: others must be done with it"
                elif target in others:
                    told = f"both scatter into the memory of {target}"
                else:
                    continue
                return refused(told, "hazard", final=True)
        return None

    def _cycle(self, a: int, b: int) -> Verdict | None:
        """Is there a third node that must run after one and before the other?"""
        first, earlier = self.mask[a], self.ancestors[b] & ~(self.mask[a] | self.mask[b])
        between = [i for i, m in self.mask.items() if m & earlier and self.ancestors[i] & first]
        if not between:
            return None
        one, other = (short_name(self.nests[group].nodes) for group in (a, b))
        externs = [i for i in between if i not in self.nests]
        i = (externs or between)[0]
        nodes = [self.nodes[i]] if externs else self.nests[i].nodes
        order = f"must run between them, after {one} and before {other}"
        told = f"cycle: {short_name(nodes)} {order}"
        return Verdict(False, told, "cycle", bool(externs), tuple(node.name for node in nodes))

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
        for i, ancestors in self.ancestors.items():
            if ancestors & both:
                self.ancestors[i] = ancestors | both | before


def template_of(nest: LoopNest) -> str | None:
    """The node of a nest that a template computes."""
    made = (node for node in nest.nodes if isinstance(node.buffer.loops, Template))
    return next((node.name for node in made), None)


def may_fuse(decision: FusionDecision) -> bool:
    """Do gates let two groups become one kernel?"""

    def origins() -> Origins:
        return union(node.origins for node in decision.nodes if isinstance(node, SchedulerNode))

    name = f"{decision.producer} and {decision.consumer}"
    before = partial("two kernels, {} and {}".format, decision.producer, decision.consumer)
    return allowed("fusion", name, before, lambda: f"one kernel: {decision.reason}", origins)


def _most_first(saved: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(saved.items(), key=lambda item: (-item[1], item[0])))


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
