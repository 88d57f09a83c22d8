"""Split reductions: few rows, each of many elements, are shared by many programs.

    sweep    ranges {p, x...}, reduction {r...}: what part p of a row comes to, in a workspace
    finish   ranges {x...}, reduction {p}: the parts combined, in order, and what is computed once a row
    ...      again for each loop over r of the undivided kernel
    spread   ranges {x..., r...}: a last loop that reduces nothing is pointwise

Each launch is a kernel plan of its own, with tiles of its own. Squared deviations, which ride beside a sum
(phases.py), are taken from each part's own mean m_p; parts of n_p elements are combined by

    sum((v - m)^2) = sum over p of (sum((v - m_p)^2) + n_p * (m_p - m)^2)

The real compiler: Reduction.create_multilayer in torch/_inductor/ir.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Literal

import sympy
import torch

from minicompile.codegen.phases import middle, stages
from minicompile.codegen.plan import KernelArgument, TritonPlan
from minicompile.codegen.printing import index_dtype
from minicompile.codegen.rewrite import Rewriter, Rules
from minicompile.lowering.ir import Layout
from minicompile.ops.table import POSITIONS, reduction_identity
from minicompile.scheduling.body import LoopBody, Recorder, Value, drop_dead, loop_level
from minicompile.scheduling.cost import Cost, touched_by_loops
from minicompile.shapes.expr import (
    Ranges,
    Size,
    coefficient_of,
    floor_div,
    loop_symbol,
    product,
    simplify_index,
    size_hint,
)
from minicompile.shapes.strided import elements

PART = loop_symbol("p")

ALIGNED = 16
"""Long parts of varying length are multiples of this, so that each begins where wide loads can."""


def refusal(plan: TritonPlan) -> str | None:
    """Why programs can't share the rows of a kernel; None if they can."""
    body = plan.body
    if body.scans:
        return "a scan goes through its row in order"
    if any(v.kind in POSITIONS for v in body.reductions):
        return "positions are counted along the whole row"
    order = {v: i for i, v in enumerate(body.values)}
    stores = {v.buffer: order[v] for v in body.stores}
    before = {v.buffer for v in body.loads if order[v] < stores.get(v.buffer, -1)}
    for launch in _Splitter(plan, 2).launches() if before else ():
        if late := {v.buffer for v in launch.body.loads} & before - stores.keys():
            return f"it would read {late.pop()} again after it has been overwritten"
        for store in launch.body.stores:
            stores.pop(store.buffer, None)
    return None


def split(plan: TritonPlan) -> None:
    """Give a plan its launches and their workspace."""
    splitter = _Splitter(plan, plan.parts)
    plan.launches, plan.workspace = splitter.launches(), splitter.workspace


def launch_plan(
    plan: TritonPlan,
    role: str,
    body: LoopBody,
    workspace: Mapping[str, Layout],
    every: Collection[Value] = (),
) -> TritonPlan:
    """The plan of one launch, nothing decided yet. `every`: stores for all r though their index has no r."""
    drop_dead(body)
    stem, _, position = plan.name.rpartition("_")
    loaded, stored = ({v.buffer for v in group} for group in (body.loads, body.stores))
    arguments = [a for a in plan.arguments if a.buffer in loaded | stored]
    spaces = {name: layout for name, layout in workspace.items() if name in loaded | stored}
    for name, layout in spaces.items():
        way: Literal["in", "out"] = "out" if name in stored else "in"
        arguments.append(KernelArgument(f"part_ptr{len(arguments)}", name, layout.dtype, way))
    sizes = {a.buffer: a.dtype.itemsize for a in arguments}
    read, written = (
        sum(elements(place, plan.hints) * sizes[name] for name in places for place in places[name])
        for places in touched_by_loops(body, plan.hints)
    )
    return replace(
        plan,
        name=f"{stem}_{role}_{position}",
        body=body,
        loop=loop_level(body, every) if body.reduction_ranges else frozenset(),
        arguments=tuple(arguments),
        workspace=spaces,
        in_place={new: old for new, old in plan.in_place.items() if new in stored},
        reduction="looped" if body.reduction_ranges else "none",
        parts=1,
        tiles={},
        index_dtype=torch.int64,
        index_reach=(),
        assumes={},
        side_by_side=False,
        tiling=None,
        steps=(),
        cost=Cost(read, written, 0),  # operations are the whole kernel's affair
        riders={},
        alternatives=(),
    )


