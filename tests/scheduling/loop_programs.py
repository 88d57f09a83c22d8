"""Random loop programs: what scheduling and code generation make of them against the reference interpreter.

    python -m tests.scheduling.loop_programs --programs 2000 --seed 0
    python -m tests.scheduling.loop_programs --programs 50 --language triton

A program is a list of steps, each a loop nest, a view or a library call on earlier results, over all dtypes,
kinds of loops and sizes, some symbolic. Every result's rounding error is bounded from what its step does, so
that a program may be long: results without one must be equal to the last bit. Failing programs are printed.
Exit code 1 if there are any.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch

from minicompile.codegen import cpp_rules
from minicompile.codegen.generate import by_position, generate_kernels, make_plans
from minicompile.codegen.wrapper import generate_wrapper
from minicompile.debug.reference import run_reference
from minicompile.lowering.ir import Layout, LoopGraph, Pointwise, Reduction, Scan, Scatter
from minicompile.options import Options
from minicompile.plugins.column_reductions import choose
from minicompile.runtime.load import kernel_loader, load_wrapper
from minicompile.scheduling.schedule import schedule
from minicompile.shapes.expr import FloorDiv, ModularIndexing, Size, product, same, size_symbol
from tests.codegen.races import shared_writes
from tests.scheduling.building import (
    GraphBuilder,
    T,
    broadcast,
    compiled,
    copied,
    dirty_empty,
    example_inputs,
)

CPU = torch.device("cpu")
F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
I64, I32, U8, BOOL = torch.int64, torch.int32, torch.uint8, torch.bool
DTYPES = [F32, F32, F32, F64, BF16, F16, I64, I32, U8, BOOL]
HALVES = (BF16, F16)
S0, S1 = size_symbol("s0"), size_symbol("s1")
LARGEST = 6000
"""Most elements of a value."""

# -- the arithmetic of steps: functions of a handler, well conditioned


def number(ops: Any, value: float, dtype: torch.dtype) -> Any:
    return ops.constant(value, dtype)


def plus_one(ops: Any, x: Any, dtype: torch.dtype) -> Any:
    """|x| + 1: a divisor that is never near 0."""
    return ops.add(ops.abs(x), number(ops, 1, dtype))


def small_divisor(ops: Any, x: Any, dtype: torch.dtype) -> Any:
    """A whole number from 1 to 8, or from -8 to -1 for some negative ones."""
    low = ops.bitwise_and(x, number(ops, 7, dtype))
    return ops.add(low, number(ops, 1, dtype))


@dataclass(frozen=True)
class Fn:
    """Arithmetic on loaded values. `slope`: how much it can enlarge an error; exact: it rounds as eager."""

    name: str
    arity: int
    kinds: str
    """Of the dtypes it takes: f, i, b."""
    fn: Callable[..., Any]
    exact: bool = True
    slope: float = 1
    step: bool = False
    """Jumps: only for operands without an error."""
    result: torch.dtype | None = None
    chooses: bool = False
    """Gives numbers of a half type if it is given such numbers."""


def plain(names: str, arity: int, kinds: str, **more: Any) -> list[Fn]:
    """Operations of the table as they are."""

    def of(name: str) -> Callable[..., Any]:
        return lambda ops, dtype, *values: getattr(ops, name)(*values)

    return [Fn(name, arity, kinds, of(name), **more) for name in names.split()]


FUNCTIONS: dict[str, Fn] = {
    f.name: f
    for f in (
        *plain("neg abs", 1, "fi", chooses=True),
        *plain("sigmoid tanh sin cos erf", 1, "f", exact=False, slope=1.2),
        *plain("floor ceil trunc round", 1, "f", step=True, chooses=True),
        *plain("sign", 1, "fi", step=True),
        *plain("isnan signbit", 1, "f", step=True, result=BOOL),
        *plain("logical_not", 1, "b"),
        *plain("bitwise_not", 1, "ib"),
        *plain("add sub", 2, "fi"),
        *plain("mul", 2, "fib"),
        *plain("maximum minimum", 2, "fi", chooses=True),
        *plain("logical_and logical_or logical_xor", 2, "b"),
        *plain("bitwise_and bitwise_or bitwise_xor", 2, "ib"),
        *plain("eq ne lt le gt ge", 2, "fi", step=True, result=BOOL),
        *plain("hypot", 2, "f", exact=False),
        *plain("copysign", 2, "f", step=True),
        *plain("fma", 3, "f", exact=False),
        Fn("exp", 1, "f", lambda o, d, x: o.exp(o.minimum(x, number(o, 2, d))), False, 8),
        Fn("expm1", 1, "f", lambda o, d, x: o.expm1(o.minimum(x, number(o, 2, d))), False, 8),
        Fn("log", 1, "f", lambda o, d, x: o.log(plus_one(o, x, d)), False),
        Fn("log1p", 1, "f", lambda o, d, x: o.log1p(o.abs(x)), False),
        Fn("sqrt", 1, "f", lambda o, d, x: o.sqrt(plus_one(o, x, d)), False),
        Fn("rsqrt", 1, "f", lambda o, d, x: o.rsqrt(plus_one(o, x, d)), False),
        Fn("reciprocal", 1, "f", lambda o, d, x: o.reciprocal(plus_one(o, x, d))),
        Fn("truediv", 2, "f", lambda o, d, x, y: o.truediv(x, plus_one(o, y, d))),
        Fn("fmod", 2, "f", lambda o, d, x, y: o.fmod(x, plus_one(o, y, d)), step=True),
        Fn("remainder_f", 2, "f", lambda o, d, x, y: o.remainder(x, plus_one(o, y, d)), step=True),
        Fn("floordiv_f", 2, "f", lambda o, d, x, y: o.floordiv(x, plus_one(o, y, d)), step=True),
        Fn("remainder", 2, "i", lambda o, d, x, y: o.remainder(x, small_divisor(o, y, d))),
        Fn("floordiv", 2, "i", lambda o, d, x, y: o.floordiv(x, small_divisor(o, y, d))),
        Fn("truncdiv", 2, "i", lambda o, d, x, y: o.truncdiv(x, small_divisor(o, y, d))),
        Fn("lshift", 2, "i", lambda o, d, x, y: o.lshift(x, o.bitwise_and(y, number(o, 7, d)))),
        Fn("rshift", 2, "i", lambda o, d, x, y: o.rshift(x, o.bitwise_and(y, number(o, 7, d)))),
    )
}
REDUCTIONS = {
    "f": "sum sum sum max min argmax argmin prod",
    "i": "sum max min argmax prod",
    "b": "any all",
}
SCANS = {"f": "sum prod", "i": "sum prod"}


def kind_of(dtype: torch.dtype) -> str:
    return "f" if dtype.is_floating_point else "b" if dtype is BOOL else "i"


# -- programs


@dataclass(frozen=True)
class Step:
    """One result: `what` is done to the results numbered `sources`."""

    what: str
    sources: tuple[int, ...] = ()
    size: tuple[Size, ...] = ()
    dtype: torch.dtype = F32
    name: str = ""
    axes: tuple[int, ...] = ()
    numbers: tuple[Any, ...] = ()
    exact: bool = True
    """Its result is the same to the last bit however it is computed."""

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        told = [f"%{i}" for i in self.sources] + [repr(self.name)] * bool(self.name)
        told += [f"{n}={v}" for n, v in (("axes", self.axes), ("numbers", self.numbers)) if v]
        size = ", ".join(map(str, self.size))
        return f"{self.what}({', '.join(told)}) -> {dtype}[{size}]{'' if self.exact else ' ~'}"


@dataclass(frozen=True)
class Program:
    """Steps, which of them are returned, and what the size symbols stand for."""

    seed: int
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    hints: dict[sympy.Symbol, int] = field(default_factory=dict)

    def build(self, outputs: Sequence[int] | None = None) -> LoopGraph:
        builder, values = GraphBuilder(self.hints), []
        builder.inputs += self.hints
        for step in self.steps:
            values.append(apply(builder, step, [values[i] for i in step.sources]))
        return builder.finish(*(values[i] for i in (self.outputs if outputs is None else outputs)))

    def __str__(self) -> str:
        lines = [f"# program {self.seed}, sizes {self.hints}"] if self.hints else []
        lines += [f"%{i} = {step}" for i, step in enumerate(self.steps)]
        return "\n".join([*lines, "return " + ", ".join(f"%{i}" for i in self.outputs)])


def of_dtype(builder: GraphBuilder, dtype: torch.dtype, size: Sequence[Size], fn: Any) -> T:
    return builder.compute(Pointwise(tuple(size), fn), size, dtype)


def apply(b: GraphBuilder, step: Step, given: Sequence[T]) -> T:
    """The step's result in a graph."""
    dtype, axes, numbers = step.dtype, step.axes, step.numbers
    x = given[0] if given else None
    axis = axes[0] if axes else 0
    if step.what == "input":
        strides: list[Size] = [0] * len(step.size)
        place: Size = 1
        for dim in reversed(axes):  # in this order in memory, `numbers` elements apart
            strides[dim], place = place * numbers[0], place * step.size[dim] * numbers[0]
        return b.input(step.size, dtype, strides)
    if step.what == "iota":
        sizes = step.size

        def iota(ops: Any, index: Sequence[Any]) -> Any:
            return ops.index_expr(sympy.sympify(index[axis]) * numbers[0] + numbers[1], dtype)

        return of_dtype(b, dtype, sizes, iota)
    if step.what == "mm":
        return b.extern(torch.ops.aten.mm.default, given, step.size, dtype)
    assert x is not None
    layout, rank = x.layout, len(x.size)
    if step.what == "map":
        fn = FUNCTIONS[step.name].fn
        own = layout.dtype

        def mapped(ops: Any, index: Sequence[Any]) -> Any:
            return fn(ops, own, *(source.load(ops, index) for source in given))

        return of_dtype(b, dtype, step.size, mapped)
    if step.what == "where":
        return of_dtype(
            b, dtype, step.size, lambda ops, index: ops.where(*(s.load(ops, index) for s in given))
        )
    if step.what == "cast":

        def cast(ops: Any, index: Sequence[Any]) -> Any:
            value = x.load(ops, index)
            if layout.dtype.is_floating_point and kind_of(dtype) == "i":
                low = number(ops, 0 if dtype is U8 else -100, layout.dtype)
                value = ops.minimum(ops.maximum(value, low), number(ops, 100, layout.dtype))
            return ops.to_dtype(value, dtype)

        return of_dtype(b, dtype, step.size, cast)
    # views: no loops of their own
    if step.what == "permute":
        return x.permute(*axes)
    if step.what == "slice":
        start, every, length = numbers
        sizes, strides = list(x.size), list(layout.stride)
        sizes[axis], strides[axis] = length, strides[axis] * every
        return x.viewed(sizes, strides, start * layout.stride[axis])
    if step.what == "select":
        keep = [d for d in range(rank) if d != axis]
        offset = numbers[0] * layout.stride[axis]
        return x.viewed([x.size[d] for d in keep], [layout.stride[d] for d in keep], offset)
    if step.what == "expand":
        sizes, strides = list(x.size), list(layout.stride)
        sizes.insert(axis, numbers[0])
        strides.insert(axis, 0)
        return x.viewed(sizes, strides)
    if step.what == "windows":
        width, every = numbers
        sizes, strides = list(x.size), list(layout.stride)
        sizes[axis] = (sizes[axis] - width) // every + 1
        return x.viewed([*sizes, width], [*strides[:axis], strides[axis] * every, *strides[axis + 1 :],
                                          strides[axis]])  # fmt: skip
    # moved elements: an index of each result's element
    if step.what in MOVES:
        move = MOVES[step.what]

        def moved(ops: Any, index: Sequence[Any]) -> Any:
            return x.load(ops, move(x, step, list(index)))

        return of_dtype(b, dtype, step.size, moved)
    if step.what == "twice":  # an element and another one of the same tensor

        def both(ops: Any, index: Sequence[Any]) -> Any:
            pair = x.load(ops, index), x.load(ops, MOVES[step.name](x, step, list(index)))
            return (ops.logical_xor if dtype is BOOL else ops.maximum)(*pair)

        return of_dtype(b, dtype, step.size, both)
    if step.what in ("shift", "pad"):
        before = numbers[0]

        def shifted(ops: Any, index: Sequence[Any]) -> Any:
            place = ops.index_expr(sympy.sympify(index[axis]), I64)
            inside = ops.ge(place, number(ops, before, I64))
            end = ops.index_expr(sympy.sympify(x.size[axis] + before), I64)
            inside = ops.logical_and(inside, ops.lt(place, end))
            where = [i - before if d == axis else i for d, i in enumerate(index)]
            return ops.masked(inside, lambda o: x.load(o, where), numbers[1])

        return of_dtype(b, dtype, step.size, shifted)
    if step.what == "cat":
        first, second = given
        edge = first.size[axis]

        def joined(ops: Any, index: Sequence[Any]) -> Any:
            place = ops.index_expr(sympy.sympify(index[axis]), I64)
            left = ops.lt(place, ops.index_expr(sympy.sympify(edge), I64))
            where = [i - edge if d == axis else i for d, i in enumerate(index)]
            one = ops.masked(left, lambda o: first.load(o, index), 0)
            right = ops.logical_not(left)
            return ops.where(left, one, ops.masked(right, lambda o: second.load(o, where), 0))

        return of_dtype(b, dtype, step.size, joined)
    if step.what == "masked":
        condition, source = given

        def masked(ops: Any, index: Sequence[Any]) -> Any:
            inside = condition.load(ops, index)
            return ops.masked(inside, lambda o: source.load(o, index), numbers[0])

        return of_dtype(b, dtype, step.size, masked)
    if step.what == "reduce":
        keep = step.name.startswith("keep ")
        kept = [d for d in range(rank) if keep or d not in axes]
        own = tuple(1 if d in axes else x.size[d] for d in kept)

        def source_of(ops: Any, index: Sequence[Any], reduced: Sequence[Any]) -> Any:
            where = dict(zip(kept, index)) | dict(zip(axes, reduced))
            value = x.load(ops, [where[d] for d in range(rank)])
            wide = step.name.rpartition(" ")[2] in ("sum", "prod")
            return ops.to_dtype(value, dtype) if wide else value

        loops = Reduction(
            own, tuple(x.size[d] for d in axes), step.name.rpartition(" ")[2], source_of
        )  # type: ignore[arg-type]
        return b.compute(loops, own, dtype)
    if step.what == "scan":
        wide = (
            F32 if layout.dtype in HALVES else I64 if kind_of(layout.dtype) == "i" else layout.dtype
        )

        def scanned(ops: Any, index: Sequence[Any]) -> Any:
            return ops.to_dtype(x.load(ops, index), wide)

        return b.compute(Scan(x.size, axis, step.name, scanned), x.size, dtype)  # type: ignore[arg-type]
    if step.what == "gather":  # along one axis, at computed or given positions
        table, rows = given

        def gathered(ops: Any, index: Sequence[Any]) -> Any:
            found = rows.load(ops, [index[axis]])
            extent = table.size[axis]
            if step.name == "computed":
                found = ops.remainder(found, ops.index_expr(sympy.sympify(extent), I64))
            at = ops.indirect_indexing(found, extent, True, step.name != "computed")
            return table.load(ops, [at if d == axis else i for d, i in enumerate(index)])

        return of_dtype(b, dtype, step.size, gathered)
    if step.what == "scatter_add":
        source, rows = given
        rows_of = numbers[0]
        target = of_dtype(
            b, dtype, (rows_of, *x.size[1:]), lambda ops, index: number(ops, numbers[1], dtype)
        )

        def put(ops: Any, index: Sequence[Any]) -> Sequence[Any]:
            return [ops.indirect_indexing(rows.load(ops, index[:1]), rows_of), *index[1:]]

        loops = Scatter(source.size, target.buffer.name, put, source.load, "atomic_add")
        return b.compute(loops, target.size, dtype)
    assert step.what == "scatter", step.what  # each element to a place of its own
    target = of_dtype(b, dtype, x.size, lambda ops, index: number(ops, numbers[1], dtype))
    every = numbers[0]

    def turned(ops: Any, index: Sequence[Any]) -> Sequence[Any]:
        where = list(index)
        extent = sympy.sympify(x.size[axis])
        where[axis] = ModularIndexing(where[axis] + every, sympy.Integer(1), extent)
        return where

    return b.compute(Scatter(x.size, target.buffer.name, turned, x.load, "store"), x.size, dtype)


