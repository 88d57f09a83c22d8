"""`launches(compiled, *args)`: one call, with a clock beside every line of the generated Python.

    LaunchTimeline := one graph's run: name, "forward" or "backward", seconds, [Launch]
    Launch         := a line of the wrapper, what kind of work it is, when it began, how long it took

What runs is a copy of each wrapper with a look at the clock after every line; the compiled function stays as
it is. Times are the host's: on a GPU a kernel's line only queues it (torch.profiler shows when the device ran
it). Clocks cost some 0.1 us a line.
The real compiler: torch/_inductor/wrapper_benchmark.py.
"""

from __future__ import annotations

import ast
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from minicompile import pipeline
from minicompile.aot.result import BoxedCallable
from minicompile.aot.runtime import make_callable
from minicompile.codegen.generate import generate_kernels
from minicompile.codegen.plan import CodeLine, WrapperSource
from minicompile.debug.program_copies import same_random_state
from minicompile.debug.variant import Case, VariantRun
from minicompile.dynamo.result import Capture
from minicompile.errors import Unsupported
from minicompile.ops.display import Several, Shown, listed
from minicompile.ops.graph import Graph
from minicompile.ops.origin import Origins, union
from minicompile.options import Options
from minicompile.runtime.load import start_loading

KINDS = ("kernel", "extern", "python")
"""What a line does: the first that fits. The last is all that isn't computing: memory, views, checks."""


@dataclass(frozen=True)
class Launch(Shown):
    """One line of a wrapper in the run that took the median time; seconds."""

    number: int
    text: str
    kind: str
    origins: Origins
    start: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.number}: {self.kind}, {self.seconds * 1e6:.1f} us: {self.text.strip()}"


@dataclass
class LaunchTimeline(Shown):
    """One graph's run, line by line."""

    name: str
    graph: str
    seconds: float
    launches: list[Launch]

    def __post_init__(self) -> None:
        listed(self, "launches")

    @property
    def shares(self) -> dict[str, float]:
        """Seconds by kind; what is no kernel or library call is Python between them."""
        kinds = [kind for kind in KINDS if any(step.kind == kind for step in self.launches)]
        return {k: sum(step.seconds for step in self.launches if step.kind == k) for k in kinds}

    @property
    def summary(self) -> str:
        parts = (f"{kind} {s / self.seconds:.0%}" for kind, s in self.shares.items())
        return f"{self.seconds * 1e6:,.1f} us: {', '.join(parts)}"

    def __str__(self) -> str:
        lines = [f"{self.graph} of {self.name}, {self.summary}", " line    starts        us"]
        for step in self.launches:
            start, seconds = step.start * 1e6, step.seconds * 1e6
            work = f"{step.kind:<9} {step.text.strip()}"
            lines.append(f"{step.number:>5}{start:>10,.1f}{seconds:>10,.1f}  {work}")
        return "\n".join(lines)


def launches(
    target: Any, /, *args: Any, repeats: int = 20, **kwargs: Any
) -> Several[LaunchTimeline]:
    """Time each line of the generated wrappers in a call on these arguments, and in its backward.

    Works on copies: neither the target, nor the arguments, nor the random state change. Raises what the call
    raises, and Unsupported where none of it compiles.
    """
    case = Case.of(target, [args], kwargs)
    measured = Instrumented(case.options)
    run = VariantRun(case, case.by(measured.backend))  # the first call compiles
    if run.error is not None:
        raise run.error
    for _ in range(repeats):
        with same_random_state():
            run.again()
    timelines = Several(graph.timeline() for graph in measured.graphs if graph.runs)
    if not timelines:
        raise Unsupported("nothing of this call was compiled: mc.explain says why")
    return timelines


class Instrumented:
    """Compiles captures with clocks in the wrappers; `graphs` are those compiled."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.graphs: list[TimedGraph] = []

    def backend(self, capture: Capture) -> BoxedCallable:
        aot = pipeline.differentiate(capture, self.options)
        forward = self.timed(capture, aot.forward, aot.metadata.written_back)
        backward = self.timed(capture, aot.backward) if aot.backward is not None else None
        return make_callable(aot, forward, backward, capture.name)

    def timed(
        self, capture: Capture, graph: Graph, back: Mapping[int, int] | None = None
    ) -> TimedGraph:
        stages = pipeline.compile_graph(graph, self.options, back).stages
        steps = steps_of(stages.wrapper)
        modules = generate_kernels(dict(enumerate(stages.plans)))
        copy = with_clock(stages.wrapper, steps)
        call = start_loading(modules, self.options)(copy, stages.loops.constants)
        self.graphs.append(TimedGraph(capture.name, graph.name, steps, call))
        return self.graphs[-1]


@dataclass(eq=False)
class TimedGraph:
    """A graph whose wrapper calls `tick` after each of its steps."""

    name: str
    graph: str
    steps: list[Launch]
    call: Any
    runs: list[list[float]] = field(default_factory=list)
    """When each step of a run began, and the end of the last, since its beginning."""

    def __call__(self, inputs: list[Any]) -> Any:
        marks: list[float] = []
        self.call.__globals__[TICK] = lambda: marks.append(time.perf_counter())
        self.call.__globals__[TICK]()
        results = self.call(inputs)
        marks.append(time.perf_counter())
        self.runs.append([at - marks[0] for at in marks])
        return results

    def timeline(self) -> LaunchTimeline:
        """The run of median length, without the first."""
        runs = sorted(self.runs[1:] or self.runs, key=lambda run: run[-1])
        chosen = runs[len(runs) // 2]
        launches = [
            replace(step, start=start, seconds=end - start)
            for step, start, end in zip(self.steps, chosen, chosen[1:])
        ]
        return LaunchTimeline(self.name, self.graph, chosen[-1], launches)


TICK = "__mc_tick"
"""The clock's name in a wrapper."""


def steps_of(wrapper: WrapperSource) -> list[Launch]:
    """The statements of the wrapper's `call`; what stands on one line is one step.

    A call of a kernel is one; a call of torch's, or of an object that the wrapper makes, is extern.
    """
    tree = ast.parse(wrapper.text)
    [call] = [part for part in tree.body if isinstance(part, ast.FunctionDef)]
    others = [name for part in tree.body if part is not call for name in ast.walk(part)]
    objects = {n.id for n in others if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    kernels = {kernel.name for kernel in wrapper.kernels}
    steps = []
    for number, group in itertools.groupby(call.body, key=lambda part: part.lineno):
        statements = list(group)
        lines = wrapper.lines[number - 1 : statements[-1].end_lineno]
        nodes = [node for part in statements for node in ast.walk(part)]
        called = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
        kind = "python"
        if called & kernels:
            kind = "kernel"
        elif called & objects or any(name.startswith("torch.") for name in called):
            kind = "extern"
        text = "\n".join(line.text for line in lines)
        steps.append(Launch(number, text, kind, union(line.origins for line in lines)))
    return steps


def with_clock(wrapper: WrapperSource, steps: Sequence[Launch]) -> WrapperSource:
    """The wrapper with a look at the clock before every step but the first."""
    first = {step.number for step in steps[1:]}
    lines: list[CodeLine] = []
    for number, line in enumerate(wrapper.lines, 1):
        lines += [CodeLine(f"    {TICK}()")] * (number in first) + [line]
    return WrapperSource(wrapper.name, lines, wrapper.kernels)
