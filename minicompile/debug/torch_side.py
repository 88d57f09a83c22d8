"""`compare_with_torch(fn, *args)`: one call through minicompile and through torch.compile, stage by stage.

Comparison   := name, ours, theirs: CompilerSide, notes; stages: {name: (ours, theirs)}
CompilerSide := compiler, StageAccuracy, kernels, seconds
              stages: {name: graphs, or code; several after a graph break}
"""

from __future__ import annotations

import re
import statistics
import types
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from minicompile import api
from minicompile.codegen.plan import CodeLine, WrapperSource
from minicompile.compat import torch_compiler
from minicompile.debug.accuracy import Accuracy
from minicompile.debug.variant import BAD, Case, StageAccuracy, Variant, VariantRun, timed
from minicompile.dynamo import dispatch
from minicompile.dynamo.module import calling
from minicompile.ops.display import Several, Shown, aligned
from minicompile.ops.events import Event
from minicompile.ops.graph import Graph, copied, placeholders, target_name
from minicompile.ops.origin import NO_ORIGINS, Origin, SourceLine

OURS, THEIRS = "minicompile", "torch.compile"
COSTS = ("graphs", "kernels", "time")
GRAPHS = ("graph", "aot.joint", "aot.forward", "aot.backward")
FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)')
NOT_USERS = tuple(str(Path(file).parent) for file in (torch.__file__, dispatch.__file__))
"""Folders whose frames are not the user's."""


def graph_of(gm: fx.GraphModule, name: str, made_by: str) -> Graph:
    """A copy of a graph of torch's compiler, with values and origins where our views look for them."""
    graph = copied(Graph(gm, name, made_by))
    for node in graph.nodes:
        frames = FRAME.findall(node.stack_trace or "")
        stack = (SourceLine(file, int(n), at) for file, n, at in frames)
        users = tuple(line for line in stack if not line.file.startswith(NOT_USERS))
        origin = Origin(node.name, target_name(node.target), users)
        node.meta["origins"] = frozenset({origin}) if users else NO_ORIGINS
        node.meta.setdefault("val", node.meta.get("example_value"))
        if node.meta.get("partitioner_tag") == "is_backward":
            node.meta["phase"] = "backward"
    return graph


