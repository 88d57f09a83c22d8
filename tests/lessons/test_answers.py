"""What the checks call an answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from minicompile.errors import OptionError
from minicompile.lessons.exercise import Lesson, NotAnswered, Run


def test_a_released_rule_is_not_answered_though_it_was_the_compiler_that_called_it():
    lesson = Lesson("99")

    @lesson.exercise("ex1", points=1, level="implement", visible=[1], hidden=[2])
    def plugged(run: Run, rule: Callable[[], int]) -> str:
        try:
            return str(rule())
        except NotImplementedError as error:
            raise OptionError("the rule at <cell>:1 failed") from error

    def released() -> int:
        raise NotImplementedError

    with pytest.raises(NotAnswered):
        lesson.exercises["ex1"].run({"rule": released})
