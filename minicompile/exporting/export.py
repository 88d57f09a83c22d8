"""`mc.export`: one call captured as a whole, then made into a graph that stands for itself.

    prepare    bind the arguments, copy what capture marks (which sizes are dynamic)
    capture    one graph or an error that lists every break
    replay     run the code that rebuilds the frame's result on stand-ins: the structure of the results
    functional a Core ATen graph: state, then arguments -> results, then new contents
    conditions capture's guards on arguments; a guard that narrows what was declared dynamic is an error

The real compiler: torch/export/_trace.py, torch/export/dynamic_shapes.py.
"""

from __future__ import annotations

import collections
import functools
import inspect
import keyword
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import sympy
import torch
from torch import fx
from torch._ops import OpOverload

from minicompile import compat
from minicompile.aot.autograd import copied, fake_mode_of
from minicompile.aot.functionalize import functionalize
from minicompile.aot.joint import trace
from minicompile.aot.layout import is_dense, same_sizes
from minicompile.aot.levels import lower_to, verify
from minicompile.aot.views import writes, written_arguments
from minicompile.api import explain
from minicompile.dynamo.capture import CapturedFrame
from minicompile.dynamo.dispatch import capture_alone, signature_of
from minicompile.dynamo.guards import generate
from minicompile.dynamo.module import call_module, calling, original_of
from minicompile.dynamo.result import Capture, GraphInput, Guard, Source
from minicompile.dynamo.sizes import MARK, Dynamic, shape_guards
from minicompile.errors import ExportError, Unsupported, refusal_text
from minicompile.exporting.conditions import Expression, always_holds, class_name, literal
from minicompile.exporting.exported import (
    Constraint,
    Exported,
    InputSpec,
    OutputSpec,
    Signature,
)
from minicompile.ops.dtypes import short, value_text
from minicompile.ops.graph import Graph, origins_of, output_node, placeholders, user_line
from minicompile.shapes.env import SMALLEST_SIZE

aten = torch.ops.aten


@dataclass(frozen=True)
class Dim:
    """A size that may differ between calls: `Dim("batch", max=64)`. One Dim in several places: equal sizes.

    Sizes 0 and 1 broadcast and are laid out differently: they are exported apart, so `min` is at least 2.
    """

    name: str
    min: int | None = None
    max: int | None = None

    AUTO: ClassVar[Dim]
    """A size that varies as far as the program lets it; what it relies on becomes a constraint."""

    def __post_init__(self) -> None:
        if self.min is not None and self.min < SMALLEST_SIZE:
            why = "sizes 0 and 1 broadcast and are laid out differently: export a program for them apart"
            raise ExportError(f"Dim {self.name!r}: min is {self.min}, at least 2; {why}")
        if self.max is not None and self.max < (self.min or SMALLEST_SIZE):
            raise ExportError(f"Dim {self.name!r}: max is {self.max}, less than its min")


Dim.AUTO = Dim("")
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
"""What is no tensor and no container among arguments: specialised."""


