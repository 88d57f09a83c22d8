"""`compare_with_torch(fn, *args)`: one call through minicompile and through torch.compile, stage by stage,
and each one's capture with the other's compiler.

    Comparison := name, cells: [Cell], notes; stages: {name: (ours, theirs)}
    Cell       := capture, compiler, StageAccuracy, kernels, seconds
                  stages: {name: graphs, or code; several after a graph break}

If only one row or column of the 2 x 2 is wrong, the fault is pinned to one half: before the captured graph or
after it. The real compiler: torch/_inductor/compiler_bisector.py.
"""

from __future__ import annotations

import functools
import statistics
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from minicompile import api
from minicompile.codegen.plan import CodeLine, WrapperSource
from minicompile.compat import torch_compiler
from minicompile.debug import torch_bridge
from minicompile.debug.accuracy import Accuracy
from minicompile.debug.variant import BAD, Case, Run, StageAccuracy, Variant, timed
from minicompile.dynamo.dispatch import Backend
from minicompile.dynamo.module import calling
from minicompile.ops.display import Several, Shown, aligned
from minicompile.ops.events import Event
from minicompile.ops.graph import placeholders

OURS, THEIRS, INDUCTOR = "minicompile", "torch", "Inductor"
COSTS = ("graphs", "kernels", "time")
GRAPHS = ("graph", "aot.joint", "aot.forward", "aot.backward")


