"""Checks of lesson 05: what operators do to memory, and writes carried through views."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

import minicompile as mc
from minicompile.aot.functionalize import Functionalizer
from minicompile.extension import inverse
from minicompile.lessons.exercise import Lesson, Run, expects, show
from minicompile.lessons.model import Block, GPTConfig, LayerCache

lesson = Lesson("05")
aten = torch.ops.aten
Tensor = torch.Tensor
READ = "minicompile.aot.functionalize:Functionalizer.read"
CARRIED = "minicompile.aot.functionalize:Functionalizer.carried"


def table(rows: int = 2, columns: int = 4) -> Tensor:
    """1, 2, 3, ... in rows."""
    return torch.arange(1.0, rows * columns + 1).view(rows, columns)


# Exercise 1 --------------------------------------------------------------------------------------


@lesson.exercise(
    "ex1",
    points=2,
    level="read",
    visible=[
        (aten.mul.Tensor, expects("new")),
        (aten.select.int, expects("view")),
        (aten.mul_.Tensor, expects("write")),
        (aten.split.Tensor, expects("view")),
    ],
    hidden=[
        (aten.add.out, expects("write")),
        (aten._native_batch_norm_legit.default, expects("write")),
        (aten._foreach_add_.Scalar, expects("write")),
        (aten.native_layer_norm.default, expects("new")),
        (aten.unbind.int, expects("view")),
        (aten.diagonal.default, expects("view")),
        (aten.slice_scatter.default, expects("new")),
        (aten.index_put_.default, expects("write")),
    ],
    forbidden=["is_view", "gives_view", "writes", "written_arguments"],
)
def operators_by_schema(run: Run, what_it_does: Callable[[Any], Any]) -> str:
    """Tells operators apart."""
    for op, expected in run.cases:
        run.expect(what_it_does(op), expected, f"what_it_does({op}), {op._schema}")
    return f"{len(run.cases)} operators told apart"


# Exercise 2 --------------------------------------------------------------------------------------


def wanted_outputs(pattern: str) -> list[str]:
    """What the compiler should say of each output."""
    counts = Counter(pattern)
    made = [letter for letter in dict.fromkeys(pattern) if letter != "x"]
    return [
        "view of input 0"
        if letter == "x"
        else f"view of result {made.index(letter)}"
        if counts[letter] > 1
        else "fresh"
        for letter in pattern
    ]


@lesson.exercise(
    "ex2",
    points=2,
    level="construct",
    visible=["xaab", "aax"],
    hidden=["aba", "c", "xbbx", "abab"],
    forbidden=["as_strided", "set_", "from_numpy", "untyped_storage"],
)
def alias_pattern(run: Run, build: Callable[[Tensor, str], Any]) -> str:
    """Traces the function and compares who shares memory, as the compiler sees it."""
    found: list[str] = []
    for pattern in run.cases:
        x = table(len(pattern) + 1)

        def pattern_of(x: Tensor, pattern: str = pattern) -> Any:
            return build(x, pattern)

        given = tuple(build(x, pattern))
        own = len({id(value) for value in (x, *given)}) - 1
        asked = f'build(x, "{pattern}")'
        run.expect(own, len(pattern), f"{asked}: tensors that are objects of their own, not x")
        trace = mc.trace(pattern_of, x)
        assert trace.aot is not None
        outputs = trace.aot.metadata.outputs
        found = run.seen(
            ["fresh" if s.kind == "result" and not s.is_view else str(s) for s in outputs]
        )
        wanted = wanted_outputs(pattern)
        run.same(len(found), len(wanted), f"{asked}: how many outputs")
        for place, (got, expected) in enumerate(zip(found, wanted)):
            run.same(got, expected, f"{asked}, output {place}")
        made = mc.compile(pattern_of, backend="aot_eager")(x)
        same = [value.untyped_storage().data_ptr() for value in made]
        first = [pattern.index(letter) for letter in pattern]
        run.expect([same.index(p) for p in same], first, f"{asked}: who shares memory, compiled")
    return f"the last pattern gives {', '.join(found)}"


# Exercises 3 and 4: small functions, and the block with its cache ---------------------------------


def cached_block() -> tuple[Block, Tensor, LayerCache]:
    """A block, three tokens for it, and an empty cache."""
    config = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16)
    torch.manual_seed(0)
    block = Block(config).eval()
    return block, torch.randn(1, 3, 32), LayerCache(config, 1, block.mlp.widen.weight)


def operators(trace: Any) -> list[str]:
    """The operators of the functional graph, in order."""
    return [str(op) for _, op in trace.aot.level("full").calls]


@torch.no_grad()
def block_operators() -> list[str]:
    """Those of the block with its cache."""
    block, h, cache = cached_block()
    return operators(mc.trace(mc.compile(block, backend="aot_eager"), h, cache, 4))


@torch.no_grad()
def block_like_eager(run: Run) -> None:
    """The compiled block gives eager's result and leaves eager's cache."""
    (block, h, theirs), (_, _, ours) = cached_block(), cached_block()
    expected = block(h, theirs, 4)
    got = mc.compile(block, backend="aot_eager", fullgraph=True)(h, ours, 4)
    run.close(got, expected, "the block's result")
    run.close(ours.keys, theirs.keys, "the keys in the block's cache")
    run.close(ours.values, theirs.values, "the values in the block's cache")


def like_eager(run: Run, function: Callable[..., Any], what: str, *inputs: Tensor) -> None:
    """Compiled and eager agree, on the result and on what is left in the inputs."""
    theirs = [x.clone() for x in inputs]
    ours = [x.clone() for x in inputs]
    expected = function(*theirs)
    got = mc.compile(function, backend="aot_eager", fullgraph=True)(*ours)
    run.close(got, expected, f"{what}, compiled, its result")
    run.all_close(ours, theirs, f"{what}, compiled, what is left in its input")


def middle_columns(x: Tensor) -> Tensor:
    x.narrow(1, 1, 2).mul_(10)
    return x.sum()


def above_the_diagonal(x: Tensor) -> Tensor:
    y = x.clone()
    y.diagonal(1).zero_()
    return y + 1


def every_other(x: Tensor) -> Tensor:
    x[:, ::2].add_(1)
    x[:, -1:].mul_(2)
    return x + 0


def tall_and_turned(x: Tensor) -> Tensor:
    y = x.t().clone()
    y.diagonal(-1).mul_(2)
    y.diagonal(0, 1, 0).add_(1)
    return y + 0


def beyond_the_corner(x: Tensor) -> Tensor:
    y = x.clone()
    y.diagonal(5).mul_(2)
    return y + 1


Place = tuple[tuple[int, ...], tuple[Any, ...]]


def negated(base: Tensor, view: Any, arguments: tuple[Any, ...]) -> Tensor:
    """A tensor after a real write through a view."""
    view(base, *arguments).neg_()
    return base


def law(run: Run, answer: Any, view: Any, place: Place, dtype: torch.dtype) -> None:
    """The rule alone, on real numbers, against a real write."""
    shape, arguments = place
    base = torch.arange(1.0, 1.0 + torch.Size(shape).numel(), dtype=dtype).view(shape)
    expected = negated(base.clone(), view, arguments)
    before, given = base.clone(), -view(base, *arguments).clone()
    got = answer(base, given, *arguments)
    told = f"{answer.__name__}(base {list(shape)}, minus what was there, {arguments})"
    hole = base.clone()
    view(hole, *arguments).fill_(torch.nan)  # what was there before must not matter
    run.close(answer(hole, given, *arguments), expected, f"{told}, with NaN where it was")
    kept = view(before, *arguments).clone()
    run.close(answer(before, kept, *arguments), before, f"{answer.__name__}, nothing changed")
    run.close(got, expected, told)
    run.close(base, before, f"{told}, the base it was given")


@lesson.exercise(
    "ex3",
    points=4,
    level="implement",
    visible=lambda: [
        (((2, 4), (1, 1, 3)), ((3, 4), (1,)), middle_columns),
        (((4,), (0, 0, -2)), ((4, 3), (-1,)), above_the_diagonal),
    ],
    hidden=lambda: [
        (((2, 5), (1, 0, 5, 2)), ((4, 3), (-2,)), every_other),
        (((2, 3, 4), (2, -2, 9)), ((2, 3, 4), (1, 1, 2)), tall_and_turned),
        (((3, 4), (0, None, 2)), ((2, 3, 3), (0, 2, 0)), middle_columns),
        (((2, 3, 4), (-2, 1, 3)), ((2, 3, 4), (1, -1, -3)), tall_and_turned),
        (((2, 5), (1, 3, None, 2)), ((2, 3), (5,)), beyond_the_corner),
    ],
    forbidden=[
        "slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter", "diag_embed",
        "copy_", "inverse", "INVERSES", "index_copy_", "slice_inverse", "fill_diagonal_",
    ],
    without=["inverse:aten.slice", "inverse:aten.diagonal"],
)  # fmt: skip
def inverses_carry_writes(
    run: Run, inverse_of_slice: Callable[..., Any], inverse_of_diagonal: Callable[..., Any]
) -> str:
    """The rules alone, then in the compiler: for small functions and for the block's cache."""
    for sliced, crossed, _ in run.cases:
        for dtype in (torch.float32, torch.float64):
            law(run, inverse_of_slice, aten.slice.Tensor, sliced, dtype)
            law(run, inverse_of_diagonal, aten.diagonal.default, crossed, dtype)
    before = block_operators()
    inverse(aten.slice.Tensor)(inverse_of_slice)
    inverse(aten.diagonal.default)(inverse_of_diagonal)
    after = block_operators()
    run.changed("\n".join(before), "\n".join(after), "the functional graph of the block")
    for _, _, function in run.cases:
        like_eager(run, function, function.__name__, table(3, 4))
    block_like_eager(run)
    by_address = "aten.as_strided_scatter.default"
    left = after.count(by_address)
    run.expect(left, 0, "writes of the block that go by address")
    return f"writes by address in the block: {before.count(by_address)} -> {left}"