def flip(x: T, step: Step, index: list[Any]) -> list[Any]:
    for axis in step.axes:
        index[axis] = x.size[axis] - 1 - index[axis]
    return index


def roll(x: T, step: Step, index: list[Any]) -> list[Any]:
    axis, extent = step.axes[0], sympy.sympify(x.size[step.axes[0]])
    index[axis] = ModularIndexing(index[axis] + step.numbers[0], sympy.Integer(1), extent)
    return index


def swap(x: T, step: Step, index: list[Any]) -> list[Any]:
    first, second = step.axes
    index[first], index[second] = index[second], index[first]
    return index


def repeat(x: T, step: Step, index: list[Any]) -> list[Any]:
    index[step.axes[0]] = FloorDiv(index[step.axes[0]], sympy.sympify(step.numbers[0]))
    return index


def tile(x: T, step: Step, index: list[Any]) -> list[Any]:
    axis = step.axes[0]
    index[axis] = ModularIndexing(index[axis], sympy.Integer(1), sympy.sympify(x.size[axis]))
    return index


def reshape(x: T, step: Step, index: list[Any]) -> list[Any]:
    """The digits of the flat position in the old shape."""
    flat = Layout.contiguous(CPU, F32, step.size).index(index)
    place: Size = 1
    digits = []
    for extent in reversed(x.size):
        digits.append(ModularIndexing(flat, sympy.sympify(place), sympy.sympify(extent)))
        place = place * extent
    return digits[::-1]


