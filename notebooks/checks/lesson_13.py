"""Checks of lesson 13."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sympy
import torch

import minicompile as mc
from minicompile.codegen.helpers import c_prelude
from minicompile.codegen.plan import KernelSource
from minicompile.debug.reference import ReferenceOps
from minicompile.lessons.assembly import cpp_assembly
from minicompile.lessons.cache import LINE, lines_fetched
from minicompile.lessons.exercise import Lesson, Run, show
from minicompile.lessons.model import GPT, GPTConfig
from minicompile.lowering.lower import lowering
from minicompile.ops.philox import KEY_STEPS, MULTIPLIERS, PHILOX, WORD
from minicompile.shapes.expr import contiguous_strides, linear_index

lesson = Lesson("13")

Function = Callable[..., torch.Tensor]


def small_block() -> tuple[torch.nn.Module, torch.Tensor]:
    """A block of the lesson model, and an input."""
    torch.manual_seed(0)
    config = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16)
    return GPT(config).blocks[0].eval(), torch.randn(2, 16, 32)


def scale(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * 2 + 1)


def running_sum(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(-1)


def row_sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1)


def row_argmax(x: torch.Tensor) -> torch.Tensor:
    return x.double().argmax(-1)


def column_argmax(x: torch.Tensor) -> torch.Tensor:
    return x.double().argmax(0)


def column_running_sum(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(0)


def row_argmin(x: torch.Tensor) -> torch.Tensor:
    return x.double().argmin(-1)


def row_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def told(value: Any) -> str:
    """A loop value by what it does."""
    if value is None:
        return "nothing"
    return f"{value.op} {value.kind}".strip()


@lesson.exercise(
    "ex1",
    points=2,
    level="read",
    visible=[scale, row_sum, running_sum, row_argmax],
    hidden=[column_argmax, row_softmax, column_running_sum, row_argmin, running_sum],
    forbidden=[
        *(
            "LoopPrinter",
            "PointwisePrinter",
            "RowPrinter",
            "RowHelperPrinter",
            "ColumnPrinter",
            "loop_printer",
        ),
        *("_simd", "print_kernel", "cpp_assembly", "lines", "text"),
    ],
)
def one_value_stops_vectors(run: Run, stops_vectors: Callable[..., Any]) -> str:
    """Compares the answer with the C text: a loop in vectors has `omp simd`, or is a helper's."""
    stopped = 0
    for function in run.cases:
        for kernel in mc.trace(function, torch.randn(64, 64)).kernels:
            plan, given = kernel.plan, f"stops_vectors for {kernel.name} of {function.__name__}"
            vectors = "omp simd" in kernel.text or "mc_row_" in kernel.text
            expected = None if vectors else next(v for v in plan.body.values if guilty(v))
            run.expect(told(stops_vectors(plan)), told(expected), given)
            stopped += not vectors
    return f"{stopped} of {len(run.cases)} kernels are not in vectors, and it is known why"


def guilty(value: Any) -> bool:
    return value.op == "scan" or value.kind in ("argmax", "argmin")


@lesson.exercise(
    "ex2",
    points=2,
    level="construct",
    visible=[(64, 48)],
    hidden=[(16, 200), (33, 7)],
    forbidden=["plan_rule", "what_if", "without"],
)
def sum_runs_over_columns(run: Run, columns_first: Callable[..., Any]) -> str:
    """The plan of a row sum of this tensor has its vectors along x."""
    for rows, length in run.cases:
        x = columns_first(rows, length)
        given = f"columns_first({rows}, {length})"
        table = run.seen(x)
        run.that(isinstance(table, torch.Tensor), given, "a tensor", show(table))
        run.same(tuple(table.shape), (rows, length), f"{given}.shape")
        run.that(table.is_floating_point(), f"{given}.dtype", "a float dtype", table.dtype)
        trace = mc.trace(row_sum, x)
        [plan] = trace.plans
        run.expect(plan.vector_axis, "x", f"{given}: vector axis of the sum's kernel")
        run.close(mc.compile(row_sum)(x), table.sum(-1), f"{given}.sum(-1)")
    return "the same sum, with its vectors across the rows"


