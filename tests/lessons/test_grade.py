"""Grading: right answers score, tampering does not, one bad answer costs its own points only."""

from __future__ import annotations

import copy
import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minicompile.__main__ import main as command_line
from minicompile.lessons import grade as grading
from minicompile.lessons.exercise import checks
from minicompile.lessons.notebook import notebooks_folder, pristine
from minicompile.lessons.processes import Nursery

for module in ("nbformat", "nbval", "ipykernel"):
    pytest.importorskip(module, reason="the extra `lessons` is not installed")

import nbformat  # noqa: E402

pytestmark = pytest.mark.long

LESSON = "00"
RIGHT = "def kernels_saved(fused, unfused):\n    return len(unfused.kernels) - len(fused.kernels)\n"
WRONG = "def kernels_saved(fused, unfused):\n    return 99\n"
HIDDEN_ONLY = "def kernels_saved(fused, unfused):\n    return 5\n"


def release() -> Any:
    [path] = notebooks_folder().glob(f"{LESSON}_*.ipynb")
    return nbformat.read(path, as_version=4)


def solution() -> Any:
    return copy.deepcopy(pristine(LESSON))


def answered(text: str, base: Any = None) -> Any:
    notebook = base or release()
    by_id(notebook)["ex1-answer"].source = text
    return notebook


def by_id(notebook: Any) -> dict[str, Any]:
    return {cell["id"]: cell for cell in notebook.cells}


def tampered() -> Any:
    """A wrong answer in a notebook in which everything else was changed too."""
    notebook = answered(WRONG, solution())
    cells = by_id(notebook)
    cells["setup"].source += "\ncheck = lambda name: print(name, 'pass')"
    cells["ex1-answer"].metadata.tags = ["answer", "raises-exception", "nbval-skip"]
    check = cells["ex1-check"]
    check.source, check.metadata.tags = 'print("ex1 pass: 5 kernels saved")', ["nbval-skip"]
    check.outputs = [nbformat.v4.new_output("stream", name="stdout", text="ex1: 99 is right\n")]
    notebook.cells.remove(cells["ex2-check"])
    return notebook


def tasks(notebook: Any) -> list[grading.Task]:
    """What is run for each exercise of a notebook."""
    return [grading.task(LESSON, one, notebook) for one in checks(LESSON).exercises.values()]


def test_what_is_outside_answer_cells_changes_nothing_of_what_is_run():
    assert tasks(tampered()) == tasks(answered(WRONG, solution()))


def what_is_run(notebook: Any) -> tuple[str, str]:
    """The text that is run for exercise 1, and the remark about it."""
    task = tasks(notebook)[0]
    assert not task.reason
    return task.cells[-2], task.remark


def test_a_copy_with_another_answer_is_joined_and_the_last_one_counts():
    notebook = answered(RIGHT)
    twin = copy.deepcopy(by_id(notebook)["ex1-answer"])
    twin["id"], twin.source = "another", WRONG
    notebook.cells.append(twin)
    assert what_is_run(notebook) == (f"{RIGHT}\n{WRONG}", " (joined from 2 cells)")


