"""`LoopBody`: what one loop nest does, recorded as typed values.

    LoopBody := ranges: {var: Size}, reduction_ranges: {var: Size}, values: [Value]
    Value    := op, inputs: (Value, ...), dtype, origins, and by op:
        load         buffer, index, mask | None               a masked-off lane gets 0
        store        buffer, index, mode, inputs=(value,)
        constant     constant
        index_expr   index
        to_dtype     inputs=(value,)                          dtype: the target
        bitcast      inputs=(value,)
        indirect     symbol, size, mode, inputs=(value,)      a loaded integer that indices use as `symbol`
        reduction    kind, inputs=(value,)                    over the reduction variables
        a row of ops/table.py, inputs in order

Values stand in an order in which they can be computed; indices are sympy expressions over the ranges'
variables, size symbols and indirect symbols. Masks are flattened: a load inside `ops.masked` carries its
mask, arithmetic happens everywhere, and a `where` picks. The real compiler: torch/_inductor/loop_body.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch

from minicompile.errors import VerifyError
from minicompile.lowering.ir import ComputedBuffer, Reduction, Scatter
from minicompile.ops.display import Shown
from minicompile.ops.dtypes import LOOP_DTYPES, short
from minicompile.ops.handler import Index, Ops, StoreMode
from minicompile.ops.origin import NO_ORIGINS, Origins, union
from minicompile.ops.table import POINTWISE, ReductionKind, result_dtype
from minicompile.shapes.expr import Size, linear_index, loop_symbol, simplify_index


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
    """Reduction kind, or store mode."""
    symbol: sympy.Symbol | None = None
    size: Size = 0
    """indirect: the extent of the dimension it indexes."""
    check: bool = True
    """indirect: a value out of range is an error at run time."""
    wrap_negative: bool = True
    """indirect: negative values count from the end."""
    indirect: tuple[Value, ...] = ()
    """The indirect values that `index` mentions."""

    @property
    def operands(self) -> tuple[Value, ...]:
        """Everything that must be computed before: inputs, mask, indirect indices."""
        mask = (self.mask,) if self.mask is not None else ()
        return (*self.inputs, *mask, *self.indirect)

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
    def origins(self) -> Origins:
        return union(v.origins for v in self.values)

    def indices(self) -> list[Index]:
        """The distinct index expressions."""
        return list(dict.fromkeys(v.index for v in self.values if v.index is not None))

    def reindexed(
        self,
        moved: Callable[[Index], Index],
        ranges: dict[sympy.Symbol, Size],
        reduction_ranges: dict[sympy.Symbol, Size],
    ) -> LoopBody:
        """The same body over other loop variables: `moved` gives the new form of an index."""
        indices = {index: moved(index) for index in self.indices()}
        copies: dict[Value, Value] = {}
        out = LoopBody(self.name, ranges, reduction_ranges)
        for value in self.values:
            index = indices[value.index] if value.index is not None else None
            copies[value] = value.copy(copies, index)
            out.values.append(copies[value])
        return out

    def __str__(self) -> str:
        return body_text(self)


class Recorder(Ops):
    """The handler that records: every value is a `Value` appended to a body, with common ones shared."""

    def __init__(
        self, body: LoopBody, origins: Origins = NO_ORIGINS, state: _State | None = None
    ) -> None:
        self.body, self.origins = body, origins
        self.state = state if state is not None else _State()

    def at(self, origins: Origins) -> Recorder:
        return Recorder(self.body, origins, self.state)

    def emit(self, op: str, inputs: tuple[Value, ...], dtype: torch.dtype, **fields: Any) -> Value:
        key = (
            op,
            tuple(map(id, inputs)),
            dtype,
            *sorted((k, _hashable(v)) for k, v in fields.items()),
        )
        known = self.state.known.get(key)
        if known is not None and op != "store":
            known.origins = known.origins | self.origins
            return known
        value = Value(op, inputs, dtype, self.origins, **fields)
        self.state.known[key] = value
        self.body.values.append(value)
        return value

    def _index(self, index: Index | int) -> tuple[Index, tuple[Value, ...]]:
        simple = simplify_index(index, self.body.all_ranges)
        used = sorted((s for s in simple.free_symbols if s in self.state.indirect), key=str)
        return simple, tuple(self.state.indirect[s] for s in used)

    def load(self, buffer: str, index: Index) -> Value:
        where, indirect = self._index(index)
        return self.emit(
            "load",
            (),
            self.state.dtype_of(buffer),
            buffer=buffer,
            index=where,
            mask=self.state.mask,
            indirect=indirect,
        )

    def store(self, buffer: str, index: Index, value: Value, mode: StoreMode = "store") -> Value:
        where, indirect = self._index(index)
        return self.emit(
            "store", (value,), value.dtype, buffer=buffer, index=where, kind=mode, indirect=indirect
        )

    def constant(self, value: float | int | bool, dtype: torch.dtype) -> Value:
        if dtype.is_floating_point:
            value = float(value)
        elif dtype is torch.bool:
            value = bool(value)
        else:
            value = int(value)
        return self.emit("constant", (), dtype, constant=value)

    def index_expr(self, expr: Index, dtype: torch.dtype) -> Value:
        where, indirect = self._index(expr)
        if where.is_Integer:
            return self.constant(int(where), dtype)
        return self.emit("index_expr", (), dtype, index=where, indirect=indirect)

    def to_dtype(self, value: Value, dtype: torch.dtype) -> Value:
        return value if value.dtype is dtype else self.emit("to_dtype", (value,), dtype)

    def bitcast(self, value: Value, dtype: torch.dtype) -> Value:
        return value if value.dtype is dtype else self.emit("bitcast", (value,), dtype)

    def masked(self, mask: Value, body: Callable[[Ops], Value], other: float | int | bool) -> Value:
        outer = self.state.mask
        self.state.mask = mask if outer is None else self.pointwise("logical_and", outer, mask)
        try:
            value = body(self)
        finally:
            self.state.mask = outer
        return self.pointwise("where", mask, value, self.constant(other, value.dtype))

    def indirect_indexing(
        self, value: Value, size: Index | int, check: bool = True, wrap_negative: bool = True
    ) -> Index:
        key = (value, size, check, wrap_negative, self.state.mask)
        if key not in self.state.indirect_keys:
            symbol = loop_symbol(f"i{len(self.state.indirect)}")
            self.state.indirect_keys[key] = symbol
            self.state.indirect[symbol] = self.emit(
                "indirect",
                (value,),
                torch.int64,
                symbol=symbol,
                size=size,
                check=check,
                wrap_negative=wrap_negative,
                mask=self.state.mask,
            )
        return self.state.indirect_keys[key]

    def reduction(self, kind: ReductionKind, dtype: torch.dtype, value: Value) -> Value:
        return self.emit("reduction", (value,), dtype, kind=kind)

    def pointwise(self, name: str, *values: Value) -> Value:
        return self.emit(name, values, result_dtype(name, tuple(v.dtype for v in values)))


class _State:
    """What all handlers of one recording share."""

    def __init__(self) -> None:
        self.known: dict[Any, Value] = {}
        self.indirect: dict[sympy.Symbol, Value] = {}
        self.indirect_keys: dict[Any, sympy.Symbol] = {}
        self.mask: Value | None = None
        self.dtypes: Mapping[str, torch.dtype] = {}

    def dtype_of(self, buffer: str) -> torch.dtype:
        return self.dtypes[buffer]


def _hashable(value: Any) -> Any:
    if isinstance(
        value, float
    ):  # 0.0 and -0.0 differ, and so do 1 and True; NaN equals itself here
        return (type(value).__name__, repr(value))
    if isinstance(value, Value):
        return id(value)
    if isinstance(value, tuple):
        return tuple(map(_hashable, value))
    return (type(value).__name__, value)


def record(buffer: ComputedBuffer, dtypes: Mapping[str, torch.dtype]) -> LoopBody:
    """Run a buffer's loop functions once and keep what they did.

    `dtypes` gives the dtype of every buffer that can be loaded. A reduction's store follows the reduction.
    """
    loops = buffer.loops
    ranges = {loop_symbol(f"p{i}"): size for i, size in enumerate(loops.ranges)}
    reduction_ranges: dict[sympy.Symbol, Size] = {}
    if isinstance(loops, Reduction):
        reduction_ranges = {
            loop_symbol(f"r{i}"): size for i, size in enumerate(loops.reduction_ranges)
        }
    body = LoopBody(buffer.name, ranges, reduction_ranges)
    recorder = Recorder(body, buffer.origins)
    recorder.state.dtypes = dtypes
    index = list(ranges)
    layout = buffer.layout
    if isinstance(loops, Reduction):
        source = loops.inner_fn(recorder, index, list(reduction_ranges))
        reduced = recorder.reduction(loops.kind, layout.dtype, source)
        recorder.store(buffer.name, layout.index(index), reduced)
    elif isinstance(loops, Scatter):
        where = loops.output_index(recorder, index)
        value = loops.inner_fn(recorder, index)
        position = linear_index(where, layout.stride, layout.offset)
        recorder.store(buffer.name, position, value, loops.mode)
    else:
        recorder.store(buffer.name, layout.index(index), loops.inner_fn(recorder, index))
    drop_dead(body)
    return body


def drop_dead(body: LoopBody) -> None:
    """Remove values that no store needs. Checked indices stay: they are errors when out of range."""
    needed: set[Value] = set()
    for value in reversed(body.values):
        if value in needed or value.op == "store" or (value.op == "indirect" and value.check):
            needed.add(value)
            needed.update(value.operands)
    body.values = [v for v in body.values if v in needed]


def names(values: list[Value]) -> dict[Value, str]:
    """tmp0, tmp1, ... in order; constants are written in place and get no name."""
    found: dict[Value, str] = {}
    for value in values:
        if value.op not in ("constant", "store"):
            found[value] = f"tmp{len(found)}"
    return found


def body_text(body: LoopBody) -> str:
    """The body as a Python class: ranges, named index formulas, then one operation a line."""
    index_names: dict[Index, str] = {}
    for value in body.values:
        if value.index is not None:
            index_names.setdefault(value.index, f"index{len(index_names)}")
    named = names(body.values)
    lines = [f"class {body.name}_loop_body:"]
    ranges = ", ".join(f"{var}: {size}" for var, size in body.ranges.items())
    lines.append(f"    var_ranges = {{{ranges}}}")
    if body.reduction_ranges:
        ranges = ", ".join(f"{var}: {size}" for var, size in body.reduction_ranges.items())
        lines.append(f"    reduction_ranges = {{{ranges}}}")
    lines += [f"    {name} = {index}" for index, name in index_names.items()]
    lines.append("    def body(self, ops):")
    for value in body.values:
        if value.op == "constant":
            continue
        call = _value_text(value, named, index_names)
        target = f"{named[value]}: '{short(value.dtype)}' = " if value in named else ""
        lines.append(f"        {target}{call}")
    return "\n".join(lines)


def _value_text(value: Value, named: Mapping[Value, str], index_names: Mapping[Index, str]) -> str:
    def ref(v: Value) -> str:
        return repr(v.constant) if v.op == "constant" else named[v]

    index = f"self.{index_names[value.index]}" if value.index is not None else ""
    arguments = [ref(v) for v in value.inputs]
    if value.op == "load":
        mask = f", mask={ref(value.mask)}" if value.mask is not None else ""
        return f"ops.load('{value.buffer}', {index}{mask})"
    if value.op == "store":
        mode = "" if value.kind == "store" else f", mode='{value.kind}'"
        return f"ops.store('{value.buffer}', {index}, {arguments[0]}{mode})"
    if value.op == "index_expr":
        return f"ops.index_expr({index}, torch.{str(value.dtype).removeprefix('torch.')})"
    if value.op == "indirect":
        return f"ops.indirect_indexing({arguments[0]}, {value.size})  # as {value.symbol}"
    if value.op == "reduction":
        return f"ops.reduction('{value.kind}', {arguments[0]})"
    if value.op in ("to_dtype", "bitcast"):
        return f"ops.{value.op}({arguments[0]}, torch.{str(value.dtype).removeprefix('torch.')})"
    return f"ops.{value.op}({', '.join(arguments)})"


def verify(body: LoopBody) -> None:
    """Raise VerifyError where a body breaks its grammar."""
    seen: set[Value] = set()
    symbols: set[sympy.Symbol] = set(body.all_ranges)
    for value in body.values:
        if value.dtype not in LOOP_DTYPES:
            raise VerifyError(
                f"{body.name}: {value.op} gives {value.dtype}, which loops can't hold"
            )
        for operand in value.operands:
            if operand not in seen:
                raise VerifyError(
                    f"{body.name}: {value.op} uses {operand.op} before it is computed"
                )
        if value.symbol is not None:
            symbols.add(value.symbol)
        if value.index is not None:
            strange = [
                s for s in value.index.free_symbols if s not in symbols and not s.is_positive
            ]
            if strange:
                raise VerifyError(f"{body.name}: index {value.index} uses unknown {strange}")
        if value.op in POINTWISE:
            expected = result_dtype(value.op, tuple(v.dtype for v in value.inputs))
            if expected is not value.dtype:
                raise VerifyError(
                    f"{body.name}: {value.op} must give {expected}, not {value.dtype}"
                )
        seen.add(value)
    if not body.stores:
        raise VerifyError(f"{body.name}: stores nothing")


def users(values: list[Value]) -> dict[Value, list[Value]]:
    """For each value, the values that use it."""
    found: dict[Value, list[Value]] = {v: [] for v in values}
    for value in values:
        for operand in value.operands:
            found[operand].append(value)
    return found
