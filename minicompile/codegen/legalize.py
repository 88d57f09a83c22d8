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
- `check` says whether a kernel must report a value: an index out of range, an integer divided by zero;
- nothing is read from or written to a dimension of size 0.

What stays a duty of the printers: max/min/argmax/argmin reductions of floats propagate NaN, argmax and argmin
give the first position, and integers wrap around.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from minicompile.codegen.printing import index_dtype
from minicompile.ops.dtypes import HALF_TYPES, computation_dtype, is_int
from minicompile.ops.table import BOOL_AS_LOGIC, POSITIONS
from minicompile.scheduling.body import LoopBody, Recorder, Rewriter, Value, drop_dead
from minicompile.shapes.expr import is_float

COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
LOGIC = frozenset({"logical_and", "logical_or", "logical_xor", "logical_not"})
ROUNDING = frozenset({"floor", "ceil", "trunc", "round"})
STEPS = ROUNDING | {"sign", "floordiv", "truncdiv", "remainder", "fmod"}
"""A last digit more or less in an operand can change the result by far."""

CONVERSIONS = frozenset({"load", "constant", "index_expr", "to_dtype", "bitcast"})
CHOICES = frozenset({"where", "maximum", "minimum", "neg", "abs", "max", "min"}) | ROUNDING
"""Operations and reductions that give numbers of a half type if they are given such numbers."""


def legalize(
    body: LoopBody, dtypes: Mapping[str, torch.dtype]
) -> tuple[LoopBody, dict[Value, Value]]:
    """The legal body, and which of its values stands for each old one.

    `dtypes` gives the dtype of each buffer in memory.
    """
    legalizer = _Legalizer(body, dtypes)
    legalizer.rewrite(body)
    drop_dead(legalizer.body)
    settle_checks(legalizer.body)
    return legalizer.body, legalizer.new


class _Legalizer(Rewriter):
    def __init__(self, body: LoopBody, dtypes: Mapping[str, torch.dtype]) -> None:
        super().__init__(body.name, body.ranges, body.reduction_ranges)
        self.dtypes = dtypes
        self.unrounded: set[Value] = set()
        """Values of half types that have more digits than their type."""

    def visit(self, value: Value) -> Value:
        chosen = not CHOICES.isdisjoint({value.op, value.kind})
        rounded = value.op in CONVERSIONS or (chosen and self.unrounded.isdisjoint(value.inputs))
        if value.dtype in HALF_TYPES and not rounded:
            self.unrounded.add(value)
        return super().visit(value)

    def operand(self, ops: Recorder, user: Value, position: int = 0) -> Value:
        """The legal form of an operand, rounded unless `user` is arithmetic within its half type."""
        value = user.inputs[position]
        stays = value.dtype is user.dtype and user.op not in STEPS
        if stays or value not in self.unrounded:
            return self.new[value]
        return convert(ops, self.new[value], value.dtype)

    def visit_other(self, ops: Recorder, value: Value) -> Value:
        operands = [self.operand(ops, value, i) for i in range(len(value.inputs))]
        if value.dtype in HALF_TYPES and value.op in ("floordiv", "truncdiv"):
            return _divide_float(ops, value.op, operands[0], operands[1], value.dtype)
        return pointwise(ops, value.op, operands)

    def visit_load(self, ops: Recorder, value: Value) -> Value:
        stored = self.dtypes.get(value.buffer, value.dtype)
        if any(v.size == 0 for v in value.indirect):
            return ops.constant(0, computation_dtype(stored))
        raw = self.again(value, dtype=torch.uint8 if stored is torch.bool else stored)
        return ops.to_dtype(raw, computation_dtype(stored))

    def visit_store(self, ops: Recorder, value: Value) -> Value:
        stored = self.dtypes.get(value.buffer, value.dtype)
        source = convert(ops, self.operand(ops, value), stored)
        if any(v.size == 0 for v in value.indirect):
            return source
        if stored in HALF_TYPES:
            source = _narrow(ops, source, stored)
        elif stored is torch.bool:
            source = ops.to_dtype(source, torch.uint8)
        return self.again(value, inputs=(source,), dtype=source.dtype)

    def visit_constant(self, ops: Recorder, value: Value) -> Value:
        return ops.constant(value.constant, computation_dtype(value.dtype))

    def visit_index_expr(self, ops: Recorder, value: Value) -> Value:
        assert value.index is not None
        if value.index.is_Integer:  # merged loops left nothing to vary
            return ops.constant(int(value.index), computation_dtype(value.dtype))
        wide = index_dtype(value.index, self.body.all_ranges)
        if is_float(value.index):
            wide = torch.float64
        return convert(ops, self.again(value, dtype=wide), value.dtype)

    def visit_to_dtype(self, ops: Recorder, value: Value) -> Value:
        return convert(ops, self.operand(ops, value), value.dtype)

    def visit_bitcast(self, ops: Recorder, value: Value) -> Value:
        source = self.new[value.inputs[0]]
        if value.inputs[0].dtype in HALF_TYPES:
            source = _narrow(ops, source, value.inputs[0].dtype)
        return ops.to_dtype(ops.bitcast(source, value.dtype), computation_dtype(value.dtype))

    def visit_indirect(self, ops: Recorder, value: Value) -> Value:
        source = ops.to_dtype(self.new[value.inputs[0]], torch.int64)
        return self.again(value, inputs=(source,), dtype=torch.int64)

    def visit_reduction(self, ops: Recorder, value: Value) -> Value:
        source, kind, dtype = self.operand(ops, value), value.kind, value.dtype
        if kind in POSITIONS:
            if source.dtype is torch.bool:
                source = ops.to_dtype(source, torch.uint8)
            return ops.emit("reduction", (source,), torch.int64, kind=kind)
        if dtype is torch.bool:
            kind = {"max": "any", "min": "all", "sum": "any", "prod": "all"}.get(kind, kind)
        if kind in ("any", "all"):
            source = ops.to_dtype(source, torch.bool)
            found = ops.emit("reduction", (source,), torch.bool, kind=kind)
            return convert(ops, found, dtype)
        source = ops.to_dtype(source, computation_dtype(dtype))
        return ops.emit("reduction", (source,), source.dtype, kind=kind)

    def visit_scan(self, ops: Recorder, value: Value) -> Value:
        return self.again(value)


