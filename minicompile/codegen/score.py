"""What fills the holes of the attention template: a score and its slope, as Triton functions of a tile.

    @triton.jit
    def score(s, b, h, i, j, rows, columns, x1):        s: products of queries i and keys j
        tmp0 = (j - i).to(tl.float32)                    of head h of batch b
        ...

The formulas are recorded as a loop body over (b, h, i, j) and made simpler: arithmetic of positions becomes
one index, divisions by numbers multiplications, and a positive factor of the result comes out, to go into
the exponent. From comparisons of i and j follows a `Band` outside of which nothing counts: tiles there are
left out. Inside of it these comparisons are settled: what they do is a function of its own, for tiles at the
edges. That one loads nothing, since Triton loads ahead only what no condition stands before.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from minicompile.codegen.legalize import legalize
from minicompile.codegen.plan import INT32_END, CodeLine
from minicompile.codegen.triton_ops import (
    TRITON_DTYPES,
    TritonIndex,
    convert,
    operand,
    pointwise_text,
)
from minicompile.errors import Unsupported
from minicompile.lowering.ir import Layout, TemplateKernel, loop_index
from minicompile.ops.origin import Origins
from minicompile.scheduling.body import (
    LoopBody,
    Recorder,
    Rewriter,
    Value,
    drop_dead,
    names,
    settled,
)
from minicompile.shapes.expr import ZERO, Size, bounds, contiguous_strides, simplify_index

BATCH, HEAD, QUERY, KEY = loop_index(4)
COORDINATES = {BATCH: "b", HEAD: "h", QUERY: "i", KEY: "j"}
MASKED = -1e30
"""A score so low weighs nothing, if its row has others."""
LARGEST = torch.finfo(torch.float32).max
MODERATE = 2**10
"""A number below is a small one."""
GENTLE = {"mul", "add", "sub", "neg", "where", "tanh", "sigmoid", "relu", "maximum", "minimum"}
"""Operations that don't make large numbers of small ones; of products those by a number."""
WIDE = ".to(tl.int64)"
QUICK = {"tanh": "quick_tanh({0})", "exp": "tl.exp({0})", "sigmoid": "tl.sigmoid({0})"}
"""Within half types' rounding, in one or two instructions."""


@dataclass(frozen=True)
class Band:
    """Where low <= i - j <= high; None: without end."""

    low: int | None = None
    high: int | None = None

    def __and__(self, other: Band) -> Band:
        lows = [x for x in (self.low, other.low) if x is not None]
        highs = [x for x in (self.high, other.high) if x is not None]
        return Band(max(lows, default=None), min(highs, default=None))

    @property
    def condition(self) -> str:
        """Of the places of a tile."""
        ends = [f"(i - j >= {self.low})"] * (self.low is not None)
        return " & ".join([*ends, *[f"(i - j <= {self.high})"] * (self.high is not None)])

    def within(self, other: Band) -> bool:
        return self & other == self

    def covers(self, rows: int, columns: int) -> bool:
        """Has each row a place in it?"""
        low, high = (self.low or 0), (0 if self.high is None else self.high)
        ends = self.low is None or self.low <= 0, self.high is None or self.high >= rows - columns
        return all(ends) and (None in (self.low, self.high) or low <= high)


EVERYWHERE = Band()
COMPARED = ("le", "lt", "ge", "gt")
LOGICAL = {"logical_not", "logical_and", "logical_or", "bitwise_and", "bitwise_or"}
FOLDED = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}


def is_position(value: Value) -> bool:
    """Known from the places of a tile alone."""
    return value.op == "constant" or (value.op == "index_expr" and not value.indirect)


def truth(value: Value, wanted: bool) -> Band:
    """A band that holds every place where a condition is true (or false)."""

    @functools.cache
    def band(value: Value, wanted: bool) -> Band:
        if value.op == "logical_not":
            return band(value.inputs[0], not wanted)
        if value.op in ("logical_and", "bitwise_and", "logical_or", "bitwise_or"):
            one, other = (band(v, wanted) for v in value.inputs)
            return one & other if value.op.endswith("and") == wanted else EVERYWHERE
        return compared(value, wanted)

    return band(value, wanted)


