"""A program to make smaller: a graph of torch's functions, and the arguments of a call.

    GraphCall  := Graph, args: (TensorSpec | number, ...)
    TensorSpec := shape, strides, dtype, device of a tensor; its values, or None: random ones from a seed

A program is never changed; `part` and `edited` make others of it. `script` is one as a file that runs. The
real compiler: torch/_dynamo/debug_utils.py (InputWriter), torch/_functorch/fx_minifier.py.
"""

from __future__ import annotations

import functools
import math
import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from minicompile import compat
from minicompile.debug.program_copies import same_random_state
from minicompile.ops.graph import Graph, argument_text, copies, output_node, placeholders, unpacks


def tensor(
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    seed: int = 0,
    values: Any = None,
    requires_grad: bool = False,
) -> Tensor:
    """A tensor with these strides: `values`, or random ones; integers are 0 and 1."""
    if values is None:
        generator = torch.Generator().manual_seed(seed)
        if dtype.is_floating_point or dtype.is_complex:
            values = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
        else:
            values = torch.randint(0, 2, tuple(shape), generator=generator)
    values = torch.as_tensor(values).to(device, dtype)
    result = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=device)
    places = torch.zeros(tuple(shape), dtype=torch.int64, device=device)
    for dim, (size, step) in enumerate(zip(shape, stride)):
        steps = step * torch.arange(size, device=device)
        places += steps.reshape(-1, *[1] * (len(shape) - dim - 1))
    if values.numel():  # elements may share memory
        result.as_strided((int(places.max()) + 1,), (1,))[places] = values
    return result.requires_grad_(requires_grad)


@dataclass(frozen=True)
class TensorSpec:
    """A tensor argument. `value` None: from its seed, the number of the argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool
    value: Tensor | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Keep also the values, unless the tensor is a fake one. Raises TypeError for a sparse tensor."""
        if tensor.layout is not torch.strided:
            raise TypeError(f"a {tensor.layout} tensor")
        shape, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
        value = None if isinstance(tensor, compat.FakeTensor) else tensor.detach().clone()
        return cls(shape, stride, tensor.dtype, str(tensor.device), tensor.requires_grad, value)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def arguments(self, number: int) -> dict[str, Any]:
        """What `tensor` is called with, apart from its defaults."""
        arguments: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        arguments |= {"seed": number} if self.value is None else {"values": self.value}
        arguments["requires_grad"] = self.requires_grad
        plain = {"dtype": torch.float32, "device": "cpu", "requires_grad": False}
        return {name: v for name, v in arguments.items() if name not in plain or v != plain[name]}

    def make(self, number: int) -> Tensor:
        return tensor(self.shape, self.stride, **self.arguments(number))

    def text(self, number: int) -> str:
        """As Python: a call of `tensor`."""
        arguments = self.arguments(number)
        if self.value is not None:
            arguments["values"] = self.value.tolist()
        named = (f"{name}={value!r}" for name, value in arguments.items())
        return f"tensor({', '.join([str(self.shape), str(self.stride), *named])})"


def spec_of(value: Any) -> Any:
    """Return an argument as a program keeps it. Raises TypeError for what none can have."""
    if isinstance(value, Tensor):
        return TensorSpec.of(value)
    if isinstance(value, TensorSpec | bool | int | float | complex | None):
        return value
    raise TypeError(f"a {type(value).__name__}")


def text(number: int, value: Any) -> str:
    return value.text(number) if isinstance(value, TensorSpec) else argument_text(value)