@dataclass
class CompilerSide:
    """One compiler: what it made of the function at each stage, and how that ran."""

    compiler: str
    accuracy: StageAccuracy = field(default_factory=lambda: StageAccuracy(""))
    stages: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    kernels: int = 0
    """Fused groups of loops."""
    seconds: float | None = None
    """Median of calls after the first."""

    HEAD = ("compiler", *Accuracy.HEAD[1:-1], *COSTS)

    @property
    def is_bad(self) -> bool:
        """Is it wrong, or does nothing of it run compiled?"""
        return self.accuracy.verdict in (*BAD, "not compiled")

    def cells(self) -> tuple[str, ...]:
        time = "" if self.seconds is None else f"{self.seconds * 1e6:.0f} us"
        costs = str(len(self.stages["graph"])), str(self.kernels), time
        return self.compiler, *self.accuracy.cells()[1:-1], *costs

    def ours(self, case: Case) -> Variant:
        """The case by minicompile, whose stages are noted."""
        compile = api.find_backend("inductor", case.options)

        def watched(capture: Any) -> Any:
            self.stages["graph"].append(capture.graph)
            capture.watch.listeners.append(self.hear)
            return compile(capture)

        return case.by(watched)

    def hear(self, event: Event) -> None:
        """Note a stage of minicompile's."""
        if event.kind == "aot":
            for name in ("joint", "forward", "backward"):
                if (graph := getattr(event.subject, name)) is not None:
                    self.stages[f"aot.{name}"].append(graph)
        elif event.kind == "graph":
            self.kernels += len(event.subject.kernels)
            self.stages["code"] += [*event.subject.kernels, event.subject.wrapper]

    def hear_inductor(self, kind: str, stage: Any, text: str) -> None:
        """Note a stage of torch's Inductor."""
        if kind == "joint":
            if any("tangents" in node.name for node in placeholders(stage.graph)):
                self.stages["aot.joint"].append(graph_of(stage, "joint", "AOT autograd"))
            return
        name = "backward" if stage.is_backward else "forward"
        graph = graph_of(stage.orig_gm, name, "AOT autograd and Inductor's passes")
        self.stages[f"aot.{name}"].append(graph)
        lines = list(map(CodeLine, text.split("\n")))
        self.stages["code"].append(WrapperSource(f"{name}, by Inductor", lines, []))
        self.kernels += torch_compiler.inductor_kernels(stage)

    def backend(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """The backend of torch.compile: Inductor, and the captured graph is noted."""
        self.stages["graph"].append(graph_of(gm, "graph", "Dynamo"))
        compiled: Callable[..., Any] = torch_compiler.compile_fx()(gm, inputs)
        return compiled


@dataclass
class Comparison(Shown):
    """Both compilers, stage by stage."""

    name: str
    ours: CompilerSide
    theirs: CompilerSide
    notes: list[str]

    @property
    def conclusion(self) -> str:
        """Which of the two is wrong, or ran nothing compiled."""
        bad = [side for side in (self.ours, self.theirs) if side.is_bad]
        return (
            "; ".join(f"{side.compiler}: {side.accuracy.verdict}" for side in bad)
            or "both agree with eager"
        )

    @property
    def stages(self) -> dict[str, tuple[list[Any], list[Any]]]:
        """What both compilers have at each stage; nothing where one did not come so far."""
        ours, theirs = self.ours.stages, self.theirs.stages
        return {name: (ours[name], theirs[name]) for name in (*GRAPHS, "code")}

    def __getitem__(self, stage: str) -> Several[Any]:
        return Several(subject for side in self.stages[stage] for subject in side)

    def __str__(self) -> str:
        lines = [f"{self.name} by minicompile and torch.compile: {self.conclusion}", ""]
        lines += aligned([CompilerSide.HEAD, self.ours.cells(), self.theirs.cells()], left=6)
        stages = f"to read one: comparison[{' | '.join(self.stages)}]"
        return "\n".join([*lines, *self.notes, "", stages])


def compare_with_torch(target: Any, /, *args: Any, **kwargs: Any) -> Comparison:
    """Run a function or module through both compilers.

    What `mc.compile` returned is compared with its options. The function is called once by float64, by eager
    and by each compiler, on copies, with its backward pass where outputs require grad, and once more
    for each timed call; what it prints is printed each time. Target, arguments and random
    state stay as they are. So does what torch.compile keeps: what it compiles here is forgotten, except in
    code of classes that it had compiled before. Random numbers are eager's on both sides (`fallback_random`).
    Raises what eager raises.
    """
    case = Case.of(target, [args], kwargs)
    case = replace(case, target=torch_compiler.torch_original(case.target))
    ours, theirs = CompilerSide(OURS), CompilerSide(THEIRS)
    with torch_compiler.torch_compile_anew():
        # torch's capture first: its first use in a process changes nn.Module, which our captures rely on
        counters = torch_compiler.dynamo_counters()
        counters.clear()
        variant = Variant(lambda target: by_torch(target, theirs.backend, case.dynamic))
        with torch_compiler.inductor_told(theirs.hear_inductor, fallback_random=True) as notes:
            by_inductor = VariantRun(case, variant)
        by_inductor.breaks = list(counters["graph_break"])
        by_inductor.compiled = bool(theirs.stages["graph"])
        runs = {OURS: VariantRun(case, ours.ours(case)), THEIRS: by_inductor}
        samples = timed([*runs.values()])
    rows = {row.stage: row for row in case.compare(runs)}
    for side, sample in zip((ours, theirs), samples):
        side.accuracy = rows[side.compiler]
        side.seconds = statistics.median(sample) if sample else None
        if side.is_bad:
            notes.append(f"{side.compiler}: {side.accuracy.note or 'there was nothing to compile'}")
        for reason in runs[side.compiler].breaks:
            notes.append(f"break by {side.compiler}: {reason.splitlines()[0]}")
    return Comparison(case.name, ours, theirs, notes)


def by_torch(target: Any, backend: Any, dynamic: bool | None) -> Callable[..., Any]:
    """The target under torch.compile, as code of its own."""
    if not isinstance(target, types.FunctionType):
        target = calling(target)
        target.__code__ = target.__code__.replace()
    compiled: Callable[..., Any] = torch.compile(target, backend=backend, dynamic=dynamic)
    return compiled
