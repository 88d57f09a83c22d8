"""Random loop programs. `loop_checks.py` has what becomes of them.

A program is a list of steps, each a loop nest, a view or a library call on earlier results, over all dtypes,
kinds of loops and sizes, some symbolic.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import sympy
import torch

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
from minicompile.shapes.expr import FloorDiv, ModularIndexing, Size, product, same, size_symbol
from tests.fuzz.loop_functions import (
    BF16,
    BOOL,
    F16,
    F32,
    F64,
    FUNCTIONS,
    I32,
    I64,
    REDUCTIONS,
    SCANS,
    U8,
    kind_of,
    number,
)
from tests.scheduling.building import (
    GraphBuilder,
    T,
    broadcast,
)

CPU = torch.device("cpu")
DTYPES = [F32, F32, F32, F64, BF16, F16, I64, I32, U8, BOOL]
HALVES = (BF16, F16)
S0, S1 = size_symbol("s0"), size_symbol("s1")
ONE = sympy.Integer(1)
LARGEST = 6000
"""Most elements of a value."""


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
