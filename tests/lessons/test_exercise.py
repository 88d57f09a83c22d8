"""Checks of exercises: what they say of wrong answers, what they take away, what they leave behind."""

from __future__ import annotations

import contextlib
import json
import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile.dynamo import dispatch
from minicompile.dynamo.interpreter import bytecode
from minicompile.lessons.exercise import (
    VERDICT,
    Lesson,
    NotAnswered,
    Run,
    Verdict,
    Wrong,
    receiving,
)

run = Run([])


def cell(text: str, name: str = "<answer cell>") -> dict[str, Any]:
    """The names that a cell defines, its text known as a notebook's is."""
    namespace: dict[str, Any] = {"torch": torch, "mc": mc}
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), namespace)
    return namespace


def lesson_about(
    test: Callable[..., str], visible: list[Any], hidden: list[Any], **how: Any
) -> Lesson:
    """A lesson whose one exercise is ex1."""
    lesson = Lesson("99")
    lesson.exercise("ex1", points=1, level="read", visible=visible, hidden=hidden, **how)(test)
    return lesson


def doubles(run: Run, double: Callable[[int], int]) -> str:
    for number in run.cases:
        run.expect(double(number), 2 * number, f"double({number})")
    return f"{len(run.cases)} numbers"


def try_answer(lesson: Lesson, namespace: dict[str, Any], hidden: bool = False) -> None:
    """Check an answer on the visible inputs, perhaps on hidden ones too. Raises Wrong."""
    lesson.exercises["ex1"].run(namespace)
    if hidden:
        lesson.exercises["ex1"].run(namespace, hidden=True)


def check_cell(lesson: Lesson, namespace: dict[str, Any]) -> Any:
    """What a check cell shows in a notebook with this namespace."""
    return eval("check('ex1')", namespace | {"check": lesson})


# -- a run's words


@pytest.mark.parametrize("got", [2, 3.0, True, None])
def test_expect_wants_the_value_and_its_type(got: object):
    run.expect(3, 3, "f(1)")
    with pytest.raises(Wrong) as wrong:
        run.expect(got, 3, "f(1)")
    assert str(wrong.value) == f"f(1): expected 3, got {got}"


NAN = torch.tensor([torch.nan, 2.0])


@pytest.mark.parametrize("got", [NAN + 0.5, NAN.double(), NAN[:1], [1.0, 2.0], torch.ones(2)])
def test_close_wants_numbers_shape_and_dtype_and_knows_nan(got: object):
    run.close(NAN + 1e-7, NAN, "g(x)")
    run.close(NAN + 0.1, NAN, "g(x)", rtol=0.2, atol=0)
    with pytest.raises(Wrong, match=r"^g\(x\): expected float32\[2\] of \[nan, 2\], got"):
        run.close(got, NAN, "g(x)")


def test_replaced_puts_the_answer_into_the_compiler_for_a_while():
    original = dispatch.Dispatcher.answered
    with run.replaced(
        "minicompile.dynamo.dispatch:Dispatcher.answered", lambda self: {0: 7}
    ) as spy:
        compiled = mc.compile(torch.nn.Identity(), backend="eager")
        assert mc.timeline(compiled)[0].answered == {0: 7} and spy.call_count == 1
    assert dispatch.Dispatcher.answered is original


def test_an_answer_that_changes_nothing_is_wrong():
    own = Run([])
    own.changed("before", "after", "the block's kernels")
    assert own.changes == ["the block's kernels"]
    with pytest.raises(Wrong) as wrong:
        own.changed("same", "same", "the block's graph")
    assert str(wrong.value) == (
        "the block's graph: expected a change by your answer, got the same as without it"
    )
    assert own.changes == ["the block's kernels"]


# -- verdicts


def test_a_right_answer_passes_and_says_what_was_seen_and_how_many_inputs_follow():
    lesson = lesson_about(doubles, [1, 2], [5])
    verdict = check_cell(lesson, cell("def double(n):\n    return n + n\n"))
    assert verdict == Verdict("ex1", passed=True, answered=True, says="2 numbers", hidden=1)
    assert repr(verdict) == "ex1 pass: 2 numbers\nGrading tries 1 hidden input more."
    verdict = check_cell(lesson, cell("def double(n):\n    return n\n"))
    assert repr(verdict) == "ex1 wrong: double(1): expected 2, got 1"
    verdict = check_cell(lesson, {})
    assert repr(verdict) == "ex1 no answer yet"
    assert not verdict.passed and not verdict.answered


@pytest.mark.parametrize(
    ("passed", "answered", "colour"),
    [(True, True, "#16a34a"), (False, True, "#dc2626"), (False, False, "#9ca3af")],
)
def test_a_notebook_shows_a_verdict_as_a_coloured_card_and_keeps_it_as_data(
    passed: bool, answered: bool, colour: str
):
    verdict = Verdict("ex1", passed, answered, "expected <a>, got 2", 4)
    shown = verdict._repr_mimebundle_()
    card = str(shown["text/html"])
    assert colour in card and "<a>" not in card and "<style" not in card and "<script" not in card
    assert shown["text/plain"] == repr(verdict)
    state = {"exercise": "ex1", "passed": passed, "answered": answered}
    assert shown[VERDICT] == json.loads(json.dumps(state))


def test_hidden_inputs_are_tried_only_when_graded():
    lesson = lesson_about(doubles, [1, 2], [5])
    namespace = cell("def double(n):\n    return {1: 2, 2: 4}.get(n, 0)\n")
    assert check_cell(lesson, namespace).passed
    assert not lesson.verdict("ex1", namespace, hidden=True).passed
    with pytest.raises(Wrong) as wrong:
        lesson.exercises["ex1"].run(namespace, hidden=True)
    assert str(wrong.value) == (
        "ex1: an input that the notebook does not show, double(5): expected 10, got 0"
    )