def compared(value: Value, wanted: bool) -> Band:
    """The same of a comparison; everywhere of anything else."""
    if value.op not in COMPARED:
        return EVERYWHERE
    if not all(map(is_position, value.inputs)):
        return EVERYWHERE
    sides = [v.index if v.op == "index_expr" else sympy.Integer(v.constant) for v in value.inputs]
    difference = sympy.expand(sides[0] - sides[1])  # type: ignore[operator]
    if value.op in ("le", "lt"):
        difference = -difference
    if not wanted:
        difference = -difference
    if (value.op in ("lt", "gt")) == wanted:
        difference -= 1
    # the condition says: difference >= 0
    for sign in (1, -1):
        rest = sympy.expand(difference - sign * (QUERY - KEY))
        if rest.is_Integer:
            return Band(low=-int(rest)) if sign == 1 else Band(high=int(rest))
    return EVERYWHERE


def counting(value: Value) -> Band:
    """A band that holds every place where a score counts. A finite mask excludes places only where those that
    it leaves can't be as low: if all of a row are, as those of padding, they weigh the same."""
    return within_masks(value, MASKED if is_small(value, MASKED) else -math.inf)


def within_masks(value: Value, mask: float) -> Band:
    """Where no condition sets a score to `mask` or below."""

    @functools.cache
    def within(value: Value) -> Band:
        if value.op == "where":
            condition, yes, no = value.inputs
            if no.op == "constant" and no.constant <= mask:
                return truth(condition, True) & within(yes)
            if yes.op == "constant" and yes.constant <= mask:
                return truth(condition, False) & within(no)
        elif value.op == "add":
            return within(value.inputs[0]) & within(value.inputs[1])
        elif value.op == "mul" and value.inputs[1].op == "constant":
            return within(value.inputs[0]) if value.inputs[1].constant > 0 else EVERYWHERE
        return EVERYWHERE

    return within(value)


def is_placed(value: Value) -> bool:
    """Is a condition read off a score's place alone?"""

    @functools.cache
    def placed(value: Value) -> bool:
        if value.op in COMPARED:
            return all(map(is_position, value.inputs))
        return value.op in LOGICAL and all(map(placed, value.inputs))

    return placed(value)


def is_small(value: Value, mask: float | None = None) -> bool:
    """Is a score made of products and small numbers alone? Conditions aren't part of it, nor is -inf. With
    `mask`, what a band leaves is meant: numbers up to `mask` are no part of it where places alone decide."""

    @functools.cache
    def small(value: Value) -> bool:
        if value.op == "constant":
            return abs(value.constant) < MODERATE or (value.constant == -math.inf and mask is None)
        if value.op == "load":
            return value.buffer == "x0"
        parts = value.inputs[1:] if value.op == "where" else value.inputs
        if value.op == "where" and mask is not None and is_placed(value.inputs[0]):
            parts = tuple(v for v in parts if v.op != "constant" or v.constant > mask)
        powers = value.op == "mul" and all(v.op != "constant" for v in parts)
        return value.op in GENTLE and not powers and all(map(small, parts))

    return small(value)


def multiplier(value: Value) -> float | None:
    """The positive number that a value is something times."""
    if value.op != "mul" or value.inputs[1].op != "constant":
        return None
    number = float(value.inputs[1].constant)
    return number if 0 < number < math.inf else None


