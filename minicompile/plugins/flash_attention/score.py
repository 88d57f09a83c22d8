"""The score function of attention's kernels: as Triton functions of a tile, and the band that it leaves.

    @triton.jit
    def score(x0, b, h, i, j, rows, columns, x1):       x0: products of queries i and keys j
        tmp0 = (j - i).to(tl.float32)                    of head h of batch b
        ...

The function is recorded as a loop body over (b, h, i, j), and so is its `slope`, the products' gradient. What
follows from a place alone is tried on every distance i - j: outside of a `Band` of distances all scores are
-inf, so that tiles there are left out. Inside of it what comes to one number is that number: the functions
ask for no place that the band has decided, and tiles at its edges are masked by the template.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from minicompile import compat
from minicompile.codegen.legalize import COMPARISONS, legalize
from minicompile.codegen.phases import cone
from minicompile.codegen.plan import INT32_END
from minicompile.codegen.rewrite import SIMPLIFY, Rewriter, Rules, first_is_constant
from minicompile.codegen.triton_ops import (
    TRITON_DTYPES,
    TritonIndex,
    convert,
    pointwise_text,
    typed_constant,
)
from minicompile.errors import Unsupported
from minicompile.lowering.ir import Layout, loop_index
from minicompile.lowering.lower import Lowering
from minicompile.lowering.value import TensorValue
from minicompile.ops.dtypes import HALF_TYPES
from minicompile.ops.graph import Graph
from minicompile.ops.handler import InnerFn
from minicompile.ops.table import EAGER
from minicompile.options import Options
from minicompile.plugins.flash_attention.operators import function_of
from minicompile.plugins.replacing import trace_function
from minicompile.scheduling.body import LoopBody, Recorder, Value, drop_dead, names
from minicompile.shapes.expr import bounds, contiguous_strides, simplify_index
from minicompile.shapes.symnode import evaluate


class Formulas(Lowering):
    """Lowers a graph to formulas: nothing gets memory, and outputs are values."""

    def realize_if_better(self, node: fx.Node, value: TensorValue) -> None:
        pass

    def output(self, item: Any) -> Any:
        return self.values[item]


def formulas(graph: Graph, options: Options) -> tuple[InnerFn, ...]:
    """Return what a graph's outputs are at an index.

    Raises Unsupported where that takes more than the graph's inputs."""
    lowering = Formulas(graph, options)
    values: Any = lowering.visit()
    if lowering.ctx.operations:
        raise Unsupported(f"{lowering.ctx.operations[0].name} needs memory of its own")
    return tuple(value.load for value in values)


BATCH, HEAD, QUERY, KEY = PLACE = loop_index(4)
NAMES = dict(zip(PLACE, "bhij"))
DISTANCE = sympy.Symbol("distance", integer=True)
COUNTING: dict[str, Any]
COUNTING = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg}
"""Arithmetic of whole numbers."""
MODERATE = 2**10
"""A number below is a small one."""
WIDE = ".to(tl.int64)"
QUICK = {"tanh": "quick_tanh({0})", "exp": "tl.exp({0})", "sigmoid": "tl.sigmoid({0})"}
"""Within half types' rounding, in one or two instructions."""


@dataclass(frozen=True)
class Band:
    """Where low <= i - j <= high; None: without end."""

    low: int | None = None
    high: int | None = None

    @property
    def condition(self) -> str:
        """What is to be added to a mask of a tile's places."""
        low = f" & (i - j >= {self.low})" if self.low is not None else ""
        return low + (f" & (i - j <= {self.high})" if self.high is not None else "")

    def covers(self, rows: int, columns: int) -> bool:
        """Has each row a place in it?"""
        ends = (self.low or 0) <= 0, self.high is None or self.high >= rows - columns
        return all(ends) and (None in (self.low, self.high) or self.low <= self.high)  # type: ignore[operator]


def places(body: LoopBody) -> dict[Value, Any]:
    """Return the values that are whole numbers made of a place, and their formulas."""
    found: dict[Value, Any] = {}
    for value in body.values:
        whole = not any(v.dtype.is_floating_point for v in value.inputs)
        inputs = [found.get(v) for v in value.inputs]
        if value.op == "constant" and value.dtype in (torch.int32, torch.int64):
            found[value] = sympy.Integer(value.constant)
        elif value.op == "index_expr" and not value.indirect:
            found[value] = value.index
        elif whole and None not in inputs and value.dtype.itemsize >= 4:
            if value.op in COUNTING:
                found[value] = COUNTING[value.op](*inputs)
            elif value.op == "to_dtype":
                found[value] = inputs[0]
    return found


