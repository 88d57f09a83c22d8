"""Which loop nests become one kernel: greedy by score, to a fixed point, every question recorded.

What is *wise* is policy, an object: `FusionPolicy`, or the one that a rule "policy" in the registry `fusion`
makes. What is *right* (no cycles, every value read where it was written, no reading of memory that the same
kernel updates) is checked here whatever the policy or a learner's wishes say.

A kernel's size is estimated as if its loop nests ran one after the other for one element. Alive at once
are the values of the nest that runs, and what was loaded or computed before it and is used again after it;
an operation's result may take the place of an operand that nobody else needs.
A thread of a GPU has 255 registers; at 4 elements a thread (one 16-byte load) that is 64 values. A CPU has
16 or 32 vector registers, but what is spilled stays in the L1 cache, which costs less than memory does.
The real compiler: Scheduler.fuse_nodes, can_fuse_vertical and choices.py (score_fusion) in torch/_inductor.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

from minicompile.lowering.ir import PRODUCTS, LoopGraph, Template
from minicompile.ops import plugins
from minicompile.ops.gates import REFUSED, allowed
from minicompile.ops.origin import Origins, union
from minicompile.ops.registry import Registry
from minicompile.options import Options
from minicompile.scheduling.align import align
from minicompile.scheduling.body import LoopBody, Value
from minicompile.scheduling.memory import kept_buffers, scatter_targets
from minicompile.scheduling.nest import LoopNest, Place, nest_of
from minicompile.scheduling.nodes import (
    Cause,
    ExternKernelSchedulerNode,
    FusionDecision,
    FusionKind,
    KernelSize,
    Pair,
    ScheduledNode,
    SchedulerNode,
    SingleNode,
)
from minicompile.scheduling.reasons import Refusal, listed, short_name
from minicompile.shapes.expr import size_hint
from minicompile.shapes.strided import elements

MAX_NEIGHBOURS = 16
"""Of the groups that only read what another reads, at most this many are asked about."""


class Verdict(NamedTuple):
    """A policy's answer, and why."""

    fuse: bool
    reason: str
    cause: Cause = "policy"


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
        self.bodies = {n.name: size_of(n.body) for n in nodes if isinstance(n, SchedulerNode)}
        """Operations of each body, and how many of its values are alive at once."""
        self.saved, self.size = cache(self._saved), cache(self._size)

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
        if not common:
            return "they have no buffer in common: one kernel would save no memory traffic"
        reads = [a for nest in (producer, consumer) for a in nest.reads if a.buffer in common]
        which = "not at the same indices"
        if any(a.footprint is None for a in reads):
            which = "which elements depends on the data"
        return f"both read {listed(common)}, but {which}: one kernel would save no memory traffic"

    def distance(self, producer: LoopNest, consumer: LoopNest) -> int:
        """How many nodes of the graph lie from the first of one to the first of the other."""
        return abs(producer.members[0].order - consumer.members[0].order)

    def _size(self, *nests: LoopNest) -> KernelSize:
        """How large one kernel of these nests would be."""
        members = sorted((m for nest in nests for m in nest.members), key=lambda m: m.order)
        bodies = [self.bodies[member.node.name] for member in members]
        places: dict[Place, list[int]] = {}
        for i, member in enumerate(members):
            for access in (*member.reads, *member.writes):
                places.setdefault(access.place, []).append(i)
        between = alive((at[0] + 1, at[-1]) for at in places.values())
        registers = max(own + between[i] for i, (_, own) in enumerate(bodies))
        return KernelSize(len(members), sum(count for count, _ in bodies), registers)


def size_of(body: LoopBody) -> tuple[int, int]:
    """How many operations a body has, and how many of its values are alive at once.

    Each operation takes a register from then on, what is loaded from its first use on.
    """
    uses: dict[Value, list[int]] = {}
    for i, value in enumerate(body.values):
        for operand in value.operands:
            uses.setdefault(operand, []).append(i)
    computed = [(i, v) for i, v in enumerate(body.values) if v.op != "constant"]
    spans = (
        (i + 1 if v.operands else uses[v][0], uses[v][-1] + 1) for i, v in computed if v in uses
    )
    return sum(v.op != "store" for _, v in computed), max([1, *alive(spans).values()])


def alive(spans: Iterable[tuple[int, int]]) -> Counter[int]:
    """How many of the spans, from the first number to before the second, each number is in."""
    return Counter(itertools.chain.from_iterable(itertools.starmap(range, spans)))


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
        if size.operations > options.max_kernel_operations:
            limit = f"options.max_kernel_operations = {options.max_kernel_operations}"
            told = f"one kernel would have {size.operations} operations, more than {limit}"
            return Verdict(False, told, "size_limit")
        least = max(context.size(nest).registers for nest in (producer, consumer))
        if size.registers > max(options.max_live_values, least):  # alone they'd be no smaller
            limit = f"options.max_live_values = {options.max_live_values}"
            told = f"{size.registers} values would be alive at once, more than {limit}"
            return Verdict(False, told, "register_limit")
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

align_rule: Registry[Callable[[LoopNest, LoopNest, Fuser], LoopNest | Refusal | None]] = Registry(
    "align",
    "name -> rule(producer, consumer, fuser) that gives common loops, or why there are none; None for others",
)

