"""Lines and values of C kernels: everything inside a loop. The loops around it are in `cpp.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import sympy
import torch

from minicompile.codegen.cpp_ops import (
    CTYPES,
    EXPRESSIONS,
    FROM_HALF,
    TO_HALF,
    IndexPrinter,
    Written,
    bitcast,
    conversion,
    literal,
)
from minicompile.codegen.plan import CodeLine, KernelPlan
from minicompile.ops.dtypes import is_int
from minicompile.ops.origin import Origins
from minicompile.ops.table import reduction_identity
from minicompile.scheduling.body import Value, names
from minicompile.shapes.expr import Size

INDEX_ERROR = 1
ZERO_DIVISION = 2

Loop = tuple[sympy.Symbol, Size]


class ValuePrinter:
    """Collects lines with origins; prints values as one declaration each."""

    def __init__(self, plan: KernelPlan) -> None:
        self.plan = plan
        self.whole = plan.origins
        self.lines: list[CodeLine] = []
        self.depth = 0
        self.helpers: set[str] = set()
        self.index = IndexPrinter(self.helpers)
        self.arguments = {a.buffer: a for a in plan.arguments}
        self.names = names(plan.body.values)
        self.names.update({v: str(v.symbol) for v in self.names if v.symbol is not None})
        self.order = {v: i for i, v in enumerate(plan.body.values)}
        self.guarded = guarded_divisions(plan.body.values)
        self.checks = any(self.can_fail(v) for v in plan.body.values)

    # ---- lines and blocks

    def line(self, text: str, origins: Origins | None = None) -> None:
        """A line; without origins of its own it belongs to everything the kernel does."""
        self.lines.append(
            CodeLine("    " * self.depth + text, self.whole if origins is None else origins)
        )

    def pragma(self, text: str) -> None:
        if text:
            self.line(f"#pragma omp {text}")

    @contextlib.contextmanager
    def block(self, header: str) -> Iterator[None]:
        self.line(header + " {")
        self.depth += 1
        yield
        self.depth -= 1
        self.line("}")

    @contextlib.contextmanager
    def loop(
        self,
        var: sympy.Symbol | str,
        size: Size,
        pragma: str = "",
        start: str = "0",
        stop: str = "",
        step: int = 1,
    ) -> Iterator[None]:
        self.pragma(pragma)
        advance = f"{var}++" if step == 1 else f"{var} += {step}"
        end = stop or self.index(size)
        with self.block(f"for (int64_t {var} = {start}; {var} < {end}; {advance})"):
            yield

    @contextlib.contextmanager
    def loops(self, nest: Sequence[Loop], pragma: str = "") -> Iterator[None]:
        """A nest of loops; `pragma` stands before the outermost."""
        with contextlib.ExitStack() as stack:
            for i, (var, size) in enumerate(nest):
                stack.enter_context(self.loop(var, size, pragma if i == 0 else ""))
            yield

    # ---- values

    def can_fail(self, value: Value) -> bool:
        """The value's lines may set `error`."""
        return (value.op == "indirect" and value.check) or value in self.guarded

    def ref(self, value: Value) -> str:
        """How an operand is written."""
        if value.op == "constant":
            return literal(value.constant, value.dtype)
        return self.names[value]

    def in_order(self, values: Collection[Value]) -> list[Value]:
        return sorted(values, key=self.order.__getitem__)

    def declare(self, value: Value, expression: str) -> None:
        ctype = CTYPES[value.dtype]
        self.line(f"{ctype} {self.names[value]} = {expression};", value.origins)

    def compute(
        self, values: Iterable[Value], accumulate: Callable[[Value], None] | None = None
    ) -> None:
        """The values in order; `accumulate` prints what a reduction does with one element."""
        for value in values:
            if value.op == "reduction":
                assert accumulate is not None
                accumulate(value)
            elif value.op == "store":
                self._store(value)
            elif value.op == "indirect":
                self._indirect(value)
            elif value.op != "constant":
                if value in self.guarded:
                    divisor = self.ref(value.inputs[1])
                    self.line(
                        f"error |= {divisor} == 0 ? {ZERO_DIVISION} : 0;",
                        value.inputs[1].origins | value.origins,
                    )
                text, helpers = self._expression(value)
                self.helpers.update(helpers)
                self.declare(value, text)

    def _expression(self, value: Value) -> Written:
        if value.op == "load":
            return self._load(value), ()
        if value.op == "index_expr":
            assert value.index is not None
            return self._index_value(value), ()
        arguments = [self.ref(v) for v in value.inputs]
        if value.op == "to_dtype":
            return conversion(arguments[0], value.inputs[0].dtype, value.dtype)
        if value.op == "bitcast":
            return bitcast(arguments[0], value.inputs[0].dtype, value.dtype)
        return EXPRESSIONS[value.op](value.inputs[-1].dtype, *arguments)

    def _index_value(self, value: Value) -> str:
        assert value.index is not None
        return self.index(value.index)

    def element(self, value: Value) -> str:
        assert value.index is not None
        return f"{self.arguments[value.buffer].name}[{self.index(value.index)}]"

    def _load(self, value: Value) -> str:
        if _in_empty(value):
            return "0"
        if value.mask is not None:
            return f"{self.ref(value.mask)} ? {self.element(value)} : 0"
        return self.element(value)

    def _store(self, value: Value) -> None:
        if _in_empty(value):
            return
        target, source = self.element(value), self.ref(value.inputs[0])
        if value.kind == "atomic_add":
            dtype = self.arguments[value.buffer].dtype
            if dtype in FROM_HALF:
                widen, narrow = FROM_HALF[dtype][0], TO_HALF[dtype][0]
                self.helpers.add(FROM_HALF[dtype][1])
                source = f"{narrow}({widen}({target}) + {widen}({source}))"
            elif dtype is torch.bool:
                source = f"{target} | {source}"
            else:
                source = f"{target} + {source}"
        self.line(f"{target} = {source};", value.origins)

    def _indirect(self, value: Value) -> None:
        """A loaded index: negative values count from the end; a bad one is reported and becomes 0."""
        name, source, size = self.names[value], self.ref(value.inputs[0]), self.index(value.size)
        origins = value.origins
        wrapped = f"{source} < 0 ? {source} + {size} : {source}" if value.wrap_negative else source
        self.line(f"int64_t {name} = {wrapped};", origins)
        if value.check:
            bad = f"({name} < 0) | ({name} >= {size})"
            if value.mask is not None:
                bad = f"{self.ref(value.mask)} & ({bad})"
            self.line(f"bool {name}_bad = {bad};", origins)
            self.line(f"error |= {name}_bad ? {INDEX_ERROR} : 0;", origins)
            self.line(f"{name} = {name}_bad ? 0 : {name};", origins)

    # ---- reductions

    def is_positional(self, value: Value) -> bool:
        return value.kind in ("argmax", "argmin")

    def tracks_nan(self, value: Value) -> bool:
        return value.kind in ("max", "min") and value.dtype.is_floating_point

    def accumulators(self, value: Value) -> list[tuple[str, str, str]]:
        """Name suffix, type and start of each accumulator; the result's own comes first."""
        dtype = value.inputs[0].dtype if self.is_positional(value) else value.dtype
        start = literal(reduction_identity(value.kind, dtype), dtype)  # type: ignore[arg-type]
        if self.is_positional(value):
            return [("", "int64_t", "0"), ("_best", CTYPES[dtype], start)]
        if dtype is torch.bool:
            return [
                ("", "int32_t", "1" if value.kind == "all" else "0")
            ]  # vectorises, bool doesn't
        return [("", CTYPES[dtype], start)]

    def combine(self, value: Value, into: str, other: str) -> str:
        """`into` with one more element or partial result, as an expression; NaN stays."""
        if value.kind in ("max", "min"):
            sign = ">" if value.kind == "max" else "<"
            if self.tracks_nan(value):
                return f"({other} {sign} {into}) | ({other} != {other}) ? {other} : {into}"
            return f"{other} {sign} {into} ? {other} : {into}"
        return f"{into} {_SIGN[value.kind]} {other}"

    def better(self, value: Value, other: str, best: str) -> str:
        """The condition under which argmax/argmin moves on: strictly better, or the first NaN."""
        sign = ">" if value.kind == "argmax" else "<"
        condition = f"{other} {sign} {best}"
        if value.inputs[0].dtype.is_floating_point:
            condition = f"({condition}) | (({other} != {other}) & ({best} == {best}))"
        return condition

    def place(self) -> sympy.Expr:
        """The linear position in the reduction's ranges."""
        place: sympy.Expr = sympy.Integer(0)
        for var, size in self.plan.reduction_ranges.items():
            place = place * size + (var if size != 1 else 0)
        return sympy.expand(place)

    def position(self) -> str:
        return self.index(self.place())


_SIGN = {"sum": "+", "prod": "*", "any": "|", "all": "&"}


def _in_empty(value: Value) -> bool:
    """The access goes through a loaded index into a dimension of size 0: always out of range."""
    return any(v.size == 0 for v in value.indirect)


def guarded_divisions(values: Sequence[Value]) -> frozenset[Value]:
    """Integer divisions that must report a zero divisor, as eager does.

    A divisor that depends on a masked load can be 0 in lanes that nobody looks at: it isn't reported.
    """
    masked: set[Value] = set()
    found: set[Value] = set()
    for value in values:
        if (value.op == "load" and value.mask is not None) or any(
            v in masked for v in value.operands
        ):
            masked.add(value)
        if value.op in ("truncdiv", "fmod") and is_int(value.dtype):
            divisor = value.inputs[1]
            constant = divisor.op == "constant" and divisor.constant != 0
            if divisor not in masked and not constant:
                found.add(value)
    return frozenset(found)
