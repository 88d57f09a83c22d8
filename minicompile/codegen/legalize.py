"""Makes explicit on a kernel's typed loop body what eager does without saying: NaN in max and min, floor
division, rounding of half types, integer widths.

After `legalize`, a printer only prints:

- half types exist at loads, stores and roundings alone: a load is followed by `to_dtype` to float32, a store
  preceded by the rounding. A value rounds to its half type before it leaves it (conversions, comparisons,
  logic, predicates, positions) and before a step function (floor, remainder, sign); from one arithmetic
  operation to the next it keeps float32's digits, where eager rounds each result;
- bools are stored as bytes (`uint8`): loads and stores convert, and arithmetic on bools is logic;
- integer and float `floordiv` and `remainder` are written with `truncdiv`, `fmod` and corrections;
- float `maximum` and `minimum` are comparisons and `where`, such that a NaN operand gives NaN; on integers
  the operations stay;
- an `index_expr` is int64, or int32 where its bounds prove that it fits; then it converts, unless it is
  only compared with others that fit. One that is a float known at run time is float64;
- a reduction's source has the accumulator's dtype, and so has its result;
- nothing is read from or written to a dimension of size 0.

Each of these is a rule of the table `LEGALIZE`. Print it; or a `Legalizer`, which tells which rules fired.

What stays a duty of the printers: max/min/argmax/argmin reductions of floats propagate NaN,
argmax and argmin give the first position, and integers wrap around.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from minicompile.codegen.printing import index_dtype
from minicompile.codegen.rewrite import SIMPLIFY, Rewriter, Rules
from minicompile.ops.dtypes import HALF_TYPES, computation_dtype
from minicompile.ops.table import BOOL_AS_LOGIC, POINTWISE, POSITIONS
from minicompile.scheduling.body import LoopBody, Recorder, Value, drop_dead
from minicompile.shapes.expr import is_float

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
LOGIC = frozenset({"logical_and", "logical_or", "logical_xor", "logical_not"})
ROUNDING = frozenset({"floor", "ceil", "trunc", "round"})
STEPS = ROUNDING | {"sign", "floordiv", "truncdiv", "remainder", "fmod"}
"""A last digit more or less in an operand can change the result by far."""

CONVERSIONS = frozenset({"load", "constant", "index_expr", "to_dtype"})
CHOICES = frozenset({"where", "maximum", "minimum", "neg", "abs", "max", "min"}) | ROUNDING
"""Operations and reductions that give numbers of a half type if they are given such numbers."""

OTHERS = POINTWISE.keys() - LOGIC - BOOL_AS_LOGIC.keys() - {"where"}
"""Operations that have no meaning of their own for bools."""

LEGALIZE = Rules("legalize", "name -> rewrite of a loop operation as printers know it", SIMPLIFY)


def legalize(body: LoopBody, dtypes: Mapping[str, torch.dtype]) -> Legalizer:
    """Return the legal body (`body`), what stands for each old value (`new`), which rules fired (`fired`).

    `dtypes` gives the dtype of each buffer in memory.
    """
    legalizer = Legalizer(LEGALIZE, body.name, body.ranges, body.reduction_ranges, dtypes)
    legalizer.rewrite(body)
    drop_dead(legalizer.body)
    return legalizer


class Legalizer(Rewriter):
    """Applies `LEGALIZE`. An operand is rounded first, unless its user is arithmetic within its half type."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.unrounded: set[Value] = set()
        """Values of half types that have more digits than their type."""

    def visit(self, value: Value) -> Value:
        chosen = not CHOICES.isdisjoint({value.op, value.kind})
        rounded = value.op in CONVERSIONS or (chosen and self.unrounded.isdisjoint(value.inputs))
        if value.dtype in HALF_TYPES and not rounded:
            self.unrounded.add(value)
        return super().visit(value)

    def renewed(self, value: Value) -> Value:
        found = super().renewed(value)
        if not self.unrounded.isdisjoint(value.inputs):
            found.inputs = tuple(self.rounded(value, v) for v in value.inputs)
        return found

    def rounded(self, user: Value, value: Value) -> Value:
        """Return the new operand of a user, rounded where that matters to it."""
        stays = value.dtype is user.dtype and user.op not in STEPS
        if stays or value not in self.unrounded:
            return self.new[value]
        return convert(self, self.new[value], value.dtype)