@dataclass
class Cell:
    """One way to run the function: who captured, who compiled, and how it went."""

    capture: str
    compiler: str
    accuracy: StageAccuracy = field(default_factory=lambda: StageAccuracy(""))
    stages: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    kernels: int = 0
    """Fused groups of loops."""
    seconds: float | None = None
    """Median of calls after the first."""

    HEAD = ("capture", "compiler", *Accuracy.HEAD[1:-1], *COSTS)

    @property
    def bad(self) -> bool | None:
        """None: it ran in eager, which says nothing."""
        verdict = self.accuracy.verdict
        return None if verdict == "not compiled" else verdict in BAD

    def cells(self) -> tuple[str, ...]:
        time = "" if self.seconds is None else f"{self.seconds * 1e6:.0f} us"
        costs = str(len(self.stages["graph"])), str(self.kernels), time
        return self.capture, self.compiler, *self.accuracy.cells()[1:-1], *costs

    # -- listening

    def listening(self, compile: Backend) -> Backend:
        """A backend of ours, and this hears what it makes."""

        def watched(capture: Any) -> Any:
            self.stages["graph"].append(capture.graph)
            capture.watch.listeners.append(self.heard)
            return compile(capture)

        return watched

    def heard(self, event: Event) -> None:
        if event.kind == "aot":
            for name in ("joint", "forward", "backward"):
                if (graph := getattr(event.subject, name)) is not None:
                    self.stages[f"aot.{name}"].append(graph)
        elif event.kind == "graph":
            self.kernels += len(event.subject.kernels)
            self.stages["code"] += [*event.subject.kernels, event.subject.wrapper]

    def told(self, kind: str, made: Any, text: str) -> None:
        """What torch's Inductor makes."""
        if kind == "joint":
            if any("tangents" in node.name for node in placeholders(made.graph)):
                graph = torch_bridge.graph_of(made, "joint", "AOT autograd")
                self.stages["aot.joint"].append(graph)
            return
        name = "backward" if made.is_backward else "forward"
        graph = torch_bridge.graph_of(made.orig_gm, name, "AOT autograd and Inductor's passes")
        self.stages[f"aot.{name}"].append(graph)
        lines = list(map(CodeLine, text.split("\n")))
        self.stages["code"].append(WrapperSource(f"{name}, by Inductor", lines, []))
        self.kernels += torch_compiler.inductor_kernels(made)

    def dynamo(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """torch.compile's backend for both halves of torch."""
        self.stages["graph"].append(torch_bridge.graph_of(gm, "graph", "Dynamo"))
        compiled: Callable[..., Any] = torch_compiler.compile_fx()(gm, inputs)
        return compiled


@dataclass
class Comparison(Shown):
    """Both compilers, stage by stage, and the four ways to join their halves."""

    name: str
    cells: list[Cell]
    """Our capture with our compiler and Inductor, torch's with the same."""
    notes: list[str]

    ours = property(lambda self: self.cells[0])
    theirs = property(lambda self: self.cells[-1])
    conclusion = property(lambda self: pinned(self.cells))

    @property
    def stages(self) -> dict[str, tuple[list[Any], list[Any]]]:
        """What both compilers have at each stage; nothing where one did not come so far."""
        ours, theirs = self.ours.stages, self.theirs.stages
        return {name: (ours[name], theirs[name]) for name in (*GRAPHS, "code")}

    def __getitem__(self, stage: str) -> Several[Any]:
        return Several(made for side in self.stages[stage] for made in side)

    def __str__(self) -> str:
        lines = [f"{self.name} by minicompile and torch.compile: {self.conclusion}", ""]
        lines += aligned([Cell.HEAD, *(cell.cells() for cell in self.cells)], left=7)
        stages = f"to read one: comparison[{' | '.join(self.stages)}]"
        return "\n".join([*lines, *self.notes, "", stages])


def pinned(cells: Sequence[Cell]) -> str:
    """Which half alone explains what is wrong and what is right."""
    if not any(cell.bad for cell in cells):
        apart = [f"{c.capture} with {c.compiler}" for c in cells if c.bad is None]
        if not apart:
            return "all four ways agree with eager"
        return f"what was compiled agrees with eager; not compiled: {', '.join(apart)}"
    found = [
        (half, who)
        for half, of in (("capture", "capture"), ("compile", "compiler"))
        for who in dict.fromkeys(getattr(cell, of) for cell in cells)
        if all(cell.bad in (None, getattr(cell, of) == who) for cell in cells)
    ]
    if len(found) != 1:
        wrong = ", ".join(f"{c.capture} with {c.compiler}" for c in cells if c.bad)
        return f"wrong: {wrong}; that is not pinned to one half"
    half, who = found[0]
    return f"the {half} half of {who} is wrong, whoever does the rest"


def compare_with_torch(target: Any, /, *args: Any, **kwargs: Any) -> Comparison:
    """Run a function or module through both compilers, and through each one's capture with the other's rest.

    What `mc.compile` returned is compared with its options. The function is called once by float64, by eager
    and by each of the four ways, on copies, with its backward pass where outputs require grad, and once more
    for each timed call; what it prints is printed each time. Target, arguments and random
    state stay as they are. So does what torch.compile keeps: what it compiles here is forgotten, except in
    code of classes that it had compiled before. Random numbers are eager's on both sides (`fallback_random`).
    Raises what eager raises.
    """
    case = Case.of(target, [args], kwargs)
    case = replace(case, target=torch_compiler.torch_original(case.target))
    options = case.options
    ours = api.find_backend("inductor", options)
    cells = [Cell(capture, rest) for capture in (OURS, THEIRS) for rest in (OURS, INDUCTOR)]

    def variant(cell: Cell) -> Variant:
        by = cell.listening(ours if cell.compiler == OURS else torch_bridge.to_inductor)
        if cell.capture == OURS:
            return case.by(by)
        backend = functools.partial(torch_bridge.backend, options=options, compile=by)
        chosen = backend if cell.compiler == OURS else cell.dynamo
        return Variant(lambda target: by_torch(target, chosen, case.dynamic))

    runs: dict[str, Run] = {}
    with torch_compiler.torch_compile_anew():
        # torch's capture first: its first use in a process changes nn.Module, which our captures rely on
        for number, cell in reversed([*enumerate(cells)]):
            counters = torch_compiler.dynamo_counters()
            counters.clear()
            with torch_compiler.inductor_told(cell.told, fallback_random=True) as notes:
                run = runs[str(number)] = Run(case, variant(cell))
            if cell.capture == THEIRS:
                left, run.breaks = list(counters["minicompile"]), list(counters["graph_break"])
                run.compiled = len(cell.stages["graph"]) > len(left)
                run.note = "; ".join(left)
        samples = timed([*runs.values()])
    rows = {row.stage: row for row in case.compare(runs)}
    for number, (cell, sample) in enumerate(zip(cells, reversed(samples))):
        run, cell.accuracy = runs[str(number)], rows[str(number)]
        cell.seconds = statistics.median(sample) if sample else None
        if cell.bad is not False:
            why = cell.accuracy.note or "there was nothing to compile"
            notes.append(f"{cell.capture} with {cell.compiler}: {why}")
        elif cell.compiler == (INDUCTOR if cell.capture == THEIRS else OURS):
            notes += [f"break by {cell.capture}: {why.splitlines()[0]}" for why in run.breaks]
    return Comparison(case.name, cells, notes)


def by_torch(target: Any, backend: Any, dynamic: bool | None) -> Callable[..., Any]:
    """The target under torch.compile, as code of its own."""
    if not isinstance(target, types.FunctionType):
        target = calling(target)
        target.__code__ = target.__code__.replace()
    compiled: Callable[..., Any] = torch.compile(target, backend=backend, dynamic=dynamic)
    return compiled
