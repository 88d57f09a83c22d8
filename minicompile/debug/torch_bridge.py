"""minicompile's halves and torch.compile's, joined at the captured graph, both ways.

    torch.compile(fn, backend="minicompile")   Dynamo's graph -> a Capture -> our rooms (`backend`)
    mc.compile(fn, backend="torch_inductor")   our Capture -> torch's AOT and Inductor (`to_inductor`)

The first is an entry point of the installed package; in a bare checkout give `torch.compile` the function
itself. Dynamo's symbols become ours where they are sizes and sums and products of sizes; others are fixed,
and what our rooms assume of them is guarded by Dynamo. A graph that they can't compile runs as it is: a
warning says why, and `torch._dynamo.utils.counters["minicompile"]` counts it. The other way sizes are fixed.
The real compiler: torch/_dynamo/backends/registry.py, torch/_inductor/compile_fx.py.
"""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx

from minicompile import api, compat
from minicompile.aot.result import BoxedCallable
from minicompile.compat import torch_compiler
from minicompile.compat.settings import restored_modes
from minicompile.dynamo import dispatch, guards
from minicompile.dynamo.result import Capture, GraphBreak, GraphInput, Source
from minicompile.dynamo.sizes import LARGEST_INT, STATIC, Sizes
from minicompile.errors import MinicompileError, OptionError, Unsupported
from minicompile.ops.events import Compilation, Event, Failure, Watch
from minicompile.ops.graph import Graph, copied, origins_of, placeholders, target_name
from minicompile.ops.origin import NO_ORIGINS, Origin, SourceLine
from minicompile.options import Options, make_options
from minicompile.shapes.env import SMALLEST_SIZE, ordered
from minicompile.shapes.expr import python_text

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
        failure = Failure(error)
        if not (known := isinstance(error, MinicompileError)):
            watch.tell("error", failure)
        reason = str(error) if known else failure.told()
        watch.tell("break", GraphBreak(reason, None, kind="graph", id="later-stage"))
        watch.tell("done", None)
        return in_eager(gm, reason)
    watch.tell("done", handed.capture)
    return run


def in_eager(gm: fx.GraphModule, reason: str) -> Callable[..., Any]:
    """The graph as it is; said and counted."""
    warnings.warn(f"minicompile runs a graph of torch.compile in eager: {reason}", stacklevel=3)
    torch_compiler.torch_counters()["minicompile"][f"in eager: {reason}"] += 1
    return gm.forward