@lesson.exercise(
    "ex3",
    points=3,
    level="implement",
    visible=[[1.0, 5.0, float("nan")]],
    hidden=[
        [float("nan"), 2.0, 1.0],
        [3.0, float("nan"), 7.0],
        [float("-inf"), float("-inf"), float("-inf")],
        [2.0, -1.0, 9.0],
    ],
    forbidden=["ValuePrinter", "better", "combine", "mc_row_max", "MC_NEXT"],
)
def maximum_keeps_nan(run: Run, moves_on: Callable[[str, str], str]) -> str:
    """The answer's condition stands in kernels of `amax` over columns."""

    def column_max(x: torch.Tensor) -> torch.Tensor:
        return x.amax(0)

    def careless(printer: Any, value: Any, other: str, best: str) -> str:
        return f"{other} > {best}"

    def answer(printer: Any, value: Any, other: str, best: str) -> str:
        return f"({moves_on(other, best)})"

    path = "minicompile.codegen.cpp_values:ValuePrinter.better"
    for column in run.cases:
        x = torch.tensor(column)[:, None].repeat(1, 32)
        with run.replaced(path, careless):
            before = mc.trace(column_max, x).kernels[0].text
        mc.reset()
        with run.replaced(path, answer) as asked:
            kernel = mc.trace(column_max, x).kernels[0]
            mc.reset()
            got = mc.compile(column_max)(x)
        run.that(run.seen(asked.called), "the kernel of amax", "a use of moves_on", "none")
        given = f"the largest of {column}"
        run.close(got, x.amax(0), given)
        run.rerun((kernel.prelude + kernel.text, kernel.name), column_max, [x], given)
        written = run.seen(kernel.text)
        run.that("omp simd" in written, "the kernel of amax", "a loop in vectors", "none")
        run.changed(before, kernel.text, "the kernel of amax")
        mc.reset()
    return "a NaN stays, and the loop is still in vectors"


ONE_BY_ONE = """static inline float mc_row_sum(const float* x, int64_t n) {
    float total = 0;
    for (int64_t i = 0; i < n; i++) total += x[i];
    return total;
}"""


@contextmanager
def row_sums_by(run: Run, text: str) -> Iterator[None]:
    """Kernels' `mc_row_sum` is this text for a while."""

    def prelude(kernel: str) -> str:
        built_in = c_prelude(kernel.replace("mc_row_sum", "row_sum"))
        return built_in + f"\n{text}\n" * ("mc_row_sum" in kernel)

    mc.reset()
    module = "minicompile.codegen.cpp"
    with (
        run.replaced(f"{module}:c_prelude", prelude),
        run.replaced(f"{module}_units:c_prelude", prelude),
    ):
        yield
    mc.reset()


def packed_additions(kernel: KernelSource) -> int:
    return cpp_assembly(kernel).counts("add")["packed"]


