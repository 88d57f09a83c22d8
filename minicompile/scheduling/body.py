"""`LoopBody`: what one loop nest does, recorded as typed values.

    LoopBody := name, ranges: {var: Size}, reduction_ranges: {var: Size}, values: [Value]
    Value    := op, inputs: (Value), dtype, origins, buffer, index, mask, constant, kind, symbol, size,
                check, wrap_negative, indirect: (Value)

    Which of its fields a value has, by op:

        load         buffer, index, mask           a masked-off lane gets 0
        store        buffer, index, kind, inputs   kind: how it is stored
        constant     constant
        index_expr   index
        to_dtype     inputs                        dtype: the target
        indirect     symbol, size, inputs          a loaded integer that indices use as `symbol`
        reduction    kind, inputs                  over the reduction variables
        scan         kind, inputs                  along r0, in order: this element and all before
        a row of ops/table.py                      inputs in order

Values stand in an order in which they can be computed; indices are sympy expressions over the ranges'
variables, size symbols and indirect symbols. Masks are flattened: a load inside `ops.masked` carries its
mask, arithmetic happens everywhere, and a `where` picks. The real compiler: torch/_inductor/loop_body.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch

from minicompile.lowering.ir import ComputedBuffer, loop_ranges, run_loops
from minicompile.ops.display import Shown
from minicompile.ops.dtypes import short
from minicompile.ops.handler import Index, Ops, StoreMode
from minicompile.ops.origin import NO_ORIGINS, Origins, union
from minicompile.ops.table import ReductionKind, ScanKind, result_dtype
from minicompile.shapes.expr import Ranges, Size, index_text, loop_symbol, simplify_index


@dataclass(eq=False, slots=True)
class Value:
    """One operation of a loop body; see the grammar at the head of this file."""

    op: str
    inputs: tuple[Value, ...]
    dtype: torch.dtype
    origins: Origins = NO_ORIGINS
    buffer: str = ""
    index: Index | None = None
    mask: Value | None = None
    constant: float | int | bool = 0
    kind: str = ""
    """Kind of a reduction or scan, or store mode."""
    symbol: sympy.Symbol | None = None
    size: Size = 0
    """indirect: the extent of the dimension it indexes."""
    check: bool = False
    """indirect: a value out of range is an error at run time. Division of integers: so is a divisor of 0."""
    wrap_negative: bool = True
    """indirect: negative values count from the end."""
    indirect: tuple[Value, ...] = ()
    """The indirect values that `index` mentions."""

    @property
    def operands(self) -> tuple[Value, ...]:
        """Everything that must be computed before: inputs, mask, indirect indices."""
        mask = (self.mask,) if self.mask is not None else ()
        return (*self.inputs, *mask, *self.indirect)

    @property
    def key(self) -> object:
        """Equal for values that are computed alike, whatever symbol stands for an indirect index."""
        constant = repr(self.constant)  # tells 0.0 from -0.0 and 1 from True; NaN equals itself
        inputs = tuple(v.key if v.op == "constant" else v for v in self.inputs)
        what = (self.op, inputs, self.dtype, self.kind, constant, self.mask)
        where = (self.buffer, self.index, self.size, self.check, self.wrap_negative, self.indirect)
        return what, where

    def copy(self, mapping: Mapping[Value, Value], index: Index | None = None) -> Value:
        """The same operation on other operands."""
        return replace(
            self,
            inputs=tuple(mapping[v] for v in self.inputs),
            mask=mapping[self.mask] if self.mask is not None else None,
            indirect=tuple(mapping[v] for v in self.indirect),
            index=self.index if index is None else index,
        )


@dataclass(eq=False)
class LoopBody(Shown):
    """A recorded loop nest. Ranges are ordered from the outermost loop to the innermost."""

    name: str
    ranges: dict[sympy.Symbol, Size]
    reduction_ranges: dict[sympy.Symbol, Size]
    values: list[Value] = field(default_factory=list)

    @property
    def all_ranges(self) -> dict[sympy.Symbol, Size]:
        return {**self.ranges, **self.reduction_ranges}

    @property
    def loads(self) -> list[Value]:
        return [v for v in self.values if v.op == "load"]

    @property
    def stores(self) -> list[Value]:
        return [v for v in self.values if v.op == "store"]

    @property
    def reductions(self) -> list[Value]:
        return [v for v in self.values if v.op == "reduction"]

    @property
    def scans(self) -> list[Value]:
        return [v for v in self.values if v.op == "scan"]

    @property
    def origins(self) -> Origins:
        return union(v.origins for v in self.values)

    def reindexed(
        self,
        moved: Callable[[Index], Index],
        ranges: dict[sympy.Symbol, Size],
        reduction_ranges: dict[sympy.Symbol, Size],
    ) -> LoopBody:
        """The same body over other loop variables: `moved` gives the new form of an index."""
        indices = {index: moved(index) for index in iterate_indices(self)}
        copies: dict[Value, Value] = {}
        out = LoopBody(self.name, ranges, reduction_ranges)
        for value in self.values:
            index = indices[value.index] if value.index is not None else None
            copies[value] = value.copy(copies, index)
            out.values.append(copies[value])
        return out

    def __str__(self) -> str:
        """The body as a Python class: ranges, named index formulas, then one operation a line."""
        named = names(self.values)
        indices = {index: f"index{k}" for k, index in enumerate(iterate_indices(self))}
        lines = [f"class {self.name}_loop_body:"]
        lines.append(f"    var_ranges = {ranges_text(self.ranges)}")
        if self.reduction_ranges:
            lines.append(f"    reduction_ranges = {ranges_text(self.reduction_ranges)}")
        lines += [f"    {name} = {index_text(index)}" for index, name in indices.items()]
        lines.append("    def body(self, ops):")
        for value in self.values:
            if value.op != "constant":
                target = f"{named[value]}: '{short(value.dtype)}' = " if value in named else ""
                lines.append(f"        {target}{_value_text(value, named, indices)}")
        return "\n".join(lines)


class Recorder(Ops):
    """The handler that records: every value is a `Value` appended to a body, with common ones shared.

    `dtypes` gives the dtype of every buffer that can be loaded.
    """

    def __init__(self, body: LoopBody, dtypes: Mapping[str, torch.dtype] | None = None) -> None:
        self.body, self.dtypes = body, dtypes or {}
        self.origins = NO_ORIGINS
        self.mask: Value | None = None
        """Where the values count that are being recorded."""
        self.known: dict[object, Value] = {}
        self.indirect: dict[sympy.Symbol, Value] = {}

    def at(self, origins: Origins) -> Recorder:
        return self._changed(origins=origins)

    def _changed(self, **fields: Any) -> Recorder:
        """A handler of the same recording that differs in origins or mask."""
        other = object.__new__(Recorder)
        other.__dict__.update(self.__dict__, **fields)
        return other

    def emit(self, op: str, inputs: tuple[Value, ...], dtype: torch.dtype, **fields: Any) -> Value:
        """The value of an operation; the known one if it has been recorded before. A constant is written in
        place, so its origins are those of its users, too."""
        constants = (v.origins for v in inputs if v.op == "constant")
        return self.append(Value(op, inputs, dtype, self.origins.union(*constants), **fields))

    def append(self, value: Value) -> Value:
        """A value of the body from now on, unless one that is computed alike is there. Constants of several
        origins stay apart."""
        key = (value.key, value.origins) if value.op == "constant" else value.key
        known = self.known.setdefault(key, value)
        if known is not value and value.op != "store":
            known.origins = known.origins | value.origins
            return known
        self.body.values.append(value)
        return value

    def _emit_at(
        self, op: str, inputs: tuple[Value, ...], dtype: torch.dtype, index: Index, **fields: Any
    ) -> Value:
        """An operation with an index, which may mention loaded values."""
        where = simplify_index(index, self.body.all_ranges)
        used = sorted(where.free_symbols & self.indirect.keys(), key=str)
        indirect = tuple(self.indirect[s] for s in used)
        return self.emit(op, inputs, dtype, index=where, indirect=indirect, **fields)

    def load(self, buffer: str, index: Index) -> Value:
        return self._emit_at("load", (), self.dtypes[buffer], index, buffer=buffer, mask=self.mask)

    def store(self, buffer: str, index: Index, value: Value, mode: StoreMode = "store") -> Value:
        return self._emit_at("store", (value,), value.dtype, index, buffer=buffer, kind=mode)

    def constant(self, value: float | int | bool, dtype: torch.dtype) -> Value:
        kind = float if dtype.is_floating_point else bool if dtype is torch.bool else int
        return self.emit("constant", (), dtype, constant=kind(value))

    def index_expr(self, expr: Index, dtype: torch.dtype) -> Value:
        where = simplify_index(expr, self.body.all_ranges)
        if where.is_Integer:
            return self.constant(int(where), dtype)
        return self._emit_at("index_expr", (), dtype, where)

    def to_dtype(self, value: Value, dtype: torch.dtype) -> Value:
        return value if value.dtype is dtype else self.emit("to_dtype", (value,), dtype)

    def masked(self, mask: Value, body: Callable[[Ops], Value], other: float | int | bool) -> Value:
        inside = mask if self.mask is None else self.pointwise("logical_and", self.mask, mask)
        value = body(self._changed(mask=inside))
        return self.pointwise("where", mask, value, self.constant(other, value.dtype))

    def indirect_indexing(
        self, value: Value, size: Index | int, check: bool = True, wrap_negative: bool = True
    ) -> Index:
        found = self.emit(
            "indirect",
            (value,),
            torch.int64,
            symbol=loop_symbol(f"i{len(self.indirect)}"),
            size=size,
            check=check,
            wrap_negative=wrap_negative,
            mask=self.mask,
        )
        assert found.symbol is not None
        self.indirect[found.symbol] = found
        return found.symbol

    def reduction(self, kind: ReductionKind, dtype: torch.dtype, value: Value) -> Value:
        return self.emit("reduction", (value,), dtype, kind=kind)

    def scan(self, kind: ScanKind, value: Value) -> Value:
        return self.emit("scan", (value,), value.dtype, kind=kind)

    def pointwise(self, name: str, *values: Value) -> Value:
        return self.emit(name, values, result_dtype(name, tuple(v.dtype for v in values)))


def record(buffer: ComputedBuffer, dtypes: Mapping[str, torch.dtype]) -> LoopBody:
    """Run a buffer's loop functions once and keep what they did."""
    body = LoopBody(buffer.name, *loop_ranges(buffer.loops))
    run_loops(buffer, Recorder(body, dtypes).at(buffer.made_by))
    drop_dead(body)
    return body


