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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from minicompile import compat
from minicompile.aot.autograd import ahead_of_time
from minicompile.aot.decompositions import decomposition
from minicompile.aot.missing import backwards
from minicompile.aot.parts import backward_of
from minicompile.aot.result import AotResult, BoxedCallable, Differentiated
from minicompile.aot.runtime import assemble, differentiated, interpret
from minicompile.codegen.generate import by_position, generate_kernels, make_plans
from minicompile.codegen.plan import KernelModule
from minicompile.codegen.wrapper import generate_wrapper
from minicompile.debug import reference as _reference  # noqa: F401  registers the interpreter
from minicompile.dynamo.result import Capture
from minicompile.errors import Unsupported
from minicompile.lowering.ir import InputBuffer, LoopGraph, View
from minicompile.lowering.lower import lower
from minicompile.ops.graph import Graph
from minicompile.ops.warned import Warned
from minicompile.options import Options
from minicompile.pipeline_result import CompiledStages
from minicompile.runtime import cuda_graphs, graph_cache
from minicompile.runtime.load import start_kept, start_loading
from minicompile.scheduling.groups import Buckets, output_groups
from minicompile.scheduling.schedule import schedule

# Now rather than in the first call: our rules, and what torch imports for its first fake mode.
decomposition.load()
with contextlib.suppress(Unsupported):  # said when something is compiled
    compat.fake_mode()


def issuing(warned: Sequence[Warned], forward: BoxedCallable) -> BoxedCallable:
    """A forward that then issues what torch's functions warned of while they were captured: where it raises,
    eager warns. Filters may make it raise, so it must not have written to inputs yet."""

    def call(inputs: list[Any]) -> Sequence[Any]:
        results = forward(inputs)
        for one in warned:
            one.issue()
        return results

    call.owned = getattr(forward, "owned", False)  # type: ignore[attr-defined]
    return call if warned else forward


def compile_capture(capture: Capture, options: Options) -> BoxedCallable:
    """Every room after capture. `capture.watch` hears what each one made."""
    key = graph_cache.key_of(capture, options)
    if key is not None and (kept := graph_cache.read(key, options)) is not None:
        return from_disk(kept, capture, options)
    aot = differentiate(capture, options)
    tell = partial(capture.watch.tell, graph="forward")
    written_back = {} if capture.warned else aot.metadata.written_back
    forward = compile_graph(aot.forward, options, written_back, tell)
    backwards, abouts = [], []
    for graph, takes in backward_of(aot):
        tell = partial(capture.watch.tell, graph=graph.name)
        buckets = ddp_buckets(capture, aot, forward.stages.loops, takes)
        backwards.append(compile_graph(graph, options, None, tell, buckets))
        abouts.append(differentiated(graph, takes, partial(compiled_now, options)))
    graphs = [forward, *backwards]
    for plan in (plan for graph in graphs for plan in graph.stages.every_plan):
        for fact, why in plan.assumes.items():
            capture.shape_env.evaluate(fact, why)
    capture.watch.tell("building", [module for graph in graphs for module in graph.modules])
    calls = [graph.finish() for graph in graphs]
    if key is not None and not any(graph.stages.loops.constants for graph in graphs):
        texts = [(graph.stages.wrapper, graph.modules) for graph in graphs]
        graph_cache.keep(key, aot.metadata, texts, abouts, options)
    if options.mode in cuda_graphs.MODES:
        schedules = [graph.stages.schedule for graph in graphs]
        first_saved = len(aot.metadata.result_requires_grad)
        taken = [about.takes for about in abouts]
        calls = cuda_graphs.around(calls, schedules, first_saved, capture.watch.tell, taken)
    first = issuing(capture.warned, calls[0])
    return assemble(aot.metadata, first, calls[1:], abouts, capture.name)


def from_disk(kept: graph_cache.Kept, capture: Capture, options: Options) -> BoxedCallable:
    """What an earlier process compiled of an equal capture."""

    @cache
    def again() -> list[tuple[Graph, Sequence[int]]]:
        return backward_of(differentiate(capture, options))

    capture.watch.tell("building", [])
    waits = [start_kept(graph.wrapper, graph.kernels, options) for graph in kept.graphs]
    forward, *calls = [wait() for wait in waits]
    compiled, abouts = partial(compiled_now, options), []
    for number, (takes, tangents, enough) in enumerate(kept.backwards):
        graph = partial(lambda number: again()[number][0], number)
        without = backwards(graph, len(takes), compiled, interpret)
        abouts.append(Differentiated(takes, tangents, enough, without))
    forward = issuing(capture.warned, forward)
    return assemble(kept.metadata, forward, calls, abouts, capture.name)


def compiled_now(options: Options, graph: Graph) -> BoxedCallable:
    """A graph that is found to be needed when gradients come."""
    made = compile_graph(graph, options)
    call = made.finish()
    if options.mode in cuda_graphs.MODES:
        [call] = cuda_graphs.around([call], [made.stages.schedule], 0, lambda *_, **__: None)
    return call


def aot_eager(capture: Capture, options: Options) -> BoxedCallable:
    """Stop after AOT and run its graphs with eager operators."""
    aot = differentiate(capture, options)
    parts = backward_of(aot)
    abouts = [differentiated(graph, takes, interpret) for graph, takes in parts]
    backwards = [interpret(graph) for graph, _ in parts]
    forward = issuing(capture.warned, interpret(aot.forward))
    return assemble(aot.metadata, forward, backwards, abouts, capture.name)


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


def ddp_buckets(
    capture: Capture, aot: AotResult, forward: LoopGraph, takes: Sequence[int]
) -> Buckets | None:
    """What DistributedDataParallel sums at once, if the captured call is inside its forward. Parts each give
    their gradients when they are done."""
    if (found := compat.ddp_buckets()) is None or len(aot.metadata.parts) > 1:
        return None
    first, rest, parameters = found
    sizes = {id(p): p.nbytes for p in parameters}
    wanted, start = aot.metadata.differentiable_inputs, len(aot.metadata.result_requires_grad)
    reals = [one.real() if one.real is not None else None for one in capture.inputs]
    names = {b.name: i for i, b in enumerate(forward.inputs) if isinstance(b, InputBuffer)}
    same: dict[int, list[int]] = {}
    for number, saved in enumerate(forward.outputs[start:]):
        given = names.get(saved.buffer) if isinstance(saved, View) else None
        if given in wanted:
            same.setdefault(wanted.index(given), []).append(number)
    return Buckets(first, rest, [sizes.get(id(reals[i]), 0) for i in wanted], same)


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
    buckets: Buckets | None = None,
) -> CompiledGraph:
    """From ATen to kernels; the C++ compiler already runs when this returns. `written_back`: the outputs that
    go into inputs, by number; `tell` hears of each stage; `buckets`: outputs are handed out while it runs."""
    loops = lower(graph, options)
    loops.written_back = dict(written_back or {})
    tell("loops", loops)
    scheduled = schedule(loops, options)
    if buckets is not None:
        why = "gradients come out at its end: a CUDA graph is replayed as a whole"
        if options.mode not in cuda_graphs.MODES or cuda_graphs.refusal(scheduled, "cuda"):
            scheduled.groups, why = output_groups(scheduled, buckets)
        tell("groups", why)
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
    wrapper = generate_wrapper(scheduled, kernels, options)
    tell("wrapper", wrapper)
    finish = partial(load, wrapper, loops.constants)
    stages = CompiledStages(loops, scheduled, list(plans.values()), sources, wrapper)
    tell("graph", stages)
    return CompiledGraph(stages, modules, finish)
