"""Checks of lesson 02."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

import minicompile as mc
from minicompile.dynamo import dispatch
from minicompile.dynamo.entry import Entry
from minicompile.dynamo.result import Guard, GuardFailure, Source
from minicompile.dynamo.variables import is_fixed
from minicompile.lessons.exercise import Lesson, Run, show
from minicompile.lessons.model import GPT, GPTConfig
from minicompile.plugins.nested_frames import hook
from minicompile.plugins.nested_frames.frames import NestedCode, NestedFrames

lesson = Lesson("02")


def mixed(x: Any, factor: Any, parts: Any, options: Any) -> Any:
    y = x * factor + options["bias"]
    for part in parts:
        y = y + part
    return y


@lesson.exercise(
    "ex1",
    points=2,
    level="construct",
    visible=["equals", "type"],
    hidden=["tensor", "length"],
    forbidden=["guard_rules", "without", "scoped", "reset"],
)
def miss_on_request(run: Run, arguments_that_miss: Callable[..., Any]) -> str:
    """The first guard that fails is of the kind asked for."""
    for kind in run.cases:
        compiled = mc.compile(mixed, backend="eager", dynamic=False)
        compiled(torch.ones(3), 2, [1, 2], {"bias": 1})
        arguments = arguments_that_miss(kind)
        told = f"arguments_that_miss({kind!r})"
        shown = run.seen(show(arguments))
        is_tuple = run.seen(isinstance(arguments, tuple))
        run.that(is_tuple, told, "a tuple of arguments", shown)
        eager = run.seen(mixed(*arguments))
        run.close(compiled(*arguments), eager, told)
        misses = mc.timeline(compiled)[0].misses
        failed = run.seen(misses[1].failures[0].guard.kind if len(misses) > 1 else "no miss")
        run.that(failed == kind, told, kind, failed)
    return f"{len(run.cases)} misses, each of the kind asked for"


def f(x: torch.Tensor, k: Any) -> Any:
    return x * k


def g(x: torch.Tensor, k: Any) -> Any:
    return x + len(str(k))


def h(x: torch.Tensor, a: Any, b: Any) -> Any:
    return x * a - b if a else x


def listed(x: torch.Tensor, many: Any) -> Any:
    return x * len(many) if isinstance(many, list) else x - many[0]


class Cases:
    """Pairs of calls: the second may not be answered by the entry of the first."""

    visible = ((f, (2.0,), (2,)), (f, (2,), (3,)), (h, (1, 2), (3, 4)))
    hidden = (
        (g, (1,), (True,)),
        (g, (0.0,), (0,)),
        (listed, ([1],), ((1,),)),
        (h, (None, 1), (1, 1)),
    )


def asked_of(guard: Guard) -> bool:
    """Is it a guard on an argument, or on an item of one?"""
    place: Source | None = guard.sources[0] if len(guard.sources) == 1 else None
    while place is not None and place.kind == "item":
        place = place.base
    return guard.kind in ("equals", "type") and place is not None and place.kind == "local"


def asking(first_failure: Callable[..., Any]) -> type[Entry]:
    """Cache entries that ask the answer before they run."""

    class Asking(Entry):
        def __init__(
            self, captured: Any, compiled: Any, parameters: Sequence[str], *rest: Any
        ) -> None:
            super().__init__(captured, compiled, parameters, *rest)
            answered = self.call

            def call(*arguments: Any) -> Any:
                values = dict(zip(parameters, arguments, strict=True))
                return answered(*arguments) if self.found(values) is None else dispatch.MISS

            self.call = call

        def found(self, values: dict[str, Any]) -> Any:
            guards = [guard for guard in self.capture.guards if asked_of(guard)]
            names = {guard.sources[0].name for guard in guards}
            return first_failure(guards, {name: value_at(name, values) for name in names})

        def misfit(self, values: dict[str, Any]) -> tuple[GuardFailure | None, dict[Source, str]]:
            guard = self.found(values)
            if not isinstance(guard, Guard):
                return super().misfit(values)
            name = guard.sources[0].name
            return GuardFailure(guard, value_at(name, values)), {}

    return Asking


def value_at(name: str, values: dict[str, Any]) -> Any:
    """What a path such as `options['bias']` leads to; None where it does not lead anywhere."""
    try:
        return eval(name, {}, values)
    except (LookupError, TypeError, AttributeError):
        return None


def entries_of_model(ask: Callable[..., Any] | None = None) -> tuple[str, list[Any]]:
    """What the cache of the lesson model holds after a call without targets and one with; the results."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16))
    idx = torch.zeros(2, 8, dtype=torch.int64)
    with mock.patch.object(dispatch, "Entry", asking(ask) if ask else Entry):
        compiled = mc.compile(model, backend="eager", dynamic=False)
        given = [compiled(idx, None), compiled(idx, idx)]
    return str(mc.timeline(compiled)), given


