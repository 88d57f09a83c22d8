"""Checks of exercises: what they say of wrong answers, what they take away, what they leave behind."""

from __future__ import annotations

import html
import json
import linecache
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile.dynamo import dispatch
from minicompile.dynamo.interpreter import bytecode
from minicompile.errors import MinicompileError
from minicompile.extension import decompose
from minicompile.lessons.exercise import (
    VERDICT,
    Lesson,
    NotAnswered,
    Run,
    Verdict,
    Wrong,
    checks,
    receiving,
    show,
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


@pytest.mark.parametrize(
    ("got", "message"),
    [
        (2, "f(1): expected 3, got 2"),
        (3.0, "f(1): expected 3, got 3.0"),
        (True, "f(1): expected 3, got True"),
        (None, "f(1): expected 3, got None"),
    ],
)
def test_expect_wants_the_value_and_its_type(got: object, message: str):
    run.expect(3, 3, "f(1)")
    with pytest.raises(Wrong) as wrong:
        run.expect(got, 3, "f(1)")
    assert str(wrong.value) == message


@pytest.mark.parametrize(
    ("got", "message"),
    [
        (torch.tensor([1.0, 2.5]), "expected float32[2] of [1, 2], got float32[2] of [1, 2.5]"),
        (torch.tensor([1, 2]), "expected float32[2] of [1, 2], got int64[2] of [1, 2]"),
        (torch.ones(1), "expected float32[2] of [1, 2], got float32[1] of [1]"),
        ([1.0, 2.0], "expected float32[2] of [1, 2], got [1.0, 2.0]"),
    ],
)
def test_close_wants_numbers_shape_and_dtype(got: object, message: str):
    expected = torch.tensor([1.0, 2.0])
    run.close(expected + 1e-7, expected, "g(x)")
    with pytest.raises(Wrong) as wrong:
        run.close(got, expected, "g(x)")
    assert str(wrong.value) == f"g(x): {message}"


def test_close_names_the_greatest_difference_of_tensors_that_are_shown_alike():
    expected, got = torch.arange(12.0).view(4, 3), torch.arange(12.0).view(4, 3)
    got[2, 1:] = 0
    with pytest.raises(Wrong, match=r"; Greatest absolute difference: 8.0 at index \(2, 2\)$"):
        run.close(got, expected, "g(x)")


def test_close_takes_tolerances_and_knows_nan():
    run.close(
        torch.tensor([float("nan"), 1.1]), torch.tensor([float("nan"), 1.0]), "x", rtol=0.2, atol=0
    )
    with pytest.raises(Wrong):
        run.close(torch.tensor([float("nan")]), torch.tensor([1.0]), "x")


def test_that_says_its_own_words():
    run.that(True, "h", "one kernel", "two")
    with pytest.raises(Wrong, match=r"^h: expected one kernel, got two$"):
        run.that(False, "h", "one kernel", "two")


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


def test_replaced_puts_the_answer_into_the_compiler_and_counts_its_calls():
    original = dispatch.fingerprint
    with run.replaced("minicompile.dynamo.dispatch:fingerprint", lambda value: "mine") as spy:
        assert dispatch.fingerprint(3) == "mine"
        assert spy.call_count == 1
    assert dispatch.fingerprint is original


def test_replaced_reaches_methods():
    original = dispatch.Dispatcher.answered
    with run.replaced("minicompile.dynamo.dispatch:Dispatcher.answered", lambda self: {0: 7}):
        compiled = mc.compile(torch.nn.Identity(), backend="eager")
        assert mc.timeline(compiled)[0].answered == {0: 7}
    assert dispatch.Dispatcher.answered is original


def test_replaced_ends_also_when_the_answer_raises():
    original = dispatch.fingerprint
    replaced = run.replaced("minicompile.dynamo.dispatch:fingerprint", lambda value: 1 / 0)
    with pytest.raises(ZeroDivisionError), replaced:
        dispatch.fingerprint(3)
    assert dispatch.fingerprint is original


def test_values_are_shown_in_one_short_line():
    assert show(torch.arange(8)) == "int64[8] of [0, 1, 2, 3, 4, 5, ...]"
    assert show("two\nlines") == "'two\\nlines'"
    assert len(show("x" * 500)) == 160 and show("x" * 500).endswith(" ...")


# -- verdicts


def test_a_right_answer_passes_and_says_what_was_seen_and_how_many_inputs_follow():
    lesson = lesson_about(doubles, [1, 2], [5])
    verdict = check_cell(lesson, cell("def double(n):\n    return n + n\n"))
    assert verdict == Verdict("ex1", passed=True, answered=True, says="2 numbers", hidden=1)
    assert repr(verdict) == "ex1 pass: 2 numbers\nGrading tries 1 hidden input more."


def test_a_check_cell_shows_a_wrong_answer_and_does_not_raise():
    verdict = check_cell(lesson_about(doubles, [1], [5]), cell("def double(n):\n    return n\n"))
    assert repr(verdict) == "ex1 wrong: double(1): expected 2, got 1"


def test_a_check_cell_shows_that_nothing_was_answered():
    verdict = check_cell(lesson_about(doubles, [1], [5]), {})
    assert repr(verdict) == "ex1 no answer yet"
    assert not verdict.passed and not verdict.answered


@pytest.mark.parametrize(
    ("verdict", "colour"),
    [
        (Verdict("ex1", True, True, "2 < 3 kernels", 4), "#16a34a"),
        (Verdict("ex1", False, True, "f(1): expected <a>, got 2"), "#dc2626"),
        (Verdict("ex1", False, False, ""), "#9ca3af"),
    ],
)
def test_a_notebook_shows_a_verdict_as_a_coloured_card_and_keeps_it_as_data(
    verdict: Verdict, colour: str
):
    shown = verdict._repr_mimebundle_()
    card = str(shown["text/html"])
    assert colour in card and "<a>" not in card and "<style" not in card and "<script" not in card
    text = " ".join(html.unescape(re.sub("<[^>]*>", " ", card)).split())
    for word in [*verdict.title.split(), *verdict.says.split(), *verdict.outlook.split()]:
        assert word in text
    assert shown["text/plain"] == repr(verdict)
    state = {"exercise": "ex1", "passed": verdict.passed, "answered": verdict.answered}
    assert shown[VERDICT] == json.loads(json.dumps(state))


def test_hidden_inputs_are_counted_and_the_random_generator_stays_as_it_was():
    lesson = lesson_about(doubles, [1], lambda: torch.rand(3).tolist())  # type: ignore[arg-type]
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    assert check_cell(lesson, cell("def double(n):\n    return 2 * n\n")).hidden == 3
    torch.testing.assert_close(torch.rand(2), expected)


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


def test_a_visible_input_that_fails_is_told_without_the_words_for_hidden_ones():
    with pytest.raises(Wrong, match=r"^ex1: double\(1\): expected 2, got 1$"):
        try_answer(lesson_about(doubles, [1], [5]), cell("def double(n):\n    return n\n"))


def test_inputs_may_come_from_a_function_and_are_made_at_each_check():
    made: list[int] = []

    def some() -> list[int]:
        made.append(1)
        return [3]

    try_answer(lesson_about(doubles, some, []), cell("def double(n):\n    return 2 * n\n"))  # type: ignore[arg-type]
    assert made == [1]


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


def relus(run: Run, relu: Callable[..., Any]) -> str:
    with mc.scoped():
        decompose(torch.ops.aten.relu.default, to="prims")(relu)
        x = torch.randn(3)
        run.close(mc.compile(torch.relu)(x), torch.relu(x), "relu")
        mc.trace(torch.relu, x)
    return "a rule"


@pytest.mark.parametrize(
    ("body", "verdict"),
    [("raise NotImplementedError", "no answer yet"), ("x.nothing", "has no attribute 'nothing'")],
)
def test_the_error_of_an_answer_inside_the_compiler_is_told_once(
    body: str, verdict: str, recwarn: pytest.WarningsRecorder
):
    with pytest.raises(Wrong, match=verdict):
        try_answer(lesson_about(relus, [1], [5]), cell(f"def relu(x):\n    {body}\n"))
    assert not [one for one in recwarn if "runs in eager" in str(one.message)]


def test_other_warnings_of_an_answer_are_told(recwarn: pytest.WarningsRecorder):
    text = "import warnings\ndef double(n):\n    warnings.warn('mine')\n    return 2 * n\n"
    try_answer(lesson_about(doubles, [1], [5]), cell(text))
    assert [str(one.message) for one in recwarn] == ["mine"]


def test_not_answered_is_a_kind_of_wrong():
    assert issubclass(NotAnswered, Wrong) and issubclass(Wrong, AssertionError)


def test_an_exception_names_the_line_of_the_answer():
    namespace = cell("def double(n):\n    half = n / (n - 1)\n    return half * 4\n")
    with pytest.raises(Wrong) as wrong:
        try_answer(lesson_about(doubles, [1], []), namespace)
    assert str(wrong.value) == (
        "ex1: doubles: expected a result, got ZeroDivisionError: division by zero"
        " in line 2 of your cell: `half = n / (n - 1)`"
    )
    assert isinstance(wrong.value.__cause__, ZeroDivisionError)


def test_an_exception_in_a_class_of_the_answer_names_its_line():
    def made(run: Run, doubler: Any) -> str:
        return str(doubler().of(1))

    namespace = cell("class doubler:\n    def of(self, n):\n        return n.missing\n")
    with pytest.raises(Wrong, match=r"AttributeError.* in line 3 of your cell: `return n.missing`"):
        try_answer(lesson_about(made, [], []), namespace)


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


def test_what_an_answer_draws_changes_no_later_input():
    def draws(run: Run, double: Callable[..., Any]) -> str:
        for _ in run.cases:
            x = torch.randn(3)
            run.close(double(x), x + x, "double")
        return "drawn"

    lesson = lesson_about(draws, [1, 2], [])
    sent = sent_by(lesson, "def double(x):\n    torch.randn(7)\n    return 2 * x\n")
    assert judged(lesson, sent) == "drawn"


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


def test_words_in_texts_and_other_names_are_not_forbidden():
    lesson = lesson_about(doubles, [1], [], forbidden=["mul"])
    text = (
        'def double(n):\n    """No mul here."""\n    multiple = 2  # mul\n    return n * multiple\n'
    )
    assert check_cell(lesson, cell(text)).passed


# -- the state of the compiler


def test_rules_are_taken_away_for_the_check_and_those_of_the_answer_go_with_it():
    def looks(run: Run, add_rule: Callable[[], None]) -> str:
        assert "BINARY_OP" not in bytecode
        add_rule()
        assert bytecode["BINARY_OP"] is len
        return "seen"

    def add_rule() -> None:
        bytecode("BINARY_OP", "MY_OWN")(len)  # type: ignore[arg-type]

    before = dict(bytecode.rules)
    lesson = lesson_about(looks, [], [], without=["bytecode:BINARY_OP"])
    try_answer(lesson, {"add_rule": add_rule})
    assert bytecode.rules == before


def test_rules_are_back_after_a_wrong_answer():
    before = dict(bytecode.rules)
    lesson = lesson_about(doubles, [1], [], without=["bytecode:BINARY_OP"])
    with pytest.raises(Wrong):
        try_answer(lesson, cell("def double(n):\n    return n\n"))
    assert bytecode.rules == before


def test_a_check_draws_the_same_numbers_each_time_and_leaves_the_generator_alone():
    drawn: list[float] = []

    def draws(run: Run, answer: object) -> str:
        drawn.append(torch.rand(()).item())
        return "drawn"

    lesson = lesson_about(draws, [], [])
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    try_answer(lesson, {"answer": 1})
    torch.testing.assert_close(torch.rand(3), wanted)
    try_answer(lesson, {"answer": 1})
    assert drawn[0] == drawn[1]


def test_a_check_starts_from_an_empty_cache():
    compiled = mc.compile(lambda x: x + 1, backend="eager")
    compiled(torch.ones(2))

    def counts(run: Run, answer: Any) -> str:
        assert not mc.timeline(answer)[0].misses
        answer(torch.ones(2))
        return "counted"

    try_answer(lesson_about(counts, [], []), {"answer": compiled})
    assert not mc.timeline(compiled)[0].misses


# -- lessons


def test_an_unknown_exercise_is_an_error_that_names_the_known_ones():
    with pytest.raises(MinicompileError, match=r"^lesson 99 has no ex7; it has ex1$"):
        lesson_about(doubles, [], [])("ex7")


def test_an_unknown_lesson_is_an_error_that_names_the_known_ones():
    with pytest.raises(MinicompileError, match=r"^no checks for lesson '77'; there are 00"):
        checks("77")


def test_the_answers_of_an_exercise_are_the_parameters_of_its_check():
    def two(run: Run, first: int, second: int) -> str:
        return f"{first} and {second}"

    lesson = lesson_about(two, [], [])
    assert lesson.exercises["ex1"].answers == ("first", "second")
    with pytest.raises(NotAnswered):
        try_answer(lesson, {"first": 1})


def test_the_checks_of_a_lesson_come_in_the_order_of_its_exercises():
    assert list(checks("00").exercises)[:4] == ["ex1", "ex2", "ex3", "ex4"]