def left_half_then_sum(x: Tensor) -> Tensor:
    y = x.clone()
    half = y[:, :2]
    y.mul_(10)
    return half.sum()


def written_through_a_view(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1].add_(1)
    y.t().mul_(2)
    return y + 0


def a_row_of_a_half(x: Tensor) -> Tensor:
    y = x.clone()
    row = y[:, 1:][0]
    row.mul_(10)
    return y + 0


def three_views_deep(x: Tensor) -> Tensor:
    y = x.clone()
    early = y[1]
    y.t()[1:][0].neg_()
    return early + y[0]


def two_names_in_turn(x: Tensor) -> Tensor:
    row, column = x[0], x[:, 1]
    row.add_(1)
    column.mul_(10)
    row.add_(1)
    return column * 2


def words(function: Callable[..., Any]) -> str:
    return function.__name__.replace("_", " ")


def no_write(state: Functionalizer, chain: list[Any], new: Any) -> Any:
    """A write that changes nothing."""
    return state.read(chain[-1])


def first_seen(state: Functionalizer, node: Any) -> Any:
    """Reading without replay."""
    return state.values[state.same_as.get(node, node)][0]


@lesson.exercise(
    "ex4",
    points=5,
    level="real",
    visible=[left_half_then_sum, written_through_a_view],
    hidden=[a_row_of_a_half, three_views_deep, two_names_in_turn],
    forbidden=["Functionalizer", "functionalize", "INVERSES", "mock"],
)
def heart_of_functionalization(
    run: Run, read: Callable[..., Any], carried: Callable[..., Any]
) -> str:
    """Both methods in place of the compiler's own."""
    with run.replaced(READ, first_seen), run.replaced(CARRIED, no_write):
        before = block_operators()
    with run.replaced(READ, read) as reads, run.replaced(CARRIED, carried) as writes:
        for function in run.cases:
            like_eager(run, function, words(function), table())
        after = block_operators()
        run.that(
            run.seen(writes.called), "writes of the block", "carried by your function", "none was"
        )
        run.that(run.seen(reads.called), "values of the block", "read by your function", "none was")
        run.changed("\n".join(before), "\n".join(after), "the functional graph of the block")
        block_like_eager(run)
    scatters = sum("scatter" in op for op in after)
    return f"{len(run.cases)} functions like eager, {scatters} writes of the block carried"


