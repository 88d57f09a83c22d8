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
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import sympy
import torch

from minicompile.codegen import cpp_rules
from minicompile.codegen.generate import by_position, generate_kernels, make_plans
from minicompile.codegen.wrapper import generate_wrapper
from minicompile.debug.reference import run_reference
from minicompile.lowering.ir import (
    InputBuffer,
    Layout,
    LoopGraph,
    Loops,
    Pointwise,
    Reduction,
    Scan,
    Scatter,
)
from minicompile.options import Options
from minicompile.plugins.column_reductions import choose
from minicompile.runtime.load import kernel_loader, load_wrapper
from minicompile.scheduling.schedule import schedule
from minicompile.shapes.expr import FloorDiv, ModularIndexing, Size, product, same, size_symbol
from tests.codegen.races import shared_writes
from tests.comparing import fresh
from tests.scheduling.building import (
    GraphBuilder,
    T,
    broadcast,
    compiled,
    dirty_empty,
    example_inputs,
)

CPU = torch.device("cpu")
F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
I64, I32, U8, BOOL = torch.int64, torch.int32, torch.uint8, torch.bool
DTYPES = [F32, F32, F32, F64, BF16, F16, I64, I32, U8, BOOL]
HALVES = (BF16, F16)
S0, S1 = size_symbol("s0"), size_symbol("s1")
ONE = sympy.Integer(1)
LARGEST = 6000
"""Most elements of a value."""

# -- the arithmetic of steps: functions of a handler, well conditioned


def number(ops: Any, value: float, dtype: torch.dtype) -> Any:
    return ops.constant(value, dtype)


def plus_one(ops: Any, x: Any, dtype: torch.dtype) -> Any:
    """|x| + 1: a divisor that is never near 0."""
    return ops.add(ops.abs(x), number(ops, 1, dtype))


def low_bits(ops: Any, x: Any, dtype: torch.dtype, least: int = 0) -> Any:
    """A whole number from `least` to `least + 7`."""
    return ops.add(ops.bitwise_and(x, number(ops, 7, dtype)), number(ops, least, dtype))


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


FUNCTIONS = [
    *plain("neg abs", 1, "fi", chooses=True),
    *plain("sigmoid tanh sin erf", 1, "f", exact=False, slope=1.2),
    *plain("floor trunc round", 1, "f", step=True, chooses=True),
    *plain("sign", 1, "fi", step=True),
    *plain("isnan signbit", 1, "f", step=True, result=BOOL),
    *plain("logical_not", 1, "b"),
    *plain("bitwise_not", 1, "ib"),
    *plain("add sub", 2, "fi"),
    *plain("mul", 2, "fib"),
    *plain("maximum minimum", 2, "fi", chooses=True),
    *plain("logical_and logical_xor", 2, "b"),
    *plain("bitwise_and bitwise_xor", 2, "ib"),
    *plain("eq lt ge", 2, "fi", step=True, result=BOOL),
    *plain("copysign", 2, "f", step=True),
    *plain("fma", 3, "f", exact=False),
    Fn("exp", 1, "f", lambda o, d, x: o.exp(o.minimum(x, number(o, 2, d))), False, 8),
    Fn("log", 1, "f", lambda o, d, x: o.log(plus_one(o, x, d)), False),
    Fn("rsqrt", 1, "f", lambda o, d, x: o.rsqrt(plus_one(o, x, d)), False),
    Fn("truediv", 2, "f", lambda o, d, x, y: o.truediv(x, plus_one(o, y, d))),
    Fn("remainder_f", 2, "f", lambda o, d, x, y: o.remainder(x, plus_one(o, y, d)), step=True),
    Fn("remainder", 2, "i", lambda o, d, x, y: o.remainder(x, low_bits(o, y, d, 1))),
    Fn("floordiv", 2, "i", lambda o, d, x, y: o.floordiv(x, low_bits(o, y, d, 1))),
    Fn("lshift", 2, "i", lambda o, d, x, y: o.lshift(x, low_bits(o, y, d))),
    Fn("rshift", 2, "i", lambda o, d, x, y: o.rshift(x, low_bits(o, y, d))),
]
SLOPES = {f.name: f.slope for f in FUNCTIONS}
REDUCTIONS = {
    "f": "sum sum sum max min argmax argmin",
    "i": "sum max min argmax prod",
    "b": "any all",
}
SCANS = {"f": "sum", "i": "sum prod"}


