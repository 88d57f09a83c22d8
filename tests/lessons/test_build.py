"""Notebooks come from text, the same bytes each time, and stale ones are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minicompile.errors import MinicompileError
from notebooks import build as builder

pytestmark = pytest.mark.long

for module in ("jupytext", "nbclient", "ipykernel"):
    pytest.importorskip(module, reason="the extra `lessons` is not installed")

SOURCE = """# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
# ---
# %% [markdown]
# # A lesson
# %% name="one two"
print("first")
for i in range(100):
    print(i, flush=True)
# %% tags=["varies"]
import time
print(time.time())
# %%
import minicompile
{"a", "b", "c"}
"""


@pytest.fixture
def lesson(tmp_path: Path) -> Path:
    source = tmp_path / "notebooks" / "src" / "00_test.py"
    source.parent.mkdir(parents=True)
    source.write_text(SOURCE)
    return source


def cells(text: str) -> dict[str, Any]:
    return {cell["id"]: cell for cell in json.loads(text)["cells"]}


def test_same_source_same_bytes(lesson: Path):
    first, again = builder.build(lesson), builder.build(lesson)
    assert (first.solution, first.release) == (again.solution, again.release)
    found = cells(first.solution)
    assert list(found) == ["cell-000", "one-two", "cell-002", "cell-003"]
    assert len(found["one-two"]["outputs"]) == 1
    assert found["one-two"]["execution_count"] == 1
    assert found["cell-002"]["outputs"] == []
    assert str(lesson.parent) not in first.solution


def test_check_finds_notebooks_that_are_not_their_sources(lesson: Path):
    folder = lesson.parent.parent
    solution, release = folder / "solutions" / "00_test.ipynb", folder / "00_test.ipynb"
    solution.parent.mkdir()
    assert "solutions/00_test.ipynb has not been built" in builder.why_stale(lesson, folder)
    built = builder.build(lesson)
    solution.write_text(built.solution)
    release.write_text(built.release)
    assert builder.why_stale(lesson, folder) == ""
    release.write_text(built.release.replace("A lesson", "forged", 1))
    assert "is not what 00_test.py gives: line" in builder.why_stale(lesson, folder)
    lesson.write_text(SOURCE.replace("A lesson", "Another"))
    assert "another version" in builder.why_stale(lesson, folder)


def test_validating_executes_again_and_finds_outputs_that_are_not_so(lesson: Path):
    folder = lesson.parent.parent
    solution = folder / "solutions" / "00_test.ipynb"
    built = builder.build(lesson)
    text = built.solution
    write_both(lesson, built)
    assert builder.validate(lesson, folder) == ""
    solution.write_text(text.replace("first\\n", "forged\\n", 1))
    assert "forged" in builder.validate(lesson, folder)


EXERCISE = """
# %% name="setup" tags=["setup"]
from minicompile.lessons.exercise import Lesson

check = Lesson("00")


@check.exercise("ex1", points=1, level="read", visible=[2], hidden=[3, 4])
def doubled(run, double):
    run.expect(double(2), 4, "double(2)")
    return "2 -> 4"


# %% name="ex1-answer" tags=["answer"]
def double(x):
    ### BEGIN SOLUTION
    return 2 * x
    ### END SOLUTION


# %% name="ex1-check" tags=["nbval-check-output"]
check("ex1")
# %% name="ex1-wrong-same" tags=["wrong"] kind="misconception" says="expected 4, got 2"
def double(x):
    return x
"""


def test_a_release_has_neither_answers_nor_outputs(lesson: Path):
    lesson.write_text(SOURCE + EXERCISE)
    built = builder.build(lesson)
    solution, release = cells(built.solution), cells(built.release)
    assert list(solution) == list(release)
    assert "ex1-wrong-same" not in release
    assert "".join(solution["ex1-answer"]["source"]) == "def double(x):\n    return 2 * x\n"
    assert "".join(release["ex1-answer"]["source"]) == (
        "def double(x):\n    # YOUR CODE HERE\n    raise NotImplementedError"
    )
    [shown] = solution["ex1-check"]["outputs"]
    assert shown["data"]["text/plain"][0] == "ex1 pass: 2 -> 4\n"
    for cell in release.values():
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None
    assert "### " not in built.solution + built.release


def test_a_reference_answer_that_does_not_pass_fails_the_build(lesson: Path):
    lesson.write_text(SOURCE + EXERCISE.replace("2 * x", "3 * x"))
    with pytest.raises(MinicompileError, match=r"ex1-check: ex1 wrong: double\(2\): expected 4"):
        builder.build(lesson)


def test_validating_runs_what_a_learner_opens_to_its_last_cell(lesson: Path):
    lesson.write_text(SOURCE + EXERCISE)
    assert builder.validate(lesson, write_both(lesson, builder.build(lesson))) == ""
    lesson.write_text(SOURCE + EXERCISE + '\n# %% name="needs-an-answer"\ndouble(2)\n')
    report = builder.validate(lesson, write_both(lesson, builder.build(lesson)))
    assert "NotImplementedError" in report and "unanswered-needs-an-answer" not in report
    assert "double(2)" in report


def write_both(lesson: Path, built: builder.Built) -> Path:
    """Save a solution and what a learner opens; gives the folder `notebooks`."""
    folder = lesson.parent.parent
    (folder / "solutions").mkdir(exist_ok=True)
    (folder / "solutions" / f"{lesson.stem}.ipynb").write_text(built.solution)
    (folder / f"{lesson.stem}.ipynb").write_text(built.release)
    return folder


def test_a_lesson_is_validated_again_when_its_text_or_a_room_that_it_imports_changes(lesson: Path):
    folder = lesson.parent.parent
    (folder / "solutions").mkdir()
    lesson.write_text(SOURCE.replace("import minicompile", "import minicompile.aot.joint"))
    for room in ("aot", "dynamo"):
        (folder.parent / "minicompile" / room).mkdir(parents=True)
        (folder.parent / "minicompile" / room / "file.py").write_text("")
    builder.write_validated([lesson], folder)
    [before] = builder.read_validated(folder).values()
    (folder.parent / "minicompile" / "dynamo" / "file.py").write_text("a = 1")
    assert builder.fingerprint(lesson, folder) == before
    (folder.parent / "minicompile" / "aot" / "file.py").write_text("a = 1")
    room_changed = builder.fingerprint(lesson, folder)
    lesson.write_text(lesson.read_text() + "\n")
    assert len({before, room_changed, builder.fingerprint(lesson, folder)}) == 3