def convert(ops: Recorder, value: Value, dtype: torch.dtype) -> Value:
    """A legal value as `dtype`; a half type rounds and stays float32."""
    if dtype not in HALF_TYPES:
        return ops.to_dtype(value, dtype)
    return ops.to_dtype(narrow(ops, value, dtype), torch.float32)


def narrow(ops: Recorder, value: Value, dtype: torch.dtype) -> Value:
    """Round to a half type. A value that was just widened from it is taken back as it was."""
    if value.op == "to_dtype" and value.inputs[0].dtype is dtype:
        return value.inputs[0]
    return ops.to_dtype(ops.to_dtype(value, torch.float32), dtype)


# -- memory, numbers, conversions -----------------------------------------------------------------


def of_nothing(ops: Rewriter, value: Value) -> bool:
    "a dimension of size 0 is indexed"
    return any(v.size == 0 for v in value.indirect)


def stored_dtype(ops: Recorder, value: Value) -> torch.dtype:
    """The dtype that a load or store has in memory."""
    return ops.dtypes.get(value.buffer, value.dtype)


@LEGALIZE.rule("load", when=of_nothing, why="such a dimension has no elements")
def no_element(ops: Rewriter, value: Value) -> Value:
    "0"
    return ops.constant(0, computation_dtype(stored_dtype(ops, value)))


@LEGALIZE.rule("load", why="half types are computed in float32, and bools are bytes in memory")
def widened_load(ops: Rewriter, value: Value) -> Value:
    "a load of what is stored, converted"
    stored = stored_dtype(ops, value)
    raw = ops.again(value, dtype=torch.uint8 if stored is torch.bool else stored)
    return ops.to_dtype(raw, computation_dtype(stored))


@LEGALIZE.rule("store", why="memory has half types and bytes, and nothing is stored in no elements")
def narrowed_store(ops: Rewriter, value: Value) -> Value:
    "a store of the converted value"
    stored = stored_dtype(ops, value)
    source = convert(ops, value.inputs[0], stored)
    if of_nothing(ops, value):
        return source
    if stored in HALF_TYPES:
        source = narrow(ops, source, stored)
    elif stored is torch.bool:
        source = ops.to_dtype(source, torch.uint8)
    return ops.again(value, inputs=(source,), dtype=source.dtype)


@LEGALIZE.rule("constant", why="half types are computed in float32")
def number(ops: Rewriter, value: Value) -> Value:
    "a constant"
    return ops.constant(value.constant, computation_dtype(value.dtype))


@LEGALIZE.rule("index_expr", why="vectors of int32 are twice as long; sums of int64 don't wrap")
def index_value(ops: Rewriter, value: Value) -> Value:
    "an index as int32 where that holds it, else int64, converted"
    assert value.index is not None
    if value.index.is_Integer:  # merged loops left nothing to vary
        return ops.constant(int(value.index), computation_dtype(value.dtype))
    wide = index_dtype(value.index, ops.body.all_ranges)
    if is_float(value.index):
        wide = torch.float64
    return convert(ops, ops.again(value, dtype=wide), value.dtype)


@LEGALIZE.rule("to_dtype", why="half types are computed in float32")
def converted(ops: Rewriter, value: Value) -> Value:
    "a conversion that rounds"
    return convert(ops, value.inputs[0], value.dtype)


@LEGALIZE.rule("indirect", why="indices are computed as int64")
def loaded_index(ops: Rewriter, value: Value) -> Value:
    "the index as int64"
    source = ops.to_dtype(value.inputs[0], torch.int64)
    return ops.again(value, inputs=(source,), dtype=torch.int64)