def kind_of(dtype: torch.dtype) -> str:
    return "f" if dtype.is_floating_point else "b" if dtype is BOOL else "i"


# -- programs


class Skip(Exception):
    """Nothing here can take the step that was drawn."""


def need(condition: bool) -> None:
    if not condition:
        raise Skip


@dataclass(eq=False)
class Step:
    """One result: `what` was done to others."""

    what: str
    value: T
    sources: tuple[Step, ...] = ()
    name: str = ""
    numbers: tuple[Any, ...] = ()
    exact: bool = True
    """Its result is the same to the last bit however it is computed."""
    target: str = ""
    """The buffer whose memory a scatter takes over."""

    @property
    def size(self) -> tuple[Size, ...]:
        return self.value.size

    @property
    def dtype(self) -> torch.dtype:
        return self.value.layout.dtype


class Program:
    """Steps drawn by chance, numbers in `steps` of those that are returned, and the hints of size symbols."""

    def __init__(self, seed: int, count: int) -> None:
        self.seed, self.count = seed, count
        self.rng = rng = random.Random(seed)
        symbols = rng.choice([(), (), (), (S0,), (S0, S1)])
        self.hints: dict[sympy.Symbol, int] = {s: rng.choice([2, 3, 6, 20]) for s in symbols}
        numbers = [1, 2, 3, 4, 5, 7, 8, 16, 17, 33, 64]
        self.extents: list[Size] = rng.sample(numbers, 3) + list(symbols) * 2
        if rng.random() < 0.04:
            self.extents.append(0)
        self.builder = GraphBuilder(self.hints)
        self.builder.inputs += self.hints
        self.steps: list[Step] = []
        for _ in range(rng.randint(2, 3)):
            self.input(self.some_size(), rng.choice(DTYPES))
        while len(self.steps) < count + 3:
            what = rng.choices(list(CHOICES), [weight for weight, _ in CHOICES.values()])[0]
            with suppress(Skip):
                CHOICES[what][1](self, what)
        made = [step for step in self.steps if step.what != "input"]
        kept = [*rng.sample(made, min(len(made), rng.randint(1, 3))), made[-1]]
        needed = set(kept)
        for step in reversed(self.steps):
            if step in needed:
                needed.update(step.sources)
        self.steps = [step for step in self.steps if step in needed]
        self.outputs = tuple(sorted({self.steps.index(step) for step in kept}))

    def build(self, whole: bool = False) -> LoopGraph:
        """A new graph of the steps that are needed. `whole`: it returns the result of each."""
        again = Program(self.seed, self.count)
        needed = {name for s in again.steps for name in (s.value.buffer.name, s.target)}
        builder = again.builder
        builder.inputs = [
            i for i in builder.inputs if not isinstance(i, InputBuffer) or i.name in needed
        ]
        builder.operations = [
            o for o in builder.operations if {x.name for x in getattr(o, "outputs", [o])} & needed
        ]
        returned = again.steps if whole else [again.steps[i] for i in again.outputs]
        return builder.finish(*(step.value for step in returned))

    def __str__(self) -> str:
        lines = [f"# program {self.seed}, sizes {self.hints}"]
        for i, step in enumerate(self.steps):
            told = [f"%{self.steps.index(s)}" for s in step.sources]
            told += [str(x) for x in (step.name, *step.numbers) if x != ""]
            value = f"{str(step.dtype).removeprefix('torch.')}{list(step.size)}"
            lines.append(
                f"%{i} = {step.what}({', '.join(told)}) -> {value}{' ~' * (not step.exact)}"
            )
        return "\n".join([*lines, "return " + ", ".join(f"%{i}" for i in self.outputs)])

    # -- what steps are made of

    def extent(self) -> Size:
        return self.rng.choice(self.extents)

    def some_size(self) -> tuple[Size, ...]:
        while True:
            size = tuple(self.extent() for _ in range(self.rng.choice([0, 1, 2, 2, 2, 3, 3, 4])))
            if self.numel(size) <= LARGEST:
                return size

    def numel(self, size: Sequence[Size]) -> int:
        return int(sympy.sympify(product(size)).xreplace(self.hints))

    def add(
        self, what: str, value: T, *sources: Step, exact: bool | None = None, **more: Any
    ) -> Step:
        """Keep a result, unless it is too large; it is as exact as its sources if nothing is said."""
        need(self.numel(value.size) <= LARGEST and len(value.size) <= 5)
        exact = all(s.exact for s in sources) if exact is None else exact
        self.steps.append(Step(what, value, sources, exact=exact, **more))
        return self.steps[-1]

    def loops(self, size: Sequence[Size], dtype: torch.dtype, fn: Any) -> T:
        return self.builder.compute(Pointwise(tuple(size), fn), size, dtype)

    def pointwise(
        self, what: str, dtype: torch.dtype, fn: Any, *sources: Step, **more: Any
    ) -> None:
        def inner(ops: Any, index: Sequence[Any]) -> Any:
            return fn(ops, *(s.value.load(ops, index) for s in sources))

        size = broadcast([s.size for s in sources])
        self.add(what, self.loops(size, dtype, inner), *sources, **more)

    def input(self, size: Sequence[Size], dtype: torch.dtype) -> Step:
        """Its dimensions lie in any order in memory, elements at times two apart."""
        order = list(range(len(size)))
        if self.rng.random() < 0.3:
            self.rng.shuffle(order)
        place: Size = 1 if self.rng.random() < 0.85 else 2
        strides: list[Size] = [0] * len(size)
        for dim in reversed(order):
            strides[dim], place = place, place * size[dim]
        return self.add("input", self.builder.input(size, dtype, strides), numbers=tuple(strides))

    def pick(self, kinds: str = "fib", exact: bool = False, rank: int = 0) -> Step:
        """A recent result of these kinds of dtypes."""
        found = [
            step
            for step in self.steps
            if kind_of(step.dtype) in kinds and step.exact >= exact and len(step.size) >= rank
        ]
        need(bool(found))
        return self.rng.choice(found[-6:])

    def like(self, other: Step, dtype: torch.dtype, exact: bool = False) -> Step:
        """A result that broadcasts with another one; a new input if there is none."""
        size, found = other.size, []
        for step in self.steps:
            tail = size[len(size) - len(step.size) :]
            fits = len(step.size) <= len(size) and all(
                n == 1 or same(n, m) for n, m in zip(step.size, tail)
            )
            if step.dtype is dtype and fits and step.exact >= exact:
                found.append(step)
        if found and self.rng.random() < 0.9:
            return self.rng.choice(found)
        start = self.rng.randint(0, len(size))
        return self.input([1 if self.rng.random() < 0.2 else n for n in size[start:]], dtype)

    def along(self, step: Step) -> tuple[list[Size], int]:
        """A copy of its size, and one of its axes."""
        return list(step.size), self.rng.randrange(len(step.size))

    # -- each of these tries one step

    def map(self, what: str) -> None:
        fn = self.rng.choice(FUNCTIONS)
        first = self.pick(fn.kinds, fn.step)
        dtype = first.dtype
        # soon beyond its largest number
        need(dtype is not F16 or fn.name not in ("lshift", "mul", "fma"))
        sources = [first, *(self.like(first, dtype, fn.step) for _ in range(fn.arity - 1))]
        exact = all(s.exact for s in sources) and fn.exact
        exact = exact and (dtype not in HALVES or fn.chooses or fn.result is BOOL)
        result = fn.result or dtype
        inner = lambda ops, *values: fn.fn(ops, dtype, *values)  # noqa: E731
        self.pointwise(what, result, inner, *sources, name=fn.name, exact=exact)

    def where(self, what: str) -> None:
        first = self.pick()
        sources = self.like(first, BOOL), first, self.like(first, first.dtype)
        self.pointwise(what, first.dtype, lambda ops, *values: ops.where(*values), *sources)

    def masked(self, what: str) -> None:
        source = self.pick()
        condition, other = self.like(source, BOOL), self.rng.choice([0, 1])

        def inner(ops: Any, index: Sequence[Any]) -> Any:
            inside = condition.value.load(ops, index)
            return ops.masked(inside, lambda o: source.value.load(o, index), other)

        value = self.loops(source.size, source.dtype, inner)
        self.add(what, value, condition, source, exact=source.exact, numbers=(other,))

    def cast(self, what: str) -> None:
        source, dtype = self.pick(), self.rng.choice(DTYPES)
        own = source.dtype
        need(dtype.is_floating_point or source.exact)
        need(dtype is not F16 or own not in (I64, I32, F64, F32))

        def inner(ops: Any, value: Any) -> Any:
            if own.is_floating_point and kind_of(dtype) == "i":
                value = ops.maximum(value, number(ops, 0 if dtype is U8 else -100, own))
                value = ops.minimum(value, number(ops, 100, own))
            return ops.to_dtype(value, dtype)

        self.pointwise(what, dtype, inner, source)

    def iota(self, what: str) -> None:
        size, dtype = self.some_size(), self.rng.choice([I64, I32, F32, F64])
        need(bool(size))
        axis = self.rng.randrange(len(size))
        every, start = self.rng.choice([1, 3, -1, 1_000_000_000]), self.rng.choice([0, 5, -7])
        need(dtype is I64 or abs(every) < 100)

        def inner(ops: Any, index: Sequence[Any]) -> Any:
            return ops.index_expr(sympy.sympify(index[axis]) * every + start, dtype)

        self.add(what, self.loops(size, dtype, inner), numbers=(axis, every, start))

    def view(self, what: str) -> None:
        """No loops of its own."""
        source, rng = self.pick(rank=1), self.rng
        x, (size, axis) = source.value, self.along(source)
        strides, offset, numbers = list(x.layout.stride), 0, (axis,)
        if what == "permute":
            numbers = tuple(rng.sample(range(len(size)), len(size)))
            size, strides = [size[d] for d in numbers], [strides[d] for d in numbers]
        elif what == "expand":
            size.insert(axis, self.extent())
            strides.insert(axis, 0)
        else:
            extent, every, width = size[axis], rng.choice([1, 1, 2, 3]), rng.randint(1, 4)
            need(isinstance(extent, int) and extent >= width)
            strides[axis] = strides[axis] * every
            if what == "windows":
                size[axis] = (extent - width) // every + 1
                size, strides = [*size, width], [*strides, x.layout.stride[axis]]
            else:
                start = rng.randrange(extent)
                most = -(-(extent - start) // every)
                size[axis] = rng.randint(rng.random() >= 0.1, most)
                offset = start * x.layout.stride[axis]
            numbers = axis, every, width, offset
        self.add(what, x.viewed(size, strides, offset), source, numbers=numbers)

    def moved(self, source: Step, what: str) -> tuple[list[Size], Any, tuple[Any, ...]]:
        """A size, how to load an element there that lies elsewhere in a tensor, and the numbers drawn."""
        x, rng, (size, axis) = source.value, self.rng, self.along(source)
        extent, count = sympy.sympify(size[axis]), rng.randint(0, 5)
        need(what == "flip" or 0 not in size)  # lowering takes no digits of an empty dimension
        if what == "swap":
            pairs = [(i, j) for i in range(len(size)) for j in range(i) if same(size[i], size[j])]
            need(bool(pairs))
            order, (i, j) = list(range(len(size))), rng.choice(pairs)
            order[i], order[j] = j, i
            return size, x.permute(*order).load, (i, j)
        if what == "reshape":
            size = rng.sample(size, len(size))
            if len(size) > 1 and rng.random() < 0.6:
                size[:2] = [size[0] * size[1]]
            if isinstance(size[0], int) and size[0] % 2 == 0 and rng.random() < 0.5:
                size[:1] = [2, size[0] // 2]

            def digits(ops: Any, index: Sequence[Any]) -> Any:
                flat, place, found = Layout.contiguous(CPU, F32, size).index(index), ONE, []
                for n in reversed(x.size):
                    found.append(ModularIndexing(flat, place, sympy.sympify(n)))
                    place = place * n
                return x.load(ops, found[::-1])

            return size, digits, ()
        if what == "repeat":
            count = rng.choice([2, 3, *self.hints])
            size[axis] = size[axis] * count
        change = {
            "flip": lambda i: extent - 1 - i,
            "roll": lambda i: ModularIndexing(i + count, ONE, extent),
            "repeat": lambda i: FloorDiv(i, sympy.sympify(count)),
        }[what]

        def load(ops: Any, index: Sequence[Any]) -> Any:
            return x.load(ops, [change(i) if d == axis else i for d, i in enumerate(index)])

        return size, load, (axis, count)

    def move(self, what: str) -> None:
        source = self.pick(rank=1)
        size, load, numbers = self.moved(source, what)
        self.add(what, self.loops(size, source.dtype, load), source, numbers=numbers)

    def twice(self, what: str) -> None:
        """An element and another one of the same tensor."""
        source, name = self.pick(rank=1), self.rng.choice(["flip", "roll", "swap", "swap"])
        size, load, numbers = self.moved(source, name)

        def both(ops: Any, index: Sequence[Any]) -> Any:
            pair = source.value.load(ops, index), load(ops, index)
            return (ops.logical_xor if source.dtype is BOOL else ops.maximum)(*pair)

        value = self.loops(size, source.dtype, both)
        self.add(what, value, source, name=name, numbers=numbers)

    def pad(self, what: str) -> None:
        """Moved to the end, what is before and behind filled; at times of the same size."""
        source, rng = self.pick(rank=1), self.rng
        size, axis = self.along(source)
        extent, before, other = size[axis], rng.randint(0, 3), rng.choice([0, 1])
        need(0 not in size)
        size[axis] = extent + rng.choice([0, before, before + 2])

        def inner(ops: Any, index: Sequence[Any]) -> Any:
            place = ops.index_expr(sympy.sympify(index[axis]), I64)
            inside = ops.ge(place, number(ops, before, I64))
            end = ops.index_expr(sympy.sympify(extent + before), I64)
            where = [i - before if d == axis else i for d, i in enumerate(index)]
            inside = ops.logical_and(inside, ops.lt(place, end))
            return ops.masked(inside, lambda o: source.value.load(o, where), other)

        value = self.loops(size, source.dtype, inner)
        self.add(what, value, source, numbers=(axis, before, other))

    def cat(self, what: str) -> None:
        first = self.pick(rank=1)
        size, axis = self.along(first)
        edge, size[axis] = size[axis], self.extent()
        second = self.input(size, first.dtype)
        size[axis] = size[axis] + edge

        def inner(ops: Any, index: Sequence[Any]) -> Any:
            place = ops.index_expr(sympy.sympify(index[axis]), I64)
            left = ops.lt(place, ops.index_expr(sympy.sympify(edge), I64))
            where = [i - edge if d == axis else i for d, i in enumerate(index)]
            one = ops.masked(left, lambda o: first.value.load(o, index), 0)
            right = ops.logical_not(left)
            return ops.where(left, one, ops.masked(right, lambda o: second.value.load(o, where), 0))

        self.add(what, self.loops(size, first.dtype, inner), first, second, numbers=(axis,))

    def reduce(self, what: str) -> None:
        source, rng = self.pick(rank=1), self.rng
        kind = rng.choice(REDUCTIONS[kind_of(source.dtype)].split())
        axes = sorted(rng.sample(range(len(source.size)), rng.randint(1, len(source.size))))
        need(
            kind in ("sum", "prod", "any", "all") or self.numel([source.size[d] for d in axes]) > 0
        )
        dtype, exact = source.dtype, source.exact
        if kind in ("argmax", "argmin"):
            need(exact)
            dtype = I64
        elif kind in ("sum", "prod"):
            exact = kind_of(dtype) == "i"
            dtype = I64 if exact else dtype
            need(dtype is not F16)
        wide = dtype if kind in ("sum", "prod") else source.dtype
        x, keep = source.value, rng.random() < 0.5
        kept = [d for d in range(len(x.size)) if keep or d not in axes]
        size = tuple(1 if d in axes else x.size[d] for d in kept)

        def inner(ops: Any, index: Sequence[Any], reduced: Sequence[Any]) -> Any:
            where = dict(zip(kept, index)) | dict(zip(axes, reduced))
            return ops.to_dtype(x.load(ops, [where[d] for d in range(len(x.size))]), wide)

        loops: Loops = Reduction(size, tuple(x.size[d] for d in axes), kind, inner)  # type: ignore[arg-type]
        value = self.builder.compute(loops, size, dtype)
        self.add(what, value, source, name=kind, numbers=tuple(axes), exact=exact)

    def scan(self, what: str) -> None:
        source = self.pick("fi", rank=1)
        dtype, (_, axis) = source.dtype, self.along(source)
        kind = self.rng.choice(SCANS[kind_of(dtype)].split())
        need(dtype is not F16)
        whole = kind_of(dtype) == "i"
        wide = F32 if dtype in HALVES else I64 if whole else dtype

        def inner(ops: Any, index: Sequence[Any]) -> Any:
            return ops.to_dtype(source.value.load(ops, index), wide)

        loops: Loops = Scan(source.size, axis, kind, inner)  # type: ignore[arg-type]
        value = self.builder.compute(loops, source.size, I64 if whole else dtype)
        exact = source.exact and whole
        self.add(what, value, source, name=kind, numbers=(axis,), exact=exact)

    def gather(self, what: str) -> None:
        """Along one axis, at computed or given positions."""
        table = self.pick(rank=1)
        size, axis = self.along(table)
        extent = size[axis]
        need(isinstance(extent, int) and extent >= 2)
        integers = [s for s in self.steps if s.dtype is I64 and len(s.size) == 1]
        known = bool(integers) and self.rng.random() < 0.5
        rows = self.rng.choice(integers) if known else self.input([self.extent()], I64)
        size[axis] = rows.size[0]

        def inner(ops: Any, index: Sequence[Any]) -> Any:
            found = rows.value.load(ops, [index[axis]])
            if known:
                found = ops.remainder(found, ops.index_expr(sympy.sympify(extent), I64))
            at = ops.indirect_indexing(found, extent, True, not known)
            return table.value.load(ops, [at if d == axis else i for d, i in enumerate(index)])

        value = self.loops(size, table.dtype, inner)
        self.add(what, value, table, rows, exact=table.exact, numbers=(axis, known))

    def scatter(self, what: str) -> None:
        """Added to rows at given positions; or each element to a place of its own."""
        add, rng = what == "scatter_add", self.rng
        source = self.pick("f" if add else "fib", rank=1)
        x, dtype = source.value, source.dtype
        need(dtype not in HALVES if add else 0 not in x.size)
        start, count = rng.choice([0, 1]), rng.choice([2, 3, 5])
        rows = [self.input(x.size[:1], I64)] if add else []
        size = (count if add else x.size[0], *x.size[1:])

        def place(ops: Any, index: Sequence[Any]) -> Sequence[Any]:
            if not add:
                return [ModularIndexing(index[0] + count, ONE, sympy.sympify(size[0])), *index[1:]]
            return [ops.indirect_indexing(rows[0].value.load(ops, index[:1]), size[0]), *index[1:]]

        target = self.loops(size, dtype, lambda ops, index: number(ops, start, dtype)).buffer.name
        loops = Scatter(x.size, target, place, x.load, "atomic_add" if add else "store")
        value, exact = self.builder.compute(loops, size, dtype), source.exact and not add
        more: dict[str, Any] = {"numbers": (count, start), "target": target}
        self.add(what, value, source, *rows, exact=exact, **more)

    def mm(self, what: str) -> None:
        found = [s for s in self.steps if s.dtype in (F32, F64) and len(s.size) == 2]
        need(bool(found))
        first = self.rng.choice(found)
        second = self.input((first.size[1], self.extent()), first.dtype)
        size = first.size[0], second.size[1]
        operands = first.value, second.value
        value = self.builder.extern(torch.ops.aten.mm.default, operands, size, first.dtype)
        self.add(what, value, first, second, exact=False)


CHOICES: dict[str, tuple[float, Callable[[Program, str], None]]] = {
    "map": (14, Program.map),
    "where": (1, Program.where),
    "masked": (1, Program.masked),
    "cast": (2, Program.cast),
    "iota": (0.7, Program.iota),
    "mm": (0.5, Program.mm),
    "cat": (0.7, Program.cat),
    "reduce": (5, Program.reduce),
    "scan": (1, Program.scan),
    "gather": (1, Program.gather),
    "scatter_add": (0.7, Program.scatter),
    "scatter": (0.4, Program.scatter),
    "twice": (2, Program.twice),
    "pad": (1.4, Program.pad),
    **dict.fromkeys(("permute", "slice", "expand", "windows"), (0.7, Program.view)),
    **dict.fromkeys(("flip", "roll", "repeat", "reshape"), (0.7, Program.move)),
}


def generate(seed: int, count: int = 9) -> Program:
    return Program(seed, count)


# -- how far two ways to compute may be apart


def magnitude(value: torch.Tensor) -> float:
    """The largest absolute value, NaN apart."""
    if value.numel() == 0:
        return 0.0
    return float(value.to(F64).nan_to_num(0, math.inf, -math.inf).abs().max())


def error_bounds(program: Program, values: Sequence[torch.Tensor]) -> list[float]:
    """For each step's result, by how much an element may differ."""
    errors: dict[Step, tuple[float, torch.Tensor]] = {}
    for step, found in zip(program.steps, values, strict=True):
        errors[step] = 0.0, found
        if step.exact:
            continue
        given = [(error, magnitude(value), value) for error, value in map(errors.get, step.sources)]
        dtypes = [step.dtype, *(v.dtype for _, _, v in given if v.is_floating_point())]
        unit = max(torch.finfo(dtype).eps for dtype in dtypes)
        rounding, carried = 8 * unit * magnitude(found), sum(error for error, _, _ in given)
        (error, most, source), (other_error, other, _) = given[0], given[:2][-1]
        multiplied = error * (other + other_error) + other_error * most
        if step.what == "map":
            carried *= SLOPES[step.name]
            if step.name in ("mul", "fma", "truediv"):
                carried = multiplied + sum(e for e, _, _ in given[2:])
                rounding += 8 * unit * (most * other if step.name == "fma" else 0)
        elif step.what == "mm":
            (count,) = source.shape[1:]
            carried = count * (multiplied + 4 * unit * most * other)
        elif step.what == "scatter_add":
            carried = (len(source) + 1) * (error + unit * (most + abs(step.numbers[1])))
        elif step.name == "sum":
            count = source.numel() // max(found.numel(), 1) + 1
            count = found.shape[step.numbers[0]] if step.what == "scan" else count
            carried = count * (error + unit * most)
        errors[step] = carried + rounding, found
    return [error for error, _ in errors.values()]


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


SMALL_LIMITS: dict[Any, dict[str, int]] = {
    cpp_rules: {
        "PARALLEL_NANOSECONDS": 0, "FEW_ROWS": 8, "LONG_ROW": 8, "CHUNK": 4, "MOST_CHUNKS": 3,
        "SQUARE": 16, "TURNED": 5, "STASH_BYTES": 64,
    },
    choose: {
        "WIDEST_TILE": 16, "COLUMN_CHUNK": 2, "MOST_COLUMN_CHUNKS": 3, "PARALLEL_NANOSECONDS": 0,
    },
}  # fmt: skip
"""Limits of the C++ plans at which small programs use what otherwise large ones do."""


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
    with ExitStack() as stack:
        for module, limits in SMALL_LIMITS.items() if small else ():
            stack.enter_context(patch.multiple(module, **limits))
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
    reference = program.build(whole=True)
    graph = program.build()
    for number, sizes in enumerate(other_sizes(program)):
        inputs = example_inputs(graph, sizes, program.seed + number)
        kept = fresh(inputs)
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
