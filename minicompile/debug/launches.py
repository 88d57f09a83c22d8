"""`launches(compiled, *args)`: one call, with a clock beside every line of the generated Python.

    Launches := name, seconds of a whole call, runs, [Timeline]
    Timeline := one graph's run: name, "forward" or "backward", seconds, [Launch]
    Launch   := a line of the wrapper, what kind of work it is, when it began, how long it took

What runs is a copy of each wrapper with a look at the clock after every line; the compiled function stays as
it is. Times are the host's: on a GPU a kernel's line only queues it, and more runs measure the device by
events, queued behind a pause so that no launch is waited for. Clocks cost some 0.1 us a line.
The real compiler: torch/_inductor/wrapper_benchmark.py.
"""

from __future__ import annotations

import ast
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from minicompile import api, pipeline
from minicompile.aot.result import BoxedCallable
from minicompile.aot.runtime import make_callable
from minicompile.codegen.generate import generate_kernels
from minicompile.codegen.plan import CodeLine, WrapperSource
from minicompile.compat import triton_api
from minicompile.debug.copies import same_random_state
from minicompile.debug.variant import Case, Run, Variant
from minicompile.dynamo.dispatch import Dispatcher
from minicompile.dynamo.module import behind
from minicompile.dynamo.result import Capture
from minicompile.errors import Unsupported
from minicompile.ops.display import Shown, aligned, listed
from minicompile.ops.graph import Graph
from minicompile.ops.origin import Origins, union
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
    device: float | None = None
    """On a GPU: between the events before and after the line, the median of all runs."""

    def __str__(self) -> str:
        gpu = f", {self.device * 1e6:.1f} us on the GPU" if self.device is not None else ""
        return f"{self.number}: {self.kind}, {self.seconds * 1e6:.1f} us{gpu}: {self.text.strip()}"


@dataclass
class Timeline(Shown):
    """One graph's run, line by line."""

    name: str
    graph: str
    seconds: float
    launches: list[Launch]
    per_call: float = 1.0
    """Runs in one call: more where a call reaches the graph again, fewer where other versions served."""

    def __post_init__(self) -> None:
        listed(self, "launches")

    @property
    def shares(self) -> dict[str, float]:
        """Seconds by kind; what is no kernel or library call is Python between them."""
        found = {kind: sum(s.seconds for s in self.launches if s.kind == kind) for kind in KINDS}
        return {kind: seconds for kind, seconds in found.items() if seconds}

    @property
    def summary(self) -> str:
        parts = (f"{kind} {s / self.seconds:.0%}" for kind, s in self.shares.items())
        gpu = [step.device for step in self.launches if step.device is not None]
        busy = f"; GPU busy {sum(gpu) * 1e6:,.1f} us" if gpu else ""
        often = f", {self.per_call:.2g} runs a call" if self.per_call != 1 else ""
        return f"{self.seconds * 1e6:,.1f} us{often}: {', '.join(parts)}{busy}"

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("line", "starts", "us", "GPU us")]
        for step in self.launches:
            times = (step.start, step.seconds, step.device)
            cells = ("" if t is None else f"{t * 1e6:,.1f}" for t in times)
            rows.append((str(step.number), *cells))
        work = ["", *(f"{step.kind:<9} {step.text.strip()}" for step in self.launches)]
        lines = [f"{numbers}  {text}" for numbers, text in zip(aligned(rows, left=0), work)]
        return "\n".join([f"{self.graph} of {self.name}, {self.summary}", *lines])


@dataclass
class Launches(Shown):
    """What a call spends its time on."""

    name: str
    seconds: float
    """Of the whole call without its backward: guards, autograd and Python around the graphs as well."""
    runs: int
    timelines: list[Timeline]

    def __post_init__(self) -> None:
        listed(self, "timelines")

    @property
    def around(self) -> float:
        """Seconds of the call outside of its forward graphs."""
        inside = (t.seconds * t.per_call for t in self.timelines if t.graph == "forward")
        return self.seconds - sum(inside)

    def __str__(self) -> str:
        about = (
            f"{self.seconds * 1e6:,.1f} us a call, {self.around * 1e6:,.1f} us around its graphs"
        )
        title = f"launches of {self.name}: {about}; the median of {self.runs} runs"
        return "\n\n".join([title, *map(str, self.timelines)])


def launches(target: Any, /, *args: Any, repeats: int = 20, **kwargs: Any) -> Launches:
    """Time each line of the generated wrappers in a call on these arguments, and in its backward.

    Works on copies: neither the target, nor the arguments, nor the random state change. Raises what the call
    raises, and Unsupported where none of it compiles.
    """
    case, measured = Case.of(target, [args], kwargs), Instrumented(target)
    run = Run(case, Variant(measured.compile))  # the first call compiles
    if run.error is not None:
        raise run.error
    whole: list[float] = []

    def repeat() -> None:
        for _ in range(repeats):
            with same_random_state():
                run.again()
            whole.append(run.forward)

    repeat()
    seconds = statistics.median(whole)
    if any(graph.on_gpu for graph in measured.graphs):
        for graph in measured.graphs:
            graph.pause = 2 * seconds + 0.001
        repeat()
    timelines = [graph.timeline(repeats + 1) for graph in measured.graphs if graph.runs]
    if not timelines:
        raise Unsupported("nothing of this call was compiled: mc.explain says why")
    return Launches(timelines[0].name, seconds, repeats, timelines)