def parted(plan: TritonPlan, parts: int) -> tuple[dict[sympy.Symbol, Size], sympy.Symbol, int]:
    """Loops over r that parts have each iteration of; the loop that is cut, and in how many."""
    whole: dict[sympy.Symbol, Size] = {}
    for var, size in plan.reduction_ranges.items():
        hint = size_hint(size, plan.hints)
        if hint >= parts or var is next(reversed(plan.reduction_ranges)):
            parts = max(min(parts, hint), 1)
            if isinstance(size, int):
                even = [n for n in range(parts, 2 * parts) if size % n == 0]
                parts = even[0] if even else -(-size // -(-size // parts))
            return whole, var, parts
        whole[var] = size
        parts = -(-parts // max(hint, 1))
    raise AssertionError("a reduction has loops")


class _Splitter:
    """`body` cut into launches. Values of stage s >= 1 that rows have once are made by finish s - 1."""

    def __init__(self, plan: TritonPlan, parts: int) -> None:
        self.plan, self.body = plan, plan.body
        whole, self.var, count = parted(plan, parts)
        self.parts: dict[sympy.Symbol, Size] = {**whole, PART: count}
        size = plan.reduction_ranges[self.var]
        long = not isinstance(size, int) and size_hint(size, plan.hints) >= 64 * ALIGNED * count
        step = ALIGNED if long else 1
        chunk = step * floor_div(size + step * count - 1, step * count)
        rest = {v: n for v, n in plan.reduction_ranges.items() if v not in whole}
        rest[self.var] = chunk
        self.inside = {v: n for v, n in rest.items() if n != 1 or len(rest) == 1}
        self.place = PART * chunk + (self.var if self.var in self.inside else 0)
        self.chunk, self.left = chunk, size - PART * chunk
        self.end = None if isinstance(size, int) and size % count == 0 else size
        self.riders = plan.riders
        self.stage = stages(self.body, self.riders)
        """How many sweeps must have run before a value can be computed."""
        static = self.end is None and all(isinstance(n, int) for n in self.inside.values())
        self.length = product(self.inside.values()) if static else None
        """Elements of a part, if all have as many."""
        self.kept: set[Value] = set()
        """Values that a finish stores for later launches."""
        self.workspace: dict[str, Layout] = {}
        self.names: dict[tuple[Value, str], str] = {}
        self.dtypes = {a.buffer: a.dtype for a in plan.arguments}

    def launches(self) -> tuple[TritonPlan, ...]:
        """In the order in which they run."""
        loop, stage, last = self.plan.loop, self.stage, max(self.stage.values())
        chosen: list[tuple[Literal["sweep", "finish", "spread"], int, set[Value]]] = []
        for k in range(last + 1):
            reduced = {v for v in self.body.reductions if stage[v] == k + 1}
            acting = {v for v in self.body.values if v.op == "store" or v.check}
            roots = reduced - self.riders.keys()
            roots |= {v for v in acting if v in loop and stage[v] == k}
            if roots:
                inside = self._cone(roots, 0) | reduced
                chosen.append(("sweep" if reduced else "spread", k, inside))
            rows = {v for v in acting - loop if stage[v] == k + 1 or stage[v] == k == 0}
            if reduced:
                chosen.append(("finish", k, rows))
        for role, k, roots in reversed(chosen):  # what later launches read is made by earlier ones
            if role == "finish":
                kept = {v for v in self.kept if stage[v] == k + 1}
                roots |= self._cone(roots | kept, k + 1)
        return tuple(self._launch(*each) for each in chosen)

    def _cone(self, roots: Iterable[Value], own: int) -> set[Value]:
        """What a launch computes: not what other launches made of rows, which are kept for it."""
        found: set[Value] = set()
        pending = list(roots)
        while pending:
            value = pending.pop()
            row = value not in self.plan.loop and value.op != "constant" and value not in roots
            if value in found or (value in self.kept and self.stage[value] != own):
                continue
            if row and self.stage[value] not in (0, own):
                self.kept.add(value)
                continue
            found.add(value)
            if value in self.riders and own:
                pending += [middle(value), self.riders[value]]
            elif value.op != "reduction" or not own:  # else its parts are in the workspace
                pending += value.operands
        return found

    def _launch(self, role: str, k: int, values: set[Value]) -> TritonPlan:
        """The plan of one launch."""
        plan = self.plan
        if role == "sweep":
            launch: _Launch = _Sweep(self, {**self.parts, **plan.ranges}, self.inside)
        elif role == "finish":
            launch = _Finish(self, plan.ranges, self.parts)
        else:
            launch = _Launch(self, self._in_order(values), {})
        for value in self.body.values:
            if value in values or value.op == "constant":
                launch.new[value] = launch.visit(value)
                if role == "finish" and value in self.kept and self.stage[value] == k + 1:
                    launch.keep(value, launch.new[value])
            elif value in self.kept and self.stage[value] <= k:
                launch.new[value] = launch.fetch(value)
        every = {launch.new[v] for v in values & plan.loop if v.op == "store"}
        return launch_plan(plan, f"{role}{k or ''}", launch.body, self.workspace, every)

    def _in_order(self, values: Collection[Value]) -> dict[sympy.Symbol, Size]:
        """All loops as parallel ones, by falling stride of the widest store."""
        ranges = self.body.all_ranges
        stores = [v for v in self.body.values if v in values and v.op == "store"]
        widest = max(stores, key=lambda v: len(sympy.sympify(v.index).free_symbols))

        def stride(var: sympy.Symbol) -> int:
            step = coefficient_of(widest.index, var)
            return -abs(size_hint(step, self.plan.hints)) if step is not None else 0

        return {var: ranges[var] for var in sorted(ranges, key=stride)}

    def memory(self, value: Value, what: str) -> str:
        """The workspace for a "row" value, or for the "part" of each part of a row."""
        if (value, what) not in self.names:
            name = f"{what}{len(self.names)}_{self.plan.name.rpartition('_')[2]}"
            loops = {**(self.parts if what != "row" else {}), **self.plan.ranges}
            dtype = torch.uint8 if value.dtype is torch.bool else value.dtype
            self.workspace[name] = Layout.contiguous(self.plan.device, dtype, tuple(loops.values()))
            self.names[value, what], self.dtypes[name] = name, dtype
        return self.names[value, what]


LAUNCH = Rules(
    "launch", "name -> rewrite of a loop operation in a launch that computes part of a kernel"
)


class _Launch(Rewriter):
    """Some of the kernel's values, over the loops of one launch."""

    def __init__(self, of: _Splitter, ranges: Ranges, reduction_ranges: Ranges) -> None:
        super().__init__(LAUNCH, of.body.name, ranges, reduction_ranges, of.dtypes)
        self.of = of

    def visit(self, value: Value) -> Value:
        if value.op == "reduction":
            return self.reduced(self.at(value.origins), value)
        return super().visit(value)

    def reduced(self, ops: Recorder, value: Value) -> Value:
        """What stands for a reduction."""
        raise NotImplementedError

    def keep(self, value: Value, found: Value, what: str = "row") -> None:
        """Store what stands for a value."""
        name, ops = self.of.memory(value, what), self.at(value.origins)
        ops.store(name, self._place(name), ops.to_dtype(found, self.of.dtypes[name]))

    def fetch(self, value: Value, what: str = "row") -> Value:
        """Load what stands for a value."""
        name, ops = self.of.memory(value, what), self.at(value.origins)
        return ops.to_dtype(ops.load(name, self._place(name)), value.dtype)

    def _place(self, name: str) -> sympy.Expr:
        layout, loops = self.of.workspace[name], [*self.of.parts, *self.of.plan.ranges]
        return layout.index(loops[len(loops) - len(layout.size) :])

    def count(self, ops: Recorder, dtype: torch.dtype) -> Value:
        """How many elements a part has."""
        of = self.of
        if of.length is not None:
            return ops.constant(float(of.length), dtype)
        zero = ops.constant(0, torch.int64)
        found, chunk = (ops.index_expr(sympy.sympify(n), torch.int64) for n in (of.left, of.chunk))
        found = ops.pointwise("where", ops.pointwise("lt", found, zero), zero, found)
        found = ops.pointwise("where", ops.pointwise("lt", found, chunk), found, chunk)
        within = product(n for v, n in of.inside.items() if v is not of.var)
        each = ops.index_expr(sympy.sympify(within), torch.int64)
        return ops.to_dtype(ops.pointwise("mul", found, each), dtype)

    def mean(self, ops: Recorder, total: Value, count: Value) -> Value:
        """The mean of a part, which may be empty."""
        if self.of.length is None:
            one = ops.constant(1.0, count.dtype)
            count = ops.pointwise("where", ops.pointwise("lt", count, one), one, count)
        return ops.pointwise("truediv", total, count)


class _Sweep(_Launch):
    """Parts of rows. Lanes beyond the end of a row are masked."""

    def __init__(self, of: _Splitter, ranges: Ranges, reduction_ranges: Ranges) -> None:
        super().__init__(of, ranges, reduction_ranges)
        self.inside: Value | None = None
        if of.end is not None:
            ops, wide = self.at(of.body.origins), index_dtype(of.place, self.body.all_ranges)
            place, end = (ops.index_expr(sympy.sympify(e), wide) for e in (of.place, of.end))
            self.inside = ops.pointwise("lt", place, end)

    def renewed(self, value: Value) -> Value:
        found = super().renewed(value)
        if found.index is not None:
            moved = found.index.xreplace({self.of.var: self.of.place})
            found.index = simplify_index(moved, self.body.all_ranges)
        touches = value.op in ("load", "store") or value.check
        if self.inside is not None and touches and value in self.of.plan.loop:
            ops, inside = self.at(value.origins), self.inside
            both = found.mask is not None and ops.pointwise("logical_and", found.mask, inside)
            found.mask = both or inside
        return found

    def reduced(self, ops: Recorder, value: Value) -> Value:
        beside = self.of.riders.get(value)
        source = self.new[value.inputs[0] if beside is None else beside.inputs[0]]
        if beside is not None:
            count = self.count(ops, value.dtype)
            apart = ops.pointwise("sub", source, self.mean(ops, self.new[beside], count))
            source = ops.pointwise("mul", apart, apart)
        found = self._reduce(ops, value, source)
        self.keep(value, found, "part")
        return found

    def _reduce(self, ops: Recorder, value: Value, source: Value) -> Value:
        if self.inside is not None:
            identity = reduction_identity(value.kind, source.dtype)  # type: ignore[arg-type]
            other = ops.constant(identity, source.dtype)
            source = ops.pointwise("where", self.inside, source, other)
        return ops.emit("reduction", (source,), value.dtype, kind=value.kind)


class _Finish(_Launch):
    """The parts of rows combined, in order."""

    def reduced(self, ops: Recorder, value: Value) -> Value:
        found, beside = self.fetch(value, "part"), self.of.riders.get(value)
        if beside is not None:
            count = self.count(ops, value.dtype)
            own = self.mean(ops, self.fetch(beside, "part"), count)
            apart = ops.pointwise("sub", own, self.new[middle(value)])
            more = ops.pointwise("mul", count, ops.pointwise("mul", apart, apart))
            found = ops.pointwise("add", found, more)
        return ops.emit("reduction", (found,), value.dtype, kind=value.kind)
