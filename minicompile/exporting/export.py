"""`mc.export`: one call captured as a whole, then made into a graph that stands for itself.

    prepare    bind the arguments, copy what capture marks (which sizes are dynamic)
    capture    one graph or an error that lists every break
    replay     run the code that rebuilds the frame's result on stand-ins: the structure of the results
    functional a Core ATen graph: state and arguments -> results, then new contents
    conditions the example's arguments but for dynamic sizes, and capture's guards on these; a guard that
               narrows what was declared dynamic is an error

The real compiler: torch/export/_trace.py, torch/export/dynamic_shapes.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
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
from minicompile.debug.history import explain
from minicompile.debug.program_copies import Copier
from minicompile.dynamo.dispatch import capture_alone
from minicompile.dynamo.module import original_of
from minicompile.dynamo.result import Capture, GraphInput
from minicompile.dynamo.sizes import Dynamic, shape_guards
from minicompile.errors import ExportError, Unsupported, refusal_text
from minicompile.exporting.call import FILE, Call
from minicompile.exporting.conditions import Constraint, always_holds, fixed, walk
from minicompile.exporting.exported import Exported, InputSpec, OutputSpec, Signature
from minicompile.exporting.results import Structure
from minicompile.ops.display import count_text
from minicompile.ops.dtypes import value_text
from minicompile.ops.graph import Graph, copied, origins_of, output_node, placeholders, user_line
from minicompile.ops.nodes import writes
from minicompile.ops.writes import written_arguments

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
    return Exported(
        name=call.name,
        graph=graph,
        signature=signature,
        constraints=conditions(call, capture),
        state=state,
        shape_env=capture.shape_env,
        call=call.signature,
        structure=structure.text,
    )


def every_break(call: Call, error: Unsupported) -> ExportError:
    """The error of a call that is no single graph: found by running a copy of it once, with breaks."""
    copies = Copier()
    target = copies(call.target)
    bound = inspect.BoundArguments(call.signature, copies(call.arguments))
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
    """The Core ATen graph: state and arguments -> results, then new contents; what it takes and gives."""
    whole = copied(capture.graph)
    inputs, out = placeholders(whole.gm.graph), output_node(whole.gm.graph)
    outputs = cast(Any, out.args[0])
    out.args = (
        tuple(
            copy_of(outputs[stand.number] if stand.of == "output" else inputs[stand.number], out)
            for stand in structure.results
        ),
    )
    mode = fake_mode_of(whole, capture.fakes, capture.shape_env)
    try:
        traced, metadata = trace(whole.gm, capture.fakes, mode, training=False)
        check_layouts(call, capture, traced)
        full = Graph(functionalize(traced, metadata, mode), call.name, "functionalization")
        core = lower_to("core", full, mode)
        verify(core)
    except Unsupported as error:
        raise ExportError(f"{call.name} can't be exported: {error}") from error
    graph, out = core.gm.graph, output_node(core.gm.graph)
    values = [n for n in compat.tree_leaves(out.args) if isinstance(n, fx.Node)]
    count = len(structure.results)
    values[count:] = [copy_of(value, out) for value in values[count:]]
    out.args = (tuple(values),)
    graph.eliminate_dead_code()
    owned = owned_tensors(call.target)
    changed = {placeholders(graph)[i]: n for i, n in zip(metadata.mutated_inputs, values[count:])}
    specs, state = dict[fx.Node, InputSpec](), dict[str, torch.Tensor]()
    for node, given in zip(placeholders(graph), capture.inputs, strict=True):
        kind, target, tensor = input_spec(call, given, owned)
        if tensor is not None:
            if not node.users and node not in changed:
                graph.erase_node(node)
                continue
            while target in state:
                target += "_"
            state[target] = tensor.detach().clone() if node in changed else tensor.detach()
        specs[node] = InputSpec(kind, node.name, target)
    gives = [OutputSpec("result", n.name, f"result[{i}]") for i, n in enumerate(values[:count])]
    for node, value in changed.items():
        before, after, target = node.meta["val"], value.meta["val"], specs[node].target
        if before.dtype != after.dtype or not same_sizes(before, after):
            was, now = value_text(before), value_text(after)
            raise ExportError(f"{call.name} makes {target} {now}; it was {was}")
        gives.append(OutputSpec("mutation", value.name, target))
    signature = Signature(tuple(specs.values()), tuple(gives))
    return Graph(core.gm, call.name, "export"), signature, state


def copy_of(node: fx.Node, before: fx.Node) -> fx.Node:
    """A copy, which has memory of its own, whatever the value is a view of."""
    with before.graph.inserting_before(before):
        copy = before.graph.call_function(aten.clone.default, (node,))
    copy.meta.update(val=node.meta["val"], origins=origins_of(node))
    return copy


def check_layouts(call: Call, capture: Capture, traced: fx.GraphModule) -> None:
    """Raise ExportError where it matters what was left open: some size may decide whether a tensor is dense,
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
            what = "whether this is a view or a copy depends on sizes, and its memory is written to"
            cure = "write `.clone()` and static sizes, or nothing in place"
            raise ExportError(f"{call.name}: {what}: {cure}\n  at {user_line(node)}")