def tried(body: LoopBody, distances: Tensor) -> dict[Value, Tensor]:
    """Return what values are at each distance of query and key, as float64; NaN where more decides."""
    formula, known = places(body), dict[Value, Tensor]()
    for value in body.values:
        inputs = [known[v] for v in value.inputs]
        both: list[Any] = [formula.get(v) for v in value.inputs]
        if value.op in COMPARISONS and None not in both:  # `j > i` asks for their difference
            inputs = [at_distances(both[0] - both[1], distances), 0.0 * distances.double()]
        known[value] = outcome(value, inputs, distances)
        if value in formula:
            known[value] = at_distances(formula[value], distances)
    return known


def at_distances(index: Any, distances: Tensor) -> Tensor:
    """Return what a formula of a place comes to, NaN where the distance doesn't decide it."""
    index = sympy.expand(index.xreplace({QUERY: KEY + DISTANCE}))
    if not index.free_symbols <= {DISTANCE}:
        return 0.0 * distances.double() + math.nan
    return 0.0 * distances.double() + evaluate(index, {DISTANCE: distances})


def outcome(value: Value, inputs: list[Tensor], distances: Tensor) -> Tensor:
    """Return what an operation gives where enough of its operands is known. Products of queries and keys are
    taken to be finite: nothing makes a score of -inf another one but a choice."""
    unknown = 0.0 * distances.double() + math.nan
    match value.op, inputs:
        case "constant", _:
            return torch.full_like(unknown, value.constant)
        case "where", (condition, yes, no):
            either = torch.where(yes == no, yes, math.nan)
            return torch.where(condition.isnan(), either, torch.where(condition != 0, yes, no))
        case "logical_and", (a, b):
            return torch.where((a == 0) | (b == 0), 0.0, a * b)
        case "logical_or", (a, b):
            return torch.where((a == 1) | (b == 1), 1.0, a + b)
    if not inputs or value.op not in {*EAGER, "to_dtype"}:
        return unknown
    known = ~torch.stack(inputs).isnan().any(0)
    typed = [x.where(known, 0).to(v.dtype) for x, v in zip(inputs, value.inputs)]
    result = typed[0] if value.op == "to_dtype" else EAGER[value.op](*typed)
    result = result.to(value.dtype).double().where(known, math.nan)
    if value.op == "add":
        return torch.where((inputs[0] == -math.inf) | (inputs[1] == -math.inf), -math.inf, result)
    return result


INSIDE = Rules("inside", "name -> rewrite of a score function inside its band", SIMPLIFY)


class Inside(Rewriter):
    """A body in fewer operations. `numbers`: what values are within the band."""

    def __init__(self, body: LoopBody, numbers: Mapping[Value, float]) -> None:
        super().__init__(INSIDE, body.name, body.ranges, body.reduction_ranges)
        self.numbers, self.formulas = numbers, places(body)
        self.rewrite(body)
        drop_dead(self.body)

    def visit(self, value: Value) -> Value:
        if value in self.numbers:
            return self.constant(self.numbers[value], value.dtype)
        if value in self.formulas:
            return self.index_expr(self.formulas[value], value.dtype)
        return super().visit(value)


def number_first(ops: Inside, value: Value) -> bool:
    "the first operand alone is a constant"
    return first_is_constant(ops, value) and not by_number(ops, value)


@INSIDE.rule("add mul", of="float", when=number_first, why="numbers come last")
def turned(ops: Inside, value: Value) -> Value:
    "the operands in the other order"
    return ops.pointwise(value.op, *value.inputs[::-1])


def by_number(ops: Inside, value: Value) -> bool:
    "the last operand is a constant"
    return value.inputs[1].op == "constant"


def with_zero(ops: Inside, value: Value) -> bool:
    "the last operand is 0"
    return by_number(ops, value) and value.inputs[1].constant == 0


@INSIDE.rule("add", of="float", when=with_zero, why="it adds nothing")
def alone(ops: Inside, value: Value) -> Value:
    "the other operand"
    return value.inputs[0]


def of_product(ops: Inside, value: Value) -> bool:
    "a product with a number is multiplied by a number"
    first = value.inputs[0]
    return by_number(ops, value) and first.op == "mul" and by_number(ops, first)


@INSIDE.rule("mul", of="float", when=of_product, why="one multiplication is enough")
def by_both(ops: Inside, value: Value) -> Value:
    "a product with the product of both"
    first, last = value.inputs
    source, factor = first.inputs
    number = last.constant * factor.constant
    return ops.pointwise("mul", source, ops.constant(number, value.dtype))


def by_one(ops: Inside, value: Value) -> bool:
    "the last operand is 1"
    return by_number(ops, value) and value.inputs[1].constant == 1