def export(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> Exported:
    """A function or nn.Module as one graph, for inference: what it computes under `torch.no_grad()`.

    args, kwargs    an example call: tensors, numbers, strings, None, in tuples, lists, dicts
    dynamic_shapes  by argument name, or by position: for a tensor `{axis: Dim}` or one entry an axis, for a
                    container what it holds; None: static

    Other sizes, numbers and structures are as in the example. Raises ExportError: with every graph break, for
    a declared size that the program narrows, for arguments and results that no file could hold.
    """
    target = original_of(target)
    if isinstance(target, type) or not callable(target):
        raise ExportError(
            f"can't export a {type(target).__name__}: give a function or an nn.Module"
        )
    call = Call.of(target, args, kwargs or {}, dynamic_shapes)
    try:
        with torch.no_grad():
            frame, dynamic = call.frame(call.arguments), Dynamic(general=True)
            captured = capture_alone(call.function, frame, dynamic, call.name)
    except Unsupported as error:
        raise every_break(call, error) from None
    capture = captured.capture
    capture.inputs[:] = [replace(i, source=call.renamed(i.source)) for i in capture.inputs]
    if (env := capture.shape_env) is not None:
        env.symbols.update({s: call.renamed(source) for s, source in env.symbols.items()})
    structure = Structure(call, captured)
    graph, signature, state = functional(call, capture, structure)
    check_declared(call, capture.shape_env)
    constraints, facts = conditions(call, capture)
    return Exported(
        name=call.name,
        graph=graph,
        signature=signature,
        constraints=tuple(constraints),
        state=state,
        shape_env=capture.shape_env,
        call=call.plain_signature,
        structure=structure.text,
        classes=structure.classes,
        facts=tuple(facts),
    )


# -- the call


def parts(value: Any) -> list[tuple[Any, Any]] | None:
    """A container's items with their keys; None if it is none."""
    if type(value) in (dict, collections.OrderedDict):
        return list(value.items())
    named = isinstance(value, tuple) and hasattr(value, "_fields")
    return list(enumerate(value)) if type(value) in (list, tuple) or named else None


def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The same containers with other leaves."""
    items = parts(value)
    if items is None:
        return leaf(value)
    made = [mapped(item, leaf) for _, item in items]
    if isinstance(value, dict):
        return type(value)(zip(value, made, strict=True))
    return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)


@dataclass
class Call:
    """An example call, ready to be captured. `arguments`: what the user gave, by the parameters' names;
    tensors as copies that carry marks."""

    target: Any
    name: str
    signature: inspect.Signature
    arguments: dict[str, Any]
    function: types.FunctionType
    """The frame that is captured."""
    owner: dict[str, Any]
    """Its locals that are no arguments: the module, or the object of a method."""
    stars: bool
    """Whether it takes `*args, **kwargs` and hands them on."""
    dims: dict[str, Dim] = field(default_factory=dict)

    @classmethod
    def of(cls, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic: Any) -> Call:
        """Binds and checks. Raises ExportError."""
        if not isinstance(args, list | tuple):
            raise ExportError(f"args is a {type(args).__name__}: give a tuple of the arguments")
        owner: dict[str, Any] = {}
        function, stars = target, False
        if isinstance(target, torch.nn.Module):
            name, signature = type(target).__qualname__, inspect.signature(target.forward)
            function, owner, stars = call_module, {"self": target}, True
        elif isinstance(target, types.FunctionType):
            name, signature = target.__qualname__, signature_of(target)
        elif isinstance(getattr(target, "__func__", None), types.FunctionType):
            function, name = target.__func__, target.__qualname__
            first, *rest = signature_of(function).parameters.values()
            owner, signature = {first.name: target.__self__}, inspect.Signature(rest)
        else:
            name, signature = (
                getattr(target, "__name__", type(target).__name__),
                inspect.signature(target),
            )
            function, stars = calling(target), True
        name = re.sub(r"\W+", "_", name.rpartition(".")[2]).strip("_") or "exported"
        name += "_" * keyword.iskeyword(name)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ExportError(f"{name}: {error}") from None
        bound.apply_defaults()
        found = cls(target, name, signature, {}, cast(Any, function), owner, stars)
        if "result" in signature.parameters:
            raise ExportError(
                f"{name}: an export's results are called `result`: rename the parameter"
            )
        found.check(bound.arguments)
        copies: dict[int, Any] = {}
        given = mapped(dict(bound.arguments), lambda x: copies.setdefault(id(x), example(x)))
        found.arguments = given
        found.declare(dynamic)
        return found

    def bound(self, arguments: dict[str, Any]) -> inspect.BoundArguments:
        return inspect.BoundArguments(self.signature, collections.OrderedDict(arguments))

    def frame(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The locals of the frame."""
        if not self.stars:
            return {**self.owner, **arguments}
        bound = self.bound(arguments)
        return {**self.owner, "args": bound.args, "kwargs": bound.kwargs}

    @functools.cached_property
    def moved(self) -> dict[Source, Source]:
        """Where arguments lie in the frame -> where they lie for the user."""
        found: dict[Source, Source] = {}
        args, kwargs = Source("local", "args"), Source("local", "kwargs")
        for name, parameter in self.signature.parameters.items() if self.stars else ():
            here, place = Source("local", name), len(found)
            if parameter.kind is parameter.VAR_POSITIONAL:
                for i in range(len(self.arguments[name])):
                    found[Source("item", place + i, args)] = Source("item", i, here)
            elif parameter.kind is parameter.VAR_KEYWORD:
                for key in self.arguments[name]:
                    found[Source("item", key, kwargs)] = Source("item", key, here)
            elif parameter.kind is parameter.KEYWORD_ONLY:
                found[Source("item", name, kwargs)] = here
            else:
                found[Source("item", place, args)] = here
        return found

    def renamed(self, source: Source) -> Source:
        """Where the user sees what a source names; what is no argument starts at something held."""
        if source in self.moved:
            return self.moved[source]
        if source.kind == "computed":
            form, function, of = source.key
            return replace(source, key=(form, function, tuple(map(self.renamed, of))))
        if source.base is None:
            return (
                replace(source, kind="held") if self.stars or source.key in self.owner else source
            )
        return replace(source, base=self.renamed(source.base))

    def is_argument(self, source: Source) -> bool:
        """Whether a source, renamed, lies in the arguments."""
        while source.base is not None:
            source = source.base
        return source.kind == "local"

    @property
    def plain_signature(self) -> inspect.Signature:
        """How the export is called: without annotations, which may be objects."""
        given = self.signature.parameters.values()
        return inspect.Signature([p.replace(annotation=p.empty) for p in given])

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raises ExportError for an argument that is neither a tensor nor plain data."""
        for path, value in leaves(arguments):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                continue
            if type(value) not in PLAIN:
                cure = "give its tensors and numbers as arguments, or close over it"
                kind = class_name(type(value))
                raise ExportError(
                    f"{self.name}: {path} is a {kind}, which no file can hold: {cure}"
                )

    def declare(self, dynamic: Any) -> None:
        """Mark the sizes that are to be dynamic. Raises ExportError."""
        if dynamic is None:
            return
        names = list(self.arguments)
        if isinstance(dynamic, list | tuple):
            if len(dynamic) > len(names):
                raise ExportError(f"dynamic_shapes has {len(dynamic)} entries, not {len(names)}")
            dynamic = dict(zip(names, dynamic))
        examples: dict[str, int] = {}
        for name, spec in dynamic.items():
            if name not in names:
                raise ExportError(f"dynamic_shapes: no argument {name!r}: {', '.join(names)}")
            self.mark(name, self.arguments[name], spec, examples)

    def mark(self, path: str, value: Any, spec: Any, examples: dict[str, int]) -> None:
        if spec is None:
            return
        items = parts(value)
        if items is not None:
            specs = spec if isinstance(spec, dict) else dict(enumerate(spec))
            known = dict(items)
            for key, inner in specs.items():
                if key not in known:
                    raise ExportError(f"dynamic_shapes: {path} has no item {key!r}")
                self.mark(f"{path}[{key!r}]", known[key], inner, examples)
            return
        if not isinstance(value, torch.Tensor):
            raise ExportError(f"dynamic_shapes: {path} is no tensor, it has no sizes")
        if not isinstance(spec, dict) and len(spec) != value.dim():
            raise ExportError(f"dynamic_shapes: {path} has {value.dim()} axes, not {len(spec)}")
        axes = spec if isinstance(spec, dict) else dict(enumerate(spec))
        marks = {}
        for axis, dim in axes.items():
            if dim is None:
                continue
            if not -value.dim() <= axis < value.dim():
                raise ExportError(f"dynamic_shapes: {path} has no axis {axis}")
            size, where = value.shape[axis], f"{path}.size({axis % value.dim()})"
            if isinstance(dim, int) and dim == size:
                continue
            if not isinstance(dim, Dim):
                raise ExportError(f"dynamic_shapes: {where} is {size}; {dim!r} is no mc.Dim")
            if size < SMALLEST_SIZE:
                why = "sizes 0 and 1 are exported apart: give an example with at least 2"
                raise ExportError(f"{where} is {size} and declared dynamic; {why}")
            low, high = dim.min or SMALLEST_SIZE, dim.max
            if not low <= size <= (size if high is None else high):
                span = f"{low} to {'any' if high is None else high}"
                raise ExportError(f"{where} is {size}, not in Dim {dim.name!r}, {span}")
            if examples.setdefault(dim.name, size) != size and dim.name:
                what = (
                    f"{where} is {size}, another size with Dim {dim.name!r} is {examples[dim.name]}"
                )
                raise ExportError(f"{what}: one Dim means equal sizes")
            if self.dims.setdefault(dim.name, dim) != dim:
                raise ExportError(f"there are two Dims {dim.name!r} with other limits")
            marks[axis % value.dim()] = (low, high, dim.name) if dim.name else (0, None)
        setattr(value, MARK, marks)


def example(leaf: Any) -> Any:
    """A tensor of the call as capture sees it: without gradient, without gaps in memory."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    seen = leaf.detach()
    if seen.is_conj() or seen.is_neg() or not is_dense(seen):
        seen = seen.resolve_conj().resolve_neg().contiguous()
    return seen


def leaves(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The tensors and numbers among arguments, by path."""
    waiting = [(name, value) for name, value in arguments.items()]
    while waiting:
        path, value = waiting.pop(0)
        items = parts(value)
        if items is None:
            yield path, value
        else:
            waiting = [*((f"{path}[{key!r}]", item) for key, item in items), *waiting]


def every_break(call: Call, error: Unsupported) -> ExportError:
    """The error of a call that is no single graph: found by running it once with breaks, on copies of its
    tensors; what it changes of a module's tensors is undone."""
    tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    owner = call.target if isinstance(call.target, torch.nn.Module) else None
    state = [] if owner is None else [*owner.parameters(), *owner.buffers()]
    for x in state:
        tensors[id(x)] = x, x.detach().clone()
    copies: dict[int, Any] = {}

    def copy(leaf: Any) -> Any:
        tensor = isinstance(leaf, torch.Tensor)
        return copies.setdefault(id(leaf), leaf.detach().clone() if tensor else leaf)

    bound = call.bound(mapped(call.arguments, copy))
    try:
        with torch.no_grad():
            breaks = list(explain(call.target)(*bound.args, **bound.kwargs).breaks)
    finally:
        with torch.no_grad():
            for x, before in tensors.values():
                x.copy_(before)
    told = [refusal_text(b.reason, b.user_line, b.hint, b.id) for b in breaks]
    told = list(dict.fromkeys(told)) or [str(error)]
    lines = [f"{call.name} is no single graph; {len(told)} places stop it:"]
    for number, text in enumerate(told, 1):
        lines.append(f"{number}. " + text.replace("\n", "\n   "))
    return ExportError("\n".join(lines))


# -- results


@dataclass(frozen=True)
class Stand:
    """Stands for a tensor of the captured graph: an output, or an input."""

    of: str
    number: int


class Structure:
    """How the results are put together: `text` says it in terms of `result[i]`, whose order is `results`;
    `assigned` are the buffers that the program replaces by another tensor."""

    def __init__(self, call: Call, captured: CapturedFrame) -> None:
        self.call, self.capture = call, captured.capture
        self.results: dict[Stand, int] = {}
        self.classes: dict[str, Any] = {}
        self.assigned: dict[str, Stand] = {}
        self.within: set[int] = set()
        self.paths: dict[int, str] = {}
        """The arguments themselves, where results may hold them: by id."""
        returned = self.replay(captured)
        self.text = self.written(returned)
        Expression(self.text)

    def replay(self, captured: CapturedFrame) -> Any:
        """What the frame returns, tensors as stand-ins. What it does to buffers is undone."""
        capture, names, call = captured.capture, dict(captured.code.names), self.call
        if "change_modes" in names:
            raise ExportError(f"{call.name} leaves grad mode or autocast changed")
        owner = call.target if isinstance(call.target, torch.nn.Module) else None
        buffers = {} if owner is None else dict(owner.named_buffers(remove_duplicate=False))
        places = {re.sub(r"\.(\d+)(?=\.)", r"[\1]", f"self.{n}"): n for n in buffers}
        for effect in capture.side_effects:
            place, _, _ = effect.partition(" = ")
            if place not in places:
                cure = "give it back as a result; register tensors that change as buffers"
                raise ExportError(f"{call.name} changes what is not exported: {effect}: {cure}")
        stands = [Stand("input", n) for n in range(len(capture.inputs))]
        outputs = cast(Any, output_node(capture.graph.gm.graph).args[0])
        outs = [Stand("output", n) for n in range(len(outputs))]
        arguments = with_fakes(call, capture.inputs)
        self.paths = {id(value): path for path, value in containers(arguments)}
        self.paths |= {id(v): p for p, v in leaves(arguments) if isinstance(v, torch.Tensor)}
        values = call.frame(arguments)
        names |= {"graph": lambda inputs: outs, "note": lambda inputs: None}
        given = ", ".join(["inputs", *(f"L_{name}" for name in values)])
        run = generate(f"replay({given})", captured.lines, names)
        modules = [] if owner is None else list(owner.modules())
        before = [dict(module._buffers) for module in modules]
        try:
            returned = run(stands, *values.values())
            if owner is not None and capture.side_effects:
                self.find_assigned(owner, places)
        finally:
            for module, kept in zip(modules, before):
                module._buffers.clear()
                module._buffers.update(kept)
        return returned

    def find_assigned(self, owner: torch.nn.Module, places: Mapping[str, str]) -> None:
        for name in places.values():
            path, _, key = name.rpartition(".")
            found: Any = owner.get_submodule(path)._buffers[key]
            if isinstance(found, Stand):
                self.assigned[name] = found
            elif not isinstance(found, torch.Tensor):
                raise ExportError(
                    f"{self.call.name} puts a {type(found).__name__} in buffer {name}"
                )

    def written(self, value: Any) -> str:
        """A part of the result as an expression."""
        if isinstance(value, Stand):
            place = self.capture.inputs[value.number].source if value.of == "input" else None
            if place is not None and self.call.is_argument(place):
                return place.name  # the argument itself, as in eager
            return f"result[{self.results.setdefault(value, len(self.results))}]"
        if id(value) in self.paths:
            return self.paths[id(value)]
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return str(self.capture.shape_env.text(value.node.expr))
        if type(value) is torch.device:
            return f"torch.device({str(value)!r})"
        if type(value) in PLAIN:
            return literal(value)
        if id(value) in self.within:
            raise ExportError(f"{self.call.name} returns a container that holds itself")
        self.within.add(id(value))
        text = self.container(value)
        self.within.remove(id(value))
        return text

    def container(self, value: Any) -> str:
        cls = type(value)
        if cls is dict:
            items = [f"{self.written(k)}: {self.written(v)}" for k, v in value.items()]
            return f"{{{', '.join(items)}}}"
        if cls is collections.OrderedDict:
            return f"OrderedDict({self.written(list(value.items()))})"
        if not isinstance(value, list | tuple):
            cure = "return tensors and numbers in tuples, lists, dicts or named tuples"
            raise ExportError(f"{self.call.name} returns a {class_name(cls)}: {cure}")
        items = [self.written(item) for item in value]
        if cls is list:
            return f"[{', '.join(items)}]"
        plain = f"({', '.join(items)}{',' if len(items) == 1 else ''})"
        if cls is tuple:
            return plain
        if cls is torch.Size:
            return f"torch.Size({plain})"
        name = class_name(cls).replace("<locals>.", "")
        self.classes[name] = cls
        if hasattr(cls, "_fields"):
            items = [f"{key}={item}" for key, item in zip(cls._fields, items, strict=True)]
            return f"{name}({', '.join(items)})"
        if cls.__module__ == "torch.return_types":
            return f"{name}({plain})"
        raise ExportError(f"{self.call.name} returns a {class_name(cls)}, a tuple of its own kind")


def containers(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The lists and dicts among arguments, by path: results may hold them themselves."""
    waiting = [(name, value) for name, value in arguments.items()]
    while waiting:
        path, value = waiting.pop()
        items = parts(value)
        if items:
            yield path, value
            waiting += [(f"{path}[{key!r}]", item) for key, item in items]


def with_fakes(call: Call, inputs: Sequence[GraphInput]) -> dict[str, Any]:
    """The arguments with the inputs' fakes in place of tensors."""
    by_path = {given.source.name: given.fake for given in inputs if call.is_argument(given.source)}
    same = {id(value): by_path[p] for p, value in leaves(call.arguments) if p in by_path}
    made: dict[str, Any] = mapped(call.arguments, lambda leaf: same.get(id(leaf), leaf))
    return made


# -- the graph


def functional(
    call: Call, capture: Capture, structure: Structure
) -> tuple[Graph, Signature, dict[str, torch.Tensor]]:
    """The Core ATen graph: state, then arguments -> results, then new contents; what it takes and gives."""
    whole = copied(capture.graph)
    graph = whole.gm.graph
    given, out = placeholders(graph), output_node(graph)
    outputs = cast(Any, out.args[0])
    with graph.inserting_before(out):
        taken = []
        for stand in (*structure.results, *structure.assigned.values()):
            of = outputs[stand.number] if stand.of == "output" else given[stand.number]
            # a copy has memory of its own, whatever it is a copy of
            taken.append(graph.call_function(torch.clone, (of,)))
            taken[-1].meta.update(val=of.meta["val"], origins=origins_of(of))
    out.args = (tuple(taken),)
    mode = fake_mode_of(whole, capture.fakes, capture.shape_env)
    try:
        traced, metadata = trace(whole.gm, capture.fakes, mode, training=False)
        check_layouts(call, capture, traced)
        if metadata.memories or metadata.relaid:
            what = "inputs share memory" if metadata.memories else "an input's shape changes"
            raise ExportError(f"{call.name}: {what}, and the program writes to it in place")
        full = Graph(functionalize(traced, metadata, mode), call.name, "functionalization")
        core = lower_to("core", full, mode)
        verify(core)
    except Unsupported as error:
        raise ExportError(f"{call.name} can't be exported: {error}") from error
    return arranged(call, capture, structure, core, metadata.mutated_inputs)


def check_layouts(call: Call, capture: Capture, traced: fx.GraphModule) -> None:
    """Raises ExportError where it matters what was left open: some size may decide whether a tensor is dense,
    and that whether a `reshape` is a view or a copy."""
    env = capture.shape_env
    if env is None or not env.unguarded:
        return
    asked = next((r for r in capture.bytecode if "is_contiguous" in r.argument), None)
    if asked is not None:
        cure = "leave the question out, or the sizes static"
        raise ExportError(
            f"{call.name} asks is_contiguous() of dynamic sizes: {cure}\n  at {asked.line}"
        )
    written = set[int]()
    for node in traced.graph.nodes:
        if isinstance(node.target, OpOverload) and writes(node.target):
            changed = compat.tree_leaves(written_arguments(node.target, node.args, node.kwargs))
            written |= {x.meta["storage"] for x in changed if "storage" in getattr(x, "meta", {})}
    for node in traced.graph.nodes:
        if node.target is not aten.clone.default or all(u.op == "output" for u in node.users):
            continue
        if {node.meta.get("storage"), node.args[0].meta.get("storage")} & written:
            what = (
                "whether this is a view or a copy depends on sizes, and memory of it is written to"
            )
            cure = "write `.clone()` and static sizes, or nothing in place"
            raise ExportError(f"{call.name}: {what}: {cure}\n  at {user_line(node)}")


def arranged(
    call: Call, capture: Capture, structure: Structure, core: Graph, mutated: Sequence[int]
) -> tuple[Graph, Signature, dict[str, torch.Tensor]]:
    """The graph with state before arguments, and without the copies that stood for results."""
    old = core.gm.graph
    values = [n for n in compat.tree_leaves(output_node(old).args) if isinstance(n, fx.Node)]
    for place in range(len(structure.results) + len(structure.assigned)):
        if values[place].target is aten.clone.default:
            values[place] = cast(Any, values[place].args[0])
    owned = owned_tensors(call.target)
    specs: dict[fx.Node, InputSpec] = {}
    state: dict[str, torch.Tensor] = {}
    for node, given in zip(placeholders(old), capture.inputs, strict=True):
        specs[node], tensor = input_spec(call, given, owned)
        if tensor is not None:
            state[specs[node].target] = tensor.detach()
    for node in old.nodes:
        if node.op == "get_attr":
            target = str(node.target)
            specs[node], state[target] = (
                InputSpec("constant", node.name, target),
                getattr(core.gm, target),
            )
    changed = [*structure.assigned, *(list(specs.values())[i].target for i in mutated)]
    made, nodes, inputs = fx.Graph(), dict[fx.Node, fx.Node](), list[InputSpec]()
    used = {*values, *(n for n in specs if n.users)}
    for node, spec in sorted(specs.items(), key=lambda item: item[1].kind == "input"):
        if spec.kind != "input" and node not in used and spec.target not in changed:
            continue
        nodes[node] = made.placeholder(node.name)
        nodes[node].meta.update(node.meta)
        inputs.append(replace(spec, name=nodes[node].name))
    for node in old.nodes:
        if node not in specs and node.op != "output":
            nodes[node] = made.node_copy(node, nodes.__getitem__)
    made.output(tuple(nodes[value] for value in values))
    made.eliminate_dead_code()
    kinds = [("result", f"result[{i}]") for i in range(len(structure.results))]
    kinds += [("mutation", target) for target in changed]
    results = cast(Any, output_node(made).args[0])
    outputs = [
        OutputSpec(cast(Any, k), n.name, t) for (k, t), n in zip(kinds, results, strict=True)
    ]
    for output, node in zip(outputs, results):
        check_written(call, output, node, inputs, placeholders(made))
    state = {i.target: state[i.target] for i in inputs if i.kind != "input"}
    state |= {name: value.clone() for name, value in state.items() if name in changed}
    tied = {name: owned[id(tensor)][0] for name, tensor in every_name(call.target)}
    tied = {name: first for name, first in tied.items() if name != first and first in state}
    gm = compat.graph_module(torch.nn.Module(), made, call.name)
    return Graph(gm, call.name, "export"), Signature(tuple(inputs), tuple(outputs), tied), state


def check_written(
    call: Call, spec: OutputSpec, node: fx.Node, inputs: list[InputSpec], given: list[fx.Node]
) -> None:
    """Raises ExportError if new contents do not fit in the old place."""
    if spec.kind == "result":
        return
    old = next((n for n, i in zip(given, inputs) if i.target == spec.target), None)
    if old is None:
        cure = "write to it in place, `copy_`"
        raise ExportError(f"{call.name} replaces buffer {spec.target} without reading it: {cure}")
    before, after = old.meta["val"], node.meta["val"]
    if before.dtype != after.dtype or not same_sizes(before, after):
        was, now = value_text(before), value_text(after)
        raise ExportError(f"{call.name} makes buffer {spec.target} {now}; it was {was}")


def every_name(target: Any) -> list[tuple[str, torch.Tensor]]:
    """A module's parameters and buffers under all their names."""
    if not isinstance(target, torch.nn.Module):
        return []
    every = target.named_parameters, target.named_buffers
    return [pair for names in every for pair in names(remove_duplicate=False)]


def owned_tensors(target: Any) -> dict[int, tuple[str, Any]]:
    """A module's parameters and buffers by id: the first name, and the kind."""
    buffers = set(map(id, target.buffers())) if isinstance(target, torch.nn.Module) else set()
    found: dict[int, tuple[str, Any]] = {}
    for name, tensor in every_name(target):
        found.setdefault(id(tensor), (name, "buffer" if id(tensor) in buffers else "parameter"))
    return found


def input_spec(
    call: Call, given: GraphInput, owned: Mapping[int, tuple[str, Any]]
) -> tuple[InputSpec, torch.Tensor | None]:
    """What a captured input stands for; its tensor if it belongs to the state."""
    if call.is_argument(given.source):
        return InputSpec("input", given.name, given.source.name), None
    tensor = given.real() if given.real is not None else None
    if tensor is None:
        raise ExportError(f"{call.name}: {given.source} is gone: keep it alive while exporting")
    kind: Any = "parameter" if isinstance(tensor, torch.nn.Parameter) else "constant"
    kind = "buffer" if given.source.kind == "buffer" else kind
    name, kind = owned.get(id(tensor), (given.source.name, kind))
    return InputSpec(kind, given.name, name), tensor


# -- conditions


def check_declared(call: Call, env: Any) -> None:
    """Raises ExportError where the program takes fewer sizes than a Dim declares."""
    if env is None:
        return
    named = {s: env.wishes[s] for s in env.symbols if env.wishes[s].startswith("dimension ")}
    told = []
    for fact in env.guards:
        if not (about := [s for s in fact.condition.free_symbols if s in named]):
            continue
        if always_holds(fact.condition):
            continue
        condition = env.text(fact.condition)
        at = f"\n  at {fact.line}" if fact.line else ""
        dims = " and ".join(sorted(named[s] for s in about))
        told.append(
            f"{dims}: the program needs {condition} ({fact.reason}){at}\n  "
            f"declare {cure(fact.condition, env, about)}"
        )
    if told:
        lines = [f"{call.name} narrows what dynamic_shapes declares:", *dict.fromkeys(told)]
        raise ExportError("\n".join(lines))


def cure(condition: Any, env: Any, about: list[Any]) -> str:
    """What to declare instead."""
    [symbol, *others] = about
    if isinstance(condition, sympy.Eq) and others:
        return "one Dim for both"
    if symbol in env.fixed:
        return f"no Dim: the size is {env.hints[symbol]} whatever is given"
    if not others and isinstance(condition, sympy.Ge | sympy.Gt | sympy.Le | sympy.Lt | sympy.Ne):
        low, high = env.ranges[symbol]
        limits = f"min={low}" + ("" if high is None else f", max={high}")
        return f"limits within which it holds (now {limits}), or no Dim"
    return "no Dim (a static size), or mc.Dim.AUTO, which makes it a constraint"


def conditions(call: Call, capture: Capture) -> tuple[list[Constraint], list[str]]:
    """What each call must fulfil; the other guards, which are facts of the moment."""
    env = capture.shape_env
    found: dict[str, Constraint] = {}
    facts: list[str] = []
    early = [g for g in capture.guards if g.kind != "shape"]  # some came after capture
    guards = [replace(g, sources=tuple(map(call.renamed, g.sources))) for g in early]
    for guard in (*guards, *(shape_guards(env))):
        about = [call.is_argument(source) for source in guard.sources]
        if not any(about) or guard.kind in DROPPED:
            facts.append(str(guard))
            continue
        if not all(about):
            raise ExportError(f"{call.name}: an argument is a tensor of the module: {guard}")
        if guard.kind == "shape" and always_holds(guard.expected):
            continue
        for text, reason in texts(guard):
            line = guard.user_line
            at = "" if line is None or line.file == call_module.__code__.co_filename else str(line)
            found.setdefault(text, Constraint(text, reason, at))
    for path, value in leaves(call.arguments):
        if not isinstance(value, torch.Tensor):
            text = f"{path} == {literal(value)}"
            found.setdefault(text, Constraint(text, "a value that the program was exported for"))
    for constraint in found.values():
        constraint.check(call.arguments)
    return list(found.values()), facts


DROPPED = ("strides", "different", "memory", "distinct", "class", "hooks", "global_state", "equals")
"""Guards without a condition: inputs are laid out anew, what changes has memory of its own
(`Exported.inputs`), and numbers are told one by one."""


def texts(guard: Guard) -> Iterator[tuple[str, str]]:
    """The conditions that a guard makes, and why."""
    names = [source.name for source in guard.sources]
    expected, reason = guard.expected, guard.reason
    match guard.kind:
        case "tensor":
            why = "what the program was exported for"
            yield f"{names[0]} is {short(expected.dtype)}", why
            yield f"{names[0]}.device == {str(expected.device)!r}", why
            yield f"{names[0]}.dim() == {expected.dim()}", why
            for axis, size in enumerate(expected.shape):
                if isinstance(size, int):
                    yield f"{names[0]}.size({axis}) == {size}", "a static size"
        case "type" if issubclass(expected, torch.Tensor):
            return
        case "type":
            yield f"type({names[0]}) is {class_name(expected)}", reason
        case "length":
            yield f"len({names[0]}) == {expected}", reason
        case "keys":
            yield f"list({names[0]}) == {list(expected)!r}", reason
        case "number":
            yield guard.expected.condition(names[0]), reason
        case "absent" if guard.sources[0].kind == "namespace":
            return  # a tensor's own attributes: no export asks for them
        case "absent":
            yield f"{expected!r} not in {names[0]}", reason
        case "same":
            yield f"{names[0]} is {names[1]}", reason
        case "identity" if expected is None or type(expected) is bool:
            return  # its value is told anyway
        case "shape" | "same_size":
            yield guard.expression, reason
        case _:
            raise ExportError(f"no condition says this: {guard}")