join_rule: Registry[Callable[[dict[int, ScheduledNode], Fuser], None]] = Registry(
    "join", "name -> join(groups, fuser), which makes one kernel of two when fusion is done"
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
        saved = {}
        if not passed:
            told += " and loads what it reads by itself: no loop of ours can share the load"
        elif extern is one[0]:
            told += f", which has stored all of {listed(passed)} before anybody reads it"
            tiles = [
                n for n in other if isinstance(n, SchedulerNode) and not n.body.reduction_ranges
            ]
            reader = next((n for n in tiles if any(d.buffer in passed for d in n.reads)), None)
            if extern.kernel.op in PRODUCTS and reader is not None:
                kind, saved = "template_epilogue", self._through_memory(passed, other)
                told += (
                    f"; a product in a kernel of our own could compute {reader.name} tile by tile"
                )
        else:
            told += f", which needs all of {listed(passed)} in memory before it starts"
        apart = abs(self.place[one[0].name] - self.place[other[0].name])
        return FusionDecision(
            tuple(one), tuple(other), kind, False, "extern", told, _most_first(saved), apart
        )

    def _through_memory(
        self, buffers: Sequence[str], readers: Sequence[SingleNode]
    ) -> dict[str, int]:
        """Bytes of buffers that are written and read; written all the same if somebody else reads them."""
        context, inside = self.context, {node.name for node in readers}
        saved = {}
        for name in buffers:
            elements = size_hint(context.buffers[name].layout.storage_size, context.hints)
            alone = name not in context.kept and context.readers[name] <= inside
            saved[name] = (1 + alone) * elements * context.itemsize[name]
        return saved

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
        decision, joined = self.decide(a, b)
        if isinstance(joined, LoopNest) and not may_fuse(decision):
            decision = replace(decision, fused=False, cause="gate", reason=REFUSED)
            joined = Refusal(REFUSED, "gate")
        self.decisions.append(decision)
        if isinstance(joined, LoopNest):
            self._fuse(a, b, joined)
        elif joined.final:
            self.vetoed[min(a, b)] |= 1 << max(a, b)

    def decide(self, a: int, b: int) -> tuple[FusionDecision, LoopNest | Refusal]:
        """The answer about two groups, and the nest that they would be."""
        if self.ancestors[a] & self.mask[b]:
            a, b = b, a
        producer, consumer = self.nests[a], self.nests[b]
        found = self._judge(a, b)
        joined, verdict = found if isinstance(found, tuple) else (found, found)
        decision = FusionDecision(
            tuple(producer.nodes),
            tuple(consumer.nodes),
            self._kind(producer, consumer),
            isinstance(joined, LoopNest),
            verdict.cause,
            verdict.reason,
            _most_first(self.context.saved(producer, consumer)),
            self.context.distance(producer, consumer),
            self.context.size(producer, consumer),
            joined.between if isinstance(joined, Refusal) else (),
        )
        return decision, joined

    def _judge(self, a: int, b: int) -> tuple[LoopNest, Verdict] | Refusal:
        """The joined nest and the policy's reason, or the refusal. A wish overrules the policy only."""
        producer, consumer = self.nests[a], self.nests[b]
        flaw = self._device(producer, consumer) or self._hazard(producer, consumer)
        flaw = flaw or self._cycle(a, b)
        if flaw is not None:
            return flaw
        if (pair := self._wished(self.wishes.forbid, a, b)) is not None:
            return Refusal(f"what_if keeps {' and '.join(pair)} apart", "wish", final=True)
        verdict = Verdict(True, "what_if asks for it", "wish")
        wish = self._wished(self.wishes.fuse, a, b) is not None
        if not wish:
            verdict = Verdict(*self.policy.can_fuse(producer, consumer, self.context))
        if not verdict.fuse:
            return Refusal(verdict.reason, verdict.cause)
        ways = (rule(producer, consumer, self) for rule in self.align_rules)
        joined = next((way for way in ways if way is not None), None) or align(producer, consumer)
        if isinstance(joined, Refusal):
            return joined
        flows = self.context.flows(producer, consumer)
        if not (wish or flows or _meet(joined, producer, consumer)):
            common = listed(producer.touched & consumer.touched)
            told = f"they read {common} in different orders: one load can't serve both"
            return Refusal(told, "no_saving")
        return joined, verdict

    def _wished(self, pairs: Sequence[Pair], a: int, b: int) -> Pair | None:
        """The pair that two groups have the nodes of."""
        return next((pair for pair in pairs if {*map(self.group, pair)} == {a, b}), None)

    def _device(self, producer: LoopNest, consumer: LoopNest) -> Refusal | None:
        one, other = (nest.nodes[0].buffer.layout.device for nest in (producer, consumer))
        told = f"different devices: {one} and {other}"
        return None if one == other else Refusal(told, "device", final=True)

    def _hazard(self, producer: LoopNest, consumer: LoopNest) -> Refusal | None:
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
                return Refusal(told, "hazard", final=True)
        return None

    def _cycle(self, a: int, b: int) -> Refusal | None:
        """Is there a third node that must run after one and before the other?"""
        first, earlier = self.mask[a], self.ancestors[b] & ~(self.mask[a] | self.mask[b])
        between = [i for i, m in self.mask.items() if m & earlier and self.ancestors[i] & first]
        if not between:
            return None
        names = [short_name(self.nests[group].nodes) for group in (a, b)]
        order = f"must run between them, after {names[0]} and before {names[1]}"
        for i in between:
            node = self.nodes[i]
            if isinstance(node, ExternKernelSchedulerNode):
                told = f"cycle: {node.kernel.op} ({node.name}) {order}"
                return Refusal(told, "cycle", True, (node.name,))
        nest = self.nests[between[0]]
        told = f"cycle: {short_name(nest.nodes)} {order}"
        return Refusal(told, "cycle", between=tuple(node.name for node in nest.nodes))

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