def settle_checks(body: LoopBody) -> None:
    """Keep the checks of indices; divisions report a zero divisor, as eager does.

    A divisor that depends on a masked load, where nothing has chosen by that mask yet, can be 0 in lanes that
    nobody looks at: it isn't reported. (Rules keep such divisions out of masks: lowering/rules/pointwise.py.)
    """
    needs: dict[Value, frozenset[Value]] = {}  # the masks under which a value is what it says
    for value in body.values:
        needs[value] = frozenset().union(*(needs[v] for v in value.operands))
        if value.op == "load" and value.mask is not None:
            needs[value] |= conditions(value.mask)
        elif value.op == "where":
            chosen, a, b = value.inputs
            needs[value] = needs[chosen] | (needs[a] - conditions(chosen)) | needs[b]
        if value.op in ("truncdiv", "fmod") and is_int(value.dtype):
            divisor = value.inputs[1]
            constant = divisor.op == "constant" and divisor.constant != 0
            value.check = not needs[divisor] and not constant


def conditions(mask: Value) -> frozenset[Value]:
    """The conditions that must all hold where `mask` does."""
    both = mask.inputs if mask.op == "logical_and" else ()
    return frozenset({mask}).union(*(conditions(v) for v in both))


def convert(ops: Recorder, value: Value, dtype: torch.dtype) -> Value:
    """A legal value as `dtype`; a half type rounds and stays float32."""
    if dtype not in HALF_TYPES:
        return ops.to_dtype(value, dtype)
    return ops.to_dtype(_narrow(ops, value, dtype), torch.float32)


def _narrow(ops: Recorder, value: Value, dtype: torch.dtype) -> Value:
    """Round to a half type. A value that was just widened from it is taken back as it was."""
    if value.op == "to_dtype" and value.inputs[0].dtype is dtype:
        return value.inputs[0]
    return ops.to_dtype(ops.to_dtype(value, torch.float32), dtype)


