"""A program to make smaller: a graph of torch's functions, and the arguments of its calls.

    Program := Graph, calls: ((TensorSpec | number, ...), ...)
    TensorSpec   := shape, strides, dtype, device of a tensor; its values, or None: random ones from a seed

A program is never changed; `part` and `edited` make others of it. `script` is one as a file that runs. The
real compiler: torch/_dynamo/debug_utils.py (InputWriter), torch/_functorch/fx_minifier.py.
"""

from __future__ import annotations

import functools
import math
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from minicompile import compat
from minicompile.debug.copies import same_random_state
from minicompile.ops.graph import Graph, argument_text, copies, output_node, placeholders, unpacks

SEED = 0


def tensor(
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    seed: int = 0,
    within: tuple[int, int] = (0, 1),
    values: Any = None,
    requires_grad: bool = False,
) -> Tensor:
    """A tensor that lies in memory as told: `values`, or random ones, integers from `within`."""
    if values is None:
        generator = torch.Generator().manual_seed(seed)
        if dtype.is_floating_point or dtype.is_complex:
            values = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
        else:
            low, high = within
            values = torch.randint(low, high + 1, tuple(shape), generator=generator)
    values = torch.as_tensor(values).to(device, dtype)
    result = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=device)
    target = result
    for dim, step in enumerate(stride):
        if step == 0 and shape[dim] > 1:  # the same element many times
            target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    target.copy_(values)
    return result.requires_grad_(requires_grad)


@dataclass(frozen=True)
class TensorSpec:
    """A tensor argument. `value` None: from its seed, the number of the argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool
    within: tuple[int, int] = (0, 1)
    """Of integers the least and the largest."""
    value: Tensor | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return replace(cls.like(tensor), value=tensor.detach().clone())

    @classmethod
    def like(cls, tensor: Tensor) -> TensorSpec:
        """Only the layout, also of a fake tensor; of integers their range."""
        shape, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
        if not is_simple(shape, stride):
            stride = torch.empty(shape, device="meta").stride()
        within = (0, 1)
        exact = not (tensor.is_floating_point() or tensor.is_complex())
        if exact and tensor.numel() and not isinstance(tensor, compat.FakeTensor):
            within = int(tensor.min()), int(tensor.max())
        return cls(shape, stride, tensor.dtype, str(tensor.device), tensor.requires_grad, within)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def arguments(self, number: int) -> dict[str, Any]:
        """What `tensor` is called with, apart from its defaults."""
        arguments: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        if self.value is not None:
            arguments["values"] = self.value
        elif self.dtype.is_floating_point or self.dtype.is_complex:
            arguments["seed"] = number
        else:
            arguments |= {"seed": number, "within": self.within}
        arguments["requires_grad"] = self.requires_grad
        plain = {"dtype": torch.float32, "device": "cpu", "requires_grad": False}
        return {name: v for name, v in arguments.items() if name not in plain or v != plain[name]}

    def make(self, number: int) -> Tensor:
        return tensor(self.shape, self.stride, **self.arguments(number))

    def text(self, number: int) -> str:
        """As Python: a call of `tensor`."""
        arguments = self.arguments(number)
        if "values" in arguments:
            arguments["values"] = arguments["values"].tolist()
        named = (f"{name}={literal(value)}" for name, value in arguments.items())
        return f"tensor({', '.join([str(self.shape), str(self.stride), *named])})"

    def sized(self, old: int, new: int) -> TensorSpec:
        """With `new` elements instead of `old` along a dimension, in the same order in memory."""
        if old not in self.shape:
            return self
        shape = tuple(new if size == old else size for size in self.shape)
        steps, step = list(self.stride), 1
        for dim in sorted(range(len(shape)), key=lambda d: (self.stride[d], -d)):
            if self.stride[dim]:
                steps[dim], step = step, step * shape[dim]
        value = self.value
        for dim, size in enumerate(self.shape if value is not None else ()):
            value = value.narrow(dim, 0, new) if size == old and value is not None else value
        return replace(self, shape=shape, stride=tuple(steps), value=value)


def literal(value: Any) -> str:
    """A value as Python; numbers that aren't finite need no import."""
    text = repr(value) if isinstance(value, list) else argument_text(value)
    return re.sub(r"(?<![\w'\"])(-?(?:inf|nan))(?![\w'\"])", r"float('\1')", text)