MOVES: dict[str, Callable[[T, Step, list[Any]], list[Any]]] = {
    "flip": flip, "roll": roll, "swap": swap, "repeat": repeat, "tile": tile, "reshape": reshape,
}  # fmt: skip


# -- random programs


class Generator:
    def __init__(self, seed: int, count: int) -> None:
        self.rng = rng = random.Random(seed)
        symbols = rng.choice([(), (), (), (S0,), (S0, S1)])
        hints: dict[sympy.Symbol, int] = {s: rng.choice([2, 3, 6, 20]) for s in symbols}
        numbers = [1, 2, 3, 4, 5, 7, 8, 16, 17, 33, 64]
        self.extents: list[Size] = rng.sample(numbers, 3) + list(symbols) * 2
        if rng.random() < 0.04:
            self.extents.append(0)
        self.steps: list[Step] = []
        self.values: list[T] = []
        self.builder = GraphBuilder(hints)
        self.hints = hints
        for _ in range(rng.randint(2, 3)):
            self.input(self.some_size(), rng.choice(DTYPES))
        while len(self.steps) < count + 3:
            self.step()
        made = [i for i, step in enumerate(self.steps) if step.what != "input"]
        kept = set(rng.sample(made, min(len(made), rng.randint(1, 3)))) | {made[-1]}
        self.program = pruned(Program(seed, tuple(self.steps), tuple(sorted(kept)), hints))

    def extent(self) -> Size:
        return self.rng.choice(self.extents)

    def some_size(self) -> tuple[Size, ...]:
        while True:
            size = tuple(self.extent() for _ in range(self.rng.choice([0, 1, 2, 2, 2, 3, 3, 4])))
            if self.numel(size) <= LARGEST:
                return size

    def numel(self, size: Sequence[Size]) -> int:
        return int(sympy.sympify(product(size)).xreplace(self.hints))

    def add(self, step: Step) -> bool:
        """Do a step, unless its result would be too large."""
        value = apply(self.builder, step, [self.values[i] for i in step.sources])
        size = broadcast([value.size])
        if self.numel(size) > LARGEST or len(size) > 5:
            return False
        self.steps.append(replace(step, size=size))
        self.values.append(value)
        return True

    def input(self, size: tuple[Size, ...], dtype: torch.dtype) -> int:
        order = list(range(len(size)))
        if self.rng.random() < 0.3:
            self.rng.shuffle(order)
        apart = 1 if self.rng.random() < 0.85 else 2
        self.add(Step("input", (), size, dtype, axes=tuple(order), numbers=(apart,)))
        return len(self.steps) - 1

    def pick(self, kinds: str = "fib", exact: bool = False, rank: int = 0) -> int | None:
        """A recent result of these kinds of dtypes."""
        found = [
            i
            for i, step in enumerate(self.steps)
            if kind_of(step.dtype) in kinds and step.exact >= exact and len(step.size) >= rank
        ]
        return self.rng.choice(found[-6:]) if found else None

    def like(self, number: int, dtype: torch.dtype, exact: bool = False) -> int:
        """A result that broadcasts with another one; a new input if there is none."""
        size = self.steps[number].size
        found = []
        for i, step in enumerate(self.steps):
            tail = size[len(size) - len(step.size) :]
            fits = len(step.size) <= len(size) and all(
                n == 1 or same(n, m) for n, m in zip(step.size, tail)
            )
            if step.dtype is dtype and fits and step.exact >= exact:
                found.append(i)
        if found and self.rng.random() < 0.9:
            return self.rng.choice(found)
        start = self.rng.randint(0, len(size))
        small = tuple(1 if self.rng.random() < 0.2 else n for n in size[start:])
        return self.input(small, dtype)

    def step(self) -> None:
        chosen = self.rng.choices(list(CHOICES), [weight for weight, _ in CHOICES.values()])[0]
        CHOICES[chosen][1](self, chosen)

    # each of these tries one step

    def map(self, what: str) -> None:
        fn = self.rng.choice(list(FUNCTIONS.values()))
        first = self.pick(fn.kinds, fn.step)
        if first is None:
            return
        dtype = self.steps[first].dtype
        if dtype is F16 and fn.name in ("lshift", "mul", "fma"):
            return  # soon beyond its largest number
        sources = [first] + [self.like(first, dtype, fn.step) for _ in range(fn.arity - 1)]
        exact = all(self.steps[i].exact for i in sources) and fn.exact
        exact = exact and (dtype not in HALVES or fn.chooses or fn.result is BOOL)
        size = broadcast([self.steps[i].size for i in sources])
        self.add(Step(what, tuple(sources), size, fn.result or dtype, fn.name, exact=exact))

    def where(self, what: str) -> None:
        condition, first = self.pick("b"), self.pick()
        if condition is None or first is None:
            return
        condition = self.like(first, BOOL)
        other = self.like(first, self.steps[first].dtype)
        exact = self.steps[first].exact and self.steps[other].exact
        sources = condition, first, other
        size = broadcast([self.steps[i].size for i in sources])
        self.add(Step(what, sources, size, self.steps[first].dtype, exact=exact))

    def masked(self, what: str) -> None:
        first = self.pick()
        if first is None:
            return
        step = self.steps[first]
        condition = self.like(first, BOOL)
        other = self.rng.choice([0, 1])
        sources = (condition, first)
        self.add(Step(what, sources, step.size, step.dtype, numbers=(other,), exact=step.exact))

    def cast(self, what: str) -> None:
        first = self.pick()
        assert first is not None
        step, dtype = self.steps[first], self.rng.choice(DTYPES)
        if not dtype.is_floating_point and not step.exact:
            return
        if dtype is F16 and step.dtype in (I64, I32, F64, F32):
            return
        self.add(Step(what, (first,), step.size, dtype, exact=step.exact))

    def iota(self, what: str) -> None:
        size, dtype = self.some_size(), self.rng.choice([I64, I32, F32, F64])
        if size:
            axis = self.rng.randrange(len(size))
            numbers = self.rng.choice([1, 3, -1, 1_000_000_000]), self.rng.choice([0, 5, -7])
            if dtype is I64 or abs(numbers[0]) < 100:
                self.add(Step(what, (), size, dtype, axes=(axis,), numbers=numbers))

    def view(self, what: str) -> None:
        first = self.pick(rank=1)
        if first is None:
            return
        source, rng = self.steps[first], self.rng
        size, axis = source.size, rng.randrange(len(source.size))
        extent, axes, numbers = size[axis], (axis,), ()
        if what in ("slice", "select", "windows") and not isinstance(extent, int):
            return
        if what == "permute":
            axes = tuple(rng.sample(range(len(size)), len(size)))
        elif what == "slice":
            every = rng.choice([1, 1, 2, 3])
            start = rng.randint(0, max(extent - 1, 0))
            length = rng.randint(
                0 if rng.random() < 0.1 else 1, max(-(-(extent - start) // every), 1)
            )
            if extent == 0:
                return
            numbers = start, every, length
        elif what == "select":
            if extent == 0:
                return
            numbers = (rng.randrange(extent),)
        elif what == "expand":
            axes, numbers = (rng.randint(0, len(size)),), (self.extent(),)
        elif what == "windows":
            width = rng.randint(1, 4)
            if extent < width:
                return
            numbers = width, rng.choice([1, 2])
        self.add(
            Step(what, (first,), (), source.dtype, axes=axes, numbers=numbers, exact=source.exact)
        )

    def move(self, what: str) -> None:
        first = self.pick(rank=1)
        if first is None:
            return
        source, rng = self.steps[first], self.rng
        size, axis = list(source.size), rng.randrange(len(source.size))
        axes: tuple[int, ...] = (axis,)
        numbers: tuple[Any, ...] = ()
        name = ""
        if what == "twice":
            pairs = [(i, j) for i in range(len(size)) for j in range(i) if same(size[i], size[j])]
            name = rng.choice(["flip", "roll"] + ["swap"] * 2 * bool(pairs))
            axes = rng.choice(pairs) if name == "swap" else axes
            numbers = (rng.randint(1, 5),)
            if 0 in size:
                return
        elif what == "flip":
            axes = tuple(rng.sample(range(len(size)), rng.randint(1, len(size))))
        elif what in ("roll", "scatter"):
            if 0 in size:
                return
            numbers = rng.randint(0, 5), 0
            if what == "scatter":
                numbers = (*numbers[:1], 1)
        elif what in ("repeat", "tile"):
            if 0 in size:
                return  # lowering takes no digits of an empty dimension
            times = rng.choice([2, 3, *self.hints])
            size[axis], numbers = size[axis] * times, (times,)
        elif 0 in size:
            return
        elif what == "reshape":
            order = rng.sample(range(len(size)), len(size))
            size = [size[i] for i in order]
            if len(size) > 1 and rng.random() < 0.6:
                size[:2] = [size[0] * size[1]]
            if isinstance(size[0], int) and size[0] and size[0] % 2 == 0 and rng.random() < 0.5:
                size[:1] = [2, size[0] // 2]
        elif what in ("shift", "pad"):
            before = rng.randint(0, 3)
            numbers = before, rng.choice([0, 1])
            if what == "pad":
                size[axis] = size[axis] + before + rng.randint(0, 3)
        self.add(Step(what, (first,), tuple(size), source.dtype, name, axes, numbers, source.exact))

    def cat(self, what: str) -> None:
        first = self.pick(rank=1)
        if first is None:
            return
        source, axis = self.steps[first], self.rng.randrange(len(self.steps[first].size))
        size = list(source.size)
        size[axis] = self.extent()
        second = self.input(tuple(size), source.dtype)
        size[axis] = size[axis] + source.size[axis]
        sources = (first, second)
        self.add(Step(what, sources, tuple(size), source.dtype, axes=(axis,), exact=source.exact))

    def reduce(self, what: str) -> None:
        first = self.pick(rank=1)
        if first is None:
            return
        source, rng = self.steps[first], self.rng
        kind = rng.choice(REDUCTIONS[kind_of(source.dtype)].split())
        axes = sorted(rng.sample(range(len(source.size)), rng.randint(1, len(source.size))))
        length = self.numel([source.size[d] for d in axes])
        if kind not in ("sum", "prod", "any", "all") and length == 0:
            return
        dtype, exact = source.dtype, source.exact
        if kind in ("argmax", "argmin"):
            if not exact:
                return
            dtype = I64
        elif kind in ("sum", "prod"):
            exact = kind_of(dtype) == "i"
            dtype = I64 if exact else dtype
            if dtype is F16 or (kind == "prod" and not exact and (length > 6 or self.hints)):
                return
        name = ("keep " if rng.random() < 0.5 else "") + kind
        self.add(Step(what, (first,), (), dtype, name, tuple(axes), exact=exact))

    def scan(self, what: str) -> None:
        first = self.pick("fi", rank=1)
        if first is None:
            return
        source, rng = self.steps[first], self.rng
        kind = rng.choice(SCANS[kind_of(source.dtype)].split())
        axis = rng.randrange(len(source.size))
        whole = kind_of(source.dtype) == "i"
        exact = source.exact and whole
        if (
            kind == "prod"
            and not whole
            and (self.numel(source.size[axis : axis + 1]) > 6 or self.hints)
        ):
            return
        dtype = I64 if whole else source.dtype
        if dtype is F16:
            return
        self.add(Step(what, (first,), source.size, dtype, kind, (axis,), exact=exact))

    def indexed(self, what: str) -> None:
        first = self.pick("f" if what == "scatter_add" else "fib", rank=1)
        if first is None:
            return
        source, rng = self.steps[first], self.rng
        size, axis = list(source.size), rng.randrange(len(source.size))
        if what == "scatter_add":
            if source.dtype in HALVES:
                return
            rows = self.input((size[0],), I64)
            to = rng.choice([2, 3, 5])
            numbers = to, rng.choice([0, 1])
            found = (to, *size[1:])
            self.add(Step(what, (first, rows), found, source.dtype, numbers=numbers, exact=False))
            return
        extent = size[axis]
        if not isinstance(extent, int) or extent < 2:
            return
        integers = [i for i, s in enumerate(self.steps) if s.dtype is I64 and len(s.size) == 1]
        name, rows = (
            "",
            self.input((self.extent(),), I64) if not integers or rng.random() < 0.5 else -1,
        )
        if rows < 0:
            name, rows = "computed", rng.choice(integers)
        size[axis] = self.steps[rows].size[0]
        sources = (first, rows)
        self.add(Step(what, sources, tuple(size), source.dtype, name, (axis,), exact=source.exact))

    def mm(self, what: str) -> None:
        found = [i for i, s in enumerate(self.steps) if s.dtype in (F32, F64) and len(s.size) == 2]
        if found:
            first = self.rng.choice(found)
            rows, inner = self.steps[first].size
            second = self.input((inner, self.extent()), self.steps[first].dtype)
            size = (rows, self.steps[second].size[1])
            self.add(Step(what, (first, second), size, self.steps[first].dtype, exact=False))


CHOICES: dict[str, tuple[float, Callable[[Generator, str], None]]] = {
    "map": (14, Generator.map),
    "where": (1, Generator.where),
    "masked": (1, Generator.masked),
    "cast": (2, Generator.cast),
    "iota": (0.7, Generator.iota),
    "mm": (0.5, Generator.mm),
    "cat": (0.7, Generator.cat),
    "reduce": (5, Generator.reduce),
    "scan": (1, Generator.scan),
    "gather": (1, Generator.indexed),
    "scatter_add": (0.7, Generator.indexed),
    "scatter": (0.4, Generator.move),
    "twice": (2, Generator.move),
    **dict.fromkeys(("permute", "slice", "select", "expand", "windows"), (0.7, Generator.view)),
    **dict.fromkeys(
        ("flip", "roll", "repeat", "tile", "reshape", "shift", "pad"), (0.7, Generator.move)
    ),
}


def generate(seed: int, count: int = 9) -> Program:
    return Generator(seed, count).program


def pruned(program: Program) -> Program:
    """Without the steps that no output needs."""
    needed = set(program.outputs)
    for i in reversed(range(len(program.steps))):
        if i in needed:
            needed.update(program.steps[i].sources)
    new = {old: i for i, old in enumerate(sorted(needed))}
    steps = tuple(
        replace(program.steps[old], sources=tuple(new[s] for s in program.steps[old].sources))
        for old in sorted(needed)
    )
    return replace(program, steps=steps, outputs=tuple(new[o] for o in program.outputs))


# -- how far two ways to compute may be apart


def magnitude(value: torch.Tensor) -> float:
    """The largest absolute value, NaN apart."""
    if value.numel() == 0:
        return 0.0
    return float(value.to(F64).nan_to_num(0, math.inf, -math.inf).abs().max())


def error_bounds(program: Program, values: Sequence[torch.Tensor]) -> list[float]:
    """For each step's result, by how much an element may differ."""
    errors: list[float] = []
    for step, found in zip(program.steps, values, strict=True):
        if step.exact:
            errors.append(0.0)
            continue
        given = [(errors[i], magnitude(values[i])) for i in step.sources]
        dtypes = [
            step.dtype,
            *(values[i].dtype for i in step.sources if values[i].is_floating_point()),
        ]
        unit = max(torch.finfo(dtype).eps for dtype in dtypes)
        rounding, carried = 8 * unit * magnitude(found), sum(error for error, _ in given)
        kind = step.name.rpartition(" ")[2]
        if step.what == "map":
            carried *= FUNCTIONS[step.name].slope
            if step.name in ("mul", "fma", "truediv"):
                (ea, a), (eb, b), *rest = given
                carried = ea * (b + eb) + eb * (a + ea) + sum(e for e, _ in rest)
                rounding += 8 * unit * (a * b if step.name == "fma" else 0)
        elif step.what in ("reduce", "scan", "scatter_add", "mm"):
            count = values[step.sources[0]].numel() // max(found.numel(), 1) + 1
            if step.what == "scan":
                count = found.shape[step.axes[0]]
            elif step.what == "mm":
                count = values[step.sources[0]].shape[1]
            elif step.what == "scatter_add":
                count = values[step.sources[0]].shape[0] + 1
            error, most = given[0]
            if kind in ("max", "min"):
                carried = error
                rounding += 8 * unit * math.log(count + 1)
            elif kind == "prod":
                most = max(most, 1) + error
                carried = count * most ** (count - 1) * error
                rounding += 8 * count * unit * most**count
            else:
                carried = count * (error + unit * (most + abs(float(sum(step.numbers[1:2])))))
                if step.what == "mm":
                    (ea, a), (eb, b) = given
                    carried = count * (ea * (b + eb) + eb * a + 4 * unit * a * b)
                rounding += unit * magnitude(found)
        errors.append(carried + rounding)
    return errors


def difference(have: Any, want: torch.Tensor, error: float) -> str | None:
    """What is wrong with a result; None if nothing is."""
    for name in ("dtype", "shape"):
        if getattr(have, name) != getattr(want, name):
            return f"{name} {getattr(have, name)}, not {getattr(want, name)}"
    if want.numel() and have.stride() != want.stride():
        return f"strides {have.stride()}, not {want.stride()}"
    if not math.isfinite(error):
        return None
    if not want.is_floating_point():
        wrong = have != want
    else:
        a, b = have.to(F64), want.to(F64)
        nan = a.isnan() & b.isnan()
        wrong = ~(((a - b).abs() <= error) | (a == b) | nan)
    if bool(wrong.any()):
        at = tuple(int(i) for i in wrong.nonzero()[0])
        count = int(wrong.sum())
        told = f"{count} of {wrong.numel()} wrong, at {at}: {have[at]}, not {want[at]}"
        return f"{told} (error at most {error:.1e})"
    return None


# -- running


SMALL_LIMITS = {
    "PARALLEL_NANOSECONDS": 0, "FEW_ROWS": 8, "LONG_ROW": 8, "CHUNK": 4, "MOST_CHUNKS": 3,
    "SQUARE": 16, "TURNED": 5, "STASH_BYTES": 64,
    "columns.WIDEST_TILE": 16, "columns.COLUMN_CHUNK": 2, "columns.MOST_COLUMN_CHUNKS": 3,
    "columns.PARALLEL_NANOSECONDS": 0,
}  # fmt: skip
"""Limits of the C++ plans at which small programs use what otherwise large ones do."""


@contextmanager
def limits(changed: dict[str, int]) -> Iterator[None]:
    places = {
        name: (choose if "." in name else cpp_rules, name.partition("columns.")[2] or name)
        for name in changed
    }
    kept = {name: getattr(*place) for name, place in places.items()}
    try:
        for name, value in changed.items():
            setattr(*places[name], value)
        yield
    finally:
        for name, value in kept.items():
            setattr(*places[name], value)


@dataclass
class Prepared:
    """A program up to its kernels' plans."""

    program: Program
    graph: LoopGraph
    scheduled: Any
    plans: dict[int, Any]


def prepare(program: Program, options: Options) -> Prepared:
    graph = program.build()
    scheduled = schedule(graph, options)
    small = program.seed % 2 == 1 and options.device_codegen == "cpp"
    with limits(SMALL_LIMITS if small else {}):
        plans = make_plans(scheduled, options)
    for plan in plans.values():
        plan.name = f"p{program.seed}_{plan.name}"
    return Prepared(program, graph, scheduled, plans)


def load(group: Sequence[Prepared], options: Options) -> list[Callable[[list[Any]], Any]]:
    """The calls of several programs, their kernels compiled together. New memory is never zero."""
    together = {(n, p): plan for n, one in enumerate(group) for p, plan in one.plans.items()}
    modules = generate_kernels(together)
    assert not [line for module in modules for line in shared_writes(module.text)]
    kernels = by_position(together, modules)
    namespace: dict[str, Any] = {"empty_strided_cpu": dirty_empty}
    for finish in [kernel_loader[module.language](module, options) for module in modules]:
        namespace.update(finish())
    calls = []
    for number, one in enumerate(group):
        own = {p: kernels[number, p] for p in one.plans}
        calls.append(load_wrapper(generate_wrapper(one.scheduled, own, options), namespace))
    return calls


def other_sizes(program: Program) -> list[dict[sympy.Symbol, int]]:
    """The sizes that a program is run with."""
    found = [program.hints]
    if program.hints:
        found.append({symbol: hint * 2 + 1 for symbol, hint in program.hints.items()})
        found.append(dict.fromkeys(program.hints, 1))
    return found


def compare(
    program: Program,
    call: Callable[[list[Any]], Any],
    bodies: Callable[[list[Any]], Any] | None = None,
) -> str | None:
    """What is wrong with a compiled program's results; None if nothing is.

    `bodies` runs the scheduled kernels' bodies in torch, which sees loads that leave their memory.
    """
    reference = program.build(range(len(program.steps)))
    graph = program.build()
    for number, sizes in enumerate(other_sizes(program)):
        inputs = example_inputs(graph, sizes, program.seed + number)
        kept = [copied(i) if isinstance(i, torch.Tensor) else i for i in inputs]
        try:
            values = run_reference(reference, kept)
        except (IndexError, RuntimeError) as e:
            if not isinstance(e, IndexError) and "non-zero size" not in str(e):
                raise
            continue  # eager would refuse these inputs, too
        errors = error_bounds(program, values)
        for name, run in (("", call), (" by its bodies", bodies if number == 0 else None)):
            have = run(list(inputs)) if run is not None else ()
            for output, found in zip(program.outputs, have):
                if wrong := difference(found, values[output], errors[output]):
                    return f"%{output}{name} at sizes {sizes}: {wrong}"
        for given, before in zip(inputs, kept, strict=True):
            if isinstance(given, torch.Tensor) and not equal(given, before):
                return "an input was overwritten"
    return None


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        torch.equal(a.nan_to_num(3), b.nan_to_num(3))
        if a.is_floating_point()
        else torch.equal(a, b)
    )


def failure(program: Program, options: Options) -> str | None:
    """How a program alone fails; None if it doesn't."""
    try:
        prepared = prepare(program, options)
        (call,) = load([prepared], options)
        return compare(program, call, compiled(prepared.scheduled))
    except Exception as e:
        where = traceback.extract_tb(e.__traceback__)[-1]
        return f"{type(e).__name__}: {str(e)[:500]} ({where.name}, line {where.lineno})"


def failures(programs: Sequence[Program], options: Options) -> dict[int, str]:
    """How programs fail, by their seeds; all are compiled together if possible."""
    found: dict[int, str] = {}
    group: list[Prepared] = []
    for program in programs:
        try:
            group.append(prepare(program, options))
        except Exception:
            found[program.seed] = failure(program, options) or "fails only at times"
    try:
        calls = load(group, options)
    except Exception:
        return found | {p.program.seed: w for p in group if (w := failure(p.program, options))}
    for one, call in zip(group, calls, strict=True):
        try:
            why = compare(one.program, call, compiled(one.scheduled))
        except Exception:
            why = failure(one.program, options) or "fails only among others"
        if why:
            found[one.program.seed] = why
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="the first program's seed")
    parser.add_argument("--size", type=int, default=9, help="steps of a program")
    parser.add_argument("--batch", type=int, default=20, help="programs compiled together")
    parser.add_argument("--language", choices=("cpp", "triton"), default="cpp")
    given = parser.parse_args()
    options, failed = Options(verify=True, device_codegen=given.language), 0
    last = given.seed + given.programs
    for start in range(given.seed, last, given.batch):
        seeds = range(start, min(start + given.batch, last))
        programs = {seed: generate(seed, given.size) for seed in seeds}
        for seed, why in failures(list(programs.values()), options).items():
            print(f"\nseed {seed}: {why}\n{programs[seed]}", flush=True)
            failed += 1
    print(f"{failed} of {given.programs} programs differ from the reference interpreter")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
