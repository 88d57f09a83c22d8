"""`Graph`: a torch.fx graph as a stage object, printed as valid Python with shapes and user lines.

Node metadata that every room keeps:
`meta["val"]`      the value at compile time (FakeTensor, SymInt, tuple of them),
`meta["origins"]`  frozenset of `Origin`,
`meta["phase"]`    "forward" or "backward" (absent before the joint graph),
`meta["region"]`   the checkpointed call that made it, None elsewhere (absent before the joint graph).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from minicompile import compat
from minicompile.ops.display import Shown
from minicompile.ops.dtypes import value_text
from minicompile.ops.origin import NO_ORIGINS, Origins, SourceLine, source_lines


def origins_of(node: fx.Node) -> Origins:
    found = node.meta.get("origins", NO_ORIGINS)
    assert isinstance(found, frozenset)
    return found


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def output_node(graph: fx.Graph) -> fx.Node:
    found: fx.Node = next(node for node in reversed(graph.nodes) if node.op == "output")
    return found


def user_line(node: fx.Node) -> SourceLine | None:
    """The first line of user code that a node came from."""
    return next(iter(source_lines(origins_of(node))), None)


def unpacks(node: fx.Node) -> bool:
    """Does a node only take a part of several results? `x[1:]` of a tensor is an operation."""
    if node.target is not operator.getitem:
        return False
    whole = node.args[0]
    return not isinstance(getattr(whole, "meta", {}).get("val"), torch.Tensor)


def target_name(target: object) -> str:
    """`aten.mul.Tensor`, `torch.relu`, `operator.getitem`: how a call target is printed."""
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(target)
    if isinstance(target, str):
        return target
    named = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    name, module = str(named or repr(target)), getattr(target, "__module__", None) or ""
    if module.startswith("torch._C") or name.startswith("_VariableFunctionsClass."):
        module, name = "torch", name.rsplit(".", 1)[-1]
    module = {"_operator": "operator", "builtins": ""}.get(module, module)
    return f"{module}.{name}" if module else name


class Listing:
    """What prints as a graph. `made_by` names the pass that produced it."""

    name: str
    made_by: str

    @property
    def nodes(self) -> Iterator[Any]:
        raise NotImplementedError

    @property
    def op_count(self) -> int:
        """Calls, without the tuple accesses that only unpack results."""
        return sum(n.op.startswith("call") and not unpacks(n) for n in self.nodes)

    @property
    def signature(self) -> str:
        """The graph's inputs, as the head of a Python function."""
        typed = [typed_name(node) for node in self.nodes if node.op == "placeholder"]
        if len(typed) > 3:
            return "\n".join([f"def {self.name}(", *(f"    {name}," for name in typed), "):"])
        return f"def {self.name}({', '.join(typed)}):"

    def __str__(self) -> str:
        """The graph as a Python function, headed by the pass that made it; user lines as comments."""
        lines = [f"# {self.name}, by {self.made_by}: {self.op_count} operations", self.signature]
        shown: object = None
        phase = "forward"
        for node in self.nodes:
            if node.op == "placeholder":
                continue
            if phase != (phase := node.meta.get("phase") or phase):
                lines.append(f"    # {phase} pass")
            at = () if node.op == "output" else source_lines(origins_of(node))
            if at and at != shown:
                lines.extend(f"    # {line}" for line in at)
                shown = at
            lines.append(f"    {statement(node)}")
        return "\n".join(lines)


@dataclass
class Graph(Listing, Shown):
    """A graph between two stages."""

    gm: fx.GraphModule
    name: str
    made_by: str

    @property
    def function(self) -> Callable[..., Any]:
        """The graph as a function."""
        return compat.graph_function(self.gm)

    @property
    def nodes(self) -> Iterator[fx.Node]:
        return iter(self.gm.graph.nodes)


def copies(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A new graph of the same nodes, and which of them stands for which."""
    made, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        nodes[node] = made.node_copy(node, nodes.__getitem__)
    return made, nodes


def copied(graph: Graph) -> Graph:
    """A graph to edit where the given one is to stay as it is."""
    made, _ = copies(graph.gm.graph)
    return Graph(compat.graph_module(graph.gm, made, graph.name), graph.name, graph.made_by)


class Snapshot(Listing):
    """A graph's nodes as they are now: quickly taken, since passes edit the graph; printed on demand."""

    def __init__(self, graph: Graph) -> None:
        self.name, self.made_by = graph.name, graph.made_by
        self.kept = [
            SimpleNamespace(
                **{key: getattr(node, key) for key in ("name", "op", "target", "args", "kwargs")},
                meta=dict(node.meta),
            )
            for node in graph.nodes
        ]

    @property
    def nodes(self) -> Iterator[SimpleNamespace]:
        return iter(self.kept)


def argument_text(value: object, named: Callable[[fx.Node], str] = attrgetter("name")) -> str:
    """An argument of a call as Python; `named` writes the nodes in it."""

    def inner(value: object) -> str:
        return argument_text(value, named)

    if isinstance(value, fx.Node):
        return named(value)
    if isinstance(value, tuple | list):
        items = ", ".join(map(inner, value))
        if isinstance(value, list):
            return f"[{items}]"
        return f"({items},)" if len(value) == 1 else f"({items})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {inner(v)}" for k, v in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({inner(value.start)}, {inner(value.stop)}, {inner(value.step)})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    return f"torch.device('{value}')" if isinstance(value, torch.device) else repr(value)


def typed_name(node: fx.Node) -> str:
    return f"{node.name}: '{value_text(node.meta.get('val'))}'"


def statement(node: fx.Node) -> str:
    """A node as a line of Python: `relu: 'f32[4]' = torch.relu(x)`."""
    if node.op == "output":
        return f"return {argument_text(node.args[0])}"
    return f"{typed_name(node)} = {call_text(node)}"


def call_text(node: fx.Node) -> str:
    """The right-hand side of a node's line: `aten.add.Tensor(x, y)`."""
    arguments = [argument_text(a) for a in node.args]
    arguments += [f"{k}={argument_text(v)}" for k, v in node.kwargs.items()]
    if node.op == "get_attr":
        return f"self.{node.target}"
    if node.target is operator.getitem and len(node.args) == 2:
        return f"{arguments[0]}[{arguments[1]}]"
    function = target_name(node.target)
    if node.op == "call_method":
        function = f"{arguments.pop(0)}.{function}"
    return f"{function}({', '.join(arguments)})"


@dataclass(frozen=True)
class Rewrite:
    """One place that a pass rewrote: by which pattern, the statements before and after, where from."""

    pattern: str
    before: str
    after: str
    origins: Origins

    @property
    def title(self) -> str:
        places = [line.place for line in source_lines(self.origins)]
        return f"{self.pattern} at {', '.join(places)}" if places else self.pattern

    def __str__(self) -> str:
        old = [f"  - {line}" for line in self.before.splitlines()]
        return "\n".join([self.title, *old, *(f"  + {line}" for line in self.after.splitlines())])


@dataclass
class PassRecord(Shown):
    """One graph pass: its name, the graph before and after, how many nodes it changed and, where a pass says
    so, each of its rewrites.
    """

    name: str
    before: Snapshot | str
    after: Snapshot | str
    changed: int
    rewrites: tuple[Rewrite, ...] = ()
    reason: str = ""
    """Why there is no change, where a pass says so."""

    def __str__(self) -> str:
        verdict = f"{self.changed} changes" if self.changed else "no change"
        verdict += f" ({self.reason})" if self.reason else ""
        return "\n".join([f"pass {self.name}: {verdict}", *map(str, self.rewrites)])
