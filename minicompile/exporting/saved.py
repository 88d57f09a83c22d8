"""An export as a folder: `program.py`, text that is parsed and never run, and `model.safetensors`, the state.

    program.py := format, name, how it is called, sizes, inputs, outputs, tied, constraints, result, the
                  graph as it prints (a line an operator, with the type of its value), and a checksum

The checksum finds damage. Loading runs every line of the graph on fake tensors: the types must be those that
the text says. Operators are torch's own, without side effects.
The real compiler: torch/export/_save.py, torch/_export/serde/serialize.py.
"""

from __future__ import annotations

import ast
import operator
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import OpOverload

from minicompile import compat
from minicompile.dynamo.result import Source
from minicompile.errors import ExportError
from minicompile.exporting.conditions import (
    DTYPES,
    Expression,
    always_holds,
    classes_of,
    dotted,
    signature_from,
    signature_rows,
    value_of,
)
from minicompile.exporting.exported import Constraint, Exported, InputSpec, OutputSpec, Signature
from minicompile.ops.dtypes import value_text
from minicompile.ops.graph import Graph, target_name
from minicompile.ops.origin import NO_ORIGINS
from minicompile.ops.philox import PHILOX
from minicompile.shapes.env import ShapeEnv
from minicompile.shapes.symnode import OPERATORS, size_expr

PROGRAM, STATE, FORMAT = "program.py", "model.safetensors", "minicompile export 2"
SUM = "crc32 = "
HEAD = "# An export of minicompile: text to read, which is parsed and never run. The state is beside it.\n"
SIZE_FUNCTIONS: dict[str, Any] = {
    target_name(function): function
    for function in (operator.sub, operator.mod, *(function for _, function in OPERATORS.values()))
}
FORBIDDEN = ("from_file", "_print")
"""Operators of torch that touch the world outside."""


def operator_named(name: str) -> Any:
    """An operator or size function. Raises ExportError for what a graph can't call."""
    if name in SIZE_FUNCTIONS:
        return SIZE_FUNCTIONS[name]
    if name == str(PHILOX):
        return PHILOX
    space, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    found: Any = None
    if space in ("aten", "prims") and packet.isidentifier() and not packet.startswith("__"):
        found = getattr(getattr(getattr(torch.ops, space), packet, None), overload, None)
    if not isinstance(found, OpOverload) or found._schema.is_mutable or packet in FORBIDDEN:
        raise ExportError(f"no operator that a graph can call: {name}")
    return found


# -- to text


def save(exported: Exported, folder: Path) -> Path:
    """Raises ExportError for operators of others than torch, BackendError without safetensors."""
    tensors, seen = {}, set[int]()
    for name, value in exported.state.items():
        alone = value.untyped_storage().nbytes() == value.nbytes
        if not value.is_contiguous() or not alone or compat.storage_id(value) in seen:
            value = value.clone(memory_format=torch.contiguous_format)
        seen.add(compat.storage_id(value))
        tensors[name] = value.detach()
    for node in exported.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            operator_named(target_name(node.target))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PROGRAM).write_text(signed(program_text(exported)), encoding="utf-8")
    safetensors().save_file(tensors, folder / STATE)
    return folder


def signed(text: str) -> str:
    """The text with its checksum."""
    return f"{text}{SUM}{zlib.crc32(text.encode())}\n"


def safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise ExportError("saving and loading needs safetensors: pip install safetensors") from None
    return safetensors.torch


def program_text(exported: Exported) -> str:
    env, signature, call = exported.shape_env, exported.signature, exported.call
    sizes = {
        str(symbol): (str(source), env.hints[symbol], *env.ranges[symbol], env.wishes[symbol])
        for symbol, source in (env.symbols.items() if env is not None else ())
    }
    devices = [str(value.device) for value in exported.layouts]
    lines = [
        f"format = {FORMAT!r}",
        f"name = {exported.name!r}",
        *rows("call", signature_rows(call)),
        *block("sizes", sizes.items()),
        *rows("inputs", ((s.kind, s.name, s.target, d) for s, d in zip(signature.inputs, devices))),
        *rows("outputs", ((s.kind, s.target) for s in signature.outputs)),
        *block("tied", signature.tied.items()),
        *rows("constraints", ((c.condition, c.reason, c.line) for c in exported.constraints)),
        f"result = {exported.structure}",
        str(exported.graph),
    ]
    return HEAD + "\n".join(lines) + "\n"


def rows(name: str, values: Iterable[Any]) -> list[str]:
    return [f"{name} = [", *(f"    {value!r}," for value in values), "]"]