def is_simple(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Do no two elements share memory, but for those of a dimension with stride 0?"""
    end = 0
    for step, size in sorted(zip(stride, shape)):
        if step and size > 1:
            if step <= end:
                return False
            end += step * (size - 1)
    return True


def spec_of(value: Any) -> Any:
    """Return an argument as a program keeps it. Raises TypeError for what none can have."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise TypeError(f"a {value.layout} tensor")
        return TensorSpec.of(value)
    if isinstance(value, TensorSpec | bool | int | float | complex | None):
        return value
    raise TypeError(f"a {type(value).__name__}")


@dataclass(frozen=True, eq=False)
class Program:
    """A graph and the arguments of its calls."""

    graph: Graph
    calls: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, gm: fx.GraphModule, calls: Sequence[Sequence[Any]], name: str) -> Program:
        """Raises TypeError for arguments that no program can have."""
        specs = tuple(tuple(map(spec_of, args)) for args in calls)
        return cls(Graph(gm, name, "minify"), specs)

    @property
    def operations(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op not in ("placeholder", "output")]

    @property
    def outputs(self) -> list[fx.Node]:
        return list(dict.fromkeys(output_node(self.graph.gm.graph).all_input_nodes))

    @functools.cached_property
    def size(self) -> tuple[int, ...]:
        """What is to be made small, the most important first."""
        tensors = [value for args in self.calls for value in args if isinstance(value, TensorSpec)]
        return (
            *(len(self.calls), sum(not unpacks(node) for node in self.operations)),
            *(len(self.operations), len(self.outputs), len(self.calls[0])),
            *(sum(t.elements for t in tensors), sum(t.requires_grad for t in tensors)),
            sum(t.value is not None for t in tensors),
        )

    @property
    def key(self) -> str:
        """All that decides how it runs."""
        return f"{self.graph.gm.code}{self.calls}"

    def arguments(self) -> list[list[Any]]:
        """New ones for each call."""
        return [
            [
                value.make(n) if isinstance(value, TensorSpec) else value
                for n, value in enumerate(args)
            ]
            for args in self.calls
        ]

    @functools.cached_property
    def values(self) -> list[Mapping[fx.Node, Any]]:
        """Run the graph in eager; return each node's result for each call, tensors as `TensorSpec`."""
        values: list[Mapping[fx.Node, Any]] = []
        for args in self.arguments():
            record = Recording(self.graph.gm)
            with same_random_state():
                torch.manual_seed(SEED)
                record.run(*args)
            values.append(record.values)
        return values

    def shown(self) -> Graph:
        """The graph with the values' types."""
        for node in self.graph.nodes:
            if node in self.values[0]:
                node.meta["val"] = compat.tree_map(typed, self.values[0][node])
        return self.graph

    # -- others made of it

    def part(self, kept: Collection[fx.Node], outputs: Collection[fx.Node] = ()) -> Program | None:
        """Only these operations; what they read besides becomes an input, with the values it has.

        Without `outputs`, those that are left; if none is, what nobody reads. None if a value can't be
        an input.
        """
        old = placeholders(self.graph.gm.graph)
        used = {u for node in kept for u in node.all_input_nodes if u not in kept}
        inputs = [
            *(node for node in old if node in used),
            *(n for n in self.operations if n in used),
        ]
        try:
            calls = tuple(
                tuple(
                    args[old.index(node)] if node in old else spec_of(values[node])
                    for node in inputs
                )
                for args, values in zip(self.calls, self.values, strict=True)
            )
        except TypeError:
            return None
        ordered = [node for node in self.operations if node in kept]
        results = [node for node in outputs or self.outputs if node in kept]
        if not results:
            read = {u for node in ordered for u in node.all_input_nodes}
            tensors = (n for n in ordered if isinstance(self.values[0].get(n), TensorSpec))
            results = [node for node in tensors if node not in read]
        return self.with_graph(subgraph(inputs, ordered, results), calls)

    def edited(self, change: Callable[[fx.Graph, Mapping[fx.Node, fx.Node]], object]) -> Program:
        """With a copy of the graph that `change` edits; it also gets each node's copy."""
        graph, new = copies(self.graph.gm.graph)
        change(graph, new)
        return self.with_graph(graph, self.calls)

    def with_graph(self, graph: fx.Graph, calls: tuple[tuple[Any, ...], ...]) -> Program:
        gm = fx.GraphModule(self.graph.gm, graph, self.graph.name)
        return Program(Graph(gm, self.graph.name, self.graph.made_by), calls)

    # -- as a file

    def script(self, why: str, settings: Mapping[str, Any]) -> str:
        """A Python file that runs the program as the failure was seen: exit code 1 while it fails."""
        code = self.graph.gm.graph.python_code("self")
        body = re.sub(r";  [\w = ]+ = None( *#.*)?$", "", code.src.strip(), flags=re.MULTILINE)
        body = "\n".join(f"    {line}".rstrip() for line in body.splitlines())
        imports = [f"{line}\n" for line in sorted(imported(code.globals, body))]
        calls = "".join(
            "    [\n"
            + "".join(f"        {text(n, value)},\n" for n, value in enumerate(args))
            + "    ],\n"
            for args in self.calls
        )
        passed = ", ".join(["Program()", "CALLS", *(f"{k}={v!r}" for k, v in settings.items())])
        why = "\n".join(f"# {line}" for line in why.splitlines())  # a comment can't end early
        return SCRIPT.format(
            why=why, imports="".join(imports), body=body, calls=calls, passed=passed
        )


