"""Exercises: what a check cell calls, and what the checks of a lesson are made of.

A lesson's checks stand in `notebooks/checks/lesson_NN.py`. Each is a function of a `Run` and of the names
that the answer cell defines; it runs the learner's answer inside the compiler, on visible inputs in the
notebook and on hidden ones when it is graded, and says in one line what it saw:

    lesson = Lesson("10")

    @lesson.exercise("ex3", points=3, visible=[(2, 3)], hidden=[(5, 1)], without=["lowering:aten.addcmul"])
    def addcmul_is_a_loop(run: Run, lower_addcmul: Any) -> str:
        for shape in run.cases:
            ...
            run.expect(got, expected, f"addcmul of shape {shape}")
        return "one kernel, no extern call"

A wrong answer raises `Wrong`, whose message states input, expected and got. `check("ex3")` in a notebook
doesn't raise: it gives a `Verdict`, which is shown as a card, so that the cells below it run all the same.

In the notebook a check runs in one process. Grading splits it: the answer's process runs the check's probe
(`lessons/probe.py`) and sends every value that `Run.seen` gets as data; another process, which has no
answer, runs the whole check with the reference answers and gets those data from `Run.seen`.

    answer                       probe: run.seen(got) -> data ----+
    judge     check with the reference: run.seen(its own) <- data +-> Wrong, or a line
"""

from __future__ import annotations

import contextlib
import html
import inspect
import json
import linecache
import re
import secrets
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from minicompile.errors import MinicompileError
from minicompile.lessons import rerun, wire
from minicompile.lessons.guard import Terms, forbidden_uses
from minicompile.lessons.notebook import checks_file, checks_text, execute
from minicompile.lessons.wire import Raised, show
from minicompile.ops.display import count_text
from minicompile.ops.registry import scoped, without

Cases = Sequence[Any] | Callable[[], Sequence[Any]]

DIFFICULTY = {
    "read": "easy",
    "construct": "solid",
    "implement": "solid",
    "real": "hard",
    "stretch": "hard",
}
"""Kinds of exercise, in rising difficulty, and what a learner is told of each."""

LEVELS = tuple(DIFFICULTY)

VERDICT = "application/vnd.minicompile.verdict+json"
"""The type under which a verdict stands as data among the outputs of a check cell."""


class Wrong(AssertionError):
    """An answer is wrong: for this input that was expected, and this came."""

    def __init__(self, given_input: str, expected: object, got: object) -> None:
        super().__init__(f"{given_input}: expected {expected}, got {got}")


class NotAnswered(Wrong):
    """The answer cell is as it was released."""

    __init__ = AssertionError.__init__


@dataclass(frozen=True)
class Verdict:
    """What a check says of an answer. A notebook shows it as a card, a terminal as a line of text."""

    exercise: str
    passed: bool
    answered: bool
    says: str
    """What a right answer achieved; otherwise input, expected and got."""
    hidden: int = 0
    """How many inputs grading tries that the notebook does not show."""

    @property
    def title(self) -> str:
        """The exercise and the verdict: "ex2 pass"."""
        state = "pass" if self.passed else "wrong" if self.answered else "no answer yet"
        return f"{self.exercise} {state}"

    @property
    def outlook(self) -> str:
        """One sentence on hidden inputs, for an answer that passed the visible ones."""
        more = count_text(self.hidden, "hidden input")
        return f"Grading tries {more} more." if self.passed and self.hidden else ""

    def __repr__(self) -> str:
        said = f"{self.title}: {self.says}" if self.says else self.title
        return f"{said}\n{self.outlook}" if self.outlook else said

    def _repr_mimebundle_(self, **_: object) -> dict[str, object]:
        """The verdict for a notebook: a card, text, and data (`VERDICT`)."""
        colour = "#16a34a" if self.passed else "#dc2626" if self.answered else "#9ca3af"
        mark = "✓" if self.passed else "✗" if self.answered else "…"
        # Inline styles: a notebook that isn't trusted loses style sheets.
        card = f'<div style="border-left: 6px solid {colour}; padding: 4px 12px; margin: 4px 0">'
        card += f'<b style="color: {colour}">{mark} {html.escape(self.title)}</b>'
        if self.says:
            said = re.sub(r"\b(expected|got) ", r"<b>\1</b> ", html.escape(self.says))
            card += f'<div style="white-space: pre-wrap; overflow-wrap: anywhere">{said}</div>'
        if self.outlook:
            card += f'<div style="opacity: 0.7">{self.outlook}</div>'
        data = {"exercise": self.exercise, "passed": self.passed, "answered": self.answered}
        return {"text/plain": repr(self), "text/html": f"{card}</div>", VERDICT: data}