@LEGALIZE.rule("reduction", why="the accumulator has its source's dtype, and bools are bits")
def accumulated(ops: Rewriter, value: Value) -> Value:
    "a reduction in a dtype that accumulates"
    (source,), kind, dtype = value.inputs, value.kind, value.dtype
    if kind in POSITIONS:
        if source.dtype is torch.bool:
            source = ops.to_dtype(source, torch.uint8)
        return ops.emit("reduction", (source,), torch.int64, kind=kind)
    if dtype is torch.bool:
        kind = {"max": "any", "min": "all", "sum": "any", "prod": "all"}.get(kind, kind)
    wide = torch.bool if kind in ("any", "all") else computation_dtype(dtype)
    found = ops.emit("reduction", (ops.to_dtype(source, wide),), wide, kind=kind)
    return convert(ops, found, dtype)


# -- arithmetic: rules may use each other's operations ------------------------------------------------


def not_bools(ops: Rewriter, value: Value) -> bool:
    "an operand is no bool"
    return any(v.dtype is not torch.bool for v in value.inputs)


@LEGALIZE.rule(LOGIC, when=not_bools, why="logic is on bools")
def logic(ops: Rewriter, value: Value) -> Value:
    "the same on operands that are not 0"
    return ops.pointwise(value.op, *(ops.to_dtype(v, torch.bool) for v in value.inputs))


@LEGALIZE.rule(BOOL_AS_LOGIC, of="bool", why="True + True is True")
def bool_arithmetic(ops: Rewriter, value: Value) -> Value:
    "logic"
    return ops.pointwise(BOOL_AS_LOGIC[value.op], *value.inputs)


@LEGALIZE.rule(
    OTHERS, of="bool", why="comparisons, division and powers of bools are those of 0 and 1"
)
def on_bytes(ops: Rewriter, value: Value) -> Value:
    "the same on bytes"
    found = ops.pointwise(value.op, *(ops.to_dtype(v, torch.uint8) for v in value.inputs))
    return ops.to_dtype(found, torch.bool)


def beside_number(ops: Rewriter, value: Value) -> bool:
    "an operand is a constant that isn't NaN"
    return any(v.op == "constant" and v.constant == v.constant for v in value.inputs)


def better(value: Value) -> str:
    return "gt" if value.op == "maximum" else "lt"


@LEGALIZE.rule(
    "maximum minimum", of="float", when=beside_number, why="then one comparison is enough"
)
def extremum_with_number(ops: Rewriter, value: Value) -> Value:
    "where(number > x, number, x)"
    x, number = value.inputs
    if not (number.op == "constant" and number.constant == number.constant):
        x, number = number, x
    return ops.pointwise("where", ops.pointwise(better(value), number, x), number, x)


@LEGALIZE.rule("maximum minimum", of="float", why="NaN wins, but every comparison with it is False")
def extremum(ops: Rewriter, value: Value) -> Value:
    "where(a > b or isnan(a), a, b)"
    a, b = value.inputs
    keep = ops.pointwise(
        "logical_or", ops.pointwise(better(value), a, b), ops.pointwise("isnan", a)
    )
    return ops.pointwise("where", keep, a, b)


@LEGALIZE.rule("truncdiv", of="float", why="only integers are divided without a fraction")
def float_truncation(ops: Rewriter, value: Value) -> Value:
    "trunc(a / b)"
    return step(ops, value, "trunc", step(ops, value, "truediv", *value.inputs))


def step(ops: Rewriter, value: Value, name: str, *operands: Value) -> Value:
    """An operation whose result is rounded to the dtype of `value`, as eager does: half types show it."""
    return convert(ops, ops.pointwise(name, *operands), value.dtype)


