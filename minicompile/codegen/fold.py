"""Folds: sums of columns that ride in a kernel which holds whole rows (scheduling/columns.py).

rows     each program goes over some of the rows and adds them to a row of sums, which it stores
columns  the sums of all programs added up, in order, and what is computed once a column
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from minicompile.codegen.phases import cone
from minicompile.codegen.plan import KernelPlan
from minicompile.codegen.split import PART, launch_plan
from minicompile.lowering.ir import Layout
from minicompile.scheduling.body import Recorder, Rewriter, Value, varying
from minicompile.shapes.expr import Ranges


def fold(plan: KernelPlan) -> None:
    """Give a plan with folds its launches and their workspace: `plan.parts` programs share the rows."""
    values, position = plan.body.values, plan.name.rpartition("_")[2]
    folds = [v for v in values if v.op == "fold"]
    names = {v: f"part{i}_{position}" for i, v in enumerate(folds)}
    size = (plan.parts, *plan.reduction_ranges.values())
    spaces = {names[v]: Layout.contiguous(plan.device, v.dtype, size) for v in folds}
    after = varying(values, (), always=folds)
    rows = _Rows(plan, names, spaces, {v for v in values if v.op == "fold" or v not in after})
    late = cone([v for v in values if v.op == "store" and v in after], values, folds)
    columns = _Columns(plan, names, spaces, late)
    held = launch_plan(plan, "rows", rows.body, spaces)
    plan.launches = (
        replace(held, parts=plan.parts, reduction="persistent", loads_ahead=plan.loads_ahead),
        launch_plan(plan, "columns", columns.body, spaces),
    )
    plan.workspace = spaces


class _Rows(Rewriter):
    """All but what follows from the folds; each goes to a row of the workspace."""

    def __init__(
        self,
        plan: KernelPlan,
        names: dict[Value, str],
        spaces: dict[str, Layout],
        values: Collection[Value],
    ) -> None:
        super().__init__(plan.body.name, *self.loops(plan))
        dtypes = {a.buffer: a.dtype for a in plan.arguments}
        self.ops = Recorder(self.body, dtypes | {n: s.dtype for n, s in spaces.items()})
        self.names = names
        variables = [PART, *plan.reduction_ranges]
        self.places = {v: spaces[name].index(variables) for v, name in names.items()}
        for value in plan.body.values:
            if value in values or value.op == "constant":
                self.new[value] = self.visit(value)

    def loops(self, plan: KernelPlan) -> tuple[Ranges, Ranges]:
        return plan.ranges, plan.reduction_ranges

    def visit_fold(self, ops: Recorder, value: Value) -> Value:
        found = self.new[value.inputs[0]]
        place = {"buffer": self.names[value], "index": self.places[value]}
        ops.emit("store", (found,), found.dtype, kind="fold", **place)
        return found


class _Columns(_Rows):
    """What follows from the folds, when the rows of the workspace are added up."""

    def loops(self, plan: KernelPlan) -> tuple[Ranges, Ranges]:
        return plan.reduction_ranges, {PART: plan.parts}

    def visit_fold(self, ops: Recorder, value: Value) -> Value:
        part = ops.load(self.names[value], self.places[value])
        return ops.emit("reduction", (part,), value.dtype, kind="sum")