def pointwise(ops: Recorder, name: str, values: list[Value]) -> Value:
    """One operation of the table on legal values, by legal operations."""
    dtype = values[-1].dtype
    if name == "where":
        return ops.pointwise(name, *values)
    if name in LOGIC:
        return ops.pointwise(name, *(ops.to_dtype(v, torch.bool) for v in values))
    if dtype is torch.bool:
        if name in BOOL_AS_LOGIC:
            return ops.pointwise(BOOL_AS_LOGIC[name], *values)
        # what is left (comparisons, division, shifts, powers) computes on bytes
        found = pointwise(ops, name, [ops.to_dtype(v, torch.uint8) for v in values])
        return ops.to_dtype(found, torch.bool)
    if name in ("maximum", "minimum") and dtype.is_floating_point:
        return _extremum(ops, "gt" if name == "maximum" else "lt", values[0], values[1])
    if name in ("floordiv", "truncdiv") and dtype.is_floating_point:
        return _divide_float(ops, name, values[0], values[1], dtype)
    if name in ("floordiv", "remainder"):
        return _divide_down(ops, name, *values)
    if name in COMPARISONS and dtype is torch.int64:
        a, b = (_as_int32(ops, v) for v in values)
        if a is not None and b is not None:
            return ops.pointwise(name, a, b)
    if is_int(dtype):
        if name in ROUNDING:
            return values[0]
        if name in ("isnan", "isinf"):
            return ops.constant(False, torch.bool)
        if name == "signbit":
            return ops.pointwise("lt", values[0], ops.constant(0, dtype))
    return ops.pointwise(name, *values)


def _extremum(ops: Recorder, better: str, a: Value, b: Value) -> Value:
    """max/min that propagates NaN. With a constant that isn't NaN, one comparison is enough."""
    if _is_number(b):
        a, b = b, a
    if _is_number(a):
        return ops.pointwise("where", ops.pointwise(better, a, b), a, b)
    keep = ops.pointwise("logical_or", ops.pointwise(better, a, b), ops.pointwise("isnan", a))
    return ops.pointwise("where", keep, a, b)


def _as_int32(ops: Recorder, value: Value) -> Value | None:
    """An int64 that was just widened from int32, or a small constant: vectors of int32 are twice as long."""
    if value.op == "constant" and -(2**31) <= value.constant < 2**31:
        return ops.constant(value.constant, torch.int32)
    widened = value.op == "to_dtype" and value.inputs[0].dtype is torch.int32
    return value.inputs[0] if widened else None


def _is_number(value: Value) -> bool:
    return value.op == "constant" and value.constant == value.constant


def _signs_differ(ops: Recorder, rest: Value, b: Value) -> Value:
    """The remainder is not 0 and its sign isn't the divisor's: truncation and floor differ."""
    zero = ops.constant(0, rest.dtype)
    inexact = ops.pointwise("ne", rest, zero)
    signs = ops.pointwise(
        "logical_xor", ops.pointwise("lt", rest, zero), ops.pointwise("lt", b, zero)
    )
    return ops.pointwise("logical_and", inexact, signs)


def _divide_down(ops: Recorder, name: str, a: Value, b: Value) -> Value:
    """The quotient or the remainder, corrected where truncation isn't floor."""
    found = ops.pointwise("truncdiv" if name == "floordiv" else "fmod", a, b)
    if a.dtype is torch.uint8:
        return found
    rest = ops.pointwise("fmod", a, b)
    change = ("sub", found, ops.constant(1, a.dtype)) if name == "floordiv" else ("add", rest, b)
    return ops.pointwise("where", _signs_differ(ops, rest, b), ops.pointwise(*change), found)


def _divide_float(ops: Recorder, name: str, a: Value, b: Value, dtype: torch.dtype) -> Value:
    """Quotients without a fraction. Eager rounds each step to `dtype`, which shows in half types."""

    def step(operation: str, *values: Value) -> Value:
        return convert(ops, ops.pointwise(operation, *values), dtype)

    plain = step("truediv", a, b)
    if name == "truncdiv":
        return step("trunc", plain)
    # Python's floor division: the exact remainder first, then a quotient that is nearly whole
    zero, one = ops.constant(0.0, a.dtype), ops.constant(1.0, a.dtype)
    rest = step("fmod", a, b)
    quotient = step("truediv", step("sub", a, rest), b)
    below = step("sub", quotient, one)
    quotient = ops.pointwise("where", _signs_differ(ops, rest, b), below, quotient)
    whole = step("floor", quotient)
    far = ops.pointwise("gt", step("sub", quotient, whole), ops.constant(0.5, a.dtype))
    whole = ops.pointwise("where", far, step("add", whole, one), whole)
    signed_zero = ops.pointwise("copysign", zero, plain)
    whole = ops.pointwise("where", ops.pointwise("ne", quotient, zero), whole, signed_zero)
    return ops.pointwise("where", ops.pointwise("eq", b, zero), plain, whole)