class Simplifier(Rewriter):
    """A body in fewer operations. `settled`: conditions whose truth is known; `factors`: what is taken out
    of the values that are stored."""

    def __init__(self, body: LoopBody, settled: Mapping[Value, bool], factor: bool) -> None:
        super().__init__(body.name, body.ranges, body.reduction_ranges)
        self.settled, self.factor = settled, factor
        self.factors: dict[str, float] = {}
        self.rewrite(body)
        drop_dead(self.body)

    def visit(self, value: Value) -> Value:
        if value in self.settled:
            return self.ops.constant(self.settled[value], torch.bool)
        return super().visit(value)

    def visit_other(self, ops: Recorder, value: Value) -> Value:
        inputs = [self.new[v] for v in value.inputs]
        counted = value.op in ("add", "sub", "mul", "neg") and not value.dtype.is_floating_point
        if counted and all(map(is_position, inputs)):
            places = [sympy.Integer(v.constant) if v.index is None else v.index for v in inputs]
            last = -places[-1] if value.op in ("sub", "neg") else places[-1]
            whole = places[0] * last if value.op == "mul" else sum(places[:-1], last)
            return ops.index_expr(whole, value.dtype)
        if value.op == "neg" and value.dtype.is_floating_point:
            minus = ops.constant(-1.0, value.dtype)
            found = self.choice(ops, "mul", [*inputs, minus])
            return found or self.product(ops, inputs[0], -1.0)
        if value.op in FOLDED and (found := self.choice(ops, value.op, inputs)) is not None:
            return found
        return self.simple(ops, value.op, *inputs) or self.again(value)

    def simple(self, ops: Recorder, name: str, *inputs: Value) -> Value | None:
        """What an operation comes to by a rule below, if by any."""
        rule = getattr(self, f"simple_{name}", lambda *a: None)
        return settled(ops, name, inputs) or rule(ops, *inputs)

    def choice(self, ops: Recorder, name: str, inputs: list[Value]) -> Value | None:
        """Arithmetic of a choice between numbers and a number is a choice between numbers."""
        for place, other in ((0, 1), (1, 0)):
            choice, number = inputs[place], inputs[other]
            if choice.op != "where" or {v.op for v in (*choice.inputs[1:], number)} != {"constant"}:
                continue
            pairs = [(way.constant, number.constant)[:: 1 - 2 * place] for way in choice.inputs[1:]]
            ways = [ops.constant(FOLDED[name](*pair), choice.dtype) for pair in pairs]
            return ops.pointwise("where", choice.inputs[0], *ways)
        return None

    def visit_to_dtype(self, ops: Recorder, value: Value) -> Value:
        source = self.new[value.inputs[0]]
        if source.index is not None and is_position(source) and value.dtype is not torch.bool:
            return ops.index_expr(source.index, value.dtype)
        if source.op == "constant":
            return ops.constant(source.constant, value.dtype)
        if source.op == "where" and value.dtype is torch.bool:
            return self.simple_ne(ops, source, ops.constant(0, source.dtype)) or self.again(value)
        return self.again(value)

    def visit_store(self, ops: Recorder, value: Value) -> Value:
        source = self.new[value.inputs[0]]
        if self.factor:
            factor, rest = self.factored(ops, source)
            numbers = [abs(v.constant) for v in self.body.values if v.op == "constant"]
            if any(number <= LARGEST < number * factor for number in numbers):
                factor, rest = 1.0, source  # a finite mask that becomes -inf does so for all
            self.factors[value.buffer], source = factor, rest
        assert value.index is not None
        return ops.store(value.buffer, value.index, source)

    def factored(self, ops: Recorder, value: Value) -> tuple[float, Value]:
        """A positive number and the value that it multiplies."""
        if (number := multiplier(value)) is not None:
            factor, rest = self.factored(ops, value.inputs[0])
            return number * factor, rest
        for one, other in (value.inputs, value.inputs[::-1]) if value.op == "mul" else ():
            if (number := multiplier(one)) is not None:
                return number, ops.pointwise("mul", one.inputs[0], other)
        if value.op == "where":
            condition, *ways = value.inputs
            for way in (0, 1):
                other = ways[1 - way]
                if other.op == "constant" and (other.constant == 0 or math.isinf(other.constant)):
                    factor, ways[way] = self.factored(ops, ways[way])
                    return factor, ops.pointwise("where", condition, *ways)
        return 1.0, value

    def simple_where(self, ops: Recorder, c: Value, yes: Value, no: Value) -> Value | None:
        if c.op == "logical_not":
            return ops.pointwise("where", c.inputs[0], no, yes)
        if yes.dtype is torch.bool and {yes.op, no.op} == {"constant"}:
            if yes.constant == no.constant:
                return yes
            return c if yes.constant else ops.pointwise("logical_not", c)
        return None

    def simple_logical_not(self, ops: Recorder, c: Value) -> Value | None:
        return c.inputs[0] if c.op == "logical_not" else None

    def simple_ne(self, ops: Recorder, a: Value, b: Value) -> Value | None:
        """Of a choice between two numbers and a number, it is the condition."""
        if a.op == "where" and {v.op for v in (*a.inputs[1:], b)} == {"constant"}:
            yes, no = (v.constant != b.constant for v in a.inputs[1:])
            ways = [ops.constant(way, torch.bool) for way in (yes, no)]
            found = self.simple(ops, "where", a.inputs[0], *ways)
            return found or ops.pointwise("where", a.inputs[0], *ways)
        return None

    def simple_eq(self, ops: Recorder, a: Value, b: Value) -> Value | None:
        found = self.simple_ne(ops, a, b)
        if found is None:
            return None
        return self.simple(ops, "logical_not", found) or ops.pointwise("logical_not", found)

    def simple_truediv(self, ops: Recorder, a: Value, b: Value) -> Value | None:
        if b.op != "constant" or b.constant == 0:
            return None
        return self.product(ops, a, 1 / b.constant)

    def simple_mul(self, ops: Recorder, a: Value, b: Value) -> Value | None:
        if a.op == "constant":
            a, b = b, a
        return self.product(ops, a, float(b.constant)) if b.op == "constant" else None

    def product(self, ops: Recorder, a: Value, number: float) -> Value:
        """One multiplication for several by numbers."""
        if a.op == "mul" and a.inputs[1].op == "constant":
            a, number = a.inputs[0], number * a.inputs[1].constant
        if a.op == "constant":
            return ops.constant(a.constant * number, a.dtype)
        return a if number == 1 else ops.pointwise("mul", a, ops.constant(number, a.dtype))

    def simple_add(self, ops: Recorder, a: Value, b: Value) -> Value | None:
        for one, other in ((a, b), (b, a)):
            if one.op == "constant" and one.constant == 0 and a.dtype.is_floating_point:
                return other
        return None


