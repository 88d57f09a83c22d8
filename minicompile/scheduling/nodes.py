"""What the scheduler works on and what it hands to code generation.

    Schedule           := graph, before: [SingleNode], nodes: [ScheduledNode],
                          decisions: [FusionDecision], memory: MemoryPlan
    SingleNode         := SchedulerNode | ExternKernelSchedulerNode       one operation, before fusion
    ScheduledNode      := FusedSchedulerNode | ExternKernelSchedulerNode  one step, in running order
    SchedulerNode      := buffer, body: LoopBody, reads: (Dependency), writes: (Dependency)
    ExternKernelSchedulerNode := kernel, reads: (Dependency), writes: (Dependency)
    FusedSchedulerNode := nodes: [SchedulerNode], bodies: [LoopBody], levels,
                          ranges: x0, x1 (parallel), reduction_ranges: r0, r1 (often empty)
    Dependency         := buffer, index, ranges                           elements that a node touches
    FusionDecision     := producers, consumers, kind, fused, cause, reason,
                          saved, distance, operations, between
    MemoryPlan         := allocate: [Allocation], free, aliases, internal, live_bytes, blocks: [Block],
                          decisions: [InPlaceDecision], buffer_bytes
    Allocation         := buffer, reuses, in_place
    InPlaceDecision    := step, old, new, done, reason
    Block              := buffers, born, dies, bytes, home

In a fused node each body is rewritten to the common variables. A body either covers every (x, r) ("elem"),
or each x once ("row"); a reduction takes values at elem level and gives them at row level, a scan gives
them at elem level and keeps the order of its r.
The real compiler: torch/_inductor/scheduler.py, dependencies.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import sympy
import torch

from minicompile.lowering.ir import ComputedBuffer, ExternKernel, Layout, LoopGraph
from minicompile.ops.display import Registered, Several, Shown, bytes_text, count_text, listed
from minicompile.ops.handler import Index
from minicompile.ops.origin import Origins, union
from minicompile.scheduling.body import LoopBody, ranges_text
from minicompile.shapes.expr import Size, index_text

Pair: TypeAlias = tuple[str, str]
"""Names of two nodes."""
FusionKind = Literal[
    "vertical",
    "horizontal",
    "reduction_prologue",
    "reduction_epilogue",
    "template_prologue",
    "template_epilogue",
]
"""Of a template: what a matrix product's own kernel does to tiles of its factors as it loads them, and to
those of the product; a library call can't."""
Cause = Literal[
    "handed_over",  # fused: one reads what the other writes
    "shared_read",  # fused: both read the same elements
    "gate",  # refused from outside, as bisection does
    "wish",  # fused or kept apart because `what_if` asks for it
    "policy",  # wise or unwise in the eyes of a policy from outside
    "no_saving",  # it would save no memory traffic
    "size_limit",  # too many operations for one kernel
    "not_asked",  # beyond the nearest groups that share only a read
    "off",  # options.fusion is False
    "extern",  # a library call is a boundary
    "template",  # a matrix product's kernel takes over no such loops
    "device",
    "hazard",  # a scatter updates memory that the other one uses
    "cycle",  # a third node must run between them
    "index_mismatch",  # an element is read where another one is written
    "unknown_index",  # the element that is read is known only at run time
    "loop_mismatch",  # no loops that suit both
    "order",  # two argmax count in different orders
]
"""Why two nodes are in one kernel, or are not."""


@dataclass(frozen=True)
class Dependency(Shown):
    """The elements of a buffer that a node reads or writes: `index` over `ranges`.

    `index` is None where the elements are unknown: extern operators and indirect indices touch any.
    """

    buffer: str
    index: Index | None
    ranges: tuple[tuple[sympy.Symbol, Size], ...] = ()

    def __str__(self) -> str:
        if self.index is None:
            return f"{self.buffer}[*]"
        return f"{self.buffer}[{index_text(self.index)}] for {ranges_text(dict(self.ranges))}"


@dataclass(eq=False)
class SchedulerNode(Shown):
    """One loop nest. `name` is that of the buffer it writes."""

    buffer: ComputedBuffer
    body: LoopBody
    reads: tuple[Dependency, ...]
    writes: tuple[Dependency, ...]

    @property
    def name(self) -> str:
        return self.buffer.name

    @property
    def origins(self) -> Origins:
        return self.buffer.origins

    @property
    def is_reduction(self) -> bool:
        return bool(self.body.reductions)

    @property
    def kind(self) -> str:
        """`pointwise`, `reduction`, `scan` or `scatter`."""
        return type(self.buffer.loops).__name__.lower()

    def __str__(self) -> str:
        x, r = (list(g.values()) for g in (self.body.ranges, self.body.reduction_ranges))
        over = "" if not r else f" over {r}" if self.is_reduction else f" along {r}"
        lines = [f"{self.name}: {self.kind} {x}{over}", *(f"  reads  {d}" for d in self.reads)]
        return "\n".join([*lines, *(f"  writes {d}" for d in self.writes)])