def drop_dead(body: LoopBody) -> None:
    """Remove values that no store needs. What is checked stays: it can be an error."""
    needed: set[Value] = set()
    for value in reversed(body.values):
        if value in needed or value.op == "store" or value.check:
            needed.add(value)
            needed.update(value.operands)
    body.values = [v for v in body.values if v in needed]


def names(values: list[Value]) -> dict[Value, str]:
    """tmp0, tmp1, ... in order; constants are written in place and get no name."""
    named = [value for value in values if value.op not in ("constant", "store")]
    return {value: f"tmp{number}" for number, value in enumerate(named)}


def ranges_text(ranges: Ranges) -> str:
    """`{p0: 64, p1: 8}`."""
    return f"{{{', '.join(f'{loop}: {size}' for loop, size in ranges.items())}}}"


def _value_text(value: Value, named: Mapping[Value, str], indices: Mapping[Index, str]) -> str:
    def ref(v: Value) -> str:
        return repr(v.constant) if v.op == "constant" else named[v]

    op, arguments, after = value.op, [ref(v) for v in value.inputs], ""
    index = [f"self.{indices[value.index]}"] if value.index is not None else []
    if op == "load":
        arguments = [f"'{value.buffer}'", *index]
        if value.mask is not None:
            arguments.append(f"mask={ref(value.mask)}")
    elif op == "store":
        arguments = [f"'{value.buffer}'", *index, *arguments]
        if value.kind != "store":
            arguments.append(f"mode='{value.kind}'")
    elif op == "indirect":
        op, after = "indirect_indexing", f"  # as {value.symbol}"
        arguments.append(str(value.size))
    elif op in ("reduction", "scan"):
        arguments.insert(0, f"'{value.kind}'")
    elif op in ("index_expr", "to_dtype"):
        arguments += [*index, str(value.dtype)]
    return f"ops.{op}({', '.join(arguments)}){after}"