INSIDE.rule("mul", of="float", when=by_one, why="it changes nothing")(alone)


def by_some(ops: Inside, value: Value) -> bool:
    "the last operand is a constant other than 0"
    return by_number(ops, value) and bool(value.inputs[1].constant)


@INSIDE.rule("truediv", of="float", when=by_some, why="products are quicker, and are joined")
def by_inverse(ops: Inside, value: Value) -> Value:
    "a product with the inverse"
    number = ops.constant(1 / value.inputs[1].constant, value.dtype)
    return ops.pointwise("mul", value.inputs[0], number)


def scale_of(value: Value) -> float:
    """Return the number that products are multiplied by in a score, to which the rest is added, be it -inf; 0
    if it is something else."""
    *first, last = value.inputs or [value]
    match value.op, [v.op for v in value.inputs]:
        case "load", _:
            return float(value.buffer == "x0")
        case "mul", (_, "constant"):
            return float(scale_of(first[0]) * last.constant)
        case "add" | "sub", _ if not reads_products(last):
            return scale_of(first[0])
        case "add", _ if not reads_products(first[0]):
            return scale_of(last)
        case "where", _ if not reads_products(first[0]):
            for one, other in ((first[1], last), (last, first[1])):
                if one.op == "constant" and one.constant == -math.inf:
                    return scale_of(other)
    return 0.0


def reads_products(value: Value) -> bool:
    return value.buffer == "x0" or any(map(reads_products, value.operands))


def taken_out(value: Value) -> tuple[float, Value]:
    """Return the positive number that a value is something times, and that."""
    product = value.op == "mul" and value.inputs[1].op == "constant"
    if product and 0 < value.inputs[1].constant < math.inf:
        return value.inputs[1].constant, value.inputs[0]
    return 1.0, value


class Scores:
    """A score function and perhaps its slope, as a body of one or two stores, and the band that counts.

    A positive factor of each is left to the template: it goes into the exponent, or into sums at the end."""

    def __init__(self, body: LoopBody, band: Band, others: dict[str, Layout], half: bool) -> None:
        self.body, self.band, self.others, self.half = body, band, others, half
        self.names = names(body.values)
        score, *slopes = (store.inputs[0] for store in body.stores)
        self.scale, (factor, product) = scale_of(score), taken_out(score)
        self.is_product = product.buffer == "x0"
        self.small = half and self.is_product and factor < MODERATE
        """Are scores products, times a small number?"""
        self.factor, score = (factor, product) if self.small else (1.0, score)
        self.slope_factor, *slopes = taken_out(slopes[0]) if slopes else [1.0]  # type: ignore[assignment]
        self.results = dict(zip(("score", "slope"), (score, *slopes)))
        loads: set[Any] = {(v.buffer, v.index) for v in body.loads if v.buffer in others}
        tiles = [others[b] for b, i in loads if {QUERY, KEY} <= i.free_symbols]
        self.read = sum(layout.dtype.itemsize for layout in tiles)
        """Bytes that each score reads, of tensors with a number of their own for each."""

    @property
    def library(self) -> tuple[float, bool, bool] | None:
        """Scale, whether a mask is needed, and causality, with which the library computes the same."""
        masked = not self.is_product or self.band not in (Band(), Band(low=0))
        if not self.scale or (masked and self.half):  # the mask would be rounded
            return None
        return self.scale, masked, not masked and self.band.low == 0

    def functions(self) -> list[str]:
        """Return their text, line by line."""
        places = [*NAMES.values(), "rows", "columns", *self.others]
        first = {"score": ["x0"], "slope": ["x0", "down"]}
        lines = []
        for name, result in self.results.items():
            lines += ["@triton.jit", f"def {name}({', '.join([*first[name], *places])}):"]
            for value in sorted(cone([result], self.body.values, ()), key=self.body.values.index):
                if value.op != "constant":
                    lines.append(f"    {self.names[value]} = {self.text(value)}")
            lines += [f"    return tl.broadcast_to({self.ref(result)}, x0.shape)", ""]
        return lines

    def ref(self, value: Value) -> str:
        if value.op == "constant":
            return typed_constant(value.constant, value.dtype)
        return self.names[value]

    def text(self, value: Value) -> str:
        dtype, source = TRITON_DTYPES[value.dtype], value.inputs[0] if value.inputs else value
        match value.op:
            case "load":
                return self.load(value) if value.buffer in self.others else value.buffer
            case "index_expr":
                return f"({self.index(value.index)}).to({dtype})"
            case "to_dtype":
                return convert(self.ref(source), source.dtype, value.dtype)
            case name if self.half and name in QUICK:
                return QUICK[name].format(self.ref(source))
        return pointwise_text(value, self.ref)

    def index(self, index: Any) -> str:
        """Return the text of an index: i and j are 32 bits wide, b and h 64."""
        ends = bounds(index, self.body.all_ranges)
        wide = ends is None or max(map(abs, ends)) >= INT32_END
        cast = {QUERY: WIDE, KEY: WIDE} if wide else {}
        ranges = self.body.all_ranges
        return TritonIndex(ranges, lambda symbol: NAMES[symbol] + cast.get(symbol, ""))(index)

    def load(self, value: Value) -> str:
        """Return the text of a load: what is the same for the whole tile goes into the pointer first."""
        layout = self.others[value.buffer]
        index = sympy.sympify(layout.offset) + value.index
        own = index.as_independent(QUERY, KEY, as_Add=True)
        texts = [value.buffer, *(f"({self.index(part)})" for part in own if part != 0)]
        axes = {QUERY: "rows", KEY: "columns"}
        masks = [mask for symbol, mask in axes.items() if symbol in index.free_symbols]
        masks += [self.ref(value.mask)] if value.mask is not None else []
        if not masks:
            return f"tl.load({' + '.join(texts)})"
        other = "0.0" if layout.dtype.is_floating_point else "0"
        return f"tl.load({' + '.join(texts)}, {' & '.join(masks)}, other={other})"