class Handover:
    """A graph of Dynamo's on its way through our rooms. Raises Unsupported for what they don't know."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], watch: Watch) -> None:
        self.gm, self.graph = gm, graph_of(gm, "captured", "torch.compile")
        nodes = placeholders(self.graph.gm.graph)
        inputs = torch_compiler.backend_fakes(inputs)
        symbolic = any(map(is_symbolic, inputs))
        self.mode = compat.fake_mode(symbolic)
        self.sizes = Sizes(self.mode, STATIC) if symbolic else None
        self.convert = compat.fakes_again(self.mode)
        self.symbols: dict[sympy.Symbol, tuple[sympy.Expr, torch.SymInt]] = {}
        """Dynamo's symbols: ours, and Dynamo's size that is nothing but the symbol."""
        self.attributes: list[torch.Tensor] = []
        """Parameters and constants that Dynamo left in the module: inputs to us."""
        self.written: tuple[int, ...] = ()
        """Inputs that the graph changes, the numbers of those that the capture has."""
        fakes = list(map(self.fake, inputs))
        for node, fake in zip(nodes, fakes, strict=True):
            node.meta["val"] = fake
        fakes += self.lifted()
        storages = [compat.storage_id(x) for x in fakes if isinstance(x, torch.Tensor)]
        if symbolic and len(set(storages)) < len(storages):
            raise Unsupported("inputs with symbolic sizes share memory")
        nodes = placeholders(self.graph.gm.graph)
        for node in self.graph.nodes if not storages else ():
            if node not in nodes:  # rooms take their mode from the values, and Dynamo's is another
                node.meta["val"] = None
        given = [GraphInput(n.name, Source("local", n.name), f) for n, f in zip(nodes, fakes)]
        stacks = [origin.stack for node in self.graph.nodes for origin in origins_of(node)]
        name = stacks[0][0].function if stacks else "graph"
        env = self.sizes.env if self.sizes is not None else None
        grad = torch.is_grad_enabled()
        self.capture = Capture(
            name, self.graph, given, [], grad_enabled=grad, shape_env=env, watch=watch
        )

    def fake(self, value: Any) -> Any:
        """A fake of our mode for one of Dynamo's inputs; a number where that is fixed."""
        if isinstance(value, torch.SymInt):
            return self.size(value)
        if isinstance(value, int | float | torch.SymFloat):
            return float(value) if isinstance(value, torch.SymFloat) else value
        plain = () if self.sizes is not None else (torch.Tensor, torch.nn.Parameter)
        if type(value) not in (compat.FakeTensor, *plain):
            raise Unsupported(f"an input of torch.compile's graph is a {type(value).__name__}")
        if not is_symbolic(value):
            return self.convert(value)
        assert self.sizes is not None
        layout = [*map(self.size, value.shape)], [*map(self.size, value.stride())]
        return self.sizes.like(value, *layout)

    def size(self, size: Any) -> Any:
        """One of Dynamo's sizes in our symbols; fixed by a guard of Dynamo's where there is no such."""
        if not isinstance(size, torch.SymInt):
            return size
        assert self.sizes is not None
        expr, hint = size.node.expr, size.node.hint
        if (
            expr.is_Symbol
            and expr not in self.symbols
            and hint is not None
            and hint >= SMALLEST_SIZE
        ):
            why = "symbolic in torch.compile's graph"
            made = self.sizes.env.create_symbol(hint, Source("local", str(expr)), why)
            self.symbols[expr] = made.node.expr, size
        if expr.free_symbols <= self.symbols.keys() and expr.is_polynomial():
            ours = {theirs: mine for theirs, (mine, _) in self.symbols.items()}
            return self.sizes.env.number(expr.xreplace(ours))
        return int(size)

    def lifted(self) -> list[Any]:
        """Makes inputs of the module's tensors that the graph reads, and gives their fakes."""
        graph, fakes = self.graph.gm.graph, []
        for node in graph.nodes:
            module = str(getattr(node.target, "__module__", ""))
            inner = isinstance(node.target, torch_compiler.HigherOrderOperator)
            if node.op == "call_module" or inner or "functorch" in module:
                raise Unsupported(f"torch.compile's graph calls {target_name(node.target)}")
            if node.op == "get_attr":
                value = operator.attrgetter(str(node.target))(self.gm)
                with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
                    placeholder = graph.placeholder(node.name)
                if not isinstance(value, torch.Tensor):
                    raise Unsupported(f"torch.compile's graph reads a {type(value).__name__}")
                self.attributes.append(value)
                fakes.append(self.convert(value))
                placeholder.meta = {**node.meta, "val": fakes[-1]}
                node.replace_all_uses_with(placeholder)
                graph.erase_node(node)
        return fakes

    def compiled(self, compile: dispatch.Backend) -> Callable[..., Any]:
        """What Dynamo calls."""
        watch = self.capture.watch
        watch.listeners.append(self.heard)
        watch.tell("capture", self.capture)
        with restored_modes():
            try:
                boxed = compile(self.capture)
            except Unsupported:
                if self.sizes is None or not self.sizes.env.guards:
                    raise
                boxed = compile(self.capture)  # with what is known of the sizes by now
        self.guard()
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
        """Which inputs share memory with those that the graph changes, and where."""
        changed = [inputs[i] for i in self.written]
        rest = [x for i, x in enumerate(inputs) if i not in self.written and torch.is_tensor(x)]
        return guards.memory_places(len(changed), *changed, *rest)

    def guard(self) -> None:
        """Let Dynamo guard what our rooms assumed of the sizes."""
        values = {str(ours): theirs for ours, theirs in self.symbols.values()}
        known = {"max": torch.sym_max, "min": torch.sym_min, "float": torch.sym_float, **values}
        holds = all(SMALLEST_SIZE <= value <= LARGEST_INT for value in values.values())
        for fact in self.sizes.env.guards if self.sizes is not None else ():
            condition = python_text(fact.condition, [*map(str, ordered(fact.condition))])
            holds = holds and bool(eval(condition, {"__builtins__": {}}, known))
        if not holds:
            raise Unsupported("torch.compile's sizes are not what our rooms assumed of them")


def is_symbolic(value: Any) -> bool:
    """Whether a number, or a size or stride of a tensor, is symbolic."""
    layout = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(number, torch.SymInt) for number in layout)


@api.backends("torch_inductor")
def torch_inductor(options: Options) -> dispatch.Backend:
    """The captured graph, compiled by torch's AOT autograd and Inductor."""
    return to_inductor


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
