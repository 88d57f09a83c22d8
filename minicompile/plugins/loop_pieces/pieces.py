"""Loops without choices: cut where a condition on a loop variable changes, and written out where short.

    for x in range(64): out[x] = x < 32 ? -a[x + 32] : a[x - 32]

`pieces` makes of it two loops, each of which knows the answer:

    for x in range(32): out[x] = -a[x + 32]
    for x in range(32): out[x + 32] = a[x]

`written_out` makes of an innermost loop of few iterations as many copies of its body, in the next loop, which
is long enough for vectors. The real compiler leaves both to gcc and computes every branch under masks.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import sympy
import torch

from minicompile.codegen.phases import is_update
from minicompile.codegen.plan import KernelPlan, body_rule, plan_rule
from minicompile.codegen.printing import index_dtype
from minicompile.ops.dtypes import is_int
from minicompile.ops.handler import Index
from minicompile.options import Options
from minicompile.scheduling.body import (
    LoopBody,
    Recorder,
    Rewriter,
    Value,
    drop_dead,
    ranges_text,
    settled,
    varying,
)
from minicompile.shapes.expr import (
    FloorDiv,
    ModularIndexing,
    bounds,
    coefficient_of,
    simplify_index,
)


@dataclass
class Cut:
    """The loop over `var` in pieces, one after the other."""

    var: sympy.Symbol
    parts: list[Pieces] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.var} in {len(self.parts)} ({'; '.join(map(_piece_text, self.parts))})"


Pieces = LoopBody | Cut
"""A body, or the pieces of its loops, which may be cut further."""


def leaves(pieces: Pieces) -> list[LoopBody]:
    """Return the bodies in the order in which they run."""
    if isinstance(pieces, LoopBody):
        return [pieces]
    return [body for part in pieces.parts for body in leaves(part)]


def _piece_text(part: Pieces) -> str:
    return str(part) if isinstance(part, Cut) else ranges_text(part.ranges)


SHORT, LONG = 4, 8
"""A loop of at most so many iterations is written out in one of at least so many."""

MOST_CUTS, MOST_VALUES = 4, 480
"""Most places at which a loop is cut, and most operations of all pieces: they take time to compile."""

COMPARISONS = {
    "lt": lambda low, high: (high < 0, low >= 0),
    "le": lambda low, high: (high <= 0, low > 0),
    "gt": lambda low, high: (low > 0, high <= 0),
    "ge": lambda low, high: (low >= 0, high < 0),
    "eq": lambda low, high: (low == high == 0, low > 0 or high < 0),
    "ne": lambda low, high: (low > 0 or high < 0, low == high == 0),
}
"""Whether a comparison always holds, and whether it never does, from the limits of the difference."""


@body_rule("coarser conditions")
def coarser(body: LoopBody) -> tuple[LoopBody, dict[Value, Value]]:
    """Let conditions have one answer for a whole inner loop: `16*x0 + x1 >= 128` is `x0 >= 8` if x1 < 16."""
    if all(_coarser(value, body) is None for value in body.values):
        return body, {value: value for value in body.values}
    writer = _Coarser(body.name, body.ranges, body.reduction_ranges)
    writer.rewrite(body)
    drop_dead(writer.body)
    return writer.body, writer.new


def _coarser(value: Value, body: LoopBody) -> tuple[Index, int] | None:
    """Return an index and a limit whose comparison answers that of another index with a constant."""
    if value.op not in ("ge", "gt", "lt", "le"):
        return None
    index, limit = value.inputs
    source = _source(index)
    if source.op != "index_expr" or limit.op != "constant" or source.indirect:
        return None
    assert source.index is not None
    beyond = value.op in ("gt", "le")
    threshold = int(limit.constant) + beyond  # the first index for which the answer changes
    terms = sympy.Add.make_args(source.index)
    steps = {c for c, _ in (term.as_coeff_Mul() for term in terms) if c.is_Integer and c > 1}
    for step in sorted(steps, reverse=True):
        quotient = simplify_index(FloorDiv(source.index, step), body.all_ranges)
        if threshold % int(step) == 0 and not quotient.has(FloorDiv):
            return quotient, threshold // int(step) - beyond
    return None


class _Coarser(Rewriter):
    def visit_other(self, ops: Recorder, value: Value) -> Value:
        if (found := _coarser(value, self.body)) is None:
            return self.again(value)
        index, limit = found
        wide = index_dtype(index, self.body.all_ranges)
        return ops.pointwise(value.op, ops.index_expr(index, wide), ops.constant(limit, wide))


@plan_rule("cpp:short", before="cpp:vector")
def write_out_short_loop(plan: KernelPlan, options: Options) -> None:
    """Few iterations fill no vector: the loop around them is longer."""
    if not plan.in_place:
        plan.body = written_out(plan.body) or plan.body


@plan_rule("cpp:pieces")
def cut_loops(plan: KernelPlan, options: Options) -> None:
    """Loops in whose pieces nothing is left to decide by position."""
    found = plan.body if plan.tiles else pieces(plan.body)
    if isinstance(found, Cut):
        plan.template, plan.details = "pieces", found


def can_be_cut(body: LoopBody) -> bool:
    """Each element is computed for itself."""
    return not (body.reduction_ranges or body.scans or any(map(is_update, body.stores)))


def written_out(body: LoopBody) -> LoopBody | None:
    """The body without its innermost loop, if that is short and the next one long."""
    loops = [var for var, size in body.ranges.items() if size != 1]
    if len(loops) < 2 or not can_be_cut(body):
        return None
    inner, size = loops[-1], body.ranges[loops[-1]]
    around = body.ranges[loops[-2]]
    if not (isinstance(size, int) and isinstance(around, int) and size <= SHORT and around >= LONG):
        return None
    moving = varying(body.values, {inner})
    if len(moving) * size > MOST_VALUES or any(v.op == "indirect" for v in moving):
        return None
    writer = _Restricted(body, {**body.ranges, inner: 1})
    for place in range(size):
        writer.moved = {inner: sympy.Integer(place)}
        writer.rewrite(body)
    drop_dead(writer.body)
    return writer.body


def pieces(body: LoopBody) -> Pieces:
    """The body in pieces, along the outermost loops first; the body itself where nothing is to be cut."""
    if not can_be_cut(body):
        return body
    found = _cut(body)
    return found if sum(len(b.values) for b in leaves(found)) <= MOST_VALUES else body


def _cut(body: LoopBody) -> Pieces:
    for var, size in body.ranges.items():
        places = cutting_places(body, var) if isinstance(size, int) and size > 1 else []
        if 0 < len(places) <= MOST_CUTS:
            found = Cut(var)
            for start, end in zip([0, *places], [*places, size], strict=True):
                piece = _Restricted(body, {**body.ranges, var: end - start})
                piece.moved = {var: sympy.Integer(start) + (var if end - start > 1 else 0)}
                piece.rewrite(body)
                drop_dead(piece.body)
                found.parts.append(_cut(piece.body))
            return found
    return body


def cutting_places(body: LoopBody, var: sympy.Symbol) -> list[int]:
    """The values of a loop variable from which a condition has another answer than before; all values of a
    short loop around others that an index divides."""
    size, found = body.ranges[var], set[int]()
    assert isinstance(size, int)
    if size <= SHORT and any(v.index is not None and _divides(v.index, var) for v in body.values):
        return [*range(1, size)]
    for value in body.values:
        if value.op not in COMPARISONS or value.inputs[1].op != "constant":
            continue
        source = _source(value.inputs[0])
        if source.op != "index_expr" or source.index is None or source.index.free_symbols != {var}:
            continue
        step, limit = coefficient_of(source.index, var), int(value.inputs[1].constant)
        first = source.index.xreplace({var: sympy.Integer(0)})
        if step is None or not step.is_Integer:
            continue
        start, step = int(first), int(step)

        def changed(limit: int, at: int, start: int = start, step: int = step) -> bool:
            return (start + step * at >= limit) != (start >= limit)

        ends = [
            bisect.bisect_left(range(size), True, key=partial(changed, t))
            for t in (limit, limit + 1)
        ]
        if value.op in ("lt", "ge"):
            found.add(ends[0])
        elif value.op in ("le", "gt"):
            found.add(ends[1])
        elif ends[0] != ends[1]:
            found.update(ends)
    return sorted(found - {0, size})


def _divides(index: Index, var: sympy.Symbol) -> bool:
    return any(var in part.free_symbols for part in index.atoms(FloorDiv, ModularIndexing))


def _holds(dtype: torch.dtype, number: float) -> bool:
    """A wide type has this whole number, exactly."""
    return dtype.itemsize >= 4 and abs(number) < 2**24


def _source(value: Value) -> Value:
    """What an integer was widened from."""
    while value.op == "to_dtype" and is_int(value.dtype) and is_int(value.inputs[0].dtype):
        if value.inputs[0].dtype.itemsize > value.dtype.itemsize:
            break
        (value,) = value.inputs
    return value


class _Restricted(Rewriter):
    """A body over a part of its ranges: what is constant there is computed now."""

    def __init__(self, body: LoopBody, ranges: Mapping[sympy.Symbol, Any]) -> None:
        super().__init__(body.name, ranges, {})
        self.moved: dict[sympy.Symbol, Index] = {}

    def again(self, value: Value, **changed: Any) -> Value:
        found = replace(value.copy(self.new), **changed)
        if found.index is not None and not found.index.free_symbols.isdisjoint(self.moved):
            found.index = simplify_index(found.index.xreplace(self.moved), self.body.ranges)
        return self.ops.append(found)

    def visit_index_expr(self, ops: Recorder, value: Value) -> Value:
        assert value.index is not None
        index = simplify_index(value.index.xreplace(self.moved), self.body.ranges)
        return ops.constant(int(index), value.dtype) if index.is_Integer else self.again(value)

    def visit_to_dtype(self, ops: Recorder, value: Value) -> Value:
        source, dtype = self.new[value.inputs[0]], value.dtype
        if source.op == "constant" and dtype is not torch.bool:
            zero = source.constant == 0 and math.copysign(1, source.constant) > 0
            if zero or (is_int(source.dtype) and _holds(dtype, source.constant)):
                return ops.constant(source.constant, dtype)
        return self.again(value)

    def visit_load(self, ops: Recorder, value: Value) -> Value:
        mask = self.new[value.mask] if value.mask is not None else None
        if mask is None or mask.op != "constant":
            return self.again(value)
        return self.again(value, mask=None) if mask.constant else ops.constant(0, value.dtype)

    def visit_other(self, ops: Recorder, value: Value) -> Value:
        if value.op in COMPARISONS and is_int(value.inputs[0].dtype):
            a, b = (self._limits(self.new[v]) for v in value.inputs)
            if a is not None and b is not None:
                always, never = COMPARISONS[value.op](a[0] - b[1], a[1] - b[0])
                if always or never:
                    return ops.constant(bool(always), torch.bool)
        return settled(ops, value.op, [self.new[v] for v in value.inputs]) or self.again(value)

    def _limits(self, value: Value) -> tuple[int, int] | None:
        value = _source(value)
        if value.op == "constant":
            return int(value.constant), int(value.constant)
        if value.op != "index_expr" or value.index is None:
            return None
        found = bounds(value.index, self.body.ranges)
        if found is None or not (found[0].is_Integer and found[1].is_Integer):
            return None
        return int(found[0]), int(found[1])