def subgraph(
    inputs: Sequence[fx.Node], operations: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.Graph:
    """Some operations as a graph of their own: what it takes, does and gives."""
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        new[node] = graph.placeholder(node.name)
    for node in operations:
        new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[node] for node in outputs))
    return graph


def text(number: int, value: Any) -> str:
    return value.text(number) if isinstance(value, TensorSpec) else literal(value)


def typed(value: Any) -> Any:
    """A tensor of that type without memory."""
    if not isinstance(value, TensorSpec):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


SCRIPT = '''"""Exit code 1 while it fails.

`minicompile bisect` finds the culprit, `minicompile minify` makes it smaller.
"""

{why}

import sys

import torch

from minicompile.debug.minify import failing
from minicompile.debug.program import tensor
{imports}

class Program(torch.nn.Module):
{body}


CALLS = [
{calls}]

if __name__ == "__main__":
    sys.exit(failing({passed}))
'''


def imported(names: Mapping[str, Any], body: str) -> Iterator[str]:
    """The lines that import a graph's names."""
    for name, value in names.items():
        if name == "torch" or not re.search(rf"\b{re.escape(name)}\b", body):
            continue
        if isinstance(value, types.ModuleType):
            yield f"import {value.__name__}" + f" as {name}" * (value.__name__ != name)
        elif isinstance(value, float):
            yield f"{name} = float({str(value)!r})"
        elif value is type(None):
            yield f"{name} = type(None)"
        elif "<" in value.__qualname__:
            yield f"{name} = None  # a function inside of another one: write it here"
        else:
            yield f"from {value.__module__} import {value.__qualname__} as {name}"


class Recording(fx.Interpreter):
    """Runs a graph and keeps what each node gave."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op != "output":
            self.values[n] = compat.tree_map(
                lambda x: TensorSpec.of(x) if isinstance(x, Tensor) else x, value
            )
        return value