@dataclass(eq=False)
class ExternKernelSchedulerNode(Shown):
    """One call of a library operator."""

    kernel: ExternKernel
    reads: tuple[Dependency, ...]
    writes: tuple[Dependency, ...]

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def nodes(self) -> list[ExternKernelSchedulerNode]:
        """What its kernels compute, where a template makes them."""
        return [self]

    @property
    def origins(self) -> Origins:
        return self.kernel.origins

    def __str__(self) -> str:
        return f"{self.name}: extern {self.kernel.op} ({self.kernel.reason})"


@dataclass(eq=False)
class FusedSchedulerNode(Shown):
    """Loop nests that run as one kernel. `bodies[i]` is node i's body over the common variables."""

    nodes: list[SchedulerNode]
    bodies: list[LoopBody]
    levels: list[Literal["row", "elem"]]
    """For each body: does it cover every (x, r), or each x once? Reductions and scans are "elem"."""
    ranges: dict[sympy.Symbol, Size]
    reduction_ranges: dict[sympy.Symbol, Size]

    @property
    def name(self) -> str:
        return "_".join(node.name for node in self.nodes)

    @property
    def origins(self) -> Origins:
        return union(node.origins for node in self.nodes)

    @property
    def reads(self) -> tuple[Dependency, ...]:
        """What it reads from outside."""
        inside = {node.name for node in self.nodes}
        return tuple(d for node in self.nodes for d in node.reads if d.buffer not in inside)

    @property
    def writes(self) -> tuple[Dependency, ...]:
        return tuple(d for node in self.nodes for d in node.writes)

    def __str__(self) -> str:
        kind, names = "fused" if len(self.nodes) > 1 else "kernel", [n.name for n in self.nodes]
        over = f" over {ranges_text(self.reduction_ranges)}" if self.reduction_ranges else ""
        return f"{kind} {' + '.join(names)}: {ranges_text(self.ranges)}{over}"


ScheduledNode: TypeAlias = FusedSchedulerNode | ExternKernelSchedulerNode


SingleNode: TypeAlias = SchedulerNode | ExternKernelSchedulerNode


@dataclass(frozen=True)
class FusionDecision(Shown):
    """One question the scheduler asked: may these two groups of nodes run as one kernel?"""

    producers: tuple[SingleNode, ...]
    consumers: tuple[SingleNode, ...]
    kind: FusionKind
    fused: bool
    cause: Cause
    reason: str
    saved: tuple[tuple[str, int], ...] = ()
    """Bytes of memory traffic that fusing saves, by buffer, the most first."""
    distance: int = 0
    """How many nodes of the graph lie from the first of one to the first of the other."""
    operations: int | None = None
    """Of the kernel that they would be; None where one is a library call."""
    between: tuple[str, ...] = ()
    """Nodes that must run after one and before the other."""

    numbers = Registered()
    """What fusing saves, how far apart the two are and how large their kernel would be, as text."""

    @property
    def producer(self) -> str:
        return "_".join(node.name for node in self.producers)

    @property
    def consumer(self) -> str:
        return "_".join(node.name for node in self.consumers)

    @property
    def score(self) -> int:
        """All bytes that fusing saves."""
        return sum(count for _, count in self.saved)

    @property
    def nodes(self) -> tuple[SingleNode, ...]:
        return (*self.producers, *self.consumers)

    @property
    def origins(self) -> Origins:
        return union(node.origins for node in self.nodes)

    def __str__(self) -> str:
        verdict = "fused" if self.fused else "kept apart"
        pair = f"{self.producer} + {self.consumer}"
        return f"{pair}: {verdict} ({self.kind}, {bytes_text(self.score)}): {self.reason}"


LARGE = 8 << 20
"""Bytes from which on fresh memory on the CPU costs page faults; malloc keeps smaller pieces."""


@dataclass(frozen=True)
class Allocation:
    """Memory for a buffer: fresh, or that of another one (`reuses`) which is dead or dies here."""

    buffer: str
    reuses: str | None = None
    in_place: bool = False
    """The kernel that writes the buffer is the last to read the other one."""

    def __str__(self) -> str:
        if self.reuses is None:
            return self.buffer
        return f"{self.buffer} in {'place of ' * self.in_place}{self.reuses}"


