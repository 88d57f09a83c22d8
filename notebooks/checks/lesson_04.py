"""Checks of lesson 04."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

import minicompile as mc
from minicompile.debug.history import timeline
from minicompile.lessons.exercise import Lesson, Run, expects
from minicompile.lessons.model import GPT, GPTConfig
from minicompile.shapes.expr import FloorDiv, ModularIndexing, size_symbol

lesson = Lesson("04")


def called(target: Any, shapes: Sequence[tuple[int, ...]], **how: Any) -> Any:
    """A compiled function after calls with ones of these shapes."""
    compiled = mc.compile(target, backend="eager", **how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for shape in shapes:
            compiled(torch.ones(shape))
    return compiled


# -- 1


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


SIZES = [(2**i, 8) for i in range(1, 7)]
SPREAD = [(2, 8), (2, 8), (1, 8), (3, 1), (1, 1), (4, 4), (1, 2)]


@lesson.exercise(
    "ex1",
    points=2,
    level="read",
    visible=[(None, SIZES), (False, SIZES)],
    hidden=[
        (True, SIZES),
        (None, SIZES[:1] * 4),
        (None, [(1, 8), *SIZES, (1, 8), (2, 9)]),
        (None, SPREAD),
    ],
    forbidden=["str", "repr"],
)
def history(run: Run, read_history: Callable[..., Any]) -> str:
    """The misses that made versions."""
    for dynamic, shapes in run.cases:
        compiled = called(double, shapes, dynamic=dynamic, options={"recompile_limit": 4})
        told = timeline(compiled)[0]
        made = [miss.call for miss in told.misses if miss.made]
        expected = (made, told.answered[0])
        what = f"read_history of {len(shapes)} calls with dynamic={dynamic}"
        run.expect(read_history(told), expected, what)
    return "versions made and calls in eager are told apart"


# -- 2

FACTS = {
    "at most": ("x.size(0) <= {}", lambda n: [n, n - 1, 3], lambda n: n + 1),
    "at least": ("x.size(0) >= {}", lambda n: [n, n + 1, 3 * n], lambda n: n - 1),
    "a multiple of": ("x.size(0) % {} == 0", lambda n: [3 * n, 5 * n, 2 * n], lambda n: 3 * n + 1),
}


HOLDS: dict[str, Callable[[int, int], bool]] = {
    "at most": lambda size, number: size <= number,
    "at least": lambda size, number: size >= number,
    "a multiple of": lambda size, number: size % number == 0,
}


def sizes_that_pass(env: Any, number: int) -> list[int]:
    """The numbers of rows that the only guard lets pass; none if it asks about anything else."""
    condition = env.guards[0].condition if len(env.guards) == 1 else sympy.true
    if len(condition.free_symbols) != 1:
        return []
    [symbol] = condition.free_symbols
    if env.text(symbol) != "x.size(0)":
        return []
    sizes = range(2, 4 * number)
    return [n for n in sizes if condition.xreplace({symbol: sympy.Integer(n)}) == sympy.true]


@lesson.exercise(
    "ex2",
    points=3,
    level="construct",
    visible=[("a multiple of", 8), ("at most", 32)],
    hidden=[("a multiple of", 3), ("at most", 100), ("at least", 5), ("at least", 9)],
    forbidden=["_check", "mark_dynamic", "_assert"],
)
def guards_on_request(run: Run, needing: Callable[..., Any]) -> str:
    """The capture's facts, and which sizes its version serves."""
    for fact, number in run.cases:
        form, fitting, other = FACTS[fact]
        expected = form.format(number)
        what = f"needing({fact!r}, {number})"
        function = needing(fact, number)
        run.that(run.seen(callable(function)), what, "a function", "none")
        shapes = [(size, 7) for size in fitting(number)]
        compiled = called(function, shapes, dynamic=True)
        capture = mc.explain(compiled)(torch.ones(shapes[0])).captures[0]
        env = capture.shape_env
        fixed = run.seen([f"{env.text(s)} is {env.values(s)}" for s in env.fixed])
        run.that(not fixed, what, "no fixed size", ", ".join(fixed))
        got = ", ".join(run.seen([env.text(given.condition) for given in env.guards]))
        passing = run.seen(sizes_that_pass(env, number))
        right = [size for size in range(2, 4 * number) if HOLDS[fact](size, number)]
        run.that(passing == right, what, f"a guard {expected}", got or "no guard")
        run.expect(len(timeline(compiled)[0].misses), 1, f"{what}: captures for {shapes}")
        compiled(torch.ones(other(number), 7))
        misses = len(timeline(compiled)[0].misses)
        run.expect(misses, 2, f"{what}: captures after x.size(0) == {other(number)}")
    return "one guard each, and it holds for all sizes that fit"