# Exercise 5: broken compilers --------------------------------------------------------------------


def never_replays() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(Functionalizer, "read", first_seen)


def stops_after_one_view() -> contextlib.AbstractContextManager[Any]:
    right = Functionalizer.carried

    def short(state: Functionalizer, chain: list[Any], new: Any) -> Any:
        return right(state, chain, new) if len(chain) <= 2 else state.read(chain[-1])

    return mock.patch.object(Functionalizer, "carried", short)


@contextlib.contextmanager
def writes_to_index_0() -> Iterator[None]:
    with mc.scoped():
        inverse(aten.select.int)(
            lambda base, new, dim, index: aten.select_scatter.default(base, new, dim, 0)
        )
        yield


def notices_one_write_only() -> contextlib.AbstractContextManager[Any]:
    right = Functionalizer.read

    def once(state: Functionalizer, node: Any) -> Any:
        node = state.same_as.get(node, node)
        value, version = state.values[node]
        return value if version and node in state.view_of else right(state, node)

    return mock.patch.object(Functionalizer, "read", once)


def forgets_the_caller() -> contextlib.AbstractContextManager[Any]:
    return mock.patch("minicompile.aot.joint.writes", lambda _: False)


def outcome(function: Callable[..., Any], x: Tensor) -> str:
    """Result and what is left of x, as text; the error's name where it raises."""
    try:
        result = function(x)
    except Exception as error:
        return type(error).__name__
    return f"{show(result)}, leaving x {show(x)}"