def results_of_model() -> list[Any]:
    """What eager gives without targets and with."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16))
    idx = torch.zeros(2, 8, dtype=torch.int64)
    return [model(idx, None), model(idx, idx)]


@lesson.exercise(
    "ex2",
    points=3,
    level="implement",
    visible=Cases.visible,
    hidden=Cases.hidden,
    forbidden=["same_constant", "failures", "evaluate", "condition", "misfit", "guard_rules"],
    without=["guard:equals", "guard:type"],
)
def answer_asks_guards(run: Run, first_failure: Callable[..., Any]) -> str:
    """The cache reuses an entry if the answer finds no failure."""
    x = torch.arange(1, 4)
    first_failure([], {})
    for function, first, second in run.cases:
        with mock.patch.object(dispatch, "Entry", asking(first_failure)):
            compiled = mc.compile(function, backend="eager", dynamic=False)
            one = ", ".join(map(repr, first))
            two = ", ".join(map(repr, second))
            run.close(
                compiled(x, *first), function(x, *first), f"{function.__name__}(int64 x, {one})"
            )
            got, wanted = run.seen(compiled(x, *second)), function(x, *second)
            told = f"{function.__name__}(int64 x, {two}) reused the entry for {one}"
            dtypes = [str(t.dtype).removeprefix("torch.") for t in (wanted, got)]
            run.that(dtypes[0] == dtypes[1], told, *dtypes)
            run.close(got, wanted, told)
            misses = mc.timeline(compiled)[0].misses
            count = run.seen(len(misses))
            run.that(count == 2, told, "two versions", f"{count} misses")
            told = f"{function.__name__}(int64 x, {two}) after {one}"
            compiled(x, *ast.literal_eval(repr(first)))  # equal, but other objects
            again = run.seen(len(mc.timeline(compiled)[0].misses) - 2)
            run.that(not again, f"{told}, then {one} again", "a hit", "a miss")
            failure = misses[1].failures[0] if misses[1].failures else None
            got_guard = run.seen(failure.guard.expression if failure else "none")
            earliest = next(
                guard.expression
                for guard in dispatch_guards(compiled)
                if changed_at(guard, function, second)
            )
            run.that(got_guard == earliest, f"the first failure of {told}", earliest, got_guard)
    before, _ = entries_of_model()
    after, results = entries_of_model(first_failure)
    for got, wanted in zip(run.seen(results), results_of_model(), strict=True):
        same = type(got) is type(wanted)
        run.that(same, "model(idx, targets) after model(idx, None)", "logits and loss", show(got))
        run.near(
            got[1] if isinstance(got, tuple) else got,
            wanted[1] if isinstance(wanted, tuple) else wanted,
            "the model",
        )
    run.changed(before, after, "the entries of the model")
    return "reuse matches eager"


def dispatch_guards(compiled: Any) -> list[Guard]:
    """The guards of the first version that the answer is asked about."""
    found = mc.api.dispatcher_of(compiled)
    assert found is not None
    return [guard for guard in found.entries[0].capture.guards if asked_of(guard)]


def changed_at(guard: Guard, function: Any, arguments: Sequence[Any]) -> bool:
    """Whether a guard on an argument fails for these arguments."""
    names = function.__code__.co_varnames[1 : function.__code__.co_argcount]
    value = value_at(guard.sources[0].name, dict(zip(names, arguments, strict=True)))
    if guard.kind == "type":
        return type(value) is not guard.expected
    return type(value) is not type(guard.expected) or value != guard.expected


RATES = [0.01 * 2**step for step in range(8)]


def decay(x: torch.Tensor, step: int) -> torch.Tensor:
    return x * RATES[min(step, 7)]


@lesson.exercise(
    "ex3",
    points=3,
    level="implement",
    visible=[range(2, 8)],
    hidden=[range(2, 12), (9, 3, 30, 2)],
    forbidden=["disable", "allow_in_graph", "mark_dynamic", "compile", "reset", "exec"],
)
def versions_of_decay(run: Run, steady: Callable[..., Any]) -> str:
    """Two versions serve all steps."""

    def versions(function: Callable[..., Any], steps: Sequence[int]) -> tuple[str, int]:
        compiled, x = mc.compile(function, backend="eager"), torch.tensor([1.0, -2.0])
        for step in steps:
            run.close(compiled(x, step), decay(x, step), f"steady(x, {step})")
        timelines = mc.timeline(compiled)
        return str(timelines), run.seen(max(len(timeline.misses) for timeline in timelines))

    made = 0
    for steps in run.cases:
        before, many = versions(decay, steps)
        after, made = versions(steady, steps)
        told = f"versions for the steps {', '.join(map(str, steps))}"
        run.that(made <= 2, told, "at most 2", made)
        run.changed(before, after, "the versions in the cache")
    return f"{many} -> {made} versions"


def shifted(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) + 1


def twice(x: torch.Tensor) -> torch.Tensor:
    return shifted(shifted(x))


def one_name(which: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Two functions of one name."""
    if which:

        def made(x: torch.Tensor) -> torch.Tensor:
            return x * 3
    else:

        def made(x: torch.Tensor) -> torch.Tensor:
            return x - 3

    return made


