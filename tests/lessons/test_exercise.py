"""Check cells say pass to the right answer only."""

from __future__ import annotations

import pytest

from minicompile.lessons.exercise import verdict, verdict_any


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "ex1: no answer yet"),
        (3, "ex1 pass"),
        (2, "ex1: 2 is not it. Count."),
        (3.0, "ex1: 3.0 is not it. Count."),
    ],
)
def test_a_verdict_is_pass_only_for_the_expected_value(
    given: object, words: str, capsys: pytest.CaptureFixture[str]
):
    verdict("ex1", given, 3, "Count.")
    assert capsys.readouterr().out == words + "\n"


@pytest.mark.parametrize(
    ("given", "words"), [(None, "no answer yet"), (5, "pass"), (6, "is not it")]
)
def test_any_of_several_answers_passes(
    given: object, words: str, capsys: pytest.CaptureFixture[str]
):
    verdict_any("ex3", given, {4, 5})
    assert words in capsys.readouterr().out
