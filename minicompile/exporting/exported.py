"""`Exported`: a program as one graph, with what it needs and what it asks of its arguments.

    Exported  := graph, Signature, [Constraint], state, shape_env | None, call, structure
    Signature := inputs: [InputSpec] (state first, then arguments), outputs: [OutputSpec] (results, then
                 what state and arguments hold afterwards)
    graph     : functional Core ATen; a placeholder's `meta["val"]` says in which layout it comes

A call checks the conditions, runs the graph with eager's operators, and writes back what the program changes.
The real compiler: torch/export/exported_program.py, torch/export/graph_signature.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from minicompile import compat
from minicompile.aot.runtime import interpret
from minicompile.errors import ExportError
from minicompile.exporting.conditions import Expression
from minicompile.ops.display import Shown, bytes_text, count_text
from minicompile.ops.graph import Graph, placeholders
from minicompile.shapes.symnode import size_expr


@dataclass(frozen=True)
class InputSpec:
    """A placeholder: its name, and what it stands for: a tensor of the state by its qualified name, or a part
    of the arguments by its path (`batch['ids']`)."""

    kind: Literal["parameter", "buffer", "constant", "input"]
    name: str
    target: str

    def __str__(self) -> str:
        return f"{self.name}: {self.kind} {self.target}"


@dataclass(frozen=True)
class OutputSpec:
    """An output of the graph: the name of its node, and what it is: `result[0]` in the structure of the
    results, or the new contents of the input `target`."""

    kind: Literal["result", "mutation"]
    name: str
    target: str

    def __str__(self) -> str:
        return f"{self.name}: {self.kind} {self.target}"


@dataclass(frozen=True)
class Signature(Shown):
    """What the graph takes and gives, in order."""

    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]

    @property
    def mutated(self) -> list[InputSpec]:
        """The inputs whose contents the program changes, in the order of the outputs."""
        changed = [spec.target for spec in self.outputs if spec.kind == "mutation"]
        return [next(i for i in self.inputs if i.target == target) for target in changed]

    def __str__(self) -> str:
        takes, gives = (count_text(len(x), "value") for x in (self.inputs, self.outputs))
        lines = [f"takes {takes}, gives {gives}"]
        lines += [f"  input  {spec}" for spec in self.inputs]
        return "\n".join([*lines, *(f"  output {spec}" for spec in self.outputs)])


@dataclass(frozen=True)
class Constraint(Shown):
    """What must hold of the arguments of each call: the condition, why, and the user's line that needs it."""

    condition: str
    reason: str
    line: str = ""

    @functools.cached_property
    def expression(self) -> Expression:
        return Expression(self.condition)

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raises ExportError if it doesn't hold."""
        if not self.expression.holds(arguments):
            found, at = self.expression.found(arguments), f"\n  at {self.line}" if self.line else ""
            why = f"\n  because: {self.reason}{at}"
            raise ExportError(f"needs {self.condition}, but {found}{why}")

    def __str__(self) -> str:
        return f"{self.condition}  # {self.reason}" + (f" ({self.line})" if self.line else "")


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
    classes: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The classes that `structure` names."""

    def __post_init__(self) -> None:
        nodes = placeholders(self.graph.gm.graph)
        self.run = interpret(self.graph)
        self.paths = [
            None if spec.kind != "input" else Expression(spec.target)
            for spec in self.signature.inputs
        ]
        self.layouts = [node.meta["val"] for node in nodes]
        self.result = Expression(self.structure)

    def arguments(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """A call's arguments by name, checked. Raises ExportError."""
        return bound_arguments(self, args, kwargs)

    def inputs(self, arguments: Mapping[str, Any]) -> list[torch.Tensor]:
        """The graph's inputs, before they are laid out. Raises ExportError if one that changes shares memory
        with another."""
        given: list[torch.Tensor] = []
        for spec, path in zip(self.signature.inputs, self.paths, strict=True):
            given.append(self.state[spec.target] if path is None else path(arguments))
        named = zip((spec.target for spec in self.signature.inputs), given)
        check_memory(self.name, named, {spec.target for spec in self.signature.mutated})
        return given

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self.arguments(*args, **kwargs)
        given = self.inputs(arguments)
        by_target = {s.target: x for s, x in zip(self.signature.inputs, given, strict=True)}
        with torch.no_grad(), compat.without_autocast():
            values = list(self.run(self.laid_out(given)))
            for spec, value in zip(self.signature.outputs, values, strict=True):
                if spec.kind == "mutation":
                    by_target[spec.target].copy_(value)
        results = values[: len(values) - len(self.signature.mutated)]
        return self.result({**arguments, **self.classes, "result": results})

    def laid_out(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """The inputs in the layout that the graph was made for; copies where they have another."""
        sizes = {
            size_expr(size): actual
            for like, value in zip(self.layouts, given)
            for size, actual in zip(like.shape, value.shape)
        }
        laid = []
        for like, value in zip(self.layouts, given):
            strides = tuple(int(as_number(stride, sizes)) for stride in like.stride())
            value = value.detach().resolve_conj().resolve_neg()
            if value.stride() != strides:
                like = torch.empty_strided(
                    value.shape, strides, dtype=value.dtype, device=value.device
                )
                value = like.copy_(value)
            laid.append(value)
        return laid

    def __str__(self) -> str:
        total = sum(value.nbytes for value in self.state.values())
        about = f"{count_text(self.graph.op_count, 'operation')}, {bytes_text(total)} of state"
        lines = [
            f"export of {self.name}: {about}, {count_text(len(self.constraints), 'constraint')}"
        ]
        lines += ["", str(self.graph), "", f"{self.name}{self.call} returns {self.structure}"]
        lines += ["", str(self.signature), "", "each call must fulfil:"]
        return "\n".join([*lines, *(f"  {c}" for c in self.constraints)])


def as_number(size: Any, sizes: Mapping[Any, int]) -> Any:
    """A size or stride for the sizes at hand."""
    expr = size_expr(size)
    return expr if isinstance(expr, int) else expr.xreplace(sizes)


def check_memory(
    name: str, inputs: Iterable[tuple[str, torch.Tensor]], changed: Collection[str]
) -> None:
    """Raises ExportError if an input that the program changes shares memory with another."""
    owners: dict[int, str] = {}
    for target, value in inputs:
        other = owners.setdefault(compat.storage_id(value), target)
        if other != target and (other in changed or target in changed):
            both = f"{other} and {target} share memory"
            raise ExportError(f"{name}: {both}, and one of them is changed")


class Called(Protocol):
    """What it takes to check a call: an export has it, and a package."""

    name: str
    call: inspect.Signature
    constraints: Sequence[Constraint]


def bound_arguments(
    program: Called, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """A call's arguments by name, checked. Raises ExportError."""
    try:
        bound = program.call.bind(*args, **kwargs)
    except TypeError as error:
        raise ExportError(f"{program.name}{program.call}: {error}") from None
    bound.apply_defaults()
    for constraint in program.constraints:
        try:
            constraint.check(bound.arguments)
        except ExportError as error:
            raise ExportError(f"{program.name} {error}") from None
    return bound.arguments
