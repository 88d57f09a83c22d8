"""Record a call in eager as a program: every call of a torch function, without the compiler's capture."""

from __future__ import annotations

import contextlib
import operator
from typing import Any

from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from minicompile import compat
from minicompile.debug.copies import Copier, same_random_state
from minicompile.debug.program import Program, TensorSpec
from minicompile.debug.variant import Case
from minicompile.ops.graph import Graph


class Tape(TorchFunctionMode):
    """Records each of torch's functions that a call reaches; all else is as in this call."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.nodes: dict[int, fx.Node] = {}
        """Where each tensor comes from, by its id."""
        self.inputs: list[TensorSpec] = []
        """The tensors that no recorded function made, as they are at first."""
        self.alive: list[Any] = []
        """All that has an id, so that no id is given twice."""

    def node_of(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self.nodes:
            self.nodes[id(value)] = add_input(self.graph, f"arg{len(self.inputs)}")
            self.inputs.append(TensorSpec.of(value))
            self.alive.append(value)
        return self.nodes[id(value)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments, named = compat.tree_map(self.node_of, (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func is SETITEM or any(isinstance(x, Tensor) for x in compat.tree_leaves(result)):
            op, target, more = call_of(func)
            node = self.graph.create_node(op, target, (*arguments, *more), named)
            self.alive.append(result)
            if isinstance(result, Tensor):
                self.nodes[id(result)] = node
            for number, part in enumerate(result if isinstance(result, tuple | list) else ()):
                if isinstance(part, Tensor):
                    item = (node, number)
                    self.nodes[id(part)] = self.graph.call_function(operator.getitem, item)
        return result


def add_input(graph: fx.Graph, name: str) -> fx.Node:
    """Add a placeholder behind the others."""
    first = next((node for node in graph.nodes if node.op != "placeholder"), None)
    with graph.inserting_before(first) if first is not None else contextlib.nullcontext():
        return graph.placeholder(name)


SETITEM = Tensor.__setitem__


def call_of(function: Any) -> tuple[str, Any, tuple[Any, ...]]:
    """Return how FX writes the call of a torch function: op, target, arguments."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return "call_function", getattr, (function.__self__.__name__,)
    if name in ("__setitem__", "__getitem__"):
        return "call_function", getattr(operator, name.strip("_")), ()
    if getattr(Tensor, name, None) is function:
        return "call_method", name, ()
    return "call_function", function, ()


def arguments_of(graph: fx.Graph) -> list[tuple[tuple[Any, ...], list[Any]]]:
    """For each node what it calls, with the structure of its arguments; and their values."""
    flattened = ((n, *compat.tree_flatten((n.args, n.kwargs))) for n in graph.nodes)
    return [((node.op, node.target, structure), values) for node, values, structure in flattened]


def taped(case: Case) -> Program | None:
    """The program that a function is in its calls; None if they differ in more than numbers."""
    copier = Copier()
    target, calls, kwargs = (
        copier(case.target), copier(list(case.calls)), copier(dict(case.kwargs))
    )  # fmt: skip
    graphs, arguments = [], []
    for args in calls:
        with same_random_state(), Tape() as tape:
            result = target(*args, **kwargs)
            outputs = [tape.nodes.get(id(x)) for x in compat.tree_leaves(result)]
        tape.graph.output(tuple(node for node in outputs if node is not None))
        graphs.append(tape.graph)
        arguments.append(list[Any](tape.inputs))
    graph, flattened = graphs[0], list(map(arguments_of, graphs))
    called = [[call for call, _ in recorded] for recorded in flattened]
    if any(recorded != called[0] for recorded in called):
        return None
    for node, *several in zip(list(graph.nodes), *flattened):
        flat = list(several[0][1])
        for number, (value, *rest) in enumerate(zip(*(values for _, values in several))):
            if isinstance(value, fx.Node) or all(value == other for other in rest):
                continue
            flat[number] = add_input(graph, f"number{number}_{node.name}")
            for inputs, own in zip(arguments, (value, *rest), strict=True):
                inputs.append(own)
        node.args, node.kwargs = compat.tree_unflatten(flat, several[0][0][-1])
    gm = fx.GraphModule({}, graph, case.name)
    return Program(Graph(gm, case.name, "minify"), tuple(map(tuple, arguments)))
