"""minicompile's halves and torch.compile's, joined at the captured graph, both ways.

    torch.compile(fn, backend="minicompile")   Dynamo's graph -> a Capture -> our rooms (`backend`)
    mc.compile(fn, backend="torch_inductor")   our Capture -> torch's AOT and Inductor (`to_inductor`)

The first is an entry point of the installed package; in a bare checkout give `torch.compile` the function
itself. A graph that our rooms can't compile runs as it is: a warning says why, and
`torch._dynamo.utils.counters["minicompile"]` counts it. Both ways symbols are fixed to their values, which
the guards of the half that captured check.
The real compiler: torch/_dynamo/backends/registry.py, torch/_inductor/compile_fx.py.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from minicompile import api, compat
from minicompile.aot.autograd import copied
from minicompile.aot.result import BoxedCallable
from minicompile.compat import torch_compiler
from minicompile.dynamo import dispatch, guards
from minicompile.dynamo.modes import restored_modes
from minicompile.dynamo.result import Capture, GraphBreak, GraphInput, Source
from minicompile.dynamo.sizes import STATIC, Sizes
from minicompile.errors import MinicompileError, OptionError, Unsupported
from minicompile.ops.events import Compilation, Event, Watch
from minicompile.ops.graph import Graph, origins_of, placeholders, target_name
from minicompile.ops.origin import NO_ORIGINS, Origin, SourceLine
from minicompile.options import Options, make_options

FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)')
NOT_USERS = tuple(str(Path(file).parent) for file in (torch.__file__, dispatch.__file__))
"""Folders whose frames are not the user's."""


def graph_of(gm: fx.GraphModule, name: str, made_by: str) -> Graph:
    """A copy of a graph of torch's compiler, with values and origins where our views look for them."""
    made = copied(Graph(gm, name, made_by))
    for node in made.nodes:
        frames = FRAME.findall(node.stack_trace or "")
        stack = (SourceLine(file, int(n), at) for file, n, at in frames)
        users = tuple(line for line in stack if not line.file.startswith(NOT_USERS))
        origin = Origin(node.name, target_name(node.target), users)
        node.meta["origins"] = frozenset({origin}) if users else NO_ORIGINS
        node.meta.setdefault("val", node.meta.get("example_value"))
        if node.meta.get("partitioner_tag") == "is_backward":
            node.meta["phase"] = "backward"
    return made


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | Options | None = None,
    compile: dispatch.Backend | None = None,
) -> Callable[..., Any]:
    """The backend "minicompile" of torch.compile, which passes its `mode` and `options` (ours) on.

    `compile` makes something else of the Capture. Raises OptionError for options that don't exist.
    """
    chosen = make_options(mode, options)
    watch = Watch(Compilation(0, 0, "torch.compile", chosen))
    watch.tell("start", [])
    try:
        capture = capture_of(gm, example_inputs, watch)
        run = guarded(gm, capture, compile or api.find_backend("inductor", chosen))
    except OptionError:
        raise
    except Exception as error:
        known = isinstance(error, MinicompileError)
        reason = f"{type(error).__name__}: {error}"
        reason = str(error) if known else f"internal error of minicompile: {reason}"
        watch.tell("break", GraphBreak(reason, None, kind="graph", id="later-stage"))
        watch.tell("done", None)
        return in_eager(gm, reason)
    watch.tell("done", capture)
    return run


def in_eager(gm: fx.GraphModule, reason: str) -> Callable[..., Any]:
    """The graph as it is; said and counted."""
    warnings.warn(f"minicompile runs a graph of torch.compile in eager: {reason}", stacklevel=3)
    torch_compiler.torch_counters()["minicompile"][f"in eager: {reason}"] += 1
    return gm.forward


