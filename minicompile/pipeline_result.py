"""What `mc.trace(fn, *args)` returns: the object of every stage, in the order of the corridor.

    Trace          := name, capture, aot | None, graphs: {"forward": CompiledStages, "backward": ...}
    CompiledStages := loops, schedule, [plan], [kernel], wrapper

`trace.stages` lists them by name; `trace.loops` is the forward's, `trace.backward.loops` the backward's;
`trace.from_line(12)` follows a line of source through all of them; `trace.save("folder")` writes them down.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from minicompile.aot.result import AotResult
from minicompile.codegen.plan import KernelPlan, KernelSource, WrapperSource
from minicompile.dynamo.result import Capture
from minicompile.lowering.ir import LoopGraph
from minicompile.ops.display import Registered, Several, Shown, methods
from minicompile.ops.events import Event
from minicompile.ops.graph import origins_of
from minicompile.ops.origin import SourceLine, union
from minicompile.scheduling.schedule import Explained

COMPILED = ("loops", "schedule", "plans", "kernels", "wrapper")
"""The stages after AOT."""


@dataclass(eq=False)
class CompiledStages(Shown):
    """What one graph (the forward, or the backward) became after AOT."""

    loops: LoopGraph
    schedule: Explained
    plans: list[KernelPlan]
    kernels: list[KernelSource]
    wrapper: WrapperSource

    def __post_init__(self) -> None:
        self.plans, self.kernels = Several(self.plans), Several(self.kernels)

    @property
    def every_plan(self) -> list[KernelPlan]:
        """Those of launches too."""
        return [plan for whole in self.plans for plan in (whole, *whole.launches)]

    @property
    def stages(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in COMPILED}

    def __str__(self) -> str:
        return "\n".join(f"{name:<10} {stage!r}" for name, stage in self.stages.items())


@dataclass(eq=False)
class Trace(Shown):
    """One function, seen at every stage. A backend that stops early leaves the later stages out."""

    name: str
    capture: Capture
    aot: AotResult | None = None
    graphs: dict[str, CompiledStages] = field(default_factory=dict)

    explore, diff, steps = Registered(), Registered(), Registered()
    """The stages side by side; what differs between two of them or between traces; every pass and stage."""
    roofline, fusion_steps, assembly = Registered(), Registered(), Registered()
    """What each kernel moves and computes, and its least time; every question of the scheduler in order; what
    a GPU that needn't be here makes of Triton kernels."""
    pieces, from_line, save = Registered(), Registered(), Registered()
    """Every object of every stage, with the operations it came from; those of a line of source; a folder of
    pictures and texts."""
    rooms, overview, eager_bytes = Registered(), Registered(), Registered()
    """Each stage with a count; the same as text; the most memory that eager would hold at once."""

    @classmethod
    def watching(cls, capture: Capture) -> Trace:
        """A trace that fills while the rooms after capture work on it."""
        trace = cls(capture.name, capture)
        capture.watch.listeners.append(trace.keep)
        return trace

    def keep(self, event: Event) -> None:
        """Keep what a room made."""
        if event.kind == "aot":
            self.aot = event.subject
        elif event.kind == "graph":
            self.graphs[event.graph] = event.subject

    @property
    def stages(self) -> dict[str, Any]:
        """Every stage object by name, in the order of the corridor."""
        found: dict[str, Any] = {"capture": self.capture}
        if self.aot is not None:
            found["aot"] = self.aot
        for name, compiled in self.graphs.items():
            found.update({f"{name}.{stage}": value for stage, value in compiled.stages.items()})
        return found

    def graph(self, name: str) -> CompiledStages:
        """The stages after AOT of "forward" or "backward"."""
        if name not in self.graphs:
            made = ", ".join(self.graphs) or "none: the backend stopped before lowering"
            raise AttributeError(f"the trace of {self.name} has no {name} graph; it has {made}")
        return self.graphs[name]

    forward = property(lambda self: self.graph("forward"))
    backward = property(lambda self: self.graph("backward"))
    loops, schedule, plans, kernels, wrapper = (
        property(attrgetter(f"forward.{stage}")) for stage in COMPILED
    )

    def source_lines(self) -> list[SourceLine]:
        """The lines of user code that the trace came from, callers included, in order."""
        origins = union(map(origins_of, self.capture.graph.nodes))
        return sorted({line for origin in origins for line in origin.stack})

    def __str__(self) -> str:
        """The overview of all stages; if the folder `debug` was deleted, the number of graphs."""
        overview = methods.get((Trace, "overview"))
        return str(overview(self)) if overview else f"{self.name}: {len(self.graphs)} graphs"
