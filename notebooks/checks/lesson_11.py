"""Checks of lesson 11: index arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor

import minicompile as mc
from minicompile.lessons.exercise import Lesson, Run
from minicompile.lessons.model import GPT, Block, GPTConfig
from minicompile.lowering.ir import ComputedBuffer, evaluate_loops, loop_ranges
from minicompile.pipeline_result import Trace
from minicompile.scheduling.body import LoopBody
from minicompile.scheduling.nest import LoopNest
from minicompile.shapes.expr import (
    Expr,
    FloorDiv,
    ModularIndexing,
    loop_symbol,
    simplify_index,
)
from minicompile.shapes.symnode import evaluate

lesson = Lesson("11")

SMALL = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8)


def kernels_text(trace: Trace) -> str:
    return "\n".join(map(str, trace.kernels))


# -- 1: steps along the innermost loop


def turned_sum(x: Tensor, y: Tensor) -> Tensor:
    return x + y.t()


def shifted(x: Tensor) -> Tensor:
    return x.t().reshape(24)[1:] + 1


def by_rows(x: Tensor, y: Tensor) -> Tensor:
    return x * y[:, :1]


def backwards(x: Tensor) -> Tensor:
    return x.flip(1)[:, ::2] * 2


def rows(x: Tensor) -> Tensor:
    return x.sum(0)


TABLES: dict[Callable[..., Tensor], Sequence[tuple[int, int]]] = {
    turned_sum: [(6, 4), (4, 6)],
    shifted: [(4, 6)],
    by_rows: [(3, 5), (3, 5)],
    backwards: [(4, 6)],
    rows: [(4, 6)],
}


def step_of(index: Expr, loop: sympy.Symbol) -> int | None:
    step = sympy.expand(index.xreplace({loop: loop + 1}) - index)
    return int(step) if step.is_Integer else None


@lesson.exercise(
    "ex1",
    points=2,
    level="read",
    visible=[turned_sum, rows],
    hidden=[shifted, backwards, by_rows],
    forbidden=["coefficient_of", "StridedIndex", "NestIndex", "Walk"],
)
def innermost_steps(run: Run, steps: Callable[[LoopBody], dict[str, int | None]]) -> str:
    """Compares with the difference of two indices."""
    fine = total = 0
    for function in run.cases:
        trace = mc.trace(function, *map(torch.randn, TABLES[function]))
        for body in trace.schedule.kernels[0].bodies:
            loop = list(body.all_ranges)[-1]
            wanted = {
                load.buffer: step_of(load.index, loop)
                for load in body.loads
                if load.index is not None
            }
            run.expect(steps(body), wanted, f"steps of {function.__name__}:\n{body}\n")
            total += len(wanted)
            fine += sum(step in (0, 1) for step in wanted.values())
    return f"{fine} of {total} loads suit vectors"


# -- 2: int32


@lesson.exercise(
    "ex2",
    points=2,
    level="construct",
    visible=[6],
    hidden=[2, 33],
    forbidden=["int32", "mock", "legalize", "index_dtype"],
)
def too_far_for_32_bits(run: Run, overflows: Callable[[Tensor], Tensor]) -> str:
    """Compiles twice: with 32 bits for each index, and honestly."""
    for n in run.cases:
        x = torch.arange(n) % 5
        what = f"overflows(x) of {n} numbers"
        right = run.seen(overflows(x))
        run.close(mc.compile(overflows)(x), right, what)
        mc.reset()
        short = "minicompile.codegen.legalize:index_dtype"
        with run.replaced(short, lambda index, ranges: torch.int32), mc.fresh_cache():
            wrong = mc.compile(overflows)(x)
        mc.reset()
        same = torch.equal(run.seen(wrong), right)
        run.that(not same, what, "another result with 32 bits", "the same")
    return "wrong with 32 bits, right as it is"


# -- 3: a handler


def square(x: Tensor) -> Tensor:
    return x * x + x


def neighbours(x: Tensor) -> Tensor:
    return x[:, 1:] - x[:, :-1]


def round_trip(x: Tensor) -> Tensor:
    return x + (x.t().reshape(24) * 2).reshape(6, 4).t()


def masked(x: Tensor) -> Tensor:
    return torch.cat([x, x * 2])


def turned(x: Tensor) -> Tensor:
    return x.flatten()[:16].view(4, 4) + x.flatten()[:16].view(4, 4).t()


def same_place(x: Tensor) -> Tensor:
    return x.sum(0) * x[0]


def expanded(x: Tensor) -> Tensor:
    return x[:1].expand(4, 6) * x[:1]


@lesson.exercise(
    "ex3",
    points=3,
    level="construct",
    visible=[square, neighbours],
    hidden=[expanded, round_trip, turned, masked, same_place],
    forbidden=["Recorder"],
)
def loads_are_counted(run: Run, CountLoads: type) -> str:  # noqa: N803
    """Evaluates loop bodies with the answer; the recorded body is the judge."""
    found: dict[str, int] = {}
    for function in run.cases:
        trace = mc.trace(function, torch.randn(4, 6))
        for node in trace.schedule.before:
            buffer = node.buffer if hasattr(node, "buffer") else None
            if not isinstance(buffer, ComputedBuffer):
                continue
            p, r = loop_ranges(buffer.loops)
            counter = CountLoads({**p, **r})
            evaluate_loops(buffer.loops, counter)
            found = {}
            places = {(v.buffer, v.index) for v in node.body.loads}  # type: ignore[union-attr]
            for name, _ in places:
                found[name] = found.get(name, 0) + 1
            run.expect(dict(counter.counts), found, f"counts for {function.__name__}")
    block = Block(SMALL).requires_grad_(False)
    total = 0
    for operation in mc.trace(block, torch.randn(1, 8, 16)).loops.operations:
        if isinstance(operation, ComputedBuffer):
            p, r = loop_ranges(operation.loops)
            counter = CountLoads({**p, **r})
            evaluate_loops(operation.loops, counter)
            total += sum(counter.counts.values())
    return f"counted as recorded; the loops of a block make {total} loads an element"


# -- 4: divisions

p0, p1, p2 = (loop_symbol(f"p{k}") for k in range(3))
s0 = sympy.Symbol("s0", integer=True, positive=True)
Sizes = Mapping[sympy.Symbol, int]


def places(sizes: Sizes) -> list[dict[sympy.Symbol, int]]:
    """Every value of the loops."""
    numbers = itertools.product(*map(range, sizes.values()))
    return [dict(zip(sizes, place, strict=True)) for place in numbers]


def same_everywhere(run: Run, base: Expr, divisor: int, sizes: Sizes, found: Expr) -> None:
    """Raises Wrong where an expression isn't base // divisor."""
    text = run.seen(str(found))
    values = run.seen([int(evaluate(found, at)) for at in places(sizes)])
    for at, got in zip(places(sizes), values, strict=True):
        expected = int(evaluate(base, at) // divisor)
        where = ", ".join(f"{loop}={value}" for loop, value in at.items())
        what = f"({base}) // {divisor} at {where}"
        run.that(expected == got, what, expected, f"{got} from {text}")


@lesson.exercise(
    "ex4",
    points=4,
    level="implement",
    visible=[
        (4 * p0 + p1, 4, {p0: 6, p1: 4}),
        (4 * p0 + p1, 4, {p0: 6, p1: 5}),
        (p1, 8, {p1: 8}),
        (12 * p0 + 6 * p1 + p2, 6, {p0: 2, p1: 2, p2: 6}),
    ],
    hidden=[
        (8 * p0 + 2 * p1 + p2, 4, {p0: 3, p1: 2, p2: 4}),
        (4 * p0 + p1 + 5, 4, {p0: 3, p1: 3}),
        (4 * p0 + p1 + 5, 4, {p0: 3, p1: 4}),
        (4 * p0 - p1 + 3, 4, {p0: 3, p1: 4}),
        (6 * p0 + 4 * p1, 3, {p0: 3, p1: 3}),
        (4 * p0 - p1, 4, {p0: 3, p1: 3}),
    ],
    forbidden=["simplify_index", "_simplify_floor", "_split", "_fits", "exact_quotient"],
)
def divisions_vanish(run: Run, floor_div: Callable[..., Expr]) -> str:
    """The answer takes the place of the compiler's rule, for every index."""
    gone = 0
    for base, divisor, sizes in run.cases:
        found = sympy.sympify(floor_div(base, sympy.Integer(divisor), sizes))
        same_everywhere(run, base, divisor, sizes, found)
        simple = not simplify_index(FloorDiv(base, divisor), sizes).has(FloorDiv)
        left = run.seen(bool(found.has(FloorDiv, ModularIndexing)))
        text = run.seen(str(found))
        ranges = ", ".join(f"{loop} < {size}" for loop, size in sizes.items())
        run.that(not (simple and left), f"({base}) // {divisor}, {ranges}", "no division", text)
        gone += simple
    for base, divisor, ranges in ((p0, s0, {p0: 6}), (4 * p0 + p1, 4, {p0: 3, p1: s0})):
        found = sympy.sympify(floor_div(base, sympy.sympify(divisor), ranges))
        for size in (2, 5, 7):
            number, end = (sympy.sympify(e).subs(s0, size) for e in (divisor, ranges.get(p1, 1)))
            sizes = {loop: end if loop == p1 else count for loop, count in ranges.items()}
            same_everywhere(run, base, number, sizes, found.subs(s0, size))
    block, h = Block(SMALL).requires_grad_(False), torch.randn(1, 8, 16)

    def folded(h: Tensor) -> Tensor:
        b, n, w = h.shape
        out: Tensor = block(h.reshape(b, n, 2, w // 2).transpose(2, 3).reshape(b, n, w))
        return out

    place = "minicompile.shapes.expr:_simplify_floor"
    with run.replaced(place, lambda base, divisor, ranges: FloorDiv(base, divisor)):
        before = kernels_text(mc.trace(folded, h))
    mc.reset()
    with run.replaced(place, lambda *given: sympy.sympify(floor_div(*given))):
        after = kernels_text(mc.trace(folded, h))
        x = torch.arange(24.0).reshape(4, 6)
        result = mc.compile(shifted)(x)
    run.changed(before, after, "the block's kernels")
    run.close(result, shifted(x), "x.t().reshape(24)[1:] + 1")
    signs = " -> ".join(str(text.count(" / ") + text.count(" % ")) for text in (before, after))
    kept = f"{gone} of {len(run.cases)} divisions gone, the others kept"
    return f"{kept}; / and % in a block's kernels: {signs}"


# -- 5: merging loops

Strides = Sequence[dict[sympy.Symbol, int]]
Pair = tuple[sympy.Symbol, sympy.Symbol]
Named = Mapping[str, int]
"""Sizes or strides by the names of loops."""


def pair_in(indices: Sequence[Named], sizes: Named) -> tuple[str, str] | None:
    """Two loops that can be one."""
    for outer, inner in itertools.permutations(sizes, 2):
        if suits(indices, sizes, (outer, inner)):
            return outer, inner
    return None


def suits(indices: Sequence[Named], sizes: Named, pair: tuple[str, str]) -> bool:
    outer, inner = pair
    return {outer, inner} <= sizes.keys() and all(
        i.get(outer, 0) == sizes[inner] * i.get(inner, 0) for i in indices
    )


class Asked:
    """Asks an answer in the scheduler's place, and notes what it was asked and what it said."""

    def __init__(self, mergeable: Callable[[Strides, Sizes], Pair | None]) -> None:
        self.answer, self.said = mergeable, list[tuple[Any, Any, Any]]()

    def __call__(self, nest: LoopNest) -> Pair | None:
        indices = list(nest.indices.values())
        for loops in (nest.x, nest.r):
            sizes = {
                loop: int(size)
                for loop, size in loops.items()
                if size != 0 and not any(index.blocks(loop) for index in indices)
            }
            strides = [
                {loop: int(s) for loop, s in index.strides.items() if loop in sizes}
                for index in indices
            ]
            found = self.answer([dict(s) for s in strides], dict(sizes))
            named = [{str(loop): step for loop, step in index.items()} for index in strides]
            pair = tuple(map(str, found)) if isinstance(found, tuple) else found
            self.said.append((named, {str(loop): size for loop, size in sizes.items()}, pair))
            if found is not None and all(loop in sizes for loop in found):
                return found
        return None


def judge_pairs(run: Run, asked: Asked, where: str) -> None:
    """Raises Wrong for the first pair that can't be merged, and for the first that is missed."""
    for strides, sizes, found in run.seen(asked.said):
        what = f"{where}mergeable({strides}, {sizes})"
        there = pair_in(strides, sizes)
        got = f"({', '.join(map(str, found))})" if isinstance(found, tuple) else str(found)
        expected = "a pair" if there else "None"
        run.that((found is None) == (there is None), what, expected, got)
        fits = found is None or (
            isinstance(found, tuple) and len(found) == 2 and suits(strides, sizes, found)
        )
        run.that(fits, what, "loops that every index allows", got)
    asked.said.clear()


def plus_one(x: Tensor) -> Tensor:
    return x + 1


def columns_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous()


def middle_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1) + 1


def plus_a_row(x: Tensor) -> Tensor:
    return x + x[0, 0]


def no_two(x: Tensor) -> Tensor:
    return x.permute(2, 1, 0).contiguous()


@lesson.exercise(
    "ex5",
    points=4,
    level="real",
    visible=[plus_one, columns_first, plus_a_row],
    hidden=[middle_first, no_two],
    forbidden=["merged", "_mergeable", "nest", "nest_of"],
)
def loops_are_merged(run: Run, mergeable: Callable[..., Any]) -> str:
    """The answer takes the place of the scheduler's rule."""
    model, idx = GPT(SMALL).requires_grad_(False), torch.randint(96, (2, 8))
    place, asked = "minicompile.scheduling.nest:_mergeable", Asked(mergeable)
    with run.replaced(place, lambda nest: None):
        before = mc.trace(model, idx)
    mc.reset()
    with run.replaced(place, asked):
        for function in run.cases:
            mc.trace(function, torch.randn(4, 2, 3))
            judge_pairs(run, asked, f"{function.__name__}, ")
        after = mc.trace(model, idx)
        judge_pairs(run, asked, "")
        x = torch.randn(4, 2, 3)
        result = mc.compile(columns_first)(x)
    run.changed(kernels_text(before), kernels_text(after), "the GPT's kernels")
    run.close(result, columns_first(x), "x.transpose(0, 1).contiguous()")
    loops = (
        sum(len(kernel.ranges) + len(kernel.reduction_ranges) for kernel in trace.schedule.kernels)
        for trace in (before, after)
    )
    return f"the GPT's kernels have {' -> '.join(map(str, loops))} loops"
