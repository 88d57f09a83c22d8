"""A ramp in attention's scores: what grows evenly along the keys and the queries, as ALiBi's bias does.

Of a tile whose first key is k, and whose queries are of a GROUP that begins with q,

    s + steep * (j - i)  =  s + steep * (j - k)      each column's, the same in every tile
                              + steep * (k - q)      one number, which goes into the largest score
                              - steep * (i - q)      each row's: left out, no weight depends on it

so a score takes one addition for it. The parts are small near the diagonal, where weights are: the digits
that this costs are none that half types have (of float32 they would be missed). Scores with a ramp are
exponents of 2, so that nothing multiplies them later.

Press, Smith and Lewis, Train Short, Test Long (2022).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import sympy
import torch

from minicompile.lowering.ir import loop_index
from minicompile.ops.attention import LOG2E
from minicompile.scheduling.body import LoopBody, Recorder, Rewriter, Value, drop_dead
from minicompile.shapes.expr import ZERO, bounds

QUERY, KEY = loop_index(4)[2:]
GROUP = 128
"""Queries that every kernel measures from the first of; no tile has more."""
EXACT = 2**24
"""Whole numbers up to this one are float32."""


@dataclass(frozen=True)
class Ramp:
    """Steepness * (`key` * j + `query` * i + `start`)."""

    steepness: LoopBody
    """One number for a batch and head; it is stored."""
    key: int
    query: int
    start: int


@dataclass(frozen=True)
class Term:
    """A product of a position and of what depends on batch and head alone. `path`: its way from the score, by
    numbers of operands. `sign`: 1, or -1 if subtracted."""

    path: tuple[int, ...]
    sign: int
    position: Value
    others: tuple[Value, ...]


def without_ramp(body: LoopBody, factor: float) -> tuple[Ramp | None, LoopBody]:
    """Take the ramp out of the first value that is stored, which is a score by a factor: then it becomes the
    rest of an exponent of 2. Other bodies stay."""
    same = uniform(body)
    term = term_of(body.stores[0].inputs[0], same)
    if term is None or not (lines := coefficients(term, body)):
        return None, body
    writer = Rewriter("ramp", body.ranges, body.reduction_ranges)
    for value in body.values:
        if value in same:
            writer.new[value] = writer.visit(value)
    steep = writer.ops.constant(term.sign * factor * LOG2E, torch.float32)
    for other in term.others:
        steep = writer.ops.pointwise("mul", writer.new[other], steep)
    writer.ops.store("ramp", ZERO, steep)
    drop_dead(writer.body)
    return Ramp(writer.body, *lines), Leveler(body, term.path, factor * LOG2E).body


def term_of(value: Value, same: set[Value]) -> Term | None:
    """The ramp that a score is a sum with, unless it is -inf."""

    @functools.cache
    def term(value: Value) -> Term | None:
        if value.op == "where":
            ways = [way for way in (1, 2) if not is_excluded(value.inputs[way])]
            return within(value, ways[0]) if len(ways) == 1 else None
        if value.op not in ("add", "sub") or value.dtype is not torch.float32:
            return None
        for place, part in enumerate(value.inputs):
            sign = -1 if (place, value.op) == (1, "sub") else 1
            if found := position_in(part, same):
                return Term((place,), sign, *found)
            if sign == 1 and (below := within(value, place)):
                return below
        return None

    def within(value: Value, place: int) -> Term | None:
        found = term(value.inputs[place])
        return found and replace(found, path=(place, *found.path))

    return term(value)


def is_excluded(value: Value) -> bool:
    return value.op == "constant" and value.constant == -math.inf


def position_in(value: Value, same: set[Value]) -> tuple[Value, tuple[Value, ...]] | None:
    """The position that a product is of, and its other factors."""
    if value.op == "index_expr" and value not in same:
        return value, ()
    for place, part in enumerate(value.inputs if value.op == "mul" else ()):
        other = value.inputs[1 - place]
        if other in same and (found := position_in(part, same)):
            return found[0], (*found[1], other)
    return None


def uniform(body: LoopBody) -> set[Value]:
    """What is one number for a batch and head."""
    found = set[Value]()
    for value in body.values:
        places = value.index.free_symbols if value.index is not None else set()
        plain = value.mask is None and not value.indirect and value.op not in ("store", "indirect")
        if plain and places.isdisjoint({QUERY, KEY}) and found.issuperset(value.inputs):
            found.add(value)
    return found


def coefficients(term: Term, body: LoopBody) -> tuple[int, int, int] | None:
    """Of keys, of queries, and what is added; None if a position isn't such a sum, or not exact."""
    index = sympy.expand(term.position.index)
    key, query = index.coeff(KEY), index.coeff(QUERY)
    start = sympy.expand(index - key * KEY - query * QUERY)
    if term.position.indirect or not (key.is_Integer and query.is_Integer and start.is_Integer):
        return None
    ends = [bounds(part, body.all_ranges) for part in (key * KEY, query * QUERY, start)]
    if any(end is None or max(map(abs, end)) > EXACT for end in ends):
        return None
    return int(key), int(query), int(start)


class Leveler(Rewriter):
    """A body whose first stored value loses the term at the end of a path and is multiplied by a number."""

    def __init__(self, body: LoopBody, path: tuple[int, ...], times: float) -> None:
        super().__init__(body.name, body.ranges, body.reduction_ranges)
        self.first, self.path, self.times = body.stores[0], path, times
        self.scaled = functools.cache(self.made_scaled)
        self.rewrite(body)
        drop_dead(self.body)

    def visit_store(self, ops: Recorder, value: Value) -> Value:
        if value is not self.first:
            return self.again(value)
        assert value.index is not None
        return ops.store(value.buffer, value.index, self.level(ops, value.inputs[0], *self.path))

    def level(self, ops: Recorder, value: Value, place: int, *path: int) -> Value:
        """Another use of the same term stays."""
        if path:
            inputs = [
                self.new[v] if v.dtype is torch.bool else self.scaled(ops, v) for v in value.inputs
            ]
            inputs[place] = self.level(ops, value.inputs[place], *path)
            return ops.pointwise(value.op, *inputs)
        rest = self.scaled(ops, value.inputs[1 - place])
        return ops.pointwise("neg", rest) if (value.op, place) == ("sub", 0) else rest

    def made_scaled(self, ops: Recorder, value: Value) -> Value:
        """The factor goes as deep as there are sums."""
        if is_excluded(value):
            return self.new[value]
        match value.op, value.inputs:
            case "add" | "sub", (a, b):
                return ops.pointwise(value.op, self.scaled(ops, a), self.scaled(ops, b))
            case "mul", (a, b) if b.op == "constant":
                times = ops.constant(b.constant * self.times, value.dtype)
                return ops.pointwise("mul", self.new[a], times)
        times = ops.constant(self.times, value.dtype)
        return ops.pointwise("mul", self.new[value], times)
