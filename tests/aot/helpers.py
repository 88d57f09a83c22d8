"""Graphs as capture makes them: torch-level calls, parameters as inputs, fakes, one origin per call."""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from minicompile import compat
from minicompile.aot.autograd import ahead_of_time
from minicompile.aot.result import AotResult
from minicompile.aot.runtime import interpret, make_callable
from minicompile.ops.graph import Graph
from minicompile.ops.origin import Origin, SourceLine
from minicompile.options import Options
from minicompile.shapes.env import ShapeEnv
from tests.comparing import assert_as_eager

Dynamic = dict[tuple[int, int], str]
"""(input, dimension) -> name of its symbol; equal names share one. A number has dimension 0."""


QUERIES = ("__get__", "size", "dim", "stride", "numel", "is_floating_point", "is_contiguous")


class Recorder(TorchFunctionMode):
    """Writes down torch-level calls while a function runs on fakes."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.nodes: dict[int, tuple[Any, fx.Node]] = {}

    def bind(self, value: Any, node: fx.Node) -> None:
        if isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat):
            self.nodes.setdefault(id(value), (value, node))
        elif isinstance(value, tuple | list):
            for index, part in enumerate(value):
                getitem = self.graph.call_function(operator.getitem, (node, index))
                getitem.meta.update(node.meta)
                self.bind(part, getitem)

    def argument(self, value: Any) -> Any:
        return self.nodes[id(value)][1] if id(value) in self.nodes else value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, torch.Tensor) and getattr(func, "__name__", "") in QUERIES:
            return result
        node_args, node_kwargs = compat.map_aggregate(
            (tuple(args), dict(kwargs or {})), self.argument
        )
        if getattr(func, "__name__", "") == "__get__":  # a property such as x.T
            func, node_args = getattr, (node_args[0], func.__self__.__name__)
        with warnings.catch_warnings():  # fx has other ideas about SymInt arguments
            warnings.simplefilter("ignore")
            node = self.graph.call_function(func, node_args, dict(node_kwargs))
        line = SourceLine("user.py", len(self.graph.nodes), "fn")
        node.meta["origins"] = frozenset(
            {Origin(node.name, str(getattr(func, "__name__", func)), (line,))}
        )
        self.bind(result, node)
        return result


def make_fakes(inputs: list[Any], mode: Any, sizes: Callable[[int, int, int], Any]) -> list[Any]:
    fakes: list[Any] = []
    addresses = [
        v.untyped_storage().data_ptr() if isinstance(v, torch.Tensor) and v.numel() else None
        for v in inputs
    ]
    memory: dict[Any, torch.Tensor] = {}
    for position, value in enumerate(inputs):
        address = addresses[position]
        if address is not None and addresses.count(address) > 1:
            if address not in memory:
                count = value.untyped_storage().nbytes() // value.element_size()
                memory[address] = compat.new_fake(mode, (count,), (1,), value.dtype, value.device)
            fakes.append(
                memory[address].as_strided(value.shape, value.stride(), value.storage_offset())
            )
            continue
        if not isinstance(value, torch.Tensor):
            fakes.append(sizes(position, 0, value))
            continue
        shape = [sizes(position, dim, size) for dim, size in enumerate(value.shape)]
        strides: list[Any] = list(value.stride())
        if any(isinstance(size, torch.SymInt) for size in shape):
            assert value.is_contiguous()
            for dim in range(len(shape) - 2, -1, -1):
                strides[dim] = strides[dim + 1] * shape[dim + 1]
        fake = compat.new_fake(
            mode, shape, strides, value.dtype, value.device, value.storage_offset()
        )
        fakes.append(fake.requires_grad_(value.requires_grad))
    return fakes


def capture(
    fn: Callable[..., Any], inputs: list[Any], dynamic: Dynamic | None = None
) -> tuple[Graph, list[Any], Any]:
    """(torch-level graph, fakes, shape_env)."""
    env = ShapeEnv() if dynamic else None
    mode = compat.fake_mode(symbolic=dynamic is not None)
    symbols: dict[str, Any] = {}

    def size_of(position: int, dim: int, size: int) -> Any:
        name = (dynamic or {}).get((position, dim))
        if name is None or env is None:
            return size
        if name not in symbols and isinstance(size, float):
            symbols[name] = env.create_float(size, f"inputs[{position}]")
        elif name not in symbols:
            symbols[name] = env.create_symbol(size, f"inputs[{position}].size({dim})")
        return symbols[name]

    recorder = Recorder()
    trial = make_fakes(inputs, mode, size_of)
    for position, fake in enumerate(trial):
        node = recorder.graph.placeholder(f"x{position}")
        node.meta["origins"] = frozenset(
            {Origin(node.name, "input", (SourceLine("user.py", 1, "fn"),))}
        )
        recorder.bind(fake, node)
    # the composites in C++ of torch 2.11 ask for plain sizes
    with mode, recorder, compat.python_dispatcher() if dynamic else contextlib.nullcontext():
        result = fn(*trial)
    result = result if isinstance(result, tuple | list) else (result,)
    recorder.graph.output(tuple(recorder.argument(value) for value in result))
    gm = fx.GraphModule(torch.nn.Module(), recorder.graph)
    return Graph(gm, "captured", "test"), make_fakes(inputs, mode, size_of), env


def module_function(module: torch.nn.Module) -> tuple[Callable[..., Any], list[Any]]:
    """(function of parameters and buffers, then inputs; the parameters and buffers)."""
    named = dict(module.named_parameters()) | dict(module.named_buffers())

    def fn(*args: Any) -> Any:
        return functional_call(module, dict(zip(named, args)), args[len(named) :])

    return fn, list(named.values())


def compile_aot(
    fn: Callable[..., Any],
    inputs: list[Any],
    *,
    training: bool | None = None,
    dynamic: Dynamic | None = None,
    options: Options | None = None,
) -> tuple[Callable[[list[Any]], list[Any]], AotResult]:
    """fn through the AOT room, its graphs run by eager operators; and the AotResult."""
    graph, fakes, env = capture(fn, inputs, dynamic)
    if training is None:
        training = torch.is_grad_enabled() and any(
            isinstance(v, torch.Tensor) and v.requires_grad for v in inputs
        )
    result = ahead_of_time(graph, fakes, options or Options(), training=training, shape_env=env)
    backward = interpret(result.backward) if result.backward is not None else None
    return make_callable(result, interpret(result.forward), backward), result


def listed(fn: Callable[..., Any]) -> Callable[..., list[Any]]:
    """The function with its results in a list, as `compile_aot`'s has them."""

    def call(*args: Any) -> list[Any]:
        results = fn(*args)
        return [*results] if isinstance(results, tuple | list) else [results]

    return call


def assert_aot_as_eager(
    call: Callable[[list[Any]], list[Any]], fn: Callable[..., Any], *args: Any, **tolerance: float
) -> None:
    """What `compile_aot` gave for a function is as the function."""
    assert_as_eager(listed(lambda *given: call([*given])), listed(fn), *args, **tolerance)
