"""`Exported`: a program as one graph, with what it needs and what it asks of its arguments.

    Exported  := graph, Signature, [Constraint], state, shape_env | None, call, structure
    Signature := inputs: [InputSpec], outputs: [OutputSpec] (results, then what inputs hold afterwards)
    graph     : functional Core ATen

A call checks the conditions, runs the graph with eager's operators, and writes back what the program changes.
The real compiler: torch/export/exported_program.py, torch/export/graph_signature.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from minicompile import compat
from minicompile.aot.runtime import interpret
from minicompile.errors import ExportError
from minicompile.exporting.conditions import Constraint, evaluate, plain
from minicompile.ops.display import Shown, count_text
from minicompile.ops.graph import Graph


@dataclass(frozen=True)
class InputSpec:
    """A placeholder: its name, and what it stands for: a tensor of the state by its qualified name, or a part
    of the arguments by its path (`batch['ids']`)."""

    kind: Literal["parameter", "buffer", "constant", "input"]
    name: str
    target: str


@dataclass(frozen=True)
class OutputSpec:
    """An output of the graph: the name of its node, and what it is: `result[0]` in the structure of the
    results, or the new contents of the input `target`."""

    kind: Literal["result", "mutation"]
    name: str
    target: str


@dataclass(frozen=True)
class Signature(Shown):
    """What the graph takes and gives, in order."""

    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]

    @property
    def mutated(self) -> list[str]:
        """The inputs whose contents the program changes, in the order of the outputs."""
        return [spec.target for spec in self.outputs if spec.kind == "mutation"]

    def __str__(self) -> str:
        specs: list[InputSpec | OutputSpec] = [*self.inputs, *self.outputs]
        head = f"takes {len(self.inputs)} values, gives {len(self.outputs)}"
        return "\n".join([head, *(f"  {s.name}: {s.kind} {s.target}" for s in specs)])


@dataclass(eq=False)
class Exported(Shown):
    """A program that was exported: `mc.export(fn, args)`.

    A call gives what the function gave, as under `torch.no_grad()`. Raises ExportError, before anything runs,
    for arguments that do not fulfil the constraints.
    """

    name: str
    graph: Graph
    signature: Signature
    constraints: Sequence[Constraint]
    state: dict[str, torch.Tensor]
    """Parameters, buffers and constants by qualified name. They share memory with those of the module, but
    for those that the program changes, which are copies."""
    shape_env: Any
    """The `ShapeEnv` of symbolic sizes; None if there are none."""
    call: inspect.Signature
    """How it is called; defaults are constants."""
    structure: str
    """How results are put together from the outputs: an expression."""

    def __post_init__(self) -> None:
        self.run = interpret(self.graph)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = bound_arguments(self, args, kwargs)
        inputs = {
            s.target: evaluate(s.target, arguments) if s.kind == "input" else self.state[s.target]
            for s in self.signature.inputs
        }
        check_memory(self.name, inputs, self.signature.mutated)
        with torch.no_grad(), compat.without_autocast():
            laid = [
                plain(inputs[s.target]) if s.kind == "input" else inputs[s.target]
                for s in self.signature.inputs
            ]
            values = list(self.run(laid))
            results = values[: len(values) - len(self.signature.mutated)]
            for target, value in zip(self.signature.mutated, values[len(results) :], strict=True):
                inputs[target].copy_(value)
        return evaluate(self.structure, {**arguments, "result": results})

    def __str__(self) -> str:
        about = count_text(self.graph.op_count, "operation")
        lines = [
            f"export of {self.name}: {about}, {count_text(len(self.state), 'tensor')} of state"
        ]
        lines += ["", str(self.graph), "", f"{self.name}{self.call} returns {self.structure}"]
        lines += ["", str(self.signature), "", "each call must fulfil:"]
        return "\n".join([*lines, *(f"  {c}" for c in self.constraints)])


def check_memory(name: str, inputs: Mapping[str, torch.Tensor], changed: Sequence[str]) -> None:
    """Raise ExportError if an input that the program changes shares memory with another."""
    owners: dict[int, str] = {}
    for target, value in inputs.items():
        other = owners.setdefault(compat.storage_id(value), target)
        if other != target and (other in changed or target in changed):
            both = f"{other} and {target} share memory"
            raise ExportError(f"{name}: {both}, and one of them is changed")


def bound_arguments(program: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of an export or package by name, checked. Raises ExportError."""
    try:
        bound = program.call.bind(*args, **kwargs)
        bound.apply_defaults()
        for constraint in program.constraints:
            constraint.check(bound.arguments)
    except (TypeError, ExportError) as error:
        raise ExportError(f"{program.name}{program.call}: {error}") from None
    return dict(bound.arguments)