# -- 3


def with_positions(x: torch.Tensor) -> torch.Tensor:
    positions = torch.tensor([float(row) for row in range(x.size(0))])
    return x + positions.unsqueeze(1) / x.size(0)


def fixed_sizes(env: Any) -> list[tuple[str, str]]:
    """Sizes that have one value only, and why."""
    return [
        (env.text(symbol), f"{env.values(symbol)}, fixed by {cause.reason}")
        for symbol, cause in env.fixed.items()
    ]


@lesson.exercise(
    "ex3",
    points=4,
    level="construct",
    visible=[6, 3],
    hidden=[6, 17, 2, 300],
    forbidden=["with_positions", "disable", "mark_dynamic"],
)
def a_size_is_free(run: Run, freed: Callable[..., Any]) -> str:
    """One version for all numbers of rows, and no fixed symbol."""
    compiled = mc.compile(freed, dynamic=True, backend="eager", fullgraph=True)
    for rows in run.cases:
        for dtype in (torch.float32, torch.float16):
            x = torch.randn(rows, 5).to(dtype)
            kind = str(dtype).removeprefix("torch.")
            run.close(freed(x), with_positions(x), f"freed of a {kind} tensor of {rows} rows")
    for number, rows in enumerate(run.cases):
        x = torch.randn(rows, 5)
        run.close(compiled(x), with_positions(x), f"freed, compiled, of a tensor of {rows} rows")
        if number == 0:
            env = mc.explain(compiled)(x).captures[0].shape_env
            for size, why in run.seen(fixed_sizes(env)):
                run.that(False, f"freed: {size}", "any size from 2 on", why)
    made = len(timeline(compiled)[0].misses)
    run.expect(made, 1, f"versions for {', '.join(map(str, run.cases))} rows")
    x = torch.ones(run.cases[0], 5)
    before, after = (mc.trace(mc.compile(f, dynamic=True), x) for f in (with_positions, freed))
    kernel = str(after.kernels[-1])
    run.changed(str(before.kernels[-1]), kernel, "the kernel")
    run.that("s0" in run.seen(kernel), "the kernel's arguments", "s0", "no symbol")
    return "the kernel takes the number of rows as an argument"


# -- 4


def outcome(rule: Callable[..., Any], *args: Any) -> Any:
    """What a rule gives as a list, or "ValueError"."""
    try:
        got = rule(*args)
    except ValueError:
        return "ValueError"
    return list(got) if isinstance(got, tuple | list) else got


RULES: dict[str, Callable[..., Any]] = vars(torch.ops.lesson04).setdefault("rules", {})
"""The shape rules in use: those of the operators, also if this file is loaded twice."""


