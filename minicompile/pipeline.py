"""The corridor: from a captured graph to something that runs, one room after the other.

    dynamo/      a Python frame            -> Capture       torch-level graph, guards
    aot/         Capture.graph             -> AotResult     functional ATen graphs, forward and backward
    lowering/    an ATen graph             -> LoopGraph     buffers defined by loops
    scheduling/  LoopGraph                 -> Schedule      which loops share a kernel, order, memory
    codegen/     Schedule                  -> KernelPlan    loops, tiles, phases of each kernel
    codegen/     KernelPlan                -> KernelSource  C++ or Triton; WrapperSource: Python
    runtime/     KernelSource              -> a callable    compiled, loaded, cached on disk

Capture comes first and calls this module back: `compile_capture` is what `backend="inductor"` means. Each
room sees only the results of earlier ones. The real compiler: torch/_inductor/compile_fx.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from minicompile import compat
from minicompile.aot.autograd import ahead_of_time
from minicompile.aot.decompositions import decomposition
from minicompile.aot.result import AotResult, BoxedCallable, RuntimeMetadata
from minicompile.aot.runtime import assemble, interpret, make_callable
from minicompile.codegen.generate import by_position, generate_kernels, make_plans
from minicompile.codegen.plan import KernelModule
from minicompile.codegen.wrapper import generate_wrapper
from minicompile.dynamo.result import Capture
from minicompile.errors import Unsupported
from minicompile.lowering.lower import lower
from minicompile.ops import plugins
from minicompile.ops.graph import Graph
from minicompile.ops.registry import Registry
from minicompile.options import Options
from minicompile.pipeline_result import CompiledStages
from minicompile.runtime.load import start_loading
from minicompile.scheduling.schedule import schedule

# Now rather than in the first call: our rules, and what torch imports for its first fake mode.
decomposition.load()
with contextlib.suppress(Unsupported):  # said when something is compiled
    compat.fake_mode()


@dataclass(eq=False)
class Program:
    """A compiled capture: callables for the forward graph and, if there is one, for the backward graph.

    `backward` gives the backward graph. `graphs` has the stages of both; it is empty where the callables were
    not compiled in this process."""

    metadata: RuntimeMetadata
    calls: list[BoxedCallable]
    backward: Callable[[], Graph | None]
    graphs: list[CompiledGraph]


Compile = Callable[[Capture, Options], Program]

around_compile: Registry[Callable[..., Program]] = Registry(
    "around_compile", "name -> function that stands around the compilation of a capture"
)
"""A rule's third parameter is `compile`: the rule calls it, or doesn't, and may change the program that comes
back."""


def compile_capture(capture: Capture, options: Options) -> BoxedCallable:
    """Every room after capture. `capture.watch` hears what each one made."""
    compile: Compile = compile_program
    for rule in plugins.rules(around_compile, options.plugins).values():
        compile = partial(rule, compile=compile)
    program = compile(capture, options)
    forward, backward = [*program.calls, None][:2]
    assert forward is not None
    return assemble(program.metadata, forward, backward, program.backward, capture.name)


def compile_program(capture: Capture, options: Options) -> Program:
    """Differentiate, lower, schedule, generate and build."""
    aot = differentiate(capture, options)
    graphs = []
    for graph in filter(None, (aot.forward, aot.backward)):
        written_back = aot.metadata.written_back if graph is aot.forward else None
        tell = partial(capture.watch.tell, graph=graph.name)
        graphs.append(compile_graph(graph, options, written_back, tell))
    for plan in (plan for graph in graphs for plan in graph.stages.every_plan):
        for fact, why in plan.assumes.items():
            capture.shape_env.evaluate(fact, why)
    capture.watch.tell("building", [module for graph in graphs for module in graph.modules])
    calls = [graph.finish() for graph in graphs]
    return Program(aot.metadata, calls, lambda: aot.backward, graphs)


def aot_eager(capture: Capture, options: Options) -> BoxedCallable:
    """Stop after AOT and run its graphs with eager operators."""
    aot = differentiate(capture, options)
    backward = interpret(aot.backward) if aot.backward is not None else None
    return make_callable(aot, interpret(aot.forward), backward, capture.name)


def differentiate(capture: Capture, options: Options) -> AotResult:
    """AOT autograd: training when gradients may be asked for later."""
    aot = ahead_of_time(
        capture.graph,
        capture.fakes,
        options,
        training=capture.grad_enabled,
        shape_env=capture.shape_env,
        continues=capture.continues,
    )
    capture.watch.tell("aot", aot)
    return aot


@dataclass(eq=False)
class CompiledGraph:
    """One ATen graph's stages, and its kernels on their way through the system's compilers."""

    stages: CompiledStages
    modules: list[KernelModule]
    finish: Callable[[], BoxedCallable]
    """Waits for the compilers. Raises BackendError where one is missing or fails."""


def compile_graph(
    graph: Graph,
    options: Options,
    written_back: Mapping[int, int] | None = None,
    tell: Callable[[str, Any], None] = lambda kind, made: None,
) -> CompiledGraph:
    """From ATen to kernels; the C++ compiler already runs when this returns. `written_back`: the outputs that
    go into inputs, by number; `tell` hears of each stage."""
    loops = lower(graph, options)
    loops.written_back = dict(written_back or {})
    tell("loops", loops)
    scheduled = schedule(loops, options)
    tell("schedule", scheduled)
    plans = make_plans(scheduled, options)
    tell("plans", list(plans.values()))
    modules = generate_kernels(plans)
    for module in modules:
        module.tell = tell
    load = start_loading(modules, options)  # while the compilers work, the wrapper is written
    kernels = by_position(plans, modules)
    sources = [kernel for group in kernels.values() for kernel in group]
    tell("kernels", sources)
    wrapper = generate_wrapper(scheduled, kernels)
    tell("wrapper", wrapper)
    finish = partial(load, wrapper, loops.constants)
    stages = CompiledStages(loops, scheduled, list(plans.values()), sources, wrapper)
    tell("graph", stages)
    return CompiledGraph(stages, modules, finish)


for _name in Options().plugins:  # at the end of the page: the rules build on every room
    plugins.load(_name)