@dataclass(frozen=True)
class InPlaceDecision:
    """May the kernel at a step write `new` into the memory of `old`, which dies there?"""

    step: int
    old: str
    new: str
    done: bool
    reason: str

    def __str__(self) -> str:
        verdict = "in place of" if self.done else "not in place of"
        return f"step {self.step}: {self.new} {verdict} {self.old}: {self.reason}"


Home = Literal["own", "library", "output"]
"""Allocated by the wrapper, or by a library operator; kept by the caller."""


@dataclass(frozen=True)
class Block:
    """One piece of memory, of buffers that live in it one after the other in the steps born to dies."""

    buffers: tuple[str, ...]
    born: int
    dies: int
    bytes: int
    home: Home


@dataclass
class MemoryPlan(Shown):
    """Per scheduled node: what to allocate before it and what is dead after it. Bytes at the size hints."""

    allocate: list[list[Allocation]] = field(default_factory=list)
    free: list[list[str]] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    """Buffers that live in another's memory by construction (scatter results in their target)."""
    internal: frozenset[str] = frozenset()
    """Buffers that exist inside one kernel only: never in memory."""
    live_bytes: list[int] = field(default_factory=list)
    """Bytes of intermediates and outputs alive while each node runs."""
    blocks: list[Block] = field(default_factory=list)
    decisions: list[InPlaceDecision] = field(default_factory=list)
    buffer_bytes: int = 0
    """All buffers that reach memory, each in memory of its own that is never freed."""

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes, default=0)

    def in_place(self, step: int) -> dict[str, str]:
        """Buffers that a step's kernel writes into the memory of others that it reads, and those."""
        new = self.allocate[step] if step < len(self.allocate) else ()
        return {a.buffer: a.reuses for a in new if a.reuses and a.in_place}

    def facts(self) -> list[str]:
        """What the plan saves, and how."""
        made = [a for step in self.allocate for a in step]
        reused, in_place = sum(1 for a in made if a.reuses), sum(a.in_place for a in made)
        return [
            f"peak {bytes_text(self.peak_bytes)}, {count_text(reused, 'buffer')} in "
            f"reused memory ({in_place} in place), {len(self.internal)} never in memory",
            f"without reuse {bytes_text(self.buffer_bytes)}",
        ]

    def __str__(self) -> str:
        first, *others = self.facts()
        lines = [f"memory plan: {first}", *(f"  {fact}" for fact in others)]
        for i, (new, dead) in enumerate(zip(self.allocate, self.free, strict=True)):
            made, freed = ", ".join(map(str, new)), ", ".join(dead)
            alive = f"{bytes_text(self.live_bytes[i])} alive"
            lines.append(f"  step {i}: {alive}; allocate [{made}], free [{freed}]")
        return "\n".join([*lines, *(f"  {d}" for d in self.decisions)])


@dataclass
class Schedule(Shown):
    """Kernels and extern calls in running order, and why they are what they are."""

    graph: LoopGraph
    before: list[SingleNode]
    """One node per buffer, as it was before fusion."""
    nodes: list[ScheduledNode]
    decisions: list[FusionDecision]
    memory: MemoryPlan

    verify = Registered()
    """Raise VerifyError where bodies, order or memory break a promise (debug/verify.py)."""

    def __post_init__(self) -> None:
        listed(self, "before", "nodes", "decisions")

    @functools.cached_property
    def layouts(self) -> dict[str, Layout]:
        """How each buffer lies in memory."""
        return {name: buffer.layout for name, buffer in self.graph.buffers.items()}

    @functools.cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Each buffer's dtype."""
        return {name: layout.dtype for name, layout in self.layouts.items()}

    @property
    def kernels(self) -> list[FusedSchedulerNode]:
        return Several(node for node in self.nodes if isinstance(node, FusedSchedulerNode))

    @property
    def fused(self) -> list[FusionDecision]:
        """The decisions that made one kernel of two."""
        return [decision for decision in self.decisions if decision.fused]

    @property
    def saved_bytes(self) -> int:
        """Memory traffic that fusion saves."""
        return sum(decision.score for decision in self.fused)

    def __str__(self) -> str:
        externs = len(self.nodes) - len(self.kernels)
        lines = [
            f"# schedule of {self.graph.name}: {count_text(len(self.before), 'node')} "
            f"-> {count_text(len(self.kernels), 'kernel')} and {count_text(externs, 'extern call')}"
        ]
        if hints := [f"{s} = {v}" for s, v in self.graph.size_hints.items()]:
            lines.append(f"bytes below are those at {', '.join(hints)}")
        lines += [str(node) for node in self.nodes]
        lines += ["fusion:"] + [f"  {decision}" for decision in self.decisions]
        lines.append(str(self.memory))
        return "\n".join(lines)