REFUSED = {
    "deleted answer": ("", "its cell is missing"),
    "shadowed print": (WRONG + "def print(*given): pass\n", "print, which is Python's"),
    "shadowed name": (
        WRONG + "def check(name, graded=''): pass\n",
        "check, which is the lesson's",
    ),
    "shadowed import": (WRONG + "from math import tau as mc\n", "mc, which is the lesson's"),
    "patched compiler": (WRONG + "mc.trace = None\n", "mc.trace"),
    "syntax": ("def kernels_saved(fused, unfused:\n", "line 1 is not Python"),
    "built-in": (
        "def kernels_saved(fused, unfused):\n    return fused.schedule.steps()\n",
        "expected an answer of your own, got a use of steps",
    ),
    "magic": ("%matplotlib inline\n" + RIGHT, "is not Python"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_answer_that_reaches_outside_is_not_run_and_told_why(name: str):
    text, reason = REFUSED[name]
    task = tasks(answered(text))[0]
    assert not task.cells
    assert task.reason.startswith("not run: ")
    assert reason in task.reason


SECONDS = 12
"""A deadline that answers which never end run into, and right ones on a slow machine do not."""

DIES, SLOW = "the kernel died", f"longer than {SECONDS} seconds"
ENDLESS = {
    "ex3": ("import os\nos._exit(0)\n", "it did not finish"),
    "ex2": (
        "def with_kernels(count):\n    while True:\n"
        "        try: print('x' * 1000)\n        except BaseException: pass\n",
        SLOW,
    ),
    "ex4": ("import os\nos.kill(os.getpid(), 9)\n", DIES),
}
"""By exercise: an answer, and what is said of it."""


def test_an_exercise_that_never_ends_costs_its_points_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(grading, "refusal", lambda *given: "")  # which would refuse some of them
    notebook = solution()
    for exercise, (text, _) in ENDLESS.items():
        by_id(notebook)[f"{exercise}-answer"].source = text
    path = tmp_path / f"{LESSON}_mine.ipynb"
    nbformat.write(notebook, path)
    with Nursery() as nursery:
        report = grading.grade(path, nursery, seconds=SECONDS)
    grades = {g.exercise: g for g in report.grades}
    for exercise, (_, reason) in ENDLESS.items():
        assert grades[exercise].earned == 0
        assert reason in grades[exercise].feedback
    assert grades["ex1"].earned == grades["ex1"].points > 0


NOISY = (
    "print('hello')\n"
    "def kernels_saved(fused, unfused):\n"
    "    import warnings\n\n    warnings.warn('of a missing compiler, say')\n    print('thinking')\n"
    "    return len(unfused.kernels) - len(fused.kernels)\n"
)
FORGED = (
    "def kernels_saved(fused, unfused):\n"
    "    print('ex1 sent')\n    raise SystemExit\nprint('ex1 sent')\n"
)


CLASS: dict[str, tuple[Callable[[], Any], int, list[str]]] = {
    "ada": (solution, 1, ["pass"]),
    "bob": (tampered, 0, ["got 99"]),
    "dan": (
        lambda: answered(HIDDEN_ONLY),
        0,
        ["an input that the notebook does not show", "expected", "got 5"],
    ),
    "eve": (lambda: answered(FORGED), 0, ["SystemExit"]),
    "fay": (lambda: answered(NOISY), 1, ["pass"]),
    "gus": (release, 0, ["ex1: no answer yet"]),
}
"""By learner: a notebook, the points of its exercise 1, and what is said of it."""


def test_a_class_is_graded_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for student, (notebook, *_) in CLASS.items():
        (tmp_path / student).mkdir()
        nbformat.write(notebook(), tmp_path / student / f"{LESSON}_mine.ipynb")
    (tmp_path / f"{LESSON}_mine.ipynb").write_text("not json")
    nbformat.write(nbformat.v4.new_notebook(), tmp_path / "notes.ipynb")
    files = sorted(tmp_path.rglob("*.ipynb"))
    before = [file.read_bytes() for file in files]
    table = tmp_path / "grades.csv"
    assert command_line(["grade", str(tmp_path), "--exercise", "ex1", "--csv", str(table)]) == 1
    assert [file.read_bytes() for file in files] == before
    lines = capsys.readouterr().out.splitlines()
    rows = {row["notebook"]: row for row in csv.DictReader(io.StringIO(table.read_text()))}
    for student, (_, points, feedback) in CLASS.items():
        assert rows[f"{student}/{LESSON}_mine.ipynb"]["points"] == str(points)
        at = next(i for i, line in enumerate(lines) if line.startswith(f"{student}/"))
        assert all(words in lines[at + 1] for words in feedback), lines[at + 1]
    assert "not a readable notebook" in rows[f"{LESSON}_mine.ipynb"]["problem"]
    assert "lesson's number" in rows["notes.ipynb"]["problem"]