@dataclass
class Run:
    """One check of one answer: its inputs, and the ways to judge it."""

    cases: Sequence[Any]
    as_data: Callable[[Any], Any] = lambda value: wire.thaw(wire.freeze(value))
    """The data that stand for a value; here, as in a notebook, they went nowhere."""
    changes: list[str] = field(default_factory=list)
    """What the answer changed in the compiler's results, as `changed` was told."""
    count: int = 0
    """Values seen so far."""

    def seen(self, value: Any) -> Any:
        """The answer's value as data: all that a judge can know of it. See `lessons/wire.py`.

        Random numbers start anew after each, so that what an answer draws changes no later input.
        """
        self.count += 1
        torch.manual_seed(self.count)
        return self.as_data(value)

    def expect(self, got: object, expected: object, given_input: str) -> None:
        """Raises Wrong unless both are equal and of the same type."""
        self.same(self.seen(got), expected, given_input)

    def same(self, got: object, expected: object, given_input: str) -> None:
        """`expect` for what `seen` gave."""
        if type(got) is not type(expected) or got != expected:
            raise Wrong(given_input, show(expected), show(got))

    def close(self, got: object, expected: torch.Tensor, given_input: str, **how: Any) -> None:
        """Raises Wrong unless `got` is a tensor of the same shape, dtype and, nearly, numbers.

        `how` goes to `torch.testing.assert_close`: rtol and atol.
        """
        self.near(self.seen(got), expected, given_input, **how)

    def all_close(
        self,
        got: object,
        expected: Sequence[torch.Tensor] | Mapping[str, torch.Tensor],
        given_input: str,
        **how: Any,
    ) -> None:
        """The same for each tensor of a list or tuple. Keys of `expected` go behind `given_input`."""
        many = self.seen(got)
        right = expected if isinstance(expected, Mapping) else dict(enumerate(expected))
        if not isinstance(many, list | tuple) or len(many) != len(right):
            raise Wrong(given_input, f"{len(right)} tensors", show(many))
        for one, (name, other) in zip(many, right.items(), strict=True):
            what = f"{given_input}{name}" if isinstance(name, str) else given_input
            self.near(one, other, what, **how)

    def near(self, got: object, expected: torch.Tensor, given_input: str, **how: Any) -> None:
        """`close` for what `seen` gave."""
        if not isinstance(got, torch.Tensor):
            raise Wrong(given_input, show(expected), show(got))
        try:
            torch.testing.assert_close(got, expected, equal_nan=True, **how)
        except AssertionError as error:
            right, wrong = show(expected), show(got)
            where = re.search(r"Greatest absolute difference: .*? at index \(.*?\)", str(error))
            more = f"; {where[0]}" if where and right == wrong else ""
            raise Wrong(given_input, right, wrong + more) from None

    def rerun(
        self,
        kernel: tuple[str, str],
        function: Callable[..., torch.Tensor],
        inputs: Sequence[torch.Tensor],
        given_input: str,
        **how: Any,
    ) -> None:
        """Raises Wrong unless a kernel, its C text and name, gives what `function` does for other inputs.

        They are new float32 numbers of the shapes of `inputs`, and the text runs in a process of its own.
        """
        text, name = self.seen(kernel)
        draw = torch.Generator().manual_seed(secrets.randbits(60))
        others = [torch.randn(x.shape, generator=draw) for x in inputs]
        expected = function(*others)
        data = [x.numpy().tobytes() for x in others]
        what = f"{given_input}, its kernel run again on other numbers"
        try:
            raw = rerun.result_of(text, name, data, expected.numel() * expected.element_size())
        except MinicompileError as error:
            raise Wrong(what, show(expected), error) from None
        got = torch.frombuffer(bytearray(raw), dtype=expected.dtype).view(expected.shape)
        self.near(got, expected, what, **how)

    def that(self, holds: bool, given_input: str, expected: object, got: object) -> None:
        """Raises Wrong with these words unless it holds: judge only what `seen` gave."""
        if not holds:
            raise Wrong(given_input, expected, got)

    def changed(self, before: str, after: str, what: str) -> None:
        """The answer was used: `what` (such as "the block's kernels") is not what it is without it."""
        if self.seen(before) == self.seen(after):
            raise Wrong(what, "a change by your answer", "the same as without it")
        self.changes.append(what)

    @contextlib.contextmanager
    def replaced(self, path: str, answer: Any) -> Iterator[mock.Mock]:
        """The compiler's own function `package.module:name` is the answer for a while.

        Gives a mock that counts the calls. For what has no registry; with one, use its decorator.
        """
        spy = mock.Mock(side_effect=answer)

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return spy(*args, **kwargs)

        with mock.patch(path.replace(":", "."), stand_in):
            yield spy


