"""Kernels that reduce along r in vectors: for each x its row, or chunks of long rows shared by threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import sympy
import torch

from minicompile.codegen.cpp_loops import (
    BLOCK,
    LoopPrinter,
    is_float_sum,
    is_long,
    least,
    operands,
    reductions_of,
)
from minicompile.codegen.plan import Phase
from minicompile.codegen.rules import count
from minicompile.scheduling.body import Value
from minicompile.shapes.expr import Size, coefficient_of

_CLAUSE = {"sum": "+", "prod": "*", "max": "max", "min": "min", "any": "|", "all": "&"}


@dataclass(frozen=True)
class Stretch:
    """A piece of the innermost loop over r: all of it, or a block from `start` to `stop`."""

    phase: Phase
    kept: frozenset[Value]
    inner: sympy.Symbol
    size: Size
    start: str
    stop: str
    part: str = ""
    """Ends the names of the block's own accumulators."""

    @property
    def length(self) -> int:
        """Most elements it can have."""
        if self.part or not isinstance(self.size, int):
            return BLOCK
        return self.size

    @property
    def place(self) -> str:
        """Where an element stands in scratch that covers this stretch."""
        return str(self.inner) if self.start == "0" else f"{self.inner} - {self.start}"

    def count(self, index: Callable[[Size], str]) -> str:
        """How many elements it has."""
        end = self.stop or index(self.size)
        return end if self.start == "0" else f"{end} - {self.start}"