def both_of_one_name(x: torch.Tensor) -> torch.Tensor:
    namespace = {"x": x, "first": one_name(True), "second": one_name(False)}
    exec("x = second(first(x))", namespace)
    return namespace["x"]


FOUR_CALLS = "for _ in range(4): h = model(h)"


def script(text: str, model: Any, h: torch.Tensor) -> torch.Tensor:
    names = {"model": model, "h": h}
    exec(text, names)
    result: torch.Tensor = names["h"]
    return result


def entry_of(frames: NestedFrames, function: Any) -> Callable[..., Any]:
    """An entry that is gone as soon as nobody keeps it."""
    code = NestedCode(frames, function.__code__)

    def entry(function: Any, *given: Any) -> Any:
        return code.entry(function, *given) if callable(code.entry) else code.entry

    return entry


def of_a_library() -> Any:
    """A function that says it is the standard library's; new, so that the hook has not seen it."""
    names: dict[str, Any] = {"__name__": "textwrap"}
    exec("def indent(x): return x", names)
    return names["indent"]


@lesson.exercise(
    "ex4",
    points=4,
    level="real",
    visible=[shifted, twice],
    hidden=[both_of_one_name, shifted],
    forbidden=["standing_of", "NestedFrames", "NestedCode", "codes", "dispatchers", "watched"],
)
def answer_is_asked(run: Run, decide: Callable[..., Any]) -> str:
    """The hook asks the answer about what eager code calls."""
    known: dict[NestedFrames, dict[Any, Any]] = {}
    questions: Counter[str] = Counter()

    def callback(frames: NestedFrames, function: Any) -> Any:
        questions[function.__qualname__] += 1
        module = str(function.__globals__.get("__name__", ""))
        given = decide(function, known.setdefault(frames, {}), functools.partial(entry_of, frames))
        if is_fixed(module) and given is not hook.NEVER:
            told = f"decide({function.__qualname__} of {module})"
            wrong.append((told, "hook.NEVER", type(given).__name__))
        return hook.NEVER if is_fixed(module) else given

    wrong: list[tuple[str, str, str]] = []
    torch.manual_seed(0)
    block = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16)).blocks[0]
    x = torch.randn(2, 16, 32)
    before = mc.explain(script)("h = 2", block, x)
    programs = [(function, f"{function.__name__} below exec") for function in run.cases] + [
        (block, "the block")
    ]
    library = of_a_library()
    with run.replaced("minicompile.plugins.nested_frames.frames:NestedFrames.decide", callback):
        mc.compile(script, backend="eager")(FOUR_CALLS, library, x)
        for given in run.seen(wrong):
            run.that(False, *given)
        for program, told in programs:
            questions.clear()
            compiled = mc.compile(script, backend="eager")
            got = compiled(FOUR_CALLS, program, x)
            run.close(got, script(FOUR_CALLS, program, x), told)
            name = getattr(program, "__name__", "Block.forward")
            run.expect(questions[name], 1, f"questions about {name} in 4 calls")
            after = mc.explain(compiled)(FOUR_CALLS, program, x)
            run.that(run.seen(after.op_count) > 0, told, "a graph below exec", "none")
    run.changed("\n".join(before.code), "\n".join(after.code), "the graphs below exec")
    return f"{len(programs)} functions are compiled below exec, each asked about once"