def block(name: str, items: Iterable[tuple[Any, Any]]) -> list[str]:
    return [f"{name} = {{", *(f"    {key!r}: {value!r}," for key, value in items), "}"]


# -- from text


def load_export(path: str | Path) -> Exported:
    """Read what `Exported.save` wrote. Raises ExportError if it is damaged, or not of this version."""
    folder = Path(path)
    file = folder / PROGRAM
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ExportError(f"{folder} is no export: {error}") from None
    head = text.rpartition(SUM)[0]
    if text != signed(head):
        raise ExportError(f"{file} is damaged: its checksum is another")
    try:
        state = safetensors().load_file(folder / STATE)
    except Exception as error:  # what safetensors raises is its own
        raise ExportError(f"{folder / STATE} can't be read: {error}") from None
    try:
        return Reader().exported(parts(ast.parse(head)), state)
    except Exception as error:  # a text that nobody here wrote may be anything
        raise ExportError(f"{file}: {error}") from error


def parts(tree: ast.Module) -> dict[str, Any]:
    """The top-level statements by name: data as it is, the results' expression and the graph as parsed."""
    found: dict[str, Any] = {}
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="result")], value=value):
                found["result"] = ast.unparse(value)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name] = ast.literal_eval(value)
            case ast.FunctionDef():
                found["graph"] = statement
            case _:
                raise ExportError(f"no part of an export: {ast.unparse(statement)[:80]}")
    if found["format"] != FORMAT:
        raise ExportError(f"it says {found['format']!r}, this version reads {FORMAT!r}")
    return found


