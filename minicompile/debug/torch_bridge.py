"""minicompile's halves and torch.compile's, joined at the captured graph, both ways.

    torch.compile(fn, backend="minicompile")   Dynamo's graph -> a Capture -> our rooms (`backend`)
    mc.compile(fn, backend="torch_inductor")   our Capture -> torch's AOT and Inductor (`to_inductor`)

The first is an entry point of the installed package; in a bare checkout give `torch.compile` the function
itself. A graph that our rooms can't compile runs as it is: a warning says why, and
`torch._dynamo.utils.counters["minicompile"]` counts it. Sizes are plain numbers both ways: where one varies,
each value is a graph of its own, which the guards of whoever captured it tell apart.
The real compiler: torch/_dynamo/backends/registry.py, torch/_inductor/compile_fx.py.
"""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from minicompile import api, compat
from minicompile.aot.result import BoxedCallable
from minicompile.compat import torch_compiler
from minicompile.compat.settings import restored_modes
from minicompile.dynamo import dispatch, guards
from minicompile.dynamo.result import Capture, GraphBreak, GraphInput, Source
from minicompile.dynamo.sizes import STATIC, Sizes
from minicompile.errors import MinicompileError, OptionError, Unsupported
from minicompile.ops.events import Compilation, Event, Failure, Watch
from minicompile.ops.graph import Graph, copied, origins_of, placeholders, target_name
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
        handed = Handover(gm, example_inputs, watch)
        run = handed.compiled(compile or api.find_backend("inductor", chosen))
    except OptionError:
        raise
    except Exception as error:
        known = isinstance(error, MinicompileError)
        reason = str(error) if known else Failure(error).told()
        watch.tell("break", GraphBreak(reason, None, kind="graph", id="later-stage"))
        return in_eager(gm, reason)
    watch.tell("done", handed.capture)
    return run


def in_eager(gm: fx.GraphModule, reason: str) -> Callable[..., Any]:
    """The graph as it is; said and counted."""
    warnings.warn(f"minicompile runs a graph of torch.compile in eager: {reason}", stacklevel=3)
    torch_compiler.dynamo_counters()["minicompile"][f"in eager: {reason}"] += 1
    return gm.forward


class Handover:
    """A graph of Dynamo's on its way through our rooms. Raises Unsupported for what they don't know."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], watch: Watch) -> None:
        self.gm, self.graph = gm, graph_of(gm, "captured", "torch.compile")
        self.plain = plain_values(compat.fake_mode())
        self.attributes: list[torch.Tensor] = []
        """Parameters and constants that Dynamo left in the module: inputs to us."""
        self.written: tuple[int, ...] = ()
        """Inputs that the graph changes, the numbers of those that the capture has."""
        fakes = list(map(self.plain, torch_compiler.backend_fakes(inputs)))
        self.lift()
        fakes += map(self.plain, self.attributes)
        nodes = placeholders(self.graph.gm.graph)
        values = dict(zip(nodes, fakes))
        # rooms take their mode from the values, and Dynamo's is another
        for node in nodes if any(map(torch.is_tensor, fakes)) else self.graph.nodes:
            node.meta["val"] = values.get(node)
        given = [GraphInput(n.name, Source("local", n.name), f) for n, f in zip(nodes, fakes)]
        stacks = [origin.stack for node in self.graph.nodes for origin in origins_of(node)]
        name = stacks[0][0].function if stacks else "graph"
        grad = torch.is_grad_enabled()
        self.capture = Capture(name, self.graph, given, [], grad_enabled=grad, watch=watch)

    def lift(self) -> None:
        """Make inputs of the module's tensors that the graph reads."""
        graph = self.graph.gm.graph
        for node in graph.nodes:
            module = str(getattr(node.target, "__module__", ""))
            inner = isinstance(node.target, torch_compiler.HigherOrderOperator)
            if node.op == "call_module" or inner or "functorch" in module:
                raise Unsupported(f"torch.compile's graph calls {target_name(node.target)}")
            if node.op == "get_attr":
                value = operator.attrgetter(str(node.target))(self.gm)
                if not isinstance(value, torch.Tensor):
                    raise Unsupported(f"torch.compile's graph reads a {type(value).__name__}")
                with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
                    placeholder = graph.placeholder(node.name)
                self.attributes.append(value)
                placeholder.meta = dict(node.meta)
                node.replace_all_uses_with(placeholder)
                graph.erase_node(node)

    def compiled(self, compile: dispatch.Backend) -> Callable[..., Any]:
        """What Dynamo calls."""
        watch = self.capture.watch
        watch.listeners.append(self.heard)
        watch.tell("capture", self.capture)
        with restored_modes():
            boxed = compile(self.capture)
        expected = self.places(self.capture.fakes)

        def run(*given: Any) -> Any:
            inputs = [*given, *self.attributes]
            if self.written and self.places(inputs) != expected:
                reason = "inputs that the graph changes share memory in another way than before"
                return in_eager(self.gm, reason)(*given)
            return boxed(inputs)

        return run

    def heard(self, event: Event) -> None:
        if event.kind == "aot":
            self.written = tuple(sorted(event.subject.metadata.mutated_inputs))

    def places(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Whether inputs that the graph changes share memory with others, and how they were made."""
        changed = [inputs[i] for i in self.written]
        rest = [x for i, x in enumerate(inputs) if i not in self.written and torch.is_tensor(x)]
        return guards.memory_facts(len(changed), *changed, *rest)


def plain_values(mode: Any) -> Callable[[Any], Any]:
    """A function that makes fakes of a mode of tensors, and numbers of symbols; each is fixed by a guard."""
    convert, like = compat.fakes_again(mode), Sizes(mode, STATIC).like

    def plain(value: Any) -> Any:
        if isinstance(value, torch.SymInt | torch.SymFloat):
            return int(value) if isinstance(value, torch.SymInt) else float(value)
        if value is None or isinstance(value, bool | int | float):
            return value
        if not isinstance(value, torch.Tensor) or type(value) not in KNOWN:
            raise Unsupported(f"an input of a graph is a {type(value).__name__}")
        layout = (*value.shape, *value.stride())
        if not any(isinstance(number, torch.SymInt) for number in layout):
            return convert(value)
        return like(value, [*map(plain, value.shape)], [*map(plain, value.stride())])

    return plain


KNOWN = (compat.FakeTensor, torch.Tensor, torch.nn.Parameter)


@api.backends("torch_inductor")
def torch_inductor(options: Options) -> dispatch.Backend:
    """The captured graph, compiled by torch's AOT autograd and Inductor."""
    return to_inductor


def to_inductor(capture: Capture) -> BoxedCallable:
    """Our captured graph compiled by torch. Symbols are fixed to their values, which our guards then check.

    Raises Unsupported with torch's error.
    """
    env, plain = capture.shape_env, plain_values(torch_compiler.torch_fake_mode())
    for symbol in [*env.symbols] if env is not None else ():
        env.evaluate(symbol, "torch's Inductor is given plain sizes")
    graph = copied(capture.graph)
    for node in graph.nodes:
        lines = [line for origin in origins_of(node) for line in origin.stack]
        frames = (f'  File "{at.file}", line {at.line}, in {at.function}\n' for at in lines)
        node.meta = {"stack_trace": "".join(frames)}
    try:
        run = torch_compiler.compile_fx()(graph.gm, list(map(plain, capture.fakes)))
    except Exception as error:
        raise Unsupported(f"torch's Inductor raised {type(error).__name__}: {error}") from error
    return lambda inputs: run(*inputs)