def core(edge: LoopBody, inside: LoopBody) -> Value:
    """The part of `edge`'s score that is `inside`'s, if places alone decide what happens to it; else all."""
    numbers, table, loaded = dict[Value, int](), dict[Any, int](), set[Value]()
    for value in (*edge.values, *inside.values):
        facts = value.op, value.dtype, value.buffer, value.index, repr(value.constant)
        numbers[value] = table.setdefault((facts, *map(numbers.get, value.operands)), len(table))
        if value.op == "load" or not loaded.isdisjoint(value.operands):
            loaded.add(value)
    whole, part = (body.stores[0].inputs[0] for body in (edge, inside))
    found = whole
    while numbers[found] != numbers[part]:
        rest = [value for value in found.operands if value in loaded]
        if len(rest) != 1:
            return whole
        found = rest[0]
    return found


@dataclass
class Scores:
    """The holes of a kernel: score and slope at the band's edges and inside of it. The score's `core` is
    computed of every tile. So is the slope inside: outside of the band weights are 0, but see `may_end`."""

    band: Band
    factors: dict[str, float]
    edge: LoopBody
    inside: LoopBody
    core: Value
    others: dict[str, Layout] = field(default_factory=dict)
    """The tensors that they read, by their names "x1", "x2", ..."""

    @property
    def read(self) -> int:
        """Bytes that each score reads."""
        own = {
            (v.buffer, v.index)
            for v in self.loads
            if {QUERY, KEY} <= (v.index or ZERO).free_symbols
        }
        return sum(self.others[buffer].dtype.itemsize for buffer, _ in own)

    @functools.cached_property
    def loads(self) -> list[Value]:
        """From `others`."""
        values = [*self.edge.values, *self.inside.values]
        return [v for v in values if v.op == "load" and v.buffer in self.others]

    @functools.cached_property
    def numbers(self) -> dict[str, str]:
        """Tensors of which a program reads one number: the loads that stand before its loops."""
        found = dict[str, str]()
        for name in self.others:
            loads = [v for v in self.loads if v.buffer == name]
            own = {(v.index, v.mask) for v in loads}
            if len(own) != 1 or loads[0].mask is not None or loads[0].index is None:
                continue
            if {QUERY, KEY}.isdisjoint(loads[0].index.free_symbols):
                found[name] = Printer(self, self.edge, False).load(loads[0])
        return found

    def pair(self, batch: int, heads: int) -> str:
        """Batch and head of a program: those that read the same numbers follow each other, for the cache."""
        reads = {v.index for v in self.loads}
        large = [x.free_symbols for x in reads if x is not None and {QUERY, KEY} <= x.free_symbols]
        if any(HEAD in own and BATCH not in own for own in large):
            return f"pair % {batch}, pair // {batch}"
        return f"pair // {heads}, pair % {heads}"

    @property
    def is_plain(self) -> bool:
        """Are slopes what comes down, and is nothing read for each score?"""
        return self.read == 0 and all(s.inputs[0].op == "load" for s in self.inside.stores[1:])

    @property
    def may_end(self) -> bool:
        """May scores within the band be masks, so that a row has none that counts?"""
        masks = [v for v in self.inside.values if v.op == "constant" and v.constant <= MASKED]
        return bool(masks) or any(load.buffer not in self.numbers for load in self.loads)

    @property
    def small(self) -> bool:
        """Are scores products, times numbers or of a bounded function, or else -inf?"""
        return self.factors["y0"] < MODERATE and is_small(self.edge.stores[0].inputs[0])

    def functions(self, quick: bool, origins: Origins) -> list[CodeLine]:
        """Their text."""
        places = [*COORDINATES.values()]
        passed = [*places, "rows", "columns", *self.others]
        edge, inside = (Printer(self, body, quick) for body in (self.edge, self.inside))
        lines = edge.function("score", ["s", *passed], self.core, {})
        whole = self.edge.stores[0].inputs[0]
        lines += edge.function("score_at_edge", ["s", *places], whole, {self.core: "s"})
        for store in self.inside.stores[1:]:
            lines += inside.function("slope", ["s", "ds", *passed], store.inputs[0], {})
        return [CodeLine(line, origins) for line in lines]


