"""`Tracer` of ATen operators: records what runs on fake tensors as a graph, below autograd.

Inside `with tracer.active():` every ATen operator that runs on fakes is recorded as a node, below
autograd: so the backward pass that the autograd engine runs is recorded just like the forward. A
table `id(tensor) -> node` is all it takes. The same class serves to rewrite graphs: copy some
nodes, and run plain Python functions in place of others.

Sizes: a SymInt argument becomes a node when first used (`sym_size`, `operator.mul`, ...), one per expression.
Floats known at run time (SymFloat) are inputs.

The real compiler: torch/fx/experimental/proxy_tensor.py.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from minicompile import compat
from minicompile.aot.decompositions.registry import Rule, rule_for
from minicompile.aot.layout import conform
from minicompile.errors import Unsupported
from minicompile.ops.graph import origins_of
from minicompile.ops.nodes import aten_ops
from minicompile.ops.origin import NO_ORIGINS, Origins, SourceLine
from minicompile.shapes.env import asking
from minicompile.shapes.symnode import SizeNodes

aten = torch.ops.aten

POSITIONS = aten_ops("select.int select_scatter.default slice.Tensor slice_scatter.default")
"""Their positions count from the end if negative."""


def signs_known(func: Any, args: Any) -> Any:
    """Arguments in which negative positions are numbers: kernels don't know a symbol's sign."""
    if func not in POSITIONS:
        return args
    return tuple(int(x) if isinstance(x, torch.SymInt) and x < 0 else x for x in args)


SPLITS = aten_ops("unbind split split_with_sizes")


def one_by_one(op: OpOverload) -> Rule | None:
    """Several views at once become single ones as they are traced: to these the inverses of views apply."""
    return rule_for(op, "prims") if op.overloadpacket in SPLITS else None


class Tracer(compat.TorchDispatchMode):
    """Records operators on fake tensors as nodes of `graph`.

    `rules` says which operators are replaced instead of recorded. `origins`, `phase` and `region` are given
    to new nodes; change them as you go.
    """

    def __init__(self, mode: Any, rules: Callable[[OpOverload], Rule | None] = one_by_one) -> None:
        super().__init__()
        self.mode, self.rules = mode, rules
        self.env = getattr(mode, "env", None)
        """The `ShapeEnv` of symbolic sizes, if there are any."""
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.sizes = SizeNodes(self.graph)
        self.origins: Origins = NO_ORIGINS
        self.phase: str | None = None
        self.region: str | None = None
        self.applied: dict[OpOverload, list[Origins]] = {}
        self.declined: dict[OpOverload, list[Origins]] = {}
        """The operators whose rules were called -> the origins of each call."""
        self.refused: set[OpOverload] = set()
        self._last_input: fx.Node | None = None
        self._bound: dict[int, tuple[torch.Tensor, fx.Node]] = {}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Operators called inside are recorded. Composite ones arrive as what they are made of."""
        # torch's Python kernels of composites: in C++ batch norm hides that it mutates
        kernels = compat.python_dispatcher(), compat.torch_kernels_as_in_eager()
        quiet = compat.quiet_fakes()  # the capture warned of what there is to warn of
        with self.mode, quiet, kernels[0], kernels[1], self, asking(self.env, self.asks):
            yield

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[None]:
        """The same for what becomes of a graph: its gradients and casts are in it, rules add none."""
        with torch.no_grad(), compat.without_autocast(), self.active():
            yield

    def asks(self) -> tuple[str, SourceLine | None]:
        """Who needs a fact about sizes right now, and the user's line."""
        lines = [origin.line for origin in sorted(self.origins) if origin.line is not None]
        return f"the {self.phase or 'compiled'} pass needs it", lines[0] if lines else None

    # Values and nodes

    def bind(self, value: Any, node: fx.Node) -> Any:
        """From now on `value` stands for `node`; elements of a tuple get their own `getitem` nodes.

        Gives the value that the node keeps in `meta["val"]`.
        """
        kept = value
        if isinstance(value, torch.Tensor):
            self._bound[id(value)] = (value, node)
        elif isinstance(value, torch.SymInt | torch.SymFloat):
            self.sizes.nodes.setdefault(value.node.expr, node)
        elif isinstance(value, tuple | list):
            made = partial(self.new_node, "call_function", operator.getitem)
            kept = tuple(
                v if v is None else self.bind(v, made((node, i))) for i, v in enumerate(value)
            )
        node.meta["val"] = kept
        return kept

    @property
    def meta(self) -> dict[str, Any]:
        """What new nodes remember."""
        return {"origins": self.origins, "phase": self.phase, "region": self.region}

    def follow(self, node: fx.Node) -> None:
        """New nodes come from where `node` came from."""
        self.origins, self.phase = origins_of(node), node.meta.get("phase")
        self.region = node.meta.get("region")

    def new_node(
        self, kind: str, target: Any, args: Any = (), kwargs: Any = None, name: str | None = None
    ) -> fx.Node:
        node = self.graph.create_node(kind, target, args, kwargs, name)
        node.meta.update(self.meta)
        return node

    def placeholder(self, name: str, value: Any) -> Any:
        with self.graph.inserting_after(self._last_input):
            node = self._last_input = self.new_node("placeholder", name)
        self.sizes.add_input(node, value)
        self.bind(value, node)
        return value

    def knows(self, value: Any) -> bool:
        return id(value) in self._bound

    def first_in_storage(self, storage: int) -> torch.Tensor:
        """The first recorded tensor in a piece of memory."""
        return next(
            value for value, _ in self._bound.values() if compat.storage_id(value) == storage
        )

    def argument(self, value: Any) -> Any:
        """What stands for a Python value in the graph: a node for tensors and symbolic sizes."""
        if isinstance(value, torch.Tensor):
            found = self._bound.get(id(value))
            return found[1] if found is not None else self._constant(value)
        if isinstance(value, torch.SymInt | torch.SymFloat):
            return self.sizes.argument(value.node.expr, value.node.shape_env, self.meta)
        return value

    def _constant(self, value: torch.Tensor) -> fx.Node:
        """A real tensor that the traced code made or held: scalars become `full`, others attributes."""
        if isinstance(value, compat.FakeTensor):
            raise Unsupported("a tensor appeared in the graph that no recorded operator made")
        if value.is_meta:
            raise Unsupported("a tensor without data appeared in the graph")
        if value.requires_grad:
            raise Unsupported("a tensor that requires grad is used without being a graph input")
        if value.numel() == 1 and not value.is_complex() and value.device.type == "cpu":
            with compat.no_dispatch_modes():
                arguments = (list(value.shape), value.item())
            options = {"dtype": value.dtype, "device": value.device}
            node = self.new_node("call_function", aten.full.default, arguments, options, "full")
        else:
            name = f"constant{len(self.constants)}"
            self.constants[name] = value
            node = self.new_node("get_attr", name)
        node.meta["val"] = self.mode.from_tensor(value)
        self._bound[id(value)] = (value, node)
        return node

    def copy(self, node: fx.Node, gm: fx.GraphModule, read: Callable[[fx.Node], Any]) -> Any:
        """Copy a node of `gm` with its value; `read` gives the values here of that graph's nodes."""
        value = node.meta["val"]
        if node.op == "placeholder":
            return self.placeholder(node.name, value)
        if node.op == "get_attr":
            self.constants[str(node.target)] = getattr(gm, str(node.target))
            self.bind(value, self.new_node("get_attr", node.target))
            return value
        if isinstance(value, torch.SymInt | torch.SymFloat):
            return value  # sizes become nodes again where they are used
        args: Any
        args, kwargs = fx.map_arg((node.args, node.kwargs), read)
        if node.target is operator.getitem:
            return args[0][args[1]]
        return self.record(node.target, args, kwargs, value)

    # Recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = signs_known(func, args), kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if func is aten._efficientzerotensor.default:  # a view of it would leave the trace
            func = aten.zeros.default
        with self:
            result = self.by_rule(func, args, kwargs)
        if result is not NotImplemented:
            expected = self.evaluate(func, args, kwargs)
            with self:
                return conform(func, result, expected)
        if compat.is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return self.record(func, args, kwargs, self.evaluate(func, args, kwargs))

    def by_rule(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The call by its operator's rule; NotImplemented where there is none, or it declines."""
        rule = self.rules(func)
        if rule is None:
            return NotImplemented
        result = rule(*args, **kwargs)
        counts = self.declined if result is NotImplemented else self.applied
        counts.setdefault(func, []).append(self.origins)
        return result

    def evaluate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the call's result on fakes; a mode of ours computes it once (compat/fakes.py)."""
        try:
            return func(*args, **kwargs)
        except (RuntimeError, LookupError, ValueError, TypeError, ArithmeticError) as error:
            text = str(error).partition("\nException raised from")[0]  # without torch's own stack
            raise Unsupported(f"{func} raises {type(error).__name__}: {text}") from error

    def record(self, func: Any, args: Any, kwargs: Any, value: Any) -> Any:
        """Append the call of `func`, whose result is `value`."""
        node_args, node_kwargs = compat.map_aggregate((args, kwargs), self.argument)
        name = func.overloadpacket.__name__.strip("_") if isinstance(func, OpOverload) else None
        node = self.new_node("call_function", func, node_args, dict(node_kwargs), name)
        self.bind(value, node)
        return value

    def finish(self, outputs: Any, name: str = "graph") -> fx.GraphModule:
        """Close the graph: it returns `outputs` (nested tuples of values)."""
        self.graph.output(compat.map_aggregate(outputs, self.argument))
        root = torch.nn.Module()
        for attribute, tensor in self.constants.items():
            root.register_buffer(attribute, tensor, persistent=False)
        return compat.graph_module(root, self.graph, name)
