"""What the scheduler works on and what it hands to code generation.

    Schedule      := graph: LoopGraph, decisions: [FusionDecision], memory: MemoryPlan,
                     nodes: [FusedSchedulerNode | ExternKernelSchedulerNode] in running order
    SchedulerNode := one ComputedBuffer with its LoopBody and dependencies
    FusedSchedulerNode := the SchedulerNodes of one kernel over common loop variables:
                     ranges x0, x1, ... (parallel) and reduction_ranges r0, r1, ... (often empty)
    Dependency    := buffer, index, ranges: which elements a node touches

In a fused node each body is rewritten to the common variables. A body either covers every (x, r) ("elem"),
or each x once ("row"); a reduction takes values at elem level and gives them at row level, a scan gives
them at elem level and keeps the order of its r.
The real compiler: torch/_inductor/scheduler.py, dependencies.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import sympy

from minicompile.lowering.ir import ComputedBuffer, ExternKernel, LoopGraph
from minicompile.ops.display import Shown, bytes_text, count_text
from minicompile.ops.handler import Index
from minicompile.ops.origin import Origins, union
from minicompile.scheduling.body import LoopBody, ranges_text
from minicompile.shapes.expr import Size

FusionKind = Literal["vertical", "horizontal", "reduction_prologue", "reduction_epilogue"]


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
        return f"{self.buffer}[{self.index}] for {ranges_text(dict(self.ranges))}"


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


@dataclass(frozen=True)
class FusionDecision(Shown):
    """One question the scheduler asked: may these two run as one kernel?"""

    producer: str
    consumer: str
    kind: FusionKind
    score: int
    """Bytes of memory traffic that fusing saves."""
    fused: bool
    reason: str

    def __str__(self) -> str:
        verdict = "fused" if self.fused else "kept apart"
        pair = f"{self.producer} + {self.consumer}"
        return f"{pair}: {verdict} ({self.kind}, {bytes_text(self.score)}): {self.reason}"


@dataclass(frozen=True)
class Allocation:
    """Memory for a buffer: fresh, or that of a dead buffer (`reuses`)."""

    buffer: str
    reuses: str | None = None


@dataclass
class MemoryPlan(Shown):
    """Per scheduled node: what to allocate before it and what is dead after it."""

    allocate: list[list[Allocation]] = field(default_factory=list)
    free: list[list[str]] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    """Buffers that live in another's memory by construction (scatter results in their target)."""
    internal: frozenset[str] = frozenset()
    """Buffers that exist inside one kernel only: never in memory."""
    live_bytes: list[int] = field(default_factory=list)
    """Bytes of intermediates alive while each node runs (at the size hints)."""

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes, default=0)

    def __str__(self) -> str:
        reused = sum(1 for step in self.allocate for a in step if a.reuses)
        lines = [
            f"memory plan: peak {bytes_text(self.peak_bytes)}, {count_text(reused, 'buffer')} in "
            f"reused memory, {len(self.internal)} never in memory"
        ]
        for i, (new, dead) in enumerate(zip(self.allocate, self.free, strict=True)):
            made = [a.buffer + (f" in {a.reuses}" if a.reuses else "") for a in new]
            lines.append(f"  step {i}: allocate [{', '.join(made)}], free [{', '.join(dead)}]")
        return "\n".join(lines)


@dataclass
class Schedule(Shown):
    """Kernels and extern calls in running order, and why they are what they are."""

    graph: LoopGraph
    before: list[SchedulerNode | ExternKernelSchedulerNode]
    """One node per buffer, as it was before fusion."""
    nodes: list[ScheduledNode]
    decisions: list[FusionDecision]
    memory: MemoryPlan

    @property
    def kernels(self) -> list[FusedSchedulerNode]:
        return [node for node in self.nodes if isinstance(node, FusedSchedulerNode)]

    def __str__(self) -> str:
        externs = len(self.nodes) - len(self.kernels)
        lines = [
            f"# schedule of {self.graph.name}: {len(self.before)} nodes "
            f"-> {count_text(len(self.kernels), 'kernel')} and {count_text(externs, 'extern call')}"
        ]
        lines += [str(node) for node in self.nodes]
        lines += ["fusion:"] + [f"  {decision}" for decision in self.decisions]
        lines.append(str(self.memory))
        return "\n".join(lines)