@pytest.mark.parametrize(
    "text",
    [
        "def double(n):\n    raise NotImplementedError\n",
        "double = None\n",
        "pass\n",
        "double = ...\n",
    ],
)
def test_a_released_cell_is_not_answered(text: str):
    with pytest.raises(NotAnswered, match=r"^ex1: no answer yet$"):
        try_answer(lesson_about(doubles, [1], [5]), cell(text))


def test_an_exception_names_the_line_of_the_answer():
    namespace = cell("def double(n):\n    half = n / (n - 1)\n    return half * 4\n")
    with pytest.raises(Wrong) as wrong:
        try_answer(lesson_about(doubles, [1], []), namespace)
    assert str(wrong.value) == (
        "ex1: doubles: expected a result, got ZeroDivisionError: division by zero"
        " in line 2 of your cell: `half = n / (n - 1)`"
    )
    assert isinstance(wrong.value.__cause__, ZeroDivisionError)


# -- in two processes


def sent_by(lesson: Lesson, text: str, hidden: bool = False) -> list[Any]:
    return lesson.exercises["ex1"].sent(cell(text), hidden)


def judged(lesson: Lesson, received: list[Any], hidden: bool = False) -> str:
    """The verdict on what was sent, with a reference answer that is right."""
    exercise = lesson.exercises["ex1"]
    run = Run(exercise.cases(hidden), receiving(received))
    return exercise.judged(run, cell("def double(n):\n    return n + n\n"), hidden)


def test_a_judge_compares_what_was_sent_and_runs_no_answer():
    lesson = lesson_about(doubles, [1, 2], [5])
    assert sent_by(lesson, "def double(n):\n    return 2 * n\n") == [2, 4]
    assert judged(lesson, [2, 4]) == "2 numbers"
    with pytest.raises(Wrong, match=r"^ex1: double\(2\): expected 4, got 5$"):
        judged(lesson, [2, 5])


@pytest.mark.parametrize(
    ("received", "got"),
    [
        ([], "it did not finish"),
        ([2], "it did not finish"),
        ([2, {"other": "Always()"}], r"double\(2\): expected 4, got Always\(\)"),
        ([2, {"raised": "ValueError: no"}], "got ValueError: no"),
        ([{"pickle": "gASV"}], "no kind of data"),
        ([{"dtype": "load"}], "a dtype 'load'"),
        ([2, True], "expected 4, got True"),
    ],
)
def test_a_judge_takes_nothing_but_data(received: list[Any], got: str):
    with pytest.raises(Wrong, match=got):
        judged(lesson_about(doubles, [1, 2], [5]), received)


def test_an_error_of_an_answer_is_sent_as_text():
    sent = sent_by(lesson_about(doubles, [1], []), "def double(n):\n    return n / 0\n")
    assert sent == [
        {"raised": "ZeroDivisionError: division by zero in line 2 of your cell: `return n / 0`"}
    ]
    lesson = lesson_about(doubles, [1], [])
    with pytest.raises(NotAnswered):
        judged(lesson, sent_by(lesson, "def double(n):\n    raise NotImplementedError\n"))


# -- names an answer may not use


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("def double(n):\n    return torch.mul(n, 2)\n", "torch.mul"),
        ("def double(n):\n    return torch.special.mul(n, 2)\n", "mul"),
        ("from operator import mul\n\n\ndef double(n):\n    return mul(n, 2)\n", "mul"),
        ("from operator import mul as d\n\n\ndef double(n):\n    return d(n, 2)\n", "operator"),
        ("import operator as o\n\n\ndef double(n):\n    return o.mul(n, 2)\n", "mul"),
    ],
)
def test_forbidden_names_are_found_wherever_they_stand(text: str, name: str):
    lesson = lesson_about(doubles, [1], [], forbidden=[name])
    with pytest.raises(Wrong) as wrong:
        try_answer(lesson, cell(text))
    assert str(wrong.value) == f"ex1: double: expected an answer of your own, got a use of {name}"


# -- the state of the compiler


@pytest.mark.parametrize("right", [True, False])
def test_rules_are_taken_away_for_the_check_and_those_of_the_answer_go_with_it(right: bool):
    def looks(run: Run, add_rule: Callable[[], None]) -> str:
        assert "BINARY_OP" not in bytecode
        add_rule()
        run.expect(right, True, "a rule")
        return "seen"

    before = dict(bytecode.records)
    lesson = lesson_about(looks, [], [], without=["bytecode:BINARY_OP"])
    answer = {"add_rule": lambda: bytecode("BINARY_OP", "MY_OWN")(len)}  # type: ignore[arg-type]
    with contextlib.nullcontext() if right else pytest.raises(Wrong):
        try_answer(lesson, answer)
    assert bytecode.records == before


def test_a_check_starts_from_an_empty_cache():
    compiled = mc.compile(lambda x: x + 1, backend="eager")
    compiled(torch.ones(2))

    def counts(run: Run, answer: Any) -> str:
        assert not mc.timeline(answer)[0].misses
        answer(torch.ones(2))
        return "counted"

    try_answer(lesson_about(counts, [], []), {"answer": compiled})
    assert not mc.timeline(compiled)[0].misses


def test_what_an_answer_draws_changes_no_later_input():
    def draws(run: Run, double: Callable[..., Any]) -> str:
        for _ in run.cases:
            x = torch.randn(3)
            run.close(double(x), x + x, "double")
        return "drawn"

    lesson = lesson_about(draws, [1, 2], [])
    sent = sent_by(lesson, "def double(x):\n    torch.randn(7)\n    return 2 * x\n")
    assert judged(lesson, sent) == "drawn"