def varying(
    values: Iterable[Value],
    variables: Collection[sympy.Symbol],
    always: Collection[Value] = (),
    never: Collection[Value] = (),
) -> frozenset[Value]:
    """The values that differ with the loop variables: their index has one, or an operand differs."""
    found = set(always)
    for value in values:
        moves = value.index is not None and not value.index.free_symbols.isdisjoint(variables)
        if (moves or not found.isdisjoint(value.operands)) and value not in never:
            found.add(value)
    return frozenset(found)


def loop_level(body: LoopBody, every: Collection[Value] = ()) -> frozenset[Value]:
    """The values that differ for each r: scans and those in `every`, too. A reduction gives row level."""
    always, never = {*every, *body.scans}, set(body.reductions)
    return varying(body.values, body.reduction_ranges, always, never)


def users(values: list[Value]) -> dict[Value, list[Value]]:
    """For each value, the values that use it."""
    found: dict[Value, list[Value]] = {v: [] for v in values}
    for value in values:
        for operand in value.operands:
            found[operand].append(value)
    return found


def numbers(body: LoopBody) -> Iterator[Size | Index]:
    """All that a body says by formulas: extents, bounds, indices."""
    yield from body.all_ranges.values()
    yield from (value.size for value in body.values)
    yield from iterate_indices(body)


def iterate_indices(body: LoopBody) -> Iterator[Index]:
    """The distinct index expressions of the body."""
    yield from dict.fromkeys(v.index for v in body.values if v.index is not None)