@lesson.exercise(
    "ex4",
    points=4,
    level="real",
    visible=[256, 64],
    hidden=[1, 15, 100, 1003],
    forbidden=["mc_block_sum", "HELPERS", "prelude"],
)
def a_row_is_summed_in_lanes(run: Run, row_sum_in_c: Callable[[], str]) -> str:
    """The kernels of sums, and of a block of the model, call the answer's C function."""
    text = row_sum_in_c()
    written = run.seen(text)
    for used in ("mc_block_sum", "MC_ROW"):
        run.that(used not in written, "row_sum_in_c()", "lanes of your own", f"a use of {used}")
    run.that("mc_row_sum" in written, "row_sum_in_c()", "a function mc_row_sum", "none")
    x = torch.randn(4, max(run.cases))
    with row_sums_by(run, ONE_BY_ONE):
        before = mc.trace(row_sum, x).kernels[0]
    for length in run.cases:
        x = torch.randn(4, length).abs()
        with row_sums_by(run, text):
            kernel, got = mc.trace(row_sum, x).kernels[0], mc.compile(row_sum)(x)
        given = f"the sums of 4 rows of {length}"
        run.close(got, x.sum(-1), given, rtol=1e-5, atol=1e-5)
        source = kernel.prelude + kernel.text, kernel.name
        run.rerun(source, row_sum, [x], given, rtol=1e-4, atol=1e-4)
    packed = run.seen(packed_additions(kernel))
    run.that(
        packed > packed_additions(before),
        "the instructions of the kernel of a row sum",
        "additions of whole vectors",
        "additions of single floats only",
    )
    run.changed(before.prelude, kernel.prelude, "the kernel of a row sum")
    block, h = small_block()
    with torch.no_grad(), row_sums_by(run, text):
        got = mc.compile(block)(h)
        used = sum("mc_row_sum" in k.text for k in mc.trace(block, h).kernels)
        run.close(got, block(h), "the model's block", rtol=1e-4, atol=1e-5)
    return f"vectors are added, and {used} kernels of the block use it"


def scaled_rows(a: torch.Tensor) -> torch.Tensor:
    return a * a[0]


