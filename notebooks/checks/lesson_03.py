"""Checks of lesson 03."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import minicompile as mc
from minicompile.dynamo import breaks
from minicompile.dynamo.reasons import refusal
from minicompile.errors import Unsupported
from minicompile.lessons.exercise import Lesson, Run
from minicompile.lessons.model import GPT, GPTConfig

lesson = Lesson("03")


def quiet() -> contextlib.redirect_stdout[io.StringIO]:
    """Inside, nothing is printed: a check says the same whatever the functions print that it calls."""
    return contextlib.redirect_stdout(io.StringIO())


@mc.disable
def pause() -> None:
    """Python runs it, so the frame that calls it is cut."""


class Listening:
    """An answer that the compiler calls: what it raises is kept, for the compiler would go on without it."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self.answer = answer
        self.calls = 0
        self.raised: BaseException | None = None

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        try:
            return self.answer(*args)
        except Unsupported:
            raise
        except BaseException as error:
            self.raised = self.raised or error
            raise

    def check(self) -> None:
        """Raises what the answer raised."""
        if self.raised is not None:
            raise self.raised


def talking_model() -> tuple[GPT, torch.Tensor]:
    """The lesson model with a break in each block, and an input."""
    torch.manual_seed(0)
    config = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, debug_print=True)
    return GPT(config), torch.arange(6).view(1, 6)


def graphs_of(compiled: Any, *inputs: Any) -> str:
    """The text of every graph behind a compiled function, which is called."""
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")
        return "\n".join(mc.explain(compiled)(*inputs).code)


# -- 1


