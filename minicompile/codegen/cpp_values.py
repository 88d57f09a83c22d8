"""Lines and values of C kernels: everything that stands inside a loop. The loops are in `cpp_loops.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import sympy
import torch

from minicompile.codegen.cpp_ops import CTYPES, EXPRESSIONS, CIndex, conversion, literal
from minicompile.codegen.phases import was_float
from minicompile.codegen.plan import INDEX_ERROR, CppPlan
from minicompile.codegen.printing import SIGNS, OperationPrinter
from minicompile.ops.table import POSITIONS, reduction_identity
from minicompile.scheduling.body import Value
from minicompile.shapes.expr import Size


class Loop(NamedTuple):
    """`for (var = start; var < stop; var += step)`; without `stop` it ends at `size`."""

    var: sympy.Symbol | str
    size: Size
    start: str = "0"
    stop: str = ""
    step: int | str = 1


ALIGNED = "__attribute__((aligned(64)))"


class ValuePrinter(OperationPrinter):
    """Prints values as one declaration each."""

    plan: CppPlan
    table = EXPRESSIONS

    def __init__(self, plan: CppPlan) -> None:
        super().__init__(plan)
        self.index = CIndex({})
        self.order = {value: i for i, value in enumerate(plan.body.values)}
        self.names |= {v: str(v.symbol) for v in plan.body.values if v.symbol is not None}
        self.checks = any(v.check for v in plan.body.values)

    # ---- lines and blocks

    def pragma(self, text: str) -> None:
        if text:
            self.line(f"#pragma omp {text}")

    def braces(self, head: str) -> contextlib.AbstractContextManager[None]:
        return self.block(f"{head} {{", "}")

    @contextlib.contextmanager
    def loop(self, loop: Loop, pragma: str = "") -> Iterator[None]:
        var, size, start, stop, step = loop
        self.pragma(pragma)
        advance = f"{var}++" if step == 1 else f"{var} += {step}"
        with self.braces(
            f"for (int64_t {var} = {start}; {var} < {stop or self.index(size)}; {advance})"
        ):
            yield

    @contextlib.contextmanager
    def loops(self, nest: Sequence[Loop], pragma: str = "") -> Iterator[None]:
        """A nest of loops; `pragma` stands before the outermost."""
        with contextlib.ExitStack() as stack:
            for i, loop in enumerate(nest):
                stack.enter_context(self.loop(loop, "" if i else pragma))
            yield

    # ---- values

    def constant(self, value: Value) -> str:
        return literal(value.constant, value.dtype)

    def in_order(self, values: Collection[Value]) -> list[Value]:
        return sorted(values, key=self.order.__getitem__)

    def declare(self, value: Value, expression: str) -> None:
        self.line(f"{CTYPES[value.dtype]} {self.names[value]} = {expression};", value.origins)

    def compute(
        self, values: Iterable[Value], accumulate: Callable[[Value], None] | None = None
    ) -> None:
        """The values in order; `accumulate` prints what a reduction or scan does with one element."""
        for value in values:
            if value.op in ("reduction", "scan"):
                assert accumulate is not None
                accumulate(value)
            elif value.op == "store":
                self._store(value)
            elif value.op == "indirect":
                self.indirect(value)
            elif value.op != "constant":
                self.declare(value, self._expression(value))

    def _expression(self, value: Value) -> str:
        operands = [self.ref(v) for v in value.inputs]
        match value.op:
            case "load":
                element = self.element(value)
                return element if value.mask is None else f"{self.ref(value.mask)} ? {element} : 0"
            case "index_expr":
                return self.index_of(value)
            case "to_dtype":
                (source,) = value.inputs
                text = f"mc_opaque({operands[0]})" if was_float(source) else operands[0]
                return conversion(text, source.dtype, value.dtype)
        return EXPRESSIONS[value.op](value.inputs[-1].dtype, *operands)

    def index_of(self, value: Value) -> str:
        assert value.index is not None
        return self.index(value.index)

    def element(self, value: Value) -> str:
        return f"{self.arguments[value.buffer].name}[{self.index_of(value)}]"

    def _store(self, value: Value) -> None:
        target, source = self.element(value), self.ref(value.inputs[0])
        if value.kind == "atomic_add":
            source = f"{target} + {source}"
        self.line(f"{target} = {source};", value.origins)

    def check_index(self, value: Value, name: str, size: str) -> None:
        """A bad index is reported, and becomes 0."""
        bad = f"({name} < 0) | ({name} >= {size})"
        if value.mask is not None:
            bad = f"{self.ref(value.mask)} & ({bad})"
        self.line(f"bool {name}_bad = {bad};", value.origins)
        self.line(f"error |= {name}_bad ? {INDEX_ERROR} : 0;", value.origins)
        self.line(f"{name} = {name}_bad ? 0 : {name};", value.origins)

    # ---- reductions

    def accumulators(self, value: Value) -> list[tuple[str, str, str]]:
        """Name suffix, type and start of each accumulator; the result's own comes first."""
        dtype, suffix = value.inputs[0].dtype, "_so_far" if value.op == "scan" else ""
        start = literal(reduction_identity(value.kind, dtype), dtype)  # type: ignore[arg-type]
        if value.kind in POSITIONS:
            return [("", "int64_t", "0"), ("_best", CTYPES[dtype], start)]
        if dtype is torch.bool:  # as an integer, which vectorises
            return [(suffix, "int32_t", str(int(value.kind == "all")))]
        return [(suffix, CTYPES[dtype], start)]

    def better(self, value: Value, other: str, best: str) -> str:
        """The condition under which a search moves on: strictly better, or (the first) NaN."""
        condition = f"{other} {'>' if value.kind.endswith('max') else '<'} {best}"
        if not value.inputs[0].dtype.is_floating_point:
            return condition
        nan = f"{other} != {other}"
        if value.kind in POSITIONS:
            nan = f"({nan}) & ({best} == {best})"
        return f"({condition}) | ({nan})"

    def combine(self, value: Value, into: str, other: str) -> str:
        """`into` with one more element or partial result, as an expression; NaN stays."""
        if value.kind in SIGNS:
            return f"{into} {SIGNS[value.kind]} {other}"
        return f"{self.better(value, other, into)} ? {other} : {into}"