def capture_of(gm: fx.GraphModule, inputs: Sequence[Any], watch: Watch) -> Capture:
    """Dynamo's graph as a capture, its symbols fixed. Raises Unsupported for what our rooms don't know."""
    graph = graph_of(gm, "captured", "torch.compile")
    torch_compiler.fix_sizes(inputs)
    convert = compat.fakes_again(compat.fake_mode())
    fakes = [fake(value, convert) for value in inputs]
    for node in graph.nodes:
        module = str(getattr(node.target, "__module__", ""))
        inner = isinstance(node.target, torch_compiler.HigherOrderOperator)
        if node.op in ("call_module", "get_attr") or inner or "functorch" in module:
            raise Unsupported(f"torch.compile's graph calls {target_name(node.target)}")
        if not any(map(torch.is_tensor, fakes)):
            node.meta["val"] = (
                None  # rooms take their mode from the values, and Dynamo's is another
            )
    given = []
    for node, value in zip(placeholders(graph.gm.graph), fakes, strict=True):
        node.meta["val"] = value
        given.append(GraphInput(node.name, Source("local", node.name), value))
    stacks = [origin.stack for node in graph.nodes for origin in origins_of(node)]
    name = stacks[0][0].function if stacks else "graph"
    return Capture(name, graph, given, [], grad_enabled=torch.is_grad_enabled(), watch=watch)


def fake(value: Any, convert: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A fake of our mode for one of Dynamo's inputs; a plain number for a number."""
    if isinstance(value, int | float):
        return value
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return int(value) if isinstance(value, torch.SymInt) else float(value)
    known = type(value) in (compat.FakeTensor, torch.Tensor, torch.nn.Parameter)
    if not known or is_symbolic(value):
        raise Unsupported(f"an input of torch.compile's graph is a {type(value).__name__}")
    return convert(value)


def guarded(gm: fx.GraphModule, capture: Capture, compile: dispatch.Backend) -> Callable[..., Any]:
    """What Dynamo calls: the graph in eager where memory that it writes to is shared in another way."""
    written: set[int] = set()

    def heard(event: Event) -> None:
        if event.kind == "aot":
            data, count = event.subject.metadata, len(capture.inputs)
            changed = {*data.mutated_inputs, *(spec.base for spec in data.relaid)}
            written.update(i for i in changed if i < count)
            for i, memory in enumerate(data.memories, count):
                if i in changed:
                    written.update((memory.of, *memory.members))

    def places(inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Which inputs share memory with those that the graph changes, and where."""
        changed = [inputs[i] for i in sorted(written)]
        rest = [x for i, x in enumerate(inputs) if i not in written and torch.is_tensor(x)]
        return guards.memory_places(len(changed), *changed, *rest)

    capture.watch.listeners.append(heard)
    capture.watch.tell("capture", capture)
    with restored_modes():
        boxed = compile(capture)
    expected = places(capture.fakes)

    def run(*given: Any) -> Any:
        if written and places(given) != expected:
            reason = "inputs that the graph changes share memory in another way than before"
            return in_eager(gm, reason)(*given)
        return boxed([*given])

    return run


def is_symbolic(value: Any) -> bool:
    """Whether a number, or a size or stride of a tensor, is symbolic."""
    layout = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(number, torch.SymInt) for number in layout)


def to_inductor(capture: Capture) -> BoxedCallable:
    """Our captured graph compiled by torch. Symbols are fixed to their values, which our guards then check.

    Raises Unsupported with torch's error.
    """
    env, mode = capture.shape_env, torch_compiler.torch_fake_mode()
    convert, like = compat.fakes_again(mode), Sizes(mode, STATIC).like
    for symbol in [*env.symbols] if env is not None else ():
        env.evaluate(symbol, "torch's Inductor is given plain sizes")

    def plain(value: Any) -> Any:
        """Numbers instead of symbols."""
        if isinstance(value, torch.Tensor):
            layout = [*map(plain, value.shape)], [*map(plain, value.stride())]
            return like(value, *layout) if is_symbolic(value) else convert(value)
        symbolic = isinstance(value, torch.SymInt | torch.SymFloat)
        return value.node.hint if symbolic else value

    graph = copied(capture.graph)
    for node in graph.nodes:
        lines = [line for origin in origins_of(node) for line in origin.stack]
        frames = (f'  File "{at.file}", line {at.line}, in {at.function}\n' for at in lines)
        node.meta = {"stack_trace": "".join(frames)}
    try:
        run = torch_compiler.inductor(graph.gm, list(map(plain, capture.fakes)))
    except Exception as error:
        raise Unsupported(f"torch's Inductor raised {type(error).__name__}: {error}") from error
    return lambda inputs: run(*inputs)