class Instrumented:
    """Compiles with the options of `target`, with clocks in the wrappers; `graphs` are those compiled."""

    def __init__(self, target: Any) -> None:
        self.options, self.dynamic = api.settings_of(target)
        self.graphs: list[TimedGraph] = []

    def compile(self, target: Any) -> Any:
        make = partial(Dispatcher, backend=self.backend, options=self.options, dynamic=self.dynamic)
        return behind(target, make, api.compile)

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
        devices = {buffer.layout.device.type for buffer in stages.loops.buffers.values()}
        self.graphs.append(TimedGraph(capture.name, graph.name, steps, call, "cuda" in devices))
        return self.graphs[-1]


class TimedGraph:
    """A graph whose wrapper calls `tick` after each of its steps."""

    def __init__(self, name: str, graph: str, steps: list[Launch], call: Any, on_gpu: bool) -> None:
        self.name, self.graph, self.steps, self.call, self.on_gpu = name, graph, steps, call, on_gpu
        self.pause: float | None = None
        """Seconds for which a GPU waits before a run that it measures itself."""
        self.runs: list[list[float]] = []
        """When each step of a run began, and the end of the last, since its beginning."""
        self.gpu_runs: list[list[float]] = []

    def __call__(self, inputs: list[Any]) -> Any:
        marks: list[Any] = []
        mark = time.perf_counter
        if self.pause is not None:
            triton_api.gpu_pause(self.pause)
            mark = gpu_event
        tick = self.call.__globals__[TICK] = lambda: marks.append(mark())
        tick()  # type: ignore[no-untyped-call]
        results = self.call(inputs)
        tick()  # type: ignore[no-untyped-call]
        if self.pause is None:
            self.runs.append([at - marks[0] for at in marks])
        else:
            torch.cuda.synchronize()
            self.gpu_runs.append([marks[0].elapsed_time(at) / 1000 for at in marks])
        return results

    def timeline(self, calls: int) -> Timeline:
        """The run of median length of so many calls, without the first; on a GPU the median of each step."""
        runs = self.runs[1:] or self.runs
        chosen = sorted(runs, key=lambda run: run[-1])[len(runs) // 2]
        launches = []
        for i, step in enumerate(self.steps):
            gpu = [run[i + 1] - run[i] for run in self.gpu_runs]
            device = statistics.median(gpu) if gpu else None
            seconds = chosen[i + 1] - chosen[i]
            launches.append(replace(step, start=chosen[i], seconds=seconds, device=device))
        return Timeline(self.name, self.graph, chosen[-1], launches, len(self.runs) / calls)


def gpu_event() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


TICK = "__mc_tick"
"""The clock's name in a wrapper."""


def steps_of(wrapper: WrapperSource) -> list[Launch]:
    """The statements of the wrapper's `call`; what stands on one line is one step."""
    tree = ast.parse(wrapper.text)
    [call] = [part for part in tree.body if isinstance(part, ast.FunctionDef)]
    objects = {
        name.id
        for part in tree.body
        for name in ast.walk(part)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store) and part is not call
    }
    kernels = {kernel.name for kernel in wrapper.kernels}
    found = []
    for number, group in itertools.groupby(call.body, key=lambda part: part.lineno):
        statements = list(group)
        lines = wrapper.lines[number - 1 : statements[-1].end_lineno]
        called = [
            ast.unparse(node.func)
            for part in statements
            for node in ast.walk(part)
            if isinstance(node, ast.Call)
        ]
        kind = kind_of(called, kernels, objects)
        text = "\n".join(line.text for line in lines)
        found.append(Launch(number, text, kind, union(line.origins for line in lines)))
    return found


def kind_of(called: Sequence[str], kernels: set[str], objects: set[str]) -> str:
    """The first of KINDS that fits the functions which a statement calls."""
    if not kernels.isdisjoint(called):
        return "kernel"
    extern = any(name in objects or name.startswith("torch.") for name in called)
    return "extern" if extern else "python"


def with_clock(wrapper: WrapperSource, steps: Sequence[Launch]) -> WrapperSource:
    """The wrapper with a look at the clock before every step but the first."""
    first = {step.number for step in steps[1:]}
    lines: list[CodeLine] = []
    for number, line in enumerate(wrapper.lines, 1):
        lines += [CodeLine(f"    {TICK}()")] * (number in first) + [line]
    return WrapperSource(wrapper.name, lines, wrapper.kernels)