def scores_of(
    kernel: TemplateKernel, sizes: tuple[int, int, int, int], others: list[Layout]
) -> Scores:
    """Record and simplify what a kernel's holes take. Raises Unsupported."""
    ranges: dict[sympy.Symbol, Size] = dict(zip((BATCH, HEAD, QUERY), sizes))
    body = LoopBody("score", ranges, {KEY: sizes[3]})
    known = {f"x{n}": layout for n, layout in enumerate(others, 1)}
    dtypes = {name: layout.dtype for name, layout in known.items()}
    dtypes |= {"x0": torch.float32, f"x{len(others) + 1}": torch.float32}
    recorder, strides = Recorder(body, dtypes), contiguous_strides(sizes)
    place = sum((x * step for x, step in zip(COORDINATES, strides)), sympy.Integer(0))
    for number, hole in enumerate(kernel.holes):
        recorder.store(f"y{number}", place, hole(recorder, (BATCH, HEAD, QUERY, KEY)))
    drop_dead(body)
    for value in body.values:
        if value.op in ("indirect", "reduction", "scan"):
            raise Unsupported("scores that are looked up")
        own = value.buffer in dtypes and value.buffer not in known
        if own and value.index != simplify_index(place, body.all_ranges):
            raise Unsupported("scores that read other scores")
    simple = Simplifier(body, {}, factor=True)
    band = counting(simple.body.stores[0].inputs[0])
    if not band.covers(*sizes[2:]):
        band = EVERYWHERE
    settled = {
        value: wanted
        for value in simple.body.values
        for wanted in (True, False)
        if value.op in COMPARED
        and (half := truth(value, wanted)) != EVERYWHERE
        and band.within(half)
    }
    inside = Simplifier(simple.body, settled, factor=False).body
    edge, inside = (legalize(part, dtypes)[0] for part in (simple.body, inside))
    return Scores(band, simple.factors, edge, inside, core(edge, inside), known)


