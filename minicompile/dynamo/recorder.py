"""Records torch calls as an FX graph, running each on fake tensors to learn what it gives.

    GraphRecorder.input(tensor, source)     a placeholder and its fake
    GraphRecorder.record(op, target, ...)   one call: runs on fakes, makes a node, gives the fake result

Every node has `meta["val"]` (its value at compile time) and `meta["origins"]` (one Origin: the user's lines).
The real compiler: torch/_dynamo/output_graph.py (OutputGraph, SubgraphTracer).
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import sympy
import torch
from torch import fx

from minicompile import compat
from minicompile.dynamo.reasons import refusal
from minicompile.dynamo.result import Source
from minicompile.dynamo.sizes import LARGEST_INT, Dynamic, SymbolicSizes
from minicompile.dynamo.variables import (
    UserError,
    VariableTracker,
    is_constant,
    is_numpy_scalar,
)
from minicompile.errors import Unsupported
from minicompile.ops.dtypes import value_text
from minicompile.ops.graph import Graph, target_name
from minicompile.ops.origin import Origin, SourceLine
from minicompile.shapes.expr import python_number
from minicompile.shapes.symnode import SYMBOLIC, operation_of

LARGEST_INT64 = 2**63 - 1


def tensors_in(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for leaf in compat.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def finished(
    graph: fx.Graph, placeholders: list[fx.Node], outputs: Iterable[Any], name: str
) -> Graph:
    """A graph that is complete but for its output, with these placeholders first."""
    for node in reversed(placeholders):
        next(iter(graph.nodes)).prepend(node)
    graph.output(tuple(outputs))
    # not lazy: a captured graph may be captured again, and then its code must be there
    gm = compat.releasing_text(fx.GraphModule(torch.nn.Module(), graph))
    return Graph(gm, name, "capture")


def largest(expr: sympy.Basic) -> Any:
    """A bound for a number that is computed from some below 2^31 and their negatives."""
    if expr.is_Symbol:
        return LARGEST_INT
    if expr.is_Pow:
        return largest(expr.base) ** expr.exp
    parts = map(largest, expr.args)
    if expr.is_Add or expr.is_Mul:
        return sum(parts) if expr.is_Add else math.prod(parts)
    return max(parts, default=abs(expr))


class GraphRecorder:
    """The graph of one capture under construction."""

    def __init__(self, dynamic: Dynamic | None = None) -> None:
        """`dynamic`: which sizes and numbers get symbols; None if none does."""
        self.root = self.graph = fx.Graph()
        """The graph of the frame, and the one that calls go to; a plug-in may have one inside."""
        self.mode = compat.fake_mode(dynamic is not None)
        self.sizes = None if dynamic is None else SymbolicSizes(self.mode, dynamic)
        self.running = ""
        """The torch function that runs on fakes right now."""
        self.numbers: dict[sympy.Symbol, fx.Node] = {}
        """Placeholders of symbolic numbers that are no input's size."""
        self.size_nodes: dict[tuple[fx.Graph, sympy.Basic], fx.Node] = {}
        self.nodes: dict[int, fx.Node] = {}
        self.alive: list[Any] = []
        """Keeps fakes alive, so that their ids stay theirs."""
        self.inputs: dict[VariableTracker, fx.Node] = {}
        """Each input's placeholder."""
        self.calls: list[fx.Node] = []
        self.stack: Callable[[], tuple[tuple[SourceLine, ...], str]] = lambda: ((), "")
        """Gives the user's lines and the module path of the call being recorded."""
        self.written: dict[int, SourceLine | None] = {}
        """Storages of the calls' arguments that the calls write to, with the user's line."""
        self.places: Callable[[], list[int]] = list
        """Gives the places where the capture could end before the instruction being interpreted."""
        self.inference = torch.is_inference_mode_enabled()
        """Whether the frame, and its graph, run in inference mode."""
        self.changes_state = False
        """Whether the graph sets grad mode or autocast."""

    # -- inputs

    def input(self, tensor: torch.Tensor, fake: torch.Tensor, source: Source) -> VariableTracker:
        """A placeholder for an outside tensor.

        Out of inference mode autograd keeps no inference tensor, and lets none be written to: eager decides.
        """
        if tensor.is_inference() and not self.inference:
            what = "an inference tensor is used outside of inference mode"
            self.refuse("inference-mode", what, "clone the inference tensor")
        name = "".join(c if c.isalnum() else "_" for c in source.name).strip("_") or "input"
        node = self.root.placeholder("self_" if name == "self" else name)  # fx's own first argument
        node.target = node.name  # which is unique
        self.describe(node, "placeholder", fake)
        self.own(fake, node)
        tracker = VariableTracker(fake, source, real=tensor)
        self.inputs[tracker] = node
        return tracker

    def own(self, value: Any, node: fx.Node) -> None:
        self.nodes[id(value)] = node
        self.alive.append(value)

    @property
    def mutated(self) -> list[VariableTracker]:
        """Inputs that the graph changes."""
        return [t for t in self.inputs if compat.storage_id(t.value) in self.written]

    def node_of(self, value: torch.Tensor) -> fx.Node:
        """A tensor's node in this graph."""
        node = self.nodes[id(value)]
        if node.graph is not self.graph:
            what = "a tensor is used outside of the function that made it, which is called later"
            self.refuse("graph-value", what)
        return node

    def note_writes(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that a call writes to these tensors."""
        self.written.update((compat.storage_id(tensor), self.line()) for tensor in tensors)

    # -- calls

    def record(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch call on fakes and record it. `op` is call_function or call_method.

        Raises Unsupported if an argument can't be in a graph, UserError if torch refuses the call.
        """
        tensors: list[torch.Tensor] = []

        def lift(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                tensors.append(value)
            return self.lift(value)

        lifted, lifted_kwargs = compat.map_aggregate((args, kwargs), lift)
        name = target if op == "call_method" else getattr(target, "__name__", None)
        if kwargs.get("out") is not None:
            self.refuse("tensor-memory", f"{name} writes to an `out`, which it may resize")
        self.mode.written.clear()
        value = self.run(op, target, args, kwargs)
        written = list(filter(self.mode.has_written, tensors))
        self.note_writes(written)
        given_back = not written and any(value is tensor for tensor in tensors)
        known = all(id(leaf) in self.nodes for leaf in tensors_in(value))
        if known and value is not None and not written and not given_back:
            return value  # a fact about metadata
        node = self.graph.create_node(op, target, lifted, lifted_kwargs, name=name)
        self.finish(node, target, value)
        if not given_back:  # such an argument keeps the node it has
            self.bind(value, node)
        return value

    def run(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = self.running = target_name(target)
        try:
            # with symbolic sizes, kernels in Python: some in C++ want numbers; dropout's copies its input
            python = self.sizes and not name.endswith(".dropout")
            composites = compat.python_dispatcher() if python else contextlib.nullcontext()
            with compat.no_function_modes(), self.mode, composites:
                function = target if op == "call_function" else getattr(args[0], target)
                given = args if op == "call_function" else args[1:]
                value = function(*given, **kwargs)
        except compat.FAKE_LIMITS as error:
            kind = type(error).__name__
            what = f"{name} gives a result that depends on the tensor's data ({kind})"
            raise refusal("data-dependent-size", what, self.line()) from error
        except Unsupported:
            raise
        except Exception as error:
            text = str(error).partition("\n")[0]
            what = f"{name} raised {type(error).__name__}: {text}"
            raise refusal("exception", what, self.line(), kind=UserError) from error
        finally:
            self.running = ""
        return value

    def statement(self, target: Any, args: tuple[Any, ...]) -> None:
        """Record a call that gives nothing and changes state (grad mode, autocast)."""
        self.changes_state = True
        node = self.graph.create_node("call_function", target, args, {})
        self.finish(node, target, None)

    def switch_gradient(self, fake: torch.Tensor, requires_grad: bool = True) -> None:
        """`requires_grad_` of a tensor that the frame made, which makes it a leaf."""
        if fake.requires_grad is requires_grad and fake.is_leaf:
            return
        given = any(tracker.value is fake for tracker in self.inputs)
        made_here = not given and self.nodes[id(fake)].graph is self.graph
        if not made_here or not is_constant(requires_grad) or self.inference:
            reason = "`.requires_grad_()` changes how autograd treats a tensor from outside"
            self.refuse("autograd-state", reason, "call it on a tensor that is made there")
        self.run("call_method", "requires_grad_", (fake, requires_grad), {})
        node = self.graph.call_method("requires_grad_", (self.node_of(fake), requires_grad))
        self.finish(node, "requires_grad_", fake)

    def refuse(
        self, id: str, what: str, hint: str = "", kind: type[Unsupported] = Unsupported
    ) -> NoReturn:
        raise refusal(id, what, self.line(), hint, kind)

    def line(self) -> SourceLine | None:
        lines, _ = self.stack()
        return lines[-1] if lines else None

    def finish(self, node: fx.Node, target: Any, value: Any) -> None:
        self.describe(node, target_name(target), value)
        self.calls.append(node)

    def describe(self, node: fx.Node, called: str, value: Any) -> None:
        """What every node carries: its value at compile time, and where it comes from."""
        node.meta["val"] = value
        node.meta["origins"] = frozenset({Origin(node.name, called, *self.stack())})

    def bind(self, value: Any, node: fx.Node) -> None:
        """The fakes of a result belong to its node, or to getitem nodes of it."""
        if isinstance(value, torch.Tensor):
            self.own(value, node)
        elif isinstance(value, tuple | list):
            for index, item in enumerate(value):
                if isinstance(item, torch.Tensor | tuple | list):
                    part = self.graph.call_function(operator.getitem, (node, index))
                    part.meta["val"], part.meta["origins"] = item, node.meta["origins"]
                    self.calls.append(part)
                    self.bind(item, part)
        elif value is not None and not is_constant(value):
            self.refuse("graph-value", f"a torch function gave a {type(value).__name__}")

    def lift(self, value: Any) -> Any:
        """A number, constant or tensor of a call's arguments as the graph writes it: tensors as nodes."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self.nodes:
                what = f"a tensor {value_text(value)} came from outside of the capture"
                self.refuse("graph-value", what)
            return self.node_of(value)
        if is_numpy_scalar(value):
            return value.item()
        if isinstance(value, SYMBOLIC):
            return self.size_node(value.node.expr)
        if is_constant(value):
            return value
        what = f"a {type(value).__name__} can't be an argument of a torch function in a graph"
        return self.refuse("graph-value", what)

    def size_node(self, expr: sympy.Basic) -> Any:
        """The node of a symbolic number: `x.size(0)` for a size, arithmetic on those otherwise."""
        if expr.is_number:
            return python_number(expr)
        assert self.sizes is not None
        key = self.graph, (expr := self.sizes.env.rooted(expr))
        if key not in self.size_nodes:
            if expr.is_integer and largest(expr) > LARGEST_INT64:  # Python's ints are larger
                return python_number(self.sizes.env.evaluate(expr))
            self.size_nodes[key] = self.size_call(expr, self.sizes)
        return self.size_nodes[key]

    def size_call(self, expr: sympy.Basic, sizes: SymbolicSizes) -> fx.Node:
        """The node that computes a size expression, or a placeholder."""
        if expr.is_Symbol:
            source = sizes.env.symbols[expr]
            if source.kind != "size":
                node = self.numbers[expr] = self.root.placeholder(str(expr))
                self.describe(node, "placeholder", sizes.numbers[source])
                return node
            tensor = next(i for i in self.inputs if i.source == source.base)
            op, target, args = "call_method", "size", (self.lift(tensor.value), source.key)
        else:
            _, target, parts = operation_of(expr)
            op, args = "call_function", tuple(map(self.size_node, parts))
        node = self.graph.create_node(op, target, args, {})
        self.finish(node, target, sizes.env.number(expr))
        return node

    # -- the end

    def build(self, outputs: Iterable[fx.Node], name: str) -> Graph:
        """The finished graph, its placeholders in the order of `inputs`."""
        tensors = [*self.inputs.values()]
        return finished(self.graph, [*tensors, *self.numbers.values()], outputs, name)