def define_operators() -> None:
    """Two operators whose shape rules are those in `RULES`."""

    @torch.library.custom_op("lesson04::joined", mutates_args=())
    def joined(x: torch.Tensor, y: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([x, y], dim)

    @joined.register_fake
    def _(x: torch.Tensor, y: torch.Tensor, dim: int) -> torch.Tensor:
        return x.new_empty(RULES["cat"]([list(x.shape), list(y.shape)], dim))

    @torch.library.custom_op("lesson04::folded", mutates_args=())
    def folded(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        return x.reshape(rows, columns).clone()

    @folded.register_fake
    def _(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        return x.new_empty(RULES["reshape"](list(x.shape), [rows, columns]))


if not RULES:
    RULES.update(cat=outcome, reshape=outcome)
    define_operators()
JOINED, FOLDED = torch.ops.lesson04.joined.default, torch.ops.lesson04.folded.default


def join_and_fold(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    both = JOINED(x, y, 0)
    result: torch.Tensor = FOLDED(both, -1, 4) * 2
    return result


CAT = (
    [([[2, 3], [4, 3]], 0, expects([6, 3]))],
    [
        ([[2, 3], [2, 4]], 1, expects([2, 7])),
        ([[2, 3], [2, 4]], 0, expects("ValueError")),
        ([[2, 3], [3, 3]], 1, expects("ValueError")),
        ([[2, 1, 5], [2, 4, 5], [2, 2, 5]], 1, expects([2, 7, 5])),
        ([[2, 3], [4, 3], [4, 2]], 0, expects("ValueError")),
        ([[2, 3], [2]], 0, expects("ValueError")),
        ([[7]], 0, expects([7])),
    ],
)
RESHAPE = (
    [
        ([6, 4], [3, 8], expects([3, 8])),
        ([6, 4], [-1, 8], expects([3, 8])),
        ([5], [2], expects("ValueError")),
    ],
    [
        ([6, 4], [2, -1, 3], expects([2, 4, 3])),
        ([6, 4], [-1, 7], expects("ValueError")),
        ([2, 3, 4], [24], expects([24])),
        ([2, 3], [5, 1], expects("ValueError")),
    ],
)


@lesson.exercise(
    "ex4",
    points=5,
    level="implement",
    visible=[(CAT[0], RESHAPE[0])],
    hidden=[(CAT[1], RESHAPE[1])],
    forbidden=["cat", "reshape", "view", "empty", "hint"],
)
def shape_rules(
    run: Run, shape_of_cat: Callable[..., Any], shape_of_reshape: Callable[..., Any]
) -> str:
    """The rules on numbers, then on symbols, as those of operators in a compiled function."""
    for cats, reshapes in run.cases:
        for *given, expected in cats:
            what = f"shape_of_cat({', '.join(map(str, given))})"
            got = run.seen(outcome(shape_of_cat, *given))
            run.that(got == expected, what, expected, got)
        for *given, expected in reshapes:
            what = f"shape_of_reshape({', '.join(map(str, given))})"
            got = run.seen(outcome(shape_of_reshape, *given))
            run.that(got == expected, what, expected, got)
    sizes = [((6, 4), (2, 4)), ((3, 4), (8, 4)), ((5, 4), (11, 4))]
    symbolic = compiled_join(run, {"cat": shape_of_cat, "reshape": shape_of_reshape}, sizes)
    fixed = compiled_join(run, {"cat": fixed_cat, "reshape": fixed_reshape}, sizes)
    versions = run.seen(len(timeline(symbolic)[0].misses))
    run.that(versions == 1, "join_and_fold at three sizes", "one version for all sizes", versions)
    before, after = (
        "\n".join(mc.explain(one)(*map(torch.ones, sizes[0])).code) for one in (fixed, symbolic)
    )
    run.changed(before, after, "the captured graph")
    return "right on numbers, and one graph for all sizes on symbols"


def compiled_join(run: Run, rules: dict[str, Any], sizes: Sequence[Any]) -> Any:
    """`join_and_fold` compiled with these shape rules, after calls that give eager's results."""
    RULES.update(rules)
    compiled = mc.compile(join_and_fold, dynamic=True, backend="eager")
    for first, second in sizes:
        x, y = torch.randn(first), torch.randn(second)
        run.close(compiled(x, y), join_and_fold(x, y), f"join_and_fold of {first} and {second}")
    told = mc.explain(compiled)(*map(torch.ones, sizes[0]))
    for reason in run.seen([found.reason for found in told.breaks]):
        run.that(False, "join_and_fold, compiled with your rules", "one graph", reason)
    return compiled


def fixed_cat(shapes: Sequence[Sequence[int]], dim: int) -> list[int]:
    """What a rule does that looks at the sizes."""
    return [int(shapes[0][0]) + int(shapes[1][0]), int(shapes[0][1])]


def fixed_reshape(shape: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """The same for reshape."""
    return [int(shape[0]) * int(shape[1]) // wanted[1], wanted[1]]


# -- 5

a, b = size_symbol("a"), size_symbol("b")
LOW = {a: 2, b: 3}

DECIDED: tuple[list[tuple[Any, bool | None]], ...] = (
    [
        (sympy.Ge(a, 2, evaluate=False), expects(True)),
        (sympy.Eq(a, 1, evaluate=False), expects(False)),
        (sympy.Gt(a * b, 5, evaluate=False), expects(True)),
        (sympy.Eq(a, 2, evaluate=False), expects(None)),
        (sympy.Lt(a + b, 5, evaluate=False), expects(False)),
        (sympy.Ne(2 * a, a, evaluate=False), expects(True)),
    ],
    [
        (sympy.Le(a, 7, evaluate=False), expects(None)),
        (sympy.Lt(a, 6, evaluate=False), expects(None)),
        (sympy.Lt(a, 400, evaluate=False), expects(None)),
        (sympy.Lt(a, 10**9, evaluate=False), expects(None)),
        (sympy.Ne(a, 77, evaluate=False), expects(None)),
        (sympy.Ge(b - a, 0, evaluate=False), expects(None)),
        (sympy.Gt(a * b + a, a * b, evaluate=False), expects(True)),
        (sympy.Le(a * (b + 1), a * b + a, evaluate=False), expects(True)),
        (sympy.Eq(a * (b + 1), a * b + a, evaluate=False), expects(True)),
        (sympy.Ne(a + b, 4, evaluate=False), expects(True)),
        (sympy.Le(1 - a, -1, evaluate=False), expects(True)),
        (sympy.Gt(1 - a * b, -5, evaluate=False), expects(False)),
        (
            sympy.Eq(ModularIndexing(a, sympy.S.One, sympy.Integer(4)), 0, evaluate=False),
            expects(None),
        ),
        (sympy.Ge(FloorDiv(a, sympy.Integer(2)), 5, evaluate=False), expects(None)),
    ],
)


@lesson.exercise(
    "ex5",
    points=6,
    level="real",
    visible=DECIDED[0],
    hidden=DECIDED[1],
    forbidden=["ShapeEnv", "static", "_compare", "bounds"],
)
def questions_decided(run: Run, decide: Callable[..., Any]) -> str:
    """On relations, then as the shape environment's only rule, on the lesson model."""
    for relation, expected in run.cases:
        got = decide(relation, dict(LOW))
        got = bool(got) if got in (sympy.true, sympy.false) else got
        run.expect(got, expected, f"decide({relation}) for a from 2 on, b from 3 on")

    def never(env: Any, relation: Any) -> None:
        return None

    def asked(env: Any, relation: Any) -> Any:
        if not relation.free_symbols <= env.ranges.keys():  # a float among them
            return None
        answer = decide(relation, {s: env.ranges[s][0] for s in relation.free_symbols})
        return None if answer is None else sympy.S(bool(answer))

    before, after = guards_of_model(run, never), guards_of_model(run, asked)
    run.changed("\n".join(before), "\n".join(after), "the lesson model's guards on sizes")
    left = run.seen(after)
    got = f"{len(left)}: {left}"
    run.that(len(left) <= 6, "the lesson model's guards on sizes", "at most 6", got)
    return f"the lesson model's guards on sizes: {len(before)} -> {len(after)}"


def guards_of_model(run: Run, compare: Callable[..., Any]) -> list[str]:
    """Texts of the guards on sizes of the lesson model, compiled with this rule; its result is checked."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=12))
    mc.reset()
    with run.replaced("minicompile.shapes.env:ShapeEnv._compare", compare):
        compiled = mc.compile(model, backend="eager", dynamic=True)
        for shape in ((3, 7), (2, 5)):
            tokens = torch.ones(shape, dtype=torch.long)
            run.close(compiled(tokens), model(tokens), f"the lesson model for tokens {list(shape)}")
        told = mc.explain(compiled)(torch.ones(3, 7, dtype=torch.long))
    for reason in run.seen([found.reason for found in told.breaks]):
        run.that(False, "the lesson model", "one graph", reason)
    return [guard.expression for guard in told.captures[0].guards if guard.kind == "shape"]
