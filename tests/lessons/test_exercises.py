"""The lessons' exercises: right answers pass, wrong ones are told why, rules change what is compiled.

`make mutants` tries every exercise; here the hardest of every third lesson, so that the test stays short.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from minicompile.lessons.exercise import LEVELS, checks
from minicompile.lessons.notebook import notebooks_folder
from minicompile.options import child_environment

pytestmark = pytest.mark.long

pytest.importorskip("jupytext", reason="the extra `lessons` is not installed")

LESSONS = sorted(p.stem[-2:] for p in (notebooks_folder() / "checks").glob("lesson_*.py"))


def hardest(lesson: str) -> str:
    """The last exercise of a lesson that implements a rule."""
    plugged = ("implement", "real")
    return [e.name for e in checks(lesson).exercises.values() if e.level in plugged][-1]


@pytest.mark.parametrize("lesson", LESSONS[::3])
def test_the_hardest_exercise_accepts_its_reference_and_rejects_wrong_answers(lesson: str):
    command = [sys.executable, "-m", "notebooks.mutants", lesson, "--only", hardest(lesson)]
    around = child_environment(PYTHONPATH=str(notebooks_folder().parent))
    done = subprocess.run(
        command, capture_output=True, text=True, env=around, cwd=notebooks_folder().parent
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr[-3000:]


@pytest.mark.parametrize("lesson", LESSONS)
def test_exercises_rise_from_reading_to_rules_of_the_compiler(lesson: str):
    exercises = list(checks(lesson).exercises.values())
    levels = [LEVELS.index(exercise.level) for exercise in exercises]
    assert len(exercises) >= 4
    assert levels == sorted(levels)
    assert sum(exercise.level in ("implement", "real") for exercise in exercises) >= 2
    points = [exercise.points for exercise in exercises]
    assert min(points) > 0