def owned_tensors(target: Any) -> dict[int, tuple[Any, str]]:
    """A module's parameters and buffers by id: the kind, and the first name."""
    if not isinstance(target, torch.nn.Module):
        return {}
    parameters = {id(x): ("parameter", name) for name, x in target.named_parameters()}
    return parameters | {id(x): ("buffer", name) for name, x in target.named_buffers()}


def input_spec(
    call: Call, given: GraphInput, owned: Mapping[int, tuple[Any, str]]
) -> tuple[Any, str, torch.Tensor | None]:
    """What a captured input stands for: kind and name; its tensor if it belongs to the state."""
    if not isinstance(given.fake, torch.Tensor):
        cure = "compute it with tensors, or leave the size static"
        raise ExportError(f"{call.name} computes with the Python number {given.source}: {cure}")
    if call.is_argument(given.source):
        return "input", given.source.name, None
    tensor = given.real() if given.real is not None else None
    if tensor is None:
        raise ExportError(f"{call.name}: {given.source} is gone: keep it alive while exporting")
    return *owned.get(id(tensor), ("constant", given.source.name)), tensor


# -- conditions


def conditions(call: Call, capture: Capture) -> tuple[Constraint, ...]:
    """What each call must fulfil. Guards on anything but arguments are facts of the moment of export.

    Raises ExportError where the program takes fewer sizes than a Dim declares.
    """
    env, narrowed = capture.shape_env, list[str]()
    wishes = env.wishes if env is not None else {}
    dims = {s: call.dims[wish] for s, wish in wishes.items() if wish in call.dims}
    ranges = {symbol: (dim.min, dim.max) for symbol, dim in dims.items()}
    example = "as in the example"
    constraints = [Constraint(c, example) for p, x in walk(call.arguments) for c in fixed(p, x)]
    for guard in (*capture.guards, *shape_guards(env)):
        about = [call.is_argument(source) for source in guard.sources]
        if guard.kind not in ("shape", "number", "same_size", "same") or not any(about):
            continue
        if not all(about):
            raise ExportError(f"{call.name}: an argument is a tensor of the module: {guard}")
        if guard.kind == "shape":
            if always_holds(guard.expected, ranges):
                continue
            names = sorted({wishes[s] for s in guard.expected.free_symbols if s in dims})
            if names:
                narrowed.append(f"{' and '.join(names)}: the program needs {guard}")
        line = guard.user_line
        place = "" if line is None or line.file == FILE else str(line)
        constraints.append(Constraint(guard.expression, guard.reason, place))
    if narrowed:
        cure = (
            "declare limits within which it holds, one Dim for equal sizes, mc.Dim.AUTO, or no Dim"
        )
        lines = [f"{call.name} narrows what dynamic_shapes declares:", *dict.fromkeys(narrowed)]
        raise ExportError("\n  ".join([*lines, cure]))
    for constraint in constraints:
        constraint.check(call.arguments)
    return tuple(dict.fromkeys(constraints))
