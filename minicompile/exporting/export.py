"""`mc.export`: one call captured as a whole, then made into a graph that stands for itself.

    prepare    bind the arguments, copy what capture marks (which sizes are dynamic)
    capture    one graph or an error that lists every break
    replay     run the code that rebuilds the frame's result on stand-ins: the structure of the results
    functional a Core ATen graph: state, then arguments -> results, then new contents
    conditions capture's guards on arguments; a guard that narrows what was declared dynamic is an error

The real compiler: torch/export/_trace.py, torch/export/dynamic_shapes.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx
from torch._ops import OpOverload

from minicompile import compat
from minicompile.aot.autograd import fake_mode_of
from minicompile.aot.functionalize import functionalize
from minicompile.aot.joint import trace
from minicompile.aot.layout import same_sizes
from minicompile.aot.levels import lower_to, verify
from minicompile.api import explain
from minicompile.debug.copies import Copier
from minicompile.dynamo.dispatch import capture_alone
from minicompile.dynamo.module import original_of
from minicompile.dynamo.result import Capture, GraphInput, Guard
from minicompile.dynamo.sizes import Dynamic, shape_guards
from minicompile.errors import ExportError, Unsupported, refusal_text
from minicompile.exporting.call import FILE, Call, leaves, parameters
from minicompile.exporting.conditions import always_holds, class_name, literal
from minicompile.exporting.exported import Constraint, Exported, InputSpec, OutputSpec, Signature
from minicompile.exporting.results import Structure
from minicompile.ops.display import count_text
from minicompile.ops.dtypes import short, value_text
from minicompile.ops.graph import Graph, copied, origins_of, output_node, placeholders, user_line
from minicompile.ops.nodes import writes, written_arguments

aten = torch.ops.aten


def export(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> Exported:
    """A function or nn.Module as one graph, for inference: what it computes under `torch.no_grad()`,
    of arguments that require no grad.

    args, kwargs    an example call: tensors, numbers, strings, None, in tuples, lists, dicts
    dynamic_shapes  by argument name, or by position: for a tensor `{axis: Dim}` or one entry an axis, for a
                    container what it holds; None: static

    To find every break of a program that is no single graph, a copy of it is run once.
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
            dynamic = Dynamic(general=True)
            captured = capture_alone(call.function, dict(call.arguments), dynamic, call.name)
    except Unsupported as error:
        raise every_break(call, error) from None
    capture = captured.capture
    structure = Structure(call, captured)
    graph, signature, state = functional(call, capture, structure)
    check_declared(call, capture.shape_env)
    return Exported(
        name=call.name,
        graph=graph,
        signature=signature,
        constraints=conditions(call, capture),
        state=state,
        shape_env=capture.shape_env,
        call=parameters(call.signature),
        structure=structure.text,
        classes=structure.classes,
    )


def every_break(call: Call, error: Unsupported) -> ExportError:
    """The error of a call that is no single graph: found by running a copy of it once, with breaks."""
    copies = Copier()
    target, bound = copies(call.target), call.bound(copies(call.arguments))
    with torch.no_grad():
        breaks = explain(target)(*bound.args, **bound.kwargs).breaks
    texts = [refusal_text(b.reason, b.user_line, b.hint, b.id) for b in breaks]
    texts = list(dict.fromkeys(texts)) or [str(error)]
    lines = [f"{call.name} is no single graph; {count_text(len(texts), 'place')} to mend:"]
    for number, text in enumerate(texts, 1):
        lines.append(f"{number}. " + text.replace("\n", "\n   "))
    return ExportError("\n".join(lines))


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
        spec, tensor = input_spec(call, given, owned)
        if tensor is not None:
            spec = replace(spec, target=free_name(spec.target, state))
            state[spec.target] = tensor.detach()
        specs[node] = spec
    for node in old.nodes:
        if node.op == "get_attr":
            target = free_name(str(node.target), state)
            state[target] = getattr(core.gm, str(node.target))
            specs[node] = InputSpec("constant", node.name, target)
    changed = [*structure.assigned, *(list(specs.values())[i].target for i in mutated)]
    made, nodes, inputs = fx.Graph(), dict[fx.Node, fx.Node](), list[InputSpec]()
    used = {*values, *(n for n in specs if n.users)}
    for node, spec in sorted(specs.items(), key=lambda item: item[1].kind == "input"):
        if spec.kind != "input" and node not in used and spec.target not in changed:
            continue
        copy = nodes[node] = made.placeholder(re.sub(r"\W+", "_", spec.target).strip("_"))
        copy.target = copy.name
        copy.meta.update(node.meta)
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
    gm = compat.graph_module(torch.nn.Module(), made, call.name)
    return Graph(gm, call.name, "export"), Signature(tuple(inputs), tuple(outputs)), state


def free_name(name: str, taken: Mapping[str, Any]) -> str:
    """A name for something that is not called like another."""
    while name in taken:
        name += "_"
    return name


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
    if call.is_argument(given.source) and isinstance(given.fake, torch.Tensor):
        return InputSpec("input", given.name, given.source.name), None
    if not isinstance(given.fake, torch.Tensor):
        cure = "compute it with tensors, or leave the size static"
        raise ExportError(f"{call.name} computes with the Python number {given.source}: {cure}")
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
        if always_holds(fact.condition, call.declared(env)):
            continue
        condition = env.text(fact.condition)
        at = f"\n  at {fact.line}" if fact.line else ""
        dims = " and ".join(sorted(named[s] for s in about))
        told.append(
            f"{dims}: the program needs {condition} ({fact.reason}){at}\n  declare limits within which it "
            "holds, one Dim for equal sizes, mc.Dim.AUTO, which makes it a constraint, or no Dim"
        )
    if told:
        lines = [f"{call.name} narrows what dynamic_shapes declares:", *dict.fromkeys(told)]
        raise ExportError("\n".join(lines))


def conditions(call: Call, capture: Capture) -> tuple[Constraint, ...]:
    """What each call must fulfil. Guards on anything but arguments are facts of the moment of export."""
    env = capture.shape_env
    found: dict[str, Constraint] = {}
    early = [g for g in capture.guards if g.kind != "shape"]  # some came after capture
    for guard in (*early, *shape_guards(env)):
        about = [call.is_argument(source) for source in guard.sources]
        if not any(about) or guard.kind in DROPPED:
            continue
        if not all(about):
            raise ExportError(f"{call.name}: an argument is a tensor of the module: {guard}")
        if guard.kind == "shape" and always_holds(guard.expected, call.declared(env)):
            continue
        for text, reason in texts(guard):
            line = guard.user_line
            at = "" if line is None or line.file == FILE else str(line)
            found.setdefault(text, Constraint(text, reason, at))
    for path, value in leaves(call.arguments):
        if not isinstance(value, torch.Tensor):
            text = f"{path} == {literal(value)}"
            found.setdefault(text, Constraint(text, "a value that the program was exported for"))
    for name, parameter in call.signature.parameters.items():
        given, text = call.arguments[name], ""
        if parameter.kind is parameter.VAR_POSITIONAL:
            text = f"len({name}) == {len(given)}"
        elif parameter.kind is parameter.VAR_KEYWORD:
            text = f"list({name}) == {list(given)!r}"
        if text:
            found.setdefault(text, Constraint(text, "what the program was exported for"))
    for constraint in found.values():
        constraint.check(call.arguments)
    return tuple(found.values())


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
            yield guard.expected.format(names[0]), reason
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