def added_turned(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b.t()


@lesson.exercise(
    "ex5",
    points=4,
    level="real",
    visible=[(64, 1024)],
    hidden=[(128, 768), (48, 1040), (8, 64)],
    forbidden=["sides", "choose_squares", "SQUARE"],
)
def transposed_loads_are_tiled(run: Run, squares: Callable[..., Any]) -> str:
    """The answer decides the squares of kernels; a toy cache counts what they fetch."""
    path = "minicompile.plugins.transposed_tiles.choose:sides"

    def chosen(plan: Any) -> dict[str, int]:
        return dict(squares(plan) or {})

    for rows, columns in run.cases:
        a, b = torch.randn(rows, columns), torch.randn(columns, rows)
        with run.replaced(path, lambda plan: {}):
            before = mc.trace(added_turned, a, b).kernels[0]
        mc.reset()
        with run.replaced(path, chosen):
            kernel, got = mc.trace(added_turned, a, b).kernels[0], mc.compile(added_turned)(a, b)
            straight = mc.trace(scaled_rows, a).plans[0]
        mc.reset()
        given = f"a + b.t(), [{rows}, {columns}]"
        run.close(got, a + b.t(), given)
        run.rerun((kernel.prelude + kernel.text, kernel.name), added_turned, [a, b], given)
        run.expect(straight.tiles, {}, f"tiles of a * a[0], [{rows}, {columns}]")
        if rows < LINE:
            run.expect(kernel.plan.tiles, {}, f"tiles of {given}")
            continue
        least = 3 * rows * columns // LINE
        found = run.seen(lines_fetched(kernel.plan))
        tiles = run.seen(str(kernel.plan.tiles))
        run.that(
            found <= 1.3 * least,
            f"{given} in tiles {tiles}, cache lines fetched",
            f"at most {int(1.3 * least)}",
            found,
        )
        run.changed(before.text, kernel.text, f"the kernel of {given}")
    block, h = small_block()
    with torch.no_grad():
        expected = block(h)
        with run.replaced(path, chosen):
            run.close(mc.compile(block)(h), expected, "the model's block", rtol=1e-4, atol=1e-5)
    return "at most 1.3 times the fewest cache lines, and no squares where none are needed"


def round_in_python(words: list[int], keys: list[int]) -> list[int]:
    words, keys = ([n & WORD for n in part] for part in (words, keys))
    a, b = MULTIPLIERS[0] * words[0], MULTIPLIERS[1] * words[2]
    return [b >> 32 ^ words[1] ^ keys[0], b & WORD, a >> 32 ^ words[3] ^ keys[1], a & WORD]


def lower_with(one_round: Callable[..., Any]) -> Callable[..., Any]:
    """The lowering of random numbers with these rounds."""

    def rule(ctx: Any, seeds: Any, number: int, size: Any, kind: str) -> Any:
        def body(ops: Any, index: Any) -> Any:
            def constant(value: int) -> Any:
                return ops.constant(value, torch.int64)

            def word(value: Any, shift: int) -> Any:
                return ops.bitwise_and(ops.rshift(value, constant(shift)), constant(WORD))

            place = linear_index(index, contiguous_strides(size))
            offset = ops.index_expr(place, torch.int64)
            seed = seeds.load(ops, [sympy.Integer(number)])
            words = [word(offset, 0), word(offset, 32), constant(0), constant(0)]
            keys = [word(seed, 0), word(seed, 32)]
            for _ in range(10):
                words = one_round(ops, words, keys)
                keys = [
                    word(ops.add(key, constant(step)), 0)
                    for key, step in zip(keys, KEY_STEPS, strict=True)
                ]
            upper = ops.gt(words[0], constant(WORD >> 1))
            folded = ops.where(upper, ops.sub(constant(WORD), words[0]), words[0])
            step = ops.constant(4.6566127342e-10, torch.float32)
            return ops.mul(ops.to_dtype(folded, torch.float32), step)

        return ctx.pointwise(size, seeds.device, body)

    return rule


def drawn_by(function: Any, x: torch.Tensor, **how: Any) -> torch.Tensor:
    """What a compiled function gives for one seed."""
    torch.manual_seed(3)
    result: torch.Tensor = mc.compile(function, **how)(x)
    return result.detach()


@lesson.exercise(
    "ex6",
    points=4,
    level="real",
    visible=[([1, 2, 0xDEADBEEF, 4], [5, 6])],
    hidden=[
        ([WORD, WORD, WORD, WORD], [WORD, WORD]),
        ([-1, 7, -(2**31), 2**40 + 5], [-3, 2**33]),
    ],
    forbidden=["philox", "words_of", "rand", "randn", "PHILOX"],
    without=["lowering:minicompile.philox.default"],
)
def random_numbers_are_drawn_by_the_answer(run: Run, one_round: Callable[..., Any]) -> str:
    """One round on numbers; then kernels draw with ten of them, bit for bit what eager code gives."""
    reference = ReferenceOps.over({}, {}, {}, {}, torch.device("cpu"))
    for words, keys in run.cases:
        given = f"one_round of words {words} and keys {keys}"
        got = one_round(reference, *([torch.tensor(n) for n in part] for part in (words, keys)))
        numbers = run.seen([int(word) for word in got])
        run.that(len(numbers) == 4, given, "four words", len(numbers))
        run.same(numbers, round_in_python(words, keys), given)

    def drawn(x: torch.Tensor) -> torch.Tensor:
        return torch.rand_like(x)

    torch.manual_seed(0)
    config = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16, dropout=0.1)
    block, h, options = GPT(config).blocks[0], torch.randn(2, 16, 32), {"fallback_random": False}
    before = mc.trace(mc.compile(block, options=options), h)
    mc.reset()
    lowering(PHILOX)(lower_with(one_round))
    for function, x in ((drawn, torch.empty(50, 77)), (block, h)):
        expected = drawn_by(function, x, backend="aot_eager", options=options)
        got = drawn_by(function, x, backend="inductor", options=options)
        name = "the model's block" if function is block else "the numbers of rand_like"
        exact = {"rtol": 1e-4, "atol": 1e-5} if function is block else {"rtol": 0, "atol": 0}
        run.close(got, expected, name, **exact)
    after = mc.trace(mc.compile(block, options=options), h)
    mc.reset()
    calls = [sum(e.op is PHILOX for e in found.loops.externs) for found in (before, after)]
    run.changed(str(calls[0]), str(calls[1]), "how often a library draws for the block")
    return f"{calls[0]} dropouts of the block draw in kernels, bit for bit the same numbers"