def recorded(
    text: str,
    size: Sequence[int],
    others: Mapping[str, Layout],
    device: torch.device,
    training: bool,
) -> LoopBody:
    """Return a score function's legal body. Raises Unsupported where it is more than elementwise."""
    mode: Any = compat.fake_mode()
    with mode:
        fakes = [torch.empty(size, device=device)]
        for layout in others.values():
            known: Any = layout.size, layout.stride
            fakes.append(torch.empty_strided(*known, dtype=layout.dtype, device=device))
    score = function_of(text)

    def with_slope(scores: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        *other, tangent = values
        with torch.enable_grad():
            result = score(scores.requires_grad_(), *other)
            (slope,) = torch.autograd.grad(result, scores, tangent)
        scores.requires_grad_(False)
        return result, slope

    function = with_slope if training else score
    traced = trace_function(function, fakes + fakes[:1] * training, mode, "post_grad")
    graph = compat.graph_module(torch.nn.Module(), traced, "scores")
    results = formulas(Graph(graph, "scores", "tracing"), Options())
    body = LoopBody("score", dict(zip(PLACE[:3], size)), {KEY: size[3]})
    last = f"x{len(others) + 1}"
    dtypes = {"x0": torch.float32, last: torch.float32} | {n: x.dtype for n, x in others.items()}
    recorder, strides = Recorder(body, dtypes), contiguous_strides(size)
    place = sum((x * step for x, step in zip(PLACE, strides)), sympy.Integer(0))
    for name, result in zip(("score", "slope"), results):
        recorder.store(name, place, result(recorder, PLACE))
    drop_dead(body)
    for value in body.values:
        if value.op in ("indirect", "reduction", "scan") or value.check:
            raise Unsupported("scores that are looked up")
        if value.op == "load" and value.buffer in ("x0", last):
            if value.index != simplify_index(place, body.all_ranges):
                raise Unsupported("scores that read other scores")
            value.buffer = "x0" if value.buffer == "x0" else "down"
    return legalize(body, dtypes | {"down": torch.float32}).body


def scores_of(
    text: str, size: Sequence[int], others: Sequence[Layout], queries: Layout, training: bool
) -> Scores:
    """Return what kernels call for scores [batch, heads, queries, keys]; `training`: with the slope.

    Raises Unsupported where the function is more than elementwise."""
    named = {f"x{n}": layout for n, layout in enumerate(others, 1)}
    body = recorded(text, size, named, queries.device, training)
    rows, columns = size[2:]
    distances = torch.arange(1 - columns, rows)
    known = tried(body, distances)
    alive = distances[known[body.stores[0].inputs[0]] != -math.inf].tolist()
    first, last = alive[0] if alive else rows, alive[-1] if alive else -columns
    band = Band(first if first > 1 - columns else None, last if last < rows - 1 else None)
    if not band.covers(rows, columns):
        band, first, last = Band(), 1 - columns, rows - 1
    within = {v: x[first + columns - 1 : last + columns] for v, x in known.items()}
    numbers = {v: x[0].item() for v, x in within.items() if bool((x == x[0]).all())}
    return Scores(Inside(body, numbers).body, band, named, queries.dtype in HALF_TYPES)