@LEGALIZE.rule(
    "floordiv", of="float", why="as Python: floor(a / b) is 1 too much where a / b rounds up"
)
def float_floor(ops: Rewriter, value: Value) -> Value:
    "the exact remainder first, then a quotient that is nearly whole"
    a, b = value.inputs
    plain = step(ops, value, "truediv", a, b)
    zero, one = ops.constant(0.0, a.dtype), ops.constant(1.0, a.dtype)
    rest = step(ops, value, "fmod", a, b)
    quotient = step(ops, value, "truediv", step(ops, value, "sub", a, rest), b)
    below = step(ops, value, "sub", quotient, one)
    quotient = ops.pointwise("where", signs_differ(ops, rest, b), below, quotient)
    whole = step(ops, value, "floor", quotient)
    far = ops.pointwise("gt", step(ops, value, "sub", quotient, whole), ops.constant(0.5, a.dtype))
    whole = ops.pointwise("where", far, step(ops, value, "add", whole, one), whole)
    signed_zero = ops.pointwise("copysign", zero, plain)
    whole = ops.pointwise("where", ops.pointwise("ne", quotient, zero), whole, signed_zero)
    return ops.pointwise("where", ops.pointwise("eq", b, zero), plain, whole)


def signs_differ(ops: Rewriter, rest: Value, b: Value) -> Value:
    """The remainder is not 0 and its sign isn't the divisor's: truncation and floor differ."""
    zero = ops.constant(0, rest.dtype)
    inexact = ops.pointwise("ne", rest, zero)
    signs = ops.pointwise(
        "logical_xor", ops.pointwise("lt", rest, zero), ops.pointwise("lt", b, zero)
    )
    return ops.pointwise("logical_and", inexact, signs)


@LEGALIZE.rule("floordiv", of="int", why="C and Triton divide towards 0")
def floor_division(ops: Rewriter, value: Value) -> Value:
    "truncdiv(a, b), less 1 where there is a remainder of the other sign"
    a, b = value.inputs
    quotient = ops.pointwise("truncdiv", a, b)
    if a.dtype is torch.uint8:
        return quotient
    differ = signs_differ(ops, ops.pointwise("fmod", a, b), b)
    below = ops.pointwise("sub", quotient, ops.constant(1, a.dtype))
    return ops.pointwise("where", differ, below, quotient)


@LEGALIZE.rule("remainder", why="C's and Triton's has the sign of the dividend")
def remainder(ops: Rewriter, value: Value) -> Value:
    "fmod(a, b), plus b where its sign is the other"
    a, b = value.inputs
    rest = ops.pointwise("fmod", a, b)
    if a.dtype is torch.uint8:
        return rest
    return ops.pointwise("where", signs_differ(ops, rest, b), ops.pointwise("add", rest, b), rest)


def as_int32(ops: Recorder, value: Value) -> Value | None:
    """An int64 that was just widened from int32, or a small constant, as int32."""
    if value.op == "constant" and -(2**31) <= value.constant < 2**31:
        return ops.constant(value.constant, torch.int32)
    widened = value.op == "to_dtype" and value.inputs[0].dtype is torch.int32
    return value.inputs[0] if widened else None


def fits_int32(ops: Rewriter, value: Value) -> bool:
    "both operands fit into int32"
    return all(as_int32(ops, v) is not None for v in value.inputs)


@LEGALIZE.rule(COMPARISONS, of="int64", when=fits_int32, why="vectors of int32 are twice as long")
def short_comparison(ops: Rewriter, value: Value) -> Value:
    "the same in int32"
    return ops.pointwise(value.op, *filter(None, (as_int32(ops, v) for v in value.inputs)))


@LEGALIZE.rule(ROUNDING, of="int", why="an integer has no fraction")
def whole_already(ops: Rewriter, value: Value) -> Value:
    "the operand"
    return value.inputs[0]


@LEGALIZE.rule("isnan", of="int", why="every integer is a number")
def never(ops: Rewriter, value: Value) -> Value:
    "False"
    return ops.constant(False, torch.bool)


@LEGALIZE.rule("signbit", of="int", why="integers have no -0")
def negative(ops: Rewriter, value: Value) -> Value:
    "a < 0"
    return ops.pointwise("lt", value.inputs[0], ops.constant(0, value.inputs[0].dtype))


@LEGALIZE.rule(POINTWISE, of="half", why="it is computed in float32")
def in_float32(ops: Rewriter, value: Value) -> Value:
    "the same on float32"
    return ops.pointwise(value.op, *value.inputs)