class Printer:
    """Writes a function of a tile, line by line."""

    def __init__(self, scores: Scores, body: LoopBody, quick: bool) -> None:
        self.scores, self.body, self.quick = scores, body, quick

    def function(
        self, name: str, parameters: list[str], result: Value, held: dict[Value, str]
    ) -> list[str]:
        """The function that gives a result. `held`: values that parameters hold."""
        needed = {result}
        for value in reversed(self.body.values):
            if value in needed and value not in held:
                needed.update(value.operands)
        values = [v for v in self.body.values if v in needed and v not in held]
        own = {"x0": "s", f"x{len(self.scores.others) + 1}": "ds"}
        held |= {v: own[v.buffer] for v in values if v.op == "load" and v.buffer in own}
        for value in values:
            if value.op == "index_expr" and value.dtype is torch.int32:
                text = self.index(value.index)
                held[value] = text if text.isidentifier() else f"({text})"
        self.names = names([v for v in values if v not in held]) | held
        lines = ["@triton.jit", f"def {name}({', '.join(parameters)}):"]
        for value in values:
            if value not in held and value.op != "constant":
                lines.append(f"    {self.names[value]} = {self.text(value)}")
        tile = "s" not in parameters or any(held.get(v) in ("s", "ds") for v in needed)
        found = self.ref(result) if tile else f"tl.broadcast_to({self.ref(result)}, s.shape)"
        return [*lines, f"    return {found}", ""]

    def ref(self, value: Value) -> str:
        return operand(value, self.names)

    def text(self, value: Value) -> str:
        match value.op:
            case "load":
                return value.buffer if value.buffer in self.scores.numbers else self.load(value)
            case "index_expr":
                return self.index(value.index, f".to({TRITON_DTYPES[value.dtype]})")
            case "to_dtype":
                source = value.inputs[0]
                if (
                    source.op == "index_expr"
                    and value.dtype is torch.float32
                    and self.exact(source)
                ):
                    return self.index(source.index, ".to(tl.float32)")
                return convert(self.ref(source), source.dtype, value.dtype)
            case name if self.quick and name in QUICK:
                return QUICK[name].format(self.ref(value.inputs[0]))
        return pointwise_text(value, self.ref)

    def exact(self, value: Value) -> bool:
        """Can each position be a float32, so that a difference of two takes one operation a score?"""
        terms = sympy.Add.make_args(value.index)
        plain = all(t.is_Integer or t.as_coeff_Mul()[1].is_Symbol for t in terms)
        ends = [bounds(term, self.body.all_ranges) for term in terms]
        return plain and all(end is not None and max(map(abs, end)) < 2**24 for end in ends)

    def index(self, index: Any, cast: str = "") -> str:
        """An index whose coordinates are converted first."""
        printed = TritonIndex(self.body.all_ranges, lambda symbol: f"{COORDINATES[symbol]}{cast}")
        terms = sympy.Add.make_args(index)
        less = [t for t in terms if t.could_extract_minus_sign()]
        text = " + ".join(printed.within(t, 1) for t in terms if t not in less) or "0"
        return text + "".join(f" - {printed.within(-t, 1)}" for t in less)

    def load(self, value: Value) -> str:
        """What is the same for the whole tile goes into the pointer, as 64 bits."""
        layout = self.scores.others[value.buffer]
        assert value.index is not None
        terms = sympy.Add.make_args(value.index + sympy.sympify(layout.offset))
        within = [t for t in terms if not t.free_symbols.isdisjoint({QUERY, KEY})]
        rest = sympy.Add(*(t for t in terms if t not in within))
        pointer = value.buffer if rest == 0 else f"{value.buffer} + ({self.index(rest, WIDE)})"
        masks = []
        if within:
            place = sympy.Add(*within)
            found = bounds(place, self.body.all_ranges)
            wide = found is None or not found[1] < INT32_END or not found[0] > -INT32_END
            pointer += f" + ({self.index(place, WIDE * wide)})"
            sides = {QUERY: "rows", KEY: "columns"}
            masks = [mask for symbol, mask in sides.items() if symbol in place.free_symbols]
        if value.mask is not None:
            masks.append(self.ref(value.mask))
        if not masks:
            return f"tl.load({pointer})"
        other = "0.0" if layout.dtype.is_floating_point else "0"
        return f"tl.load({pointer}, {' & '.join(masks)}, other={other})"