def compiled_outcomes(functions: list[Callable[..., Any]]) -> list[str]:
    """The outcomes of functions, each compiled afresh."""
    outcomes = []
    for function in functions:
        mc.reset()
        outcomes.append(outcome(mc.compile(function, backend="aot_eager"), table()))
    mc.reset()
    return outcomes


@lesson.exercise(
    "ex5",
    points=3,
    level="stretch",
    visible=[never_replays],
    hidden=[stops_after_one_view, writes_to_index_0, notices_one_write_only, forgets_the_caller],
    forbidden=["Functionalizer", "functionalize", "mock", "compile", "trace"],
)
def traps_catch_broken_compilers(run: Run, traps: Callable[[], Any]) -> str:
    """Every trap passes with the right compiler; each broken one fails in one."""
    functions = list(traps())
    names = run.seen([getattr(function, "__name__", "a trap") for function in functions])
    expected = run.seen([outcome(function, table()) for function in functions])
    results = run.seen(compiled_outcomes(functions))
    for name, right, got in zip(names, expected, results):
        run.that(got == right, f"{name} with the right compiler", right, got)
    for broken in run.cases:
        with broken():
            results = run.seen(compiled_outcomes(functions))
        run.that(
            results != expected,
            f"a compiler that {words(broken)}",
            "a wrong result of one of your functions",
            f"none wrong of {len(names)}",
        )
    results = run.seen(compiled_outcomes(functions))
    for name, right, got in zip(names, expected, results):  # what changes by itself catches nobody
        run.that(got == right, f"{name}, called again", right, got)
    return f"{len(run.cases)} broken compiler caught"