@dataclass(frozen=True, eq=False)
class GraphCall:
    """A graph and the arguments of a call."""

    graph: Graph
    args: tuple[Any, ...]

    @classmethod
    def of(cls, gm: fx.GraphModule, args: Sequence[Any], name: str) -> GraphCall:
        """Raises TypeError for arguments that no program can have."""
        return cls(Graph(gm, name, "minify"), tuple(map(spec_of, args)))

    @property
    def operations(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op not in ("placeholder", "output")]

    @property
    def outputs(self) -> list[fx.Node]:
        return list(dict.fromkeys(output_node(self.graph.gm.graph).all_input_nodes))

    @functools.cached_property
    def size(self) -> tuple[int, ...]:
        """Operations, outputs, inputs, elements, gradients, kept values: the most important first."""
        tensors = [value for value in self.args if isinstance(value, TensorSpec)]
        return (
            sum(not unpacks(node) for node in self.operations),
            len(self.outputs),
            len(self.args),
            sum(t.elements for t in tensors),
            sum(t.requires_grad for t in tensors),
            sum(t.value is not None for t in tensors),
        )

    @property
    def key(self) -> str:
        """All that decides how it runs."""
        return f"{self.graph.gm.code}{self.args}"

    def arguments(self) -> list[Any]:
        """New ones for a call."""
        return [v.make(n) if isinstance(v, TensorSpec) else v for n, v in enumerate(self.args)]

    @functools.cached_property
    def values(self) -> Mapping[fx.Node, Any]:
        """Run the graph in eager; return each node's result, tensors as `TensorSpec`."""
        record = fx.Interpreter(self.graph.gm, garbage_collect_values=False)
        with same_random_state():
            torch.manual_seed(0)
            record.run(*self.arguments())

        def spec(value: Any) -> Any:
            return TensorSpec.of(value) if isinstance(value, Tensor) else value

        return {node: compat.tree_map(spec, record.env[node]) for node in self.operations}

    # -- others made of it

    def part(
        self, kept: Collection[fx.Node], outputs: Collection[fx.Node] = ()
    ) -> GraphCall | None:
        """Only these operations; what they read besides becomes an input, with the value it has.

        Without `outputs`, those that are left; if none is, what nobody reads. None if a value can't be
        an input.
        """
        read = {used for node in kept for used in node.all_input_nodes}
        given = dict(zip(placeholders(self.graph.gm.graph), self.args))
        inputs = [node for node in self.graph.nodes if node in read and node not in kept]
        try:
            args = tuple(given[n] if n in given else spec_of(self.values[n]) for n in inputs)
        except TypeError:
            return None
        ordered = [node for node in self.operations if node in kept]
        results = [node for node in outputs or self.outputs if node in kept] or [
            node
            for node in ordered
            if isinstance(self.values.get(node), TensorSpec) and node not in read
        ]
        graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in inputs:
            new[node] = graph.placeholder(node.name)
            new[node].meta.update(node.meta)
        for node in ordered:
            new[node] = graph.node_copy(node, new.__getitem__)
        graph.output(tuple(new[node] for node in results))
        return self.with_graph(graph, args)

    def edited(self, change: Callable[[fx.Graph, Mapping[fx.Node, fx.Node]], object]) -> GraphCall:
        """With a copy of the graph that `change` edits; it also gets each node's copy."""
        graph, new = copies(self.graph.gm.graph)
        change(graph, new)
        return self.with_graph(graph, self.args)

    def with_graph(self, graph: fx.Graph, args: tuple[Any, ...]) -> GraphCall:
        gm = fx.GraphModule(self.graph.gm, graph, self.graph.name)
        return GraphCall(Graph(gm, self.graph.name, self.graph.made_by), args)

    # -- as a file

    def script(self, why: str, settings: Mapping[str, Any]) -> str:
        """A Python file that runs the program as the failure was seen: exit code 1 while it fails."""
        code = self.graph.gm.graph.python_code("self")
        body = "\n".join(f"    {line}".rstrip() for line in code.src.strip().splitlines())
        args = "".join(f"    {text(n, value)},\n" for n, value in enumerate(self.args))
        passed = "".join(f", {k}={v!r}" for k, v in settings.items())
        why = "\n".join(f"# {line}" for line in why.splitlines())  # a comment can't end early
        names = "".join(
            f"{imported(name, value)}\n"
            for name, value in code.globals.items()
            if name not in ("torch", "inf", "nan") and re.search(rf"\b{re.escape(name)}\b", body)
        )
        return SCRIPT.format(why=why, imports=names, body=body, args=args, passed=passed)


SCRIPT = '''"""Exit code 1 while it fails.

`minicompile bisect` finds the culprit, `minicompile minify` makes it smaller.
"""

{why}

import sys

import torch
from torch import inf, nan

from minicompile.debug.minify import failing
from minicompile.debug.program import tensor
{imports}

class FailingGraph(torch.nn.Module):
{body}


ARGS = [
{args}]

if __name__ == "__main__":
    sys.exit(failing(FailingGraph(), ARGS{passed}))
'''


def imported(name: str, value: Any) -> str:
    """The line that gives a graph's code one of its names."""
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__}" + f" as {name}" * (value.__name__ != name)
    if value is type(None):
        return f"{name} = type(None)"
    if "<" in value.__qualname__:
        return f"{name} = None  # a function inside of another one: write it here"
    return f"from {value.__module__} import {value.__qualname__} as {name}"