class RowPrinter(LoopPrinter):
    """Rows and split rows."""

    def _rows(self) -> None:
        nest = self._x_loops()
        with self.loops(nest, self._parallel(len(nest)) if nest else ""):
            self._scratch(self.in_order(self.plan.stashed), "_row", self._row_length())
            kept: set[Value] = set()
            for phase in self.plan.phases:
                if phase.level == "row":
                    self.compute(phase.values)
                else:
                    self._row_loop(phase, kept)
                    kept |= self.plan.stashed & set(phase.values)

    def _row_length(self) -> int:
        return count(self.plan.reduction_ranges.values(), self.plan.hints)

    def _row_loop(
        self, phase: Phase, kept: Collection[Value] = (), start: str = "0", stop: str = ""
    ) -> None:
        """One loop over r with its accumulators; `start` and `stop` bound the outermost variable."""
        *outer, (inner, size) = self._r_loops()
        reductions = reductions_of(phase)
        rows = [v for v in reductions if self._by_row(v)]
        blocks = is_long(size) and bool(rows or any(map(is_float_sum, reductions)))
        at_once = not outer and not blocks
        for value in reductions:
            if value not in rows or not at_once:
                self._start(value)
        with contextlib.ExitStack() as stack:
            for i, (var, extent) in enumerate(outer):
                bounds = (start, stop) if i == 0 else ("0", "")
                stack.enter_context(self.loop(var, extent, "", *bounds))
            if outer:
                start, stop = "0", ""
            stretch = Stretch(phase, frozenset(kept), inner, size, start, stop)
            if blocks:
                self._blocks(stretch)
            else:
                self._vector_loop(stretch)
                self._reduce_rows(stretch, rows, declare=at_once)
        for value in reductions:
            if self.tracks_nan(value) and value not in rows:
                name = self.names[value]
                self.line(f"{name} = {name}_nan ? NAN : {name};", value.origins)

    def _start(self, value: Value, part: str = "") -> None:
        name = self.names[value]
        for suffix, ctype, initial in self.accumulators(value):
            self.line(f"{ctype} {name}{suffix}{part} = {initial};", value.origins)
        if self.tracks_nan(value) and not self._by_row(value):
            self.line(f"int32_t {name}_nan = 0;", value.origins)

    def _by_row(self, value: Value) -> bool:
        """The reduction reads a row of floats in memory, by a helper; others ride along in the loop."""
        known = value.kind in ("sum", "max", "min") and value.dtype is torch.float32
        return known and value.inputs[0] in self.plan.loop and self.plan.vector_width > 1

    def _blocks(self, stretch: Stretch) -> None:
        """The loop in blocks; each sums floats for itself, and the sums are added up as doubles."""
        reductions, inner = reductions_of(stretch.phase), stretch.inner
        sums = [v for v in reductions if is_float_sum(v)]
        rows = [v for v in reductions if self._by_row(v)]
        for value in sums:
            self.line(f"double {self.names[value]}_total = 0.0;", value.origins)
        block = f"{inner}_block"
        with self.loop(block, stretch.size, "", stretch.start, stretch.stop, BLOCK):
            for value in sums:
                if value not in rows:
                    self._start(value, "_part")
            end = least(f"{block} + {BLOCK}", stretch.stop or self.index(stretch.size))
            self.line(f"const int64_t {inner}_end = {end};")
            part = replace(stretch, start=block, stop=f"{inner}_end", part="_part")
            self._vector_loop(part)
            self._reduce_rows(part, rows, declare=True)
            for value in self.in_order({*sums, *rows}):
                name = self.names[value]
                if value in sums:
                    self.line(f"{name}_total += {name}_part;", value.origins)
                else:
                    text = self.combine(value, name, f"{name}_part")
                    self.line(f"{name} = {text};", value.origins)
        for value in sums:
            name = self.names[value]
            self.line(f"{name} += {name}_total;", value.origins)

    def _vector_loop(self, stretch: Stretch) -> None:
        """The innermost loop over r: values, stores, what row reductions will read, other reductions."""
        phase, inner = stretch.phase, stretch.inner
        riding = [v for v in reductions_of(phase) if not self._by_row(v)]
        filled = self._filled(phase)
        values = self._needed(phase, riding, filled)
        if not values:
            return
        self._scratch([v for v in filled if v not in self.plan.stashed], "_part", stretch.length)
        simd = ""
        if not any(map(self.is_positional, riding)):
            simd = self._simd(values, inner, self._clauses(riding, stretch.part))
        position, place = self.position(), stretch.place
        with self.loop(inner, stretch.size, simd, stretch.start, stretch.stop):
            for value in self.in_order(stretch.kept & operands(values)):
                self.declare(value, f"{self.names[value]}_row[{position}]")
            self.compute(values, partial(self._accumulate, part=stretch.part))
            for value in values:
                name = self.names.get(value, "")
                if value in self.plan.stashed:
                    self.line(f"{name}_row[{position}] = {name};", value.origins)
                elif value in filled:
                    self.line(f"{name}_part[{place}] = {name};", value.origins)

    def _filled(self, phase: Phase) -> list[Value]:
        """The sources of row reductions that don't lie in a buffer already."""
        sources = {v.inputs[0] for v in reductions_of(phase) if self._by_row(v)}
        return self.in_order({v for v in sources if not self._lies_in_memory(v)})

    def _lies_in_memory(self, value: Value) -> bool:
        """A plain load whose elements stand side by side along the inner r."""
        inner, _ = self._r_loops()[-1]
        plain = value.op == "load" and value.mask is None and not value.indirect
        return plain and value.index is not None and coefficient_of(value.index, inner) == 1

    def _needed(
        self, phase: Phase, riding: Sequence[Value], filled: Sequence[Value]
    ) -> list[Value]:
        """The values of a phase without row reductions and the loads that only these use."""
        roots = [v for v in phase.values if v.op == "store" or self.can_fail(v)]
        roots += [v for v in phase.values if v in self.plan.stashed or v in filled]
        inside = set(phase.values)
        needed: set[Value] = set()
        pending = [*roots, *riding]
        while pending:
            value = pending.pop()
            if value in inside and value not in needed:
                needed.add(value)
                pending += value.operands
        return [v for v in phase.values if v in needed]

    def _reduce_rows(self, stretch: Stretch, rows: Sequence[Value], declare: bool) -> None:
        """Call a helper on each row that the loop filled or that lies in memory."""
        for value in rows:
            source, name = value.inputs[0], self.names[value]
            helper = f"mc_row_{value.kind}"
            self.helpers.add(helper)
            found = f"{helper}({self._row_address(source, stretch)}, {stretch.count(self.index)})"
            if declare:
                self.line(f"float {name}{stretch.part} = {found};", value.origins)
            elif value.kind == "sum":
                self.line(f"{name} += {found};", value.origins)
            else:
                self.line(f"float {name}_part = {found};", value.origins)
                self.line(f"{name} = {self.combine(value, name, f'{name}_part')};", value.origins)

    def _row_address(self, source: Value, stretch: Stretch) -> str:
        name = self.names.get(source, "")
        first = sympy.Symbol(stretch.start) if stretch.start != "0" else sympy.Integer(0)
        if self._lies_in_memory(source):
            assert source.index is not None
            base = self.arguments[source.buffer].name
            offset = self.index(source.index.xreplace({stretch.inner: first}))
        elif source in self.plan.stashed:
            base, offset = f"{name}_row", self.index(self.place().xreplace({stretch.inner: first}))
        else:
            base, offset = f"{name}_part", "0"
        return base if offset == "0" else f"{base} + {offset}"

    def _clauses(self, reductions: Sequence[Value], part: str) -> list[str]:
        groups: dict[str, list[str]] = {}
        for value in reductions:
            ending = part if is_float_sum(value) else ""
            groups.setdefault(_CLAUSE[value.kind], []).append(self.names[value] + ending)
            if self.tracks_nan(value):
                groups.setdefault("|", []).append(f"{self.names[value]}_nan")
        return [f"reduction({sign}:{', '.join(found)})" for sign, found in groups.items()]

    def _accumulate(self, value: Value, part: str = "") -> None:
        """One element into scalar accumulators, in the forms that `omp simd` can vectorise."""
        name, source = self.names[value], self.ref(value.inputs[0])
        if self.is_positional(value):
            better = self.better(value, source, f"{name}_best")
            with self.block(f"if ({better})"):
                self.line(f"{name}_best = {source};", value.origins)
                self.line(f"{name} = {self.position()};", value.origins)
        elif value.kind in ("max", "min"):
            sign = ">" if value.kind == "max" else "<"
            self.line(f"{name} = {source} {sign} {name} ? {source} : {name};", value.origins)
            if self.tracks_nan(value):
                self.line(f"{name}_nan |= {source} != {source};", value.origins)
        else:
            name += part if is_float_sum(value) else ""
            self.line(f"{name} = {self.combine(value, name, source)};", value.origins)

    def _split(self) -> None:
        """Threads share chunks of the outermost r."""
        most, size = self._chunks()
        with self.loops(self._x_loops()):
            for phase in self.plan.phases:
                if phase.level == "row":
                    self.compute(phase.values)
                else:
                    self._split_loop(phase, size, most)

    def _split_loop(self, phase: Phase, size: str, most: int) -> None:
        """Each chunk has its own results, which are combined in the order of the chunks."""
        reductions = reductions_of(phase)
        for value in reductions:
            for suffix, ctype, _ in self.accumulators(value):
                self.line(f"{ctype} {self.names[value]}{suffix}_parts[{most}];", value.origins)
        self.pragma(self._parallel())
        with self.block("for (int64_t c = 0; c < chunks; c++)"):
            self.line(f"const int64_t end = {least('(c + 1) * chunk', size)};")
            self._row_loop(phase, start="c * chunk", stop="end")
            for value in reductions:
                for suffix, _, _ in self.accumulators(value):
                    name = self.names[value] + suffix
                    self.line(f"{name}_parts[c] = {name};", value.origins)
        for value in reductions:
            for suffix, ctype, initial in self.accumulators(value):
                self.line(f"{ctype} {self.names[value]}{suffix} = {initial};", value.origins)
        if reductions:
            with self.block("for (int64_t c = 0; c < chunks; c++)"):
                for value in reductions:
                    self._combine_parts(value)

    def _combine_parts(self, value: Value) -> None:
        name = self.names[value]
        if self.is_positional(value):
            with self.block(f"if ({self.better(value, f'{name}_best_parts[c]', f'{name}_best')})"):
                self.line(f"{name}_best = {name}_best_parts[c];", value.origins)
                self.line(f"{name} = {name}_parts[c];", value.origins)
        else:
            self.line(f"{name} = {self.combine(value, name, f'{name}_parts[c]')};", value.origins)
