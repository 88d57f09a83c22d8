"""`mc.operator_accuracy(fn, *args)`: after each captured operator, every stage's error against float64.

    OperatorAccuracy := name, rows: [OperatorRow], first: (stage, OperatorRow) | None
    OperatorRow      := operator, user's line, allowed error, errors: {stage: error}

A stage runs the captured graphs with the value of every operator as a result; it may err ten times as much
as eager, or by ten roundings of the largest value, whichever is more. Where the operators are right one by
one and the whole isn't, what made them one kernel is at fault: `mc.bisect` finds that. Gradients aren't
compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from minicompile.debug.limit import Limit
from minicompile.debug.minify import captured_programs
from minicompile.debug.program import GraphCall, TensorSpec
from minicompile.debug.variant import (
    EAGER,
    FAR,
    REFERENCE,
    Case,
    VariantRun,
    distance,
    error_text,
)
from minicompile.ops.display import Shown, aligned
from minicompile.ops.graph import call_text, user_line

STAGES: dict[str, tuple[Limit, dict[str, Any]]] = {
    "captured": (Limit("eager"), {}),
    "functional": (Limit("aot_eager", "decomposition", "<", 0), {}),
    "decomposed": (Limit("aot_eager"), {}),
    "loops": (Limit(), {"device_codegen": "reference"}),
    "kernels": (Limit(), {}),
}
"""A limit of the compiler, and options that are changed."""


@dataclass(frozen=True)
class OperatorRow:
    """One operator; errors are the largest absolute ones."""

    operator: str
    line: str
    allowed: float
    errors: Mapping[str, float]

    def cells(self) -> tuple[str, ...]:
        errors = [error_text(error) for error in self.errors.values()]
        return self.operator, error_text(self.allowed), *errors


@dataclass(frozen=True)
class OperatorAccuracy(Shown):
    """Every operator in order."""

    name: str
    rows: tuple[OperatorRow, ...]

    HEAD = ("operator", "allowed", EAGER, *STAGES)

    @property
    def first(self) -> tuple[str, OperatorRow] | None:
        """The first stage that errs more than is allowed, and the first operator at which it does."""
        for name in STAGES:
            for row in self.rows:
                if row.errors[name] > row.allowed:
                    return name, row
        return None

    @property
    def verdict(self) -> str:
        if self.first is None:
            return "every operator is as accurate as eager's, or within ten roundings"
        name, row = self.first
        at = f" at {row.line}" if row.line else ""
        far = f"off by {error_text(row.errors[name])}, allowed {error_text(row.allowed)}"
        return f"{name}: {row.operator} is {far}{at}"

    def __str__(self) -> str:
        rows = [self.HEAD, *(row.cells() for row in self.rows)]
        return "\n".join([f"accuracy of {self.name} by operator: {self.verdict}", *aligned(rows)])


def operator_accuracy(target: Any, /, *args: Any, **kwargs: Any) -> OperatorAccuracy:
    """Run the captured graphs of a call in each stage and compare operator by operator.

    What `mc.compile` returned keeps its options. Raises what eager raises, and what a stage raises.
    """
    case = Case.of(target, [args], kwargs)
    rows: list[OperatorRow] = []
    for program in captured_programs(case):
        rows += operators_of(program, case)
    return OperatorAccuracy(case.name, tuple(rows))


def operators_of(program: GraphCall, case: Case) -> list[OperatorRow]:
    nodes = [n for n in program.operations if isinstance(program.values.get(n), TensorSpec)]
    if not nodes:
        return []
    whole = program.edited(lambda graph, new: show(graph, [new[node] for node in nodes]))
    case = replace(case, target=whole.graph.gm, calls=[whole.arguments()], kwargs={})
    runs = {
        name: VariantRun(case, case.compiled(limit, **changes))
        for name, (limit, changes) in STAGES.items()
    }
    reference, eager = case.baseline[REFERENCE], case.baseline[EAGER]
    for run in (eager, *runs.values()):
        if run.error is not None:
            raise run.error
    against = eager if eager.drew or reference.error is not None else reference
    rows = []
    for number, node in enumerate(nodes):
        place = f"[0][{number}]"
        true, own = against.groups[0][place], eager.groups[0][place]
        errors = {
            name: distance(run.groups[0][place], true)
            for name, run in {EAGER: eager, **runs}.items()
        }
        allowed = FAR * max(errors[EAGER], own.rounding)
        rows.append(OperatorRow(call_text(node), str(user_line(node) or ""), allowed, errors))
    return rows


def show(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Let a graph return these values."""
    graph.erase_node(next(node for node in reversed(graph.nodes) if node.op == "output"))
    graph.output(tuple(nodes))