def cut_once(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    pause()
    return y.cos() + x


def cut_twice(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    pause()
    z = y.sum(0)
    pause()
    return z.cos() * 2


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x.cos() * 2


def calls_below_exec(x: torch.Tensor) -> torch.Tensor:
    names = {"x": x.sin(), "scaled": scaled}
    exec("x = scaled(x)", names)
    result: torch.Tensor = names["x"]  # type: ignore[assignment]
    return result + x


def not_cut(x: torch.Tensor) -> torch.Tensor:
    return x.sin().cos() + x


@lesson.exercise(
    "ex1",
    points=2,
    level="read",
    visible=[(cut_once, torch.float32)],
    hidden=[
        (cut_once, torch.float64),
        (cut_twice, torch.float32),
        (not_cut, torch.float32),
        (calls_below_exec, torch.float32),
    ],
    forbidden=["str", "repr"],
)
def what_crosses_the_gap(run: Run, bytes_over_the_gap: Callable[..., Any]) -> str:
    """Sums the inputs of resume functions."""
    for function, dtype in run.cases:
        x = torch.ones(4, 8, dtype=dtype)
        told = mc.explain(function)(x)
        resumed = [c for c in told.captures if "resumed" in c.name]
        expected = sum(given.fake.nbytes for capture in resumed for given in capture.inputs)
        what = f"bytes_over_the_gap for {function.__name__} of {x.dtype}[4, 8]"
        run.expect(bytes_over_the_gap(told), expected, what)
    return "every tensor that crosses a gap is counted"


# -- 2


def broken_model(x: torch.Tensor, training: bool = True) -> torch.Tensor:
    y = x.sin()
    print(f"Input norm: {x.norm():.2f}")
    if x.sum() > 0:
        y = y * 2
    results = sorted([y, y.cos()], key=lambda t: t.sum())
    return results[0]


def called(compiled: Callable[..., Any], x: torch.Tensor) -> tuple[Any, str]:
    """What a call gives, and why it could not be one graph."""
    try:
        return compiled(x), ""
    except Unsupported as why:
        return None, str(why)


@lesson.exercise(
    "ex2",
    points=4,
    level="construct",
    visible=[(1.5, 0.5), (0.3, 1.0)],
    hidden=[(-0.5, 1.0), (-2.0, 0.3), (-4.0, 0.2), (0.9, 0.1)],
    forbidden=["disable", "sorted", "print", "item", "tolist", "numpy", "broken_model"],
)
def three_breaks_are_mended(run: Run, mended: Callable[..., Any]) -> str:
    """One graph for all inputs, and eager's results."""
    with quiet():
        before = mc.explain(broken_model)(torch.ones(4, 8))
    for mean, spread in run.cases:
        x = torch.randn(4, 8) * spread + mean
        what = f"mended of a tensor with sum {x.sum():.1f}"
        with quiet():
            expected = broken_model(x)
        mc.reset()
        compiled = mc.compile(mended, fullgraph=True, backend="eager")
        run.close(mended(x), expected, f"{what}, in eager")
        got, why = called(compiled, x)
        broken = run.seen(why)
        run.that(not broken, what, "one graph", f"a break: {broken}")
        run.close(got, expected, what)
        after = mc.explain(compiled)(x)
        run.changed("\n".join(before.code), "\n".join(after.code), "the graphs of the model")
    pieces = sum(capture.graph.op_count > 0 for capture in before.captures)
    return f"{pieces} graphs with operations before, {after.graph_count} now"


# -- 3


class Trail(list[str]):
    """A list that notes in which mode it grew, and what was in it when Python was asked for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: dict[str, bool] = {}
        self.moments: list[list[str]] = []

    def append(self, word: str) -> None:
        self.gradients[word] = torch.is_grad_enabled()
        super().append(word)

    def extend(self, words: Iterable[str]) -> None:
        for word in words:
            self.append(word)

    def __iadd__(self, words: Iterable[str]) -> Self:
        self.extend(words)
        return self


class Asked(TorchDispatchMode):
    """Notes the moments at which a tensor's value is asked for."""

    def __init__(self, trail: Trail) -> None:
        super().__init__()
        self.trail = trail

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.trail.moments.append(list(self.trail))
        return func(*args, **kwargs or {})


class Paper(io.StringIO):
    """Notes the moments at which something is printed."""

    def __init__(self, trail: Trail) -> None:
        super().__init__()
        self.trail = trail

    def write(self, text: str) -> int:
        self.trail.moments.append(list(self.trail))
        return super().write(text)


@lesson.exercise(
    "ex3",
    points=4,
    level="construct",
    visible=["print"],
    hidden=["item", "branch-on-tensor", "print"],
    forbidden=["disable", "graph_break"],
)
def cut_inside_a_with(run: Run, cut_inside: Callable[..., Any]) -> str:
    """The break's kind, the mode of what follows, and the order of side effects."""
    for reason in run.cases:
        function = cut_inside(reason)
        what = f"cut_inside({reason!r})"
        run.that(run.seen(callable(function)), what, "a function", "none")
        x = torch.ones(4, 8, requires_grad=True)
        noted = Trail()
        with contextlib.redirect_stdout(Paper(noted)), Asked(noted):
            expected = run.seen(function(x, noted))
        run.expect(list(noted), ["before", "inside", "after"], f"the trail of {what}, in eager")
        moment = run.seen(noted.moments[0] if noted.moments else "no such moment")
        run.that(moment == ["before"], f"the trail of {what} at the break", ["before"], moment)
        mode = "with gradients" if noted.gradients.get("after", True) else "without gradients"
        run.expect(mode, "with gradients", f'the mode in which {what} appends "after"')
        compiled = mc.compile(function, backend="eager")
        trail: list[str] = []
        with quiet():
            got = compiled(x, trail)
        run.expect(trail, ["before", "inside", "after"], f"the trail of {what}, compiled")
        with quiet():
            told = mc.explain(compiled)(x, [])
        kinds = run.seen([each.id for each in told.breaks])
        run.that(bool(kinds), what, f"a break of kind {reason!r}", "no break")
        run.that(kinds[0] == reason, what, f"a break of kind {reason!r}", repr(kinds[0]))
        resumed = [c for c in told.captures if "resumed" in c.name]
        inside = [c for c in resumed if not c.grad_enabled and c.graph.op_count]
        count, suitable = run.seen(len(resumed)), run.seen(len(inside))
        run.that(
            suitable > 0,
            what,
            "a resume function that begins without gradients and has operations",
            f"{count} resume function(s), none of which does",
        )
        run.close(got, expected, what)
        run.expect(got.requires_grad, expected.requires_grad, f"requires_grad of {what}'s result")
    return "cut inside, in the right mode; before, inside, after"


# -- 4


def dead_and_alive(x: torch.Tensor) -> torch.Tensor:
    big = x.exp()
    small = big.sum()
    pause()
    return x * small


def in_a_loop(x: torch.Tensor, times: int = 3) -> torch.Tensor:
    step, total = x.cos(), x * 0
    while times > 0:
        total = total + step
        pause()
        times = times - 1
    return total


def in_a_try(x: torch.Tensor) -> torch.Tensor:
    spare, twice = x * 2, x + x
    try:
        pause()
        return twice[[].index(1)]
    except ValueError:
        return spare


@lesson.exercise(
    "ex4",
    points=5,
    level="implement",
    visible=[dead_and_alive, in_a_loop],
    hidden=[in_a_try, talking_model],
    forbidden=["breaks"],
)
def names_that_are_alive(run: Run, live_names: Callable[..., Any]) -> str:
    """The compiler cuts frames by the answer."""
    right = breaks.live_names
    answers: list[Any] = []
    most: dict[Any, set[str]] = {}

    def checked(code: CodeType, point: int) -> set[str]:
        got = live_names(code, point)
        answers.append((code.co_name, point, got))
        most.update({(code.co_name, point): right(code, point)})
        return set(got) if isinstance(got, set | frozenset) else set(code.co_varnames)

    def no_more_than_read_later() -> None:
        for name, point, got in run.seen(answers):
            what = f"live_names of {name} at unit {point}"
            run.that(isinstance(got, set | frozenset), what, "a set of names", repr(got))
            more = ", ".join(sorted(got - most.get((name, point), got)))
            run.that(not more, what, "no more names than are read later", f"also {more}")
        answers.clear()

    def every_name(code: CodeType, point: int) -> set[str]:
        return set(code.co_varnames) | right(code, point)

    checked(dead_and_alive.__code__, 0)
    no_more_than_read_later()
    path, before, after = "minicompile.dynamo.breaks:live_names", [], []
    for case in run.cases:
        what, target, inputs = case.__name__, case, (torch.ones(2, 3),)
        if case is talking_model:
            what, (target, *inputs) = "the lesson model", talking_model()
        answer = Listening(checked)
        with run.replaced(path, answer):
            compiled = mc.compile(target, backend="eager")
            got = run.seen(attempt(answer, compiled, *inputs))
            no_more_than_read_later()
            run.that(run.seen(answer.calls) > 0, what, "a cut by your rule", "none")
            is_tensor = isinstance(got, torch.Tensor)
            run.that(is_tensor, f"a call of {what}", "what eager returns", got)
            with quiet():
                expected = target(*inputs)
            run.near(got, expected, f"a call of {what}")
            after.append(graphs_of(compiled, *inputs))
        mc.reset()
        with run.replaced(path, every_name):
            before.append(graphs_of(mc.compile(target, backend="eager"), *inputs))
    run.changed("\n".join(before), "\n".join(after), "the graphs, against handing over every name")
    return "nothing is missing, and nothing dead is handed over"


def attempt(answer: Listening, compiled: Any, *inputs: Any) -> Any:
    """What a call gives; the text of what it raises. Raises what the answer raised."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = compiled(*inputs)
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
    answer.check()
    return got


# -- 5


def innermost(x: torch.Tensor) -> torch.Tensor:
    y = x + x
    pause()
    return y


def between(x: torch.Tensor, more: int) -> torch.Tensor:
    return innermost(x) * more


def caller(x: torch.Tensor, more: int) -> torch.Tensor:
    return x + between(x, more=more)


def two_calls_deep(x: torch.Tensor) -> torch.Tensor:
    return innermost(x) - 5


def three_calls_deep(x: torch.Tensor) -> torch.Tensor:
    return caller(x, 3) * 5


def deep_in_a_loop(x: torch.Tensor) -> torch.Tensor:
    for number in range(3):
        x = x + caller(x, *[number])
    return x


@lesson.exercise(
    "ex5",
    points=6,
    level="real",
    visible=[two_calls_deep],
    hidden=[three_calls_deep, deep_in_a_loop],
    forbidden=["resume_after"],
)
def every_open_frame_is_cut(run: Run, go_on_after: Callable[..., Any]) -> str:
    """The compiler's own rule is replaced by the answer."""
    path = "minicompile.dynamo.capture:resume_after"
    for function in run.cases:
        x = torch.ones(2, 3)
        answer = Listening(go_on_after)
        with run.replaced(path, answer):
            compiled = mc.compile(function, backend="eager")
            got = attempt(answer, compiled, x)
            told = graphs_of(compiled, x)
        what = f"{function.__name__.replace('_', ' ')}: the result for ones(2, 3)"
        run.that(run.seen(answer.calls) > 0, what, "a cut by your rule", "none")
        run.close(got, function(x), what)
        run.that("operator.add" in run.seen(told), what, "graphs", "a frame in eager")
    model, tokens = talking_model()

    def none_inside(frame: Any, resume: Any, fix_cells: Any) -> Any:
        if frame.parent is not None:
            raise refusal("place-of-cut", "no cut inside calls")
        return go_on_after(frame, resume, fix_cells)

    with run.replaced(path, none_inside):
        before = graphs_of(mc.compile(model, backend="eager"), tokens)
    mc.reset()
    answer = Listening(go_on_after)
    with run.replaced(path, answer):
        compiled = mc.compile(model, backend="eager")
        with quiet():
            got = attempt(answer, compiled, tokens)
            expected = model(tokens)
        run.close(got, expected, "the lesson model")
        after = graphs_of(compiled, tokens)
    run.changed(before, after, "the graphs of the lesson model")
    return "breaks inside calls cut every frame; the lesson model talks and is compiled"
