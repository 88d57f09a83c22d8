"""Prints folds: sums of columns that are computed in a kernel which holds whole rows (join.py chooses them).

rows     each program goes over some of the rows and adds them to a row of sums, which it stores
columns  the sums of all programs added up, in order, and what is computed once a column
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from minicompile.codegen.phases import cone
from minicompile.codegen.plan import KernelPlan, plan_rule, power_of_two
from minicompile.codegen.printing import kernel_template
from minicompile.codegen.triton import TilePrinter
from minicompile.codegen.triton_ops import TRITON_DTYPES
from minicompile.codegen.triton_rules import (
    LONG_ROW,
    assume_row,
    busy,
    clamp,
    longest_persistent,
    widest,
)
from minicompile.errors import Unsupported
from minicompile.lowering.ir import Layout
from minicompile.ops.device import Gpu, gpu_of
from minicompile.options import Options
from minicompile.plugins.split_reductions.split import PART, launch_plan
from minicompile.scheduling.body import Recorder, Rewriter, Value, varying
from minicompile.shapes.expr import Ranges

AHEAD = 8
"""Most bytes of each element of a row that a program loads before it computes with them."""


def has_folds(plan: KernelPlan) -> bool:
    """Return whether sums of columns ride in a kernel."""
    return any(value.op == "fold" for value in plan.body.values)


@plan_rule("triton:fold", whole=True, needed=True)
def fold(plan: KernelPlan, options: Options) -> None:
    """Give a kernel with folds its launches, and their workspace: `plan.parts` programs share the rows."""
    if not has_folds(plan):
        return
    gpu = gpu_of(plan.device)
    held = sum(v.dtype.itemsize for v in widest(plan) if v.op == "load")
    # two programs keep memory busy if there are registers for that
    ahead = plan.row_length >= LONG_ROW and held <= AHEAD
    programs = busy(gpu) * (1 if ahead else 2)
    plan.reduction, plan.parts = "persistent", min(programs, max(plan.rows // 8, 1))
    assume_row(plan, longest_persistent(plan, gpu))
    values, position = plan.body.values, plan.name.rpartition("_")[2]
    folds = [v for v in values if v.op == "fold"]
    names = {v: f"part{i}_{position}" for i, v in enumerate(folds)}
    size = (plan.parts, *plan.reduction_ranges.values())
    spaces = {names[v]: Layout.contiguous(plan.device, v.dtype, size) for v in folds}
    after = varying(values, (), always=folds)
    rows = _Rows(plan, names, spaces, {v for v in values if v.op == "fold" or v not in after})
    late = cone([v for v in values if v.op == "store" and v in after], values, folds)
    columns = _Columns(plan, names, spaces, late)
    sums = launch_plan(plan, "columns", columns.body, spaces)
    plan.launches = (
        rows_launch(plan, launch_plan(plan, "rows", rows.body, spaces), gpu, ahead),
        replace(sums, side_by_side=plan.side_by_side),
    )
    plan.workspace = spaces


def rows_launch(plan: KernelPlan, launch: KernelPlan, gpu: Gpu, ahead: bool) -> KernelPlan:
    """The launch that holds rows, with its tiles: a program goes over its rows one or a few at a time."""
    launch = replace(launch, reduction="persistent", programs={PART: plan.parts}, side_by_side=True)
    length = power_of_two(launch.row_length)
    room = longest_persistent(launch, gpu) // length
    x, each = (1, 16) if ahead else (clamp(power_of_two(room + 1) // 2, 1, 4), 32)
    warps = clamp(x * length // (32 * each), 1, 32)
    template = "fold ahead" if ahead else "fold"
    return replace(launch, template=template, tiles={"x": x, "r": length}, num_warps=warps)


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


@kernel_template("fold", "fold ahead")
class FoldPrinter(TilePrinter):
    """Prints a kernel that adds the rows which it holds to sums of columns. "Ahead": it loads the next rows
    before it computes these."""

    def __init__(self, plan: KernelPlan) -> None:
        super().__init__(plan)
        if plan.reduction != "persistent":
            raise Unsupported(f"{plan.name}: only whole rows can be added to sums of columns")
        stores = [v for v in plan.body.stores if v.kind == "fold"]
        self.folds = {v: f"_fold{i}" for i, v in enumerate(stores)}
        written = {v.buffer for v in plan.body.stores} | {*plan.in_place.values()}
        early = plan.body.loads if plan.template == "fold ahead" else []
        self.ahead = [v for v in early if self._early(v, written)]

    def program(self) -> None:
        """Some of the rows, one tile after the other; each is added to the sums of its columns."""
        self._indices()
        for value, name in self.folds.items():
            zeros = f"tl.full([1, RBLOCK], 0.0, {TRITON_DTYPES[value.dtype]})"
            self.line(f"{name} = {zeros}", value.origins)
        (count,) = self.plan.programs.values()
        self.line(f"share = (xnumel + {count - 1}) // {count}")
        self.line("xend = tl.minimum((p + 1) * share, xnumel)")
        if self.ahead:
            self._load_ahead("p * share")
        with self.block("for xoffset in range(p * share, xend, XBLOCK):"):
            for value in self.ahead:
                self.line(
                    f"{self.names[value]} = _{self.names[value]}", value.origins, scaffold=True
                )
            if self.ahead:
                self._load_ahead("xoffset + XBLOCK")
            self._rows_from("xoffset")
            self._phases()
        for value, name in self.folds.items():
            pointer = f"{self.arguments[value.buffer].name} + ({self._index(value)})"
            mask = self._masks(frozenset("r")) or "None"
            self.line(f"tl.store({pointer}, {name}, {mask})", value.origins)

    def value(self, value: Value, level: str) -> None:
        if value in self.folds:
            tile = f"tl.where(xmask, {self._tile(value.inputs[0])}, 0.0)"
            self.line(f"{self.folds[value]} += tl.sum({tile}, 0)[None, :]", value.origins)
        elif value not in self.ahead:
            super().value(value, level)

    def _rows_from(self, start: str) -> None:
        """The rows of a tile, of those between which a program sums."""
        self.line(f"xindex = {start} + {self._lanes('x')}")
        self.line("xmask = xindex < xend")
        self._digits(self.plan.ranges, "xindex")

    def _early(self, value: Value, written: Collection[str]) -> bool:
        """The load of rows needs nothing that the program computes."""
        plain = value.mask is None and not value.indirect and value.buffer not in written
        return plain and self.axes[value] == {"x", "r"}

    def _load_ahead(self, start: str) -> None:
        """Rows that are computed with in the next round: they arrive while this one computes."""
        self._rows_from(start)
        for value in self.ahead:
            self.line(f"_{self.names[value]} = {self._load(value)}", value.origins)