def receiving(received: Iterable[Any]) -> Callable[[Any], Any]:
    """`Run.as_data` of a judge: in place of each value, what the answer's process sent there."""
    items = iter(received)

    def receive(_: object) -> Any:
        item = next(items, {"raised": "it did not finish"})
        if isinstance(item, dict) and "raised" in item:
            raise Raised(str(item["raised"]))
        return wire.thaw(item)

    return receive


def expects(value: Any) -> Any:
    """Marks an expected value in a table of cases, which the answer's process doesn't get."""
    return value


@dataclass(frozen=True)
class Exercise(Terms):
    """An exercise: what its answer is called, what checks it, and what the answer must do without."""

    points: int
    level: str
    test: Callable[..., str]
    visible: Cases
    hidden: Cases
    without: tuple[str, ...]
    """Rules taken away while the answer is checked."""

    def run(self, namespace: Mapping[str, Any], hidden: bool = False) -> str:
        """Check the answers in `namespace`: what a pass says. Raises Wrong."""
        for name in self.answers:
            cell = "".join(linecache.getlines(file_of(namespace.get(name))))
            for used in forbidden_uses(cell, self):
                raise Wrong(f"{self.name}: {name}", "an answer of your own", f"a use of {used}")
        return self.judged(Run(self.cases(hidden)), namespace, hidden)

    def cases(self, hidden: bool) -> list[Any]:
        """The inputs of a run."""
        chosen = self.hidden if hidden else self.visible
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            return list(chosen() if callable(chosen) else chosen)

    def called(self, run: Run, namespace: Mapping[str, Any]) -> str:
        """What the check says of the answers in a namespace, which may be missing."""
        answers = [namespace.get(name) for name in self.answers]
        if any(answer is None or answer is ... for answer in answers):
            raise NotImplementedError  # as a stub does
        return self.test(run, *answers)

    def judged(self, run: Run, namespace: Mapping[str, Any], hidden: bool) -> str:
        """What a pass says. Raises Wrong, whose message begins with the exercise."""
        before = f"{self.name}: " + "an input that the notebook does not show, " * hidden
        try:
            with fresh(self.without):
                return self.called(run, namespace)
        except Wrong as wrong:
            wrong.args = (f"{before}{wrong}",)
            raise
        except (Exception, SystemExit) as error:
            got = self.error_text(error, namespace)
            if not got:
                raise NotAnswered(f"{self.name}: no answer yet") from None
            raise Wrong(f"{before}{self.test.__name__}", "a result", got) from error

    def sent(self, namespace: Mapping[str, Any], hidden: bool) -> list[Any]:
        """What the answers in `namespace` give a probe, frozen; an error of theirs is the last item."""
        sent: list[Any] = []

        def send_on(value: Any) -> Any:
            sent.append(wire.freeze(value))
            return value

        try:
            with fresh(self.without):
                self.called(Run(self.cases(hidden), send_on), namespace)
        except (Exception, SystemExit) as error:
            sent.append({"raised": self.error_text(error, namespace)})
        return sent

    def error_text(self, error: BaseException, namespace: Mapping[str, Any]) -> str:
        """An error and the line of the answer that it came from; "" for that of a released cell."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, NotImplementedError) and not str(cause):
                return ""
            cause = cause.__cause__
        if isinstance(error, Raised):
            return str(error)
        what = f"{type(error).__name__}: {error}".strip()[:600]
        files = {file_of(namespace.get(name)) for name in self.answers}
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if frame.filename in files:
                return f"{what} in line {frame.lineno} of your cell: `{frame.line}`"
        return what


@contextlib.contextmanager
def fresh(taken_away: Sequence[str]) -> Iterator[None]:
    """A compiler that remembers no earlier cell, seeded, with its rules as they were afterwards.

    It doesn't warn of what runs in eager: an error of the answer is told by the check.
    """
    from minicompile import api, extension  # noqa: F401 (fills the registries)

    api.reset()
    random = torch.random.fork_rng(devices=())
    try:
        with scoped(), without(*taken_away), random, warnings.catch_warnings():
            torch.manual_seed(0)
            warnings.filterwarnings("ignore", "(?s).*runs in eager")
            yield
    finally:
        api.reset()


def file_of(answer: Any) -> str:
    """The cell in which a function, or a function of a class, was written; "" for other values."""
    members = vars(answer).values() if isinstance(answer, type) else [answer]
    files = (m.__code__.co_filename for m in members if inspect.isfunction(m))
    return next(files, "")


class Lesson:
    """The exercises of one lesson, by name, in order."""

    def __init__(self, number: str) -> None:
        self.number = number
        self.exercises: dict[str, Exercise] = {}

    def exercise(
        self,
        name: str,
        *,
        points: int,
        level: str,
        visible: Cases,
        hidden: Cases,
        forbidden: Sequence[str] = (),
        without: Sequence[str] = (),
        computed_names: bool = False,
    ) -> Callable[[Callable[..., str]], Exercise]:
        """Decorator of the function that checks exercise `name`; see `Exercise`. `level` is one of LEVELS."""

        def add(test: Callable[..., str]) -> Exercise:
            answers = tuple(inspect.signature(test).parameters)[1:]
            exercise = Exercise(
                name, answers, frozenset(forbidden), computed_names, points, level, test,
                visible, hidden, tuple(without),
            )  # fmt: skip
            self.exercises[name] = exercise
            return exercise

        return add

    def __call__(self, name: str) -> Verdict:
        """Check an answer of the notebook that calls this, on its visible inputs: a verdict to show."""
        return self.verdict(name, sys._getframe(1).f_globals)

    def verdict(self, name: str, namespace: Mapping[str, Any], hidden: bool = False) -> Verdict:
        """Check the answer to exercise `name` in a namespace; a wrong answer raises nothing."""
        exercise = self.find(name)
        try:
            said = exercise.run(namespace, hidden)
        except NotAnswered:
            return Verdict(name, False, False, "")
        except Wrong as wrong:
            return Verdict(name, False, True, str(wrong).removeprefix(f"{name}: "))
        return Verdict(name, True, True, said, len(exercise.cases(hidden=True)))

    def find(self, name: str) -> Exercise:
        """The exercise of this name. Raises MinicompileError with the names of those that there are."""
        if name not in self.exercises:
            raise MinicompileError(
                f"lesson {self.number} has no {name}; it has {', '.join(self.exercises)}"
            )
        return self.exercises[name]


def send(name: str, probe: str, namespace: Mapping[str, Any]) -> None:
    """Run a probe on the answers in `namespace`, and leave what it sends in the file `answer.json`."""
    exercise = lesson_in(probe, f"probe_of_{name}").exercises[name]
    sent = [exercise.sent(namespace, hidden) for hidden in (False, True)]
    Path("answer.json").write_text(json.dumps(sent), encoding="utf-8")


def checks(number: str) -> Lesson:
    """The checks of lesson `number`. Raises MinicompileError for a lesson that has none."""
    return lesson_in(checks_text(number), f"minicompile_checks_{number}", str(checks_file(number)))


def lesson_in(text: str, name: str, file: str = "") -> Lesson:
    """The lesson that the text of a module defines."""
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = file or name
    execute(text, module.__file__, module.__dict__)
    lesson: Lesson = module.lesson
    return lesson