class Reader:
    """Reads one program."""

    def __init__(self) -> None:
        self.env = ShapeEnv()
        self.env.general = True
        self.mode = compat.fake_mode(symbolic=True)
        self.mode.env = self.env
        self.names: dict[str, Any] = {}
        """Symbols, by name and by the size that they are."""
        self.ranges: dict[Any, Any] = {}
        """What each stood for before the graph was run."""

    def exported(self, parts: dict[str, Any], state: dict[str, torch.Tensor]) -> Exported:
        """The program of these parts."""
        inputs = [InputSpec(*row[:3]) for row in parts["inputs"]]
        constraints = tuple(Constraint(*row) for row in parts["constraints"])
        self.sizes(parts["sizes"], constraints)
        known = set(self.env.guards)
        devices = [torch.device(row[3]) for row in parts["inputs"]]
        graph, values = self.graph(parts["graph"], parts["name"], devices)
        for fact in self.env.guards:
            if fact not in known and not always_holds(fact.condition, self.ranges):
                what = self.env.text(fact.condition)
                raise ExportError(f"the graph needs {what}, which no constraint says")
        outputs = [
            OutputSpec(kind, node.name, target)
            for (kind, target), node in zip(parts["outputs"], values, strict=True)
        ]
        return Exported(
            name=parts["name"],
            graph=graph,
            signature=Signature(tuple(inputs), tuple(outputs), parts["tied"]),
            constraints=constraints,
            state=self.state(state, inputs, list(graph.nodes)),
            shape_env=self.env if self.env.symbols else None,
            call=signature_from(parts["call"]),
            structure=parts["result"],
            classes=classes_of(Expression(parts["result"])),
        )

    def state(
        self, found: dict[str, torch.Tensor], inputs: list[InputSpec], nodes: list[fx.Node]
    ) -> dict[str, torch.Tensor]:
        """The tensors that the graph asks for, on their devices."""
        made = {}
        for spec, node in zip(inputs, nodes):
            if spec.kind == "input":
                continue
            like, value = node.meta["val"], found.get(spec.target)
            if value is None or value.dtype != like.dtype or value.shape != like.shape:
                has = "nothing" if value is None else value_text(value)
                raise ExportError(f"{spec.target} is {value_text(like)}, {STATE} has {has}")
            made[spec.target] = value.to(like.device)
        return made

    def sizes(self, table: Mapping[str, Any], constraints: Iterable[Constraint]) -> None:
        """The symbols, and what is known of them."""
        for name, (source, hint, low, high, wish) in table.items():
            made = self.env.create_symbol(hint, path_source(source), wish, low, high)
            self.names |= {name: made, source: made}
            self.ranges[made.node.given] = self.env.ranges[made.node.given]
        for constraint in constraints:
            constraint.expression.holds(self.names)  # what isn't about symbols is not there
        for symbol in self.env.quotients:
            self.names[str(symbol)] = self.env.number(symbol)

    def graph(
        self, function: ast.FunctionDef, name: str, devices: list[torch.device]
    ) -> tuple[Graph, list[fx.Node]]:
        """The graph, each value a fake that was computed, and its outputs."""
        made, nodes = fx.Graph(), dict[str, Any]()
        for arg, device in zip(function.args.args, devices, strict=True):
            node = nodes[arg.arg] = made.placeholder(arg.arg)
            node.meta.update(val=self.typed(arg.annotation, device), origins=NO_ORIGINS)
        *body, last = function.body
        for statement in body:
            match statement:
                case ast.AnnAssign(
                    target=ast.Name(id=target), annotation=said, value=ast.expr() as value
                ):
                    node = nodes[target] = self.operation(made, value, nodes, target)
                    self.compare(node, said)
                case _:
                    raise ExportError(f"no operation: {ast.unparse(statement)[:80]}")
        if not isinstance(last, ast.Return) or not isinstance(last.value, ast.Tuple):
            raise ExportError("the graph ends without its results")
        outputs = [nodes[part.id] for part in last.value.elts if isinstance(part, ast.Name)]
        made.output(tuple(outputs))
        gm = compat.graph_module(torch.nn.Module(), made, name)
        return Graph(gm, name, "export"), outputs

    def compare(self, node: fx.Node, said: ast.expr) -> None:
        """Raises ExportError if a value is of another type than the text says."""
        value = node.meta["val"]
        text = value_text(value)
        if isinstance(said, ast.Constant) and said.value == text:
            return
        if isinstance(value, torch.Tensor):  # sizes may be written in another way
            meant = self.typed(said, value.device)
            pairs = zip((*value.shape, *value.stride()), (*meant.shape, *meant.stride()))
            equal = (sympy.Eq(size_expr(a), size_expr(b)) for a, b in pairs)
            alike = value.dtype == meant.dtype and value.dim() == meant.dim()
            if alike and all(always_holds(one, self.ranges) for one in equal):
                node.meta["val"] = meant
                return
        raise ExportError(f"{node.name} is {text}, not {ast.unparse(said)}")

    def operation(
        self, graph: fx.Graph, value: ast.expr, nodes: Mapping[str, fx.Node], name: str
    ) -> fx.Node:
        """One line: a call, or a part of several results."""
        match value:
            case ast.Subscript(value=ast.Name(id=whole), slice=index):
                target: Any = operator.getitem
                args: tuple[Any, ...] = (nodes[whole], value_of(index, {}))
                kwargs = {}
            case ast.Call(func=function):
                target = operator_named(dotted(function))
                args = tuple(value_of(arg, nodes) for arg in value.args)
                kwargs = {str(k.arg): value_of(k.value, nodes) for k in value.keywords}
            case _:
                raise ExportError(f"no operation: {ast.unparse(value)[:80]}")
        node = graph.create_node("call_function", target, args, kwargs, name)
        given = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with torch.no_grad(), self.mode, compat.python_dispatcher(), compat.quiet_fakes():
            made = target(*given[0], **given[1])
        node.meta.update(val=tuple(made) if isinstance(made, list) else made, origins=NO_ORIGINS)
        return node

    def typed(self, annotation: ast.expr | None, device: torch.device) -> torch.Tensor:
        """A fake of the type that an annotation says: `f32[s0, 8; 1, s0]`."""
        text = annotation.value if isinstance(annotation, ast.Constant) else ""
        name, _, inner = str(text).partition("[")
        dtype = DTYPES.get(name) or getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype) or not inner.endswith("]"):
            raise ExportError(f"no type of a tensor: {text!r}")
        numbers = [
            Expression(f"({part},)" if part.strip() else "()")(self.names)
            for part in inner[:-1].split(";")
        ]
        with self.mode:
            if len(numbers) == 1:
                return torch.empty(*numbers, dtype=dtype, device=device)
            return torch.empty_strided(*numbers, dtype=dtype, device=device)


def path_source(text: str) -> Source:
    """`batch['ids'].size(0)` as a Source."""

    def source(node: ast.expr) -> Source:
        match node:
            case ast.Name():
                return Source("local", node.id)
            case ast.Subscript(value=base, slice=ast.Constant(value=key)):
                return Source("item", key, source(base))
            case ast.Call(
                func=ast.Attribute(attr="size", value=base), args=[ast.Constant(value=k)]
            ):
                return Source("size", k, source(base))
        raise ExportError(f"no place among the arguments: {text!r}")

    return source(Expression(text).tree)
