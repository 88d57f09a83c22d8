"""Sums of which at most one term isn't zero.

The gradient of a loss by its logits is zero but at the label; what the softmax's backward needs of it is the
sum of a row:

    sum over r of where(r == label, slope, 0)    =    where(0 <= label < n, slope, 0)

which needs no loop.
"""

from __future__ import annotations

from collections.abc import Iterator

import sympy
import torch

from minicompile.codegen.plan import body_rule
from minicompile.ops.dtypes import is_int
from minicompile.scheduling.body import LoopBody, Recorder, Rewriter, Value, drop_dead, loop_level


@body_rule("one term")
def take_one_term(body: LoopBody) -> tuple[LoopBody, dict[Value, Value]]:
    """The body without loops for such sums, and which of its values stands for each old one."""
    rewriter = _OneTerm(body)
    rewriter.rewrite(body)
    drop_dead(rewriter.body)
    return rewriter.body, rewriter.new


class _OneTerm(Rewriter):
    def __init__(self, body: LoopBody) -> None:
        super().__init__(body.name, body.ranges, body.reduction_ranges)
        self.loop = loop_level(body)

    def visit_reduction(self, ops: Recorder, value: Value) -> Value:
        roundings, choice = [], value.inputs[0]
        while choice.op == "to_dtype" and choice.inputs[0].dtype.is_floating_point:
            roundings.append(choice.dtype)
            choice = choice.inputs[0]
        if value.kind != "sum" or choice.op != "where" or not choice.dtype.is_floating_point:
            return self.again(value)
        condition, term, other = choice.inputs
        conditions = list(conjuncts(condition))
        hits = [c for c in conditions if c in self.loop]
        zero = other.op == "constant" and other.constant == 0
        if not zero or term in self.loop or len(hits) != 1 or hits[0].op != "eq":
            return self.again(value)
        place = self.place(*hits[0].inputs) or self.place(*reversed(hits[0].inputs))
        if place is None:
            return self.again(value)
        at, end = self.new[place[0]], ops.index_expr(place[1], torch.int64)
        start = ops.constant(0, at.dtype)
        found = ops.pointwise("logical_and", *(
            ops.pointwise("le", start, at), ops.pointwise("lt", at, ops.to_dtype(end, at.dtype))
        ))  # fmt: skip
        for also in (self.new[c] for c in conditions if c not in self.loop):
            found = ops.pointwise("logical_and", found, also)
        total = ops.pointwise("where", found, self.new[term], self.new[other])
        for dtype in reversed(roundings):
            total = ops.to_dtype(total, dtype)
        return ops.pointwise("add", total, ops.constant(0.0, total.dtype))  # as 0 + -0.0 is

    def place(self, index: Value, at: Value) -> tuple[Value, sympy.Expr] | None:
        """Which r an equality picks, and how many there are, if `index` is r."""
        while index.op == "to_dtype" and is_int(index.inputs[0].dtype):
            index = index.inputs[0]
        loops = [(v, n) for v, n in self.body.reduction_ranges.items() if n != 1]
        if index.op != "index_expr" or at in self.loop or at.dtype is not torch.int64:
            return None
        return (at, sympy.sympify(loops[0][1])) if [v for v, _ in loops] == [index.index] else None


def conjuncts(condition: Value) -> Iterator[Value]:
    """Conditions that must all hold."""
    if condition.op not in ("logical_and", "bitwise_and"):
        yield condition
        return
    for part in condition.inputs:
        yield from conjuncts(part)
