"""Grading: right answers score, tampering does not, one bad answer costs its own points only."""

from __future__ import annotations

import contextlib
import copy
import csv
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from minicompile.__main__ import main as command_line
from minicompile.errors import MinicompileError
from minicompile.lessons import grade as grading
from minicompile.lessons.exercise import checks
from minicompile.lessons.guard import refusal
from minicompile.lessons.notebook import notebooks_folder, pristine, tags
from minicompile.lessons.processes import Nursery

for module in ("nbformat", "nbval", "ipykernel"):
    pytest.importorskip(module, reason="the extra `lessons` is not installed")

import nbformat  # noqa: E402

pytestmark = pytest.mark.long

LESSON = "00"
RIGHT = "def kernels_saved(fused, unfused):\n    return len(unfused.kernels) - len(fused.kernels)\n"
WRONG = "def kernels_saved(fused, unfused):\n    return 99\n"
HIDDEN_ONLY = "def kernels_saved(fused, unfused):\n    return 5\n"

Edit = Callable[[Any, dict[str, Any]], None]


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


def cleared(notebook: Any, cells: dict[str, Any]) -> None:
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None


def delete_checks(notebook: Any, cells: dict[str, Any]) -> None:
    notebook.cells = [cell for cell in notebook.cells if not cell["id"].endswith("-check")]


def edit_check(notebook: Any, cells: dict[str, Any]) -> None:
    cells["ex1-check"].source = 'print("ex1 pass: 5 kernels saved")'
    cells["ex1-check"].metadata.tags = ["nbval-skip"]


def forge_output(notebook: Any, cells: dict[str, Any]) -> None:
    text = nbformat.v4.new_output("stream", name="stdout", text="ex1: 99 is right\n")
    cells["ex1-check"].outputs = [text]


def edit_setup(notebook: Any, cells: dict[str, Any]) -> None:
    cells["setup"].source += "\ncheck = lambda name: print(name, 'pass')"


def raises_tag(notebook: Any, cells: dict[str, Any]) -> None:
    cells["ex1-answer"].metadata.tags = ["answer", "raises-exception", "nbval-skip"]


TAMPERED: dict[str, Edit] = {
    "cleared outputs": cleared,
    "edited check": edit_check,
    "forged output": forge_output,
    "edited set-up": edit_setup,
    "tag that expects an exception": raises_tag,
    "deleted checks": delete_checks,
}


def tasks(notebook: Any) -> list[grading.Task]:
    """What is run for each exercise of a notebook."""
    return [grading.task(LESSON, one, notebook) for one in checks(LESSON).exercises.values()]


@pytest.mark.parametrize("name", TAMPERED)
def test_what_is_outside_answer_cells_changes_nothing_of_what_is_run(name: str):
    notebook, honest = answered(WRONG, solution()), answered(WRONG, solution())
    TAMPERED[name](notebook, by_id(notebook))
    assert tasks(notebook) == tasks(honest)
    assert notebook != honest


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


def test_a_split_answer_is_joined():
    notebook = answered(RIGHT)
    at = [cell["id"] for cell in notebook.cells].index("ex1-answer")
    second = copy.deepcopy(notebook.cells[at])
    notebook.cells[at].source, second.source = RIGHT.splitlines()
    notebook.cells[at]["id"] = "fe1bfe28"
    notebook.cells.insert(at + 1, second)
    assert what_is_run(notebook) == (RIGHT.rstrip(), " (joined from 2 cells)")


def test_an_answer_without_metadata_is_found_by_its_id():
    notebook = answered(RIGHT)
    by_id(notebook)["ex1-answer"].metadata.clear()
    assert what_is_run(notebook) == (RIGHT, "")


REFUSED = {
    "deleted answer": ("", "its cell is missing"),
    "shadowed print": (WRONG + "def print(*given): pass\n", "print, which is Python's"),
    "shadowed name": (
        WRONG + "def check(name, graded=''): pass\n",
        "check, which is the lesson's",
    ),
    "shadowed import": (WRONG + "from math import tau as mc\n", "mc, which is the lesson's"),
    "transformer": (
        WRONG + "get_ipython().input_transformers_post.append(lambda lines: lines)\n",
        "get_ipython",
    ),
    "builtins": (WRONG + "import builtins as b\nb.print = None\n", "builtins"),
    "the checks": (
        WRONG + "from minicompile.lessons import exercise\nexercise.Run.expect = print\n",
        "which reaches outside the answer",
    ),
    "patched library": (WRONG + "import torch\ntorch.equal = lambda *a: True\n", "torch.equal"),
    "patched compiler": (WRONG + "mc.trace = None\n", "mc.trace"),
    "own globals": (WRONG + "kernels_saved.__globals__['check'] = print\n", "__globals__"),
    "modules": (WRONG + "import sys\nsys.modules.clear()\n", "sys"),
    "exec": (WRONG + "exec('1')\n", "exec"),
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


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nfrom torch import nn\n" + RIGHT,
        "import minicompile as mc\n" + RIGHT,
        "class Helper:\n    kept = 0\n    def count(self):\n        self.kept = 1\n" + RIGHT,
        "table = {}\ntable['a'] = 1\n" + RIGHT,
        "import torch\nmodel = torch.nn.Linear(1, 1).eval()\nlist(model.modules())\n" + RIGHT,
    ],
)
def test_ordinary_python_is_not_refused(text: str):
    code = [cell for cell in pristine(LESSON).cells if cell.cell_type == "code"]
    setup = [cell for cell in code if "setup" in tags(cell)]
    assert refusal(text, setup, checks(LESSON).exercises["ex1"]) == ""


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


def tampered() -> Any:
    """A wrong answer in a notebook in which everything else was changed too."""
    notebook = answered(WRONG, solution())
    for tamper in TAMPERED.values():
        tamper(notebook, by_id(notebook))
    return notebook


@dataclass(frozen=True)
class Graded:
    """A class of learners after grading: what the command wrote, printed, and left of their files."""

    code: int
    printed: str
    rows: dict[str, dict[str, str]]
    unchanged: bool

    def said(self, student: str) -> tuple[int, str]:
        """Points of a learner's exercise 1, and what they are told."""
        lines = self.printed.splitlines()
        at = next(i for i, line in enumerate(lines) if line.startswith(f"{student}/"))
        return int(self.of(student)["points"]), lines[at + 1].split(None, 2)[2]

    def of(self, student: str) -> dict[str, str]:
        """The row of a learner's notebook."""
        return self.rows[f"{student}/{LESSON}_mine.ipynb"]


@pytest.fixture(scope="module")
def graded_class(tmp_path_factory: pytest.TempPathFactory) -> Graded:
    """Exercise 1 of a folder of learners, graded by one command."""
    place = tmp_path_factory.mktemp("graded")
    notebooks = {
        "ada": solution(),
        "bob": tampered(),
        "dan": answered(HIDDEN_ONLY),
        "eve": answered(FORGED),
        "fay": answered(NOISY),
        "gus": release(),
    }
    for student, notebook in notebooks.items():
        (place / "class" / student).mkdir(parents=True)
        nbformat.write(notebook, place / "class" / student / f"{LESSON}_mine.ipynb")
    (place / "class" / "cy").mkdir()
    (place / "class" / "cy" / f"{LESSON}_mine.ipynb").write_text("not json")
    nbformat.write(nbformat.v4.new_notebook(), place / "class" / "notes.ipynb")
    files = sorted((place / "class").rglob("*.ipynb"))
    before = [file.read_bytes() for file in files]
    table = place / "grades.csv"
    given = ["grade", str(place / "class"), "--exercise", "ex1", "--csv", str(table)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = command_line(given)
    return Graded(
        code,
        printed.getvalue(),
        {row["notebook"]: row for row in csv.DictReader(io.StringIO(table.read_text()))},
        [file.read_bytes() for file in files] == before,
    )


def test_the_reference_scores_full_and_the_release_scores_nothing(graded_class: Graded):
    assert graded_class.said("ada") == (checks(LESSON).exercises["ex1"].points, "pass")
    assert graded_class.said("gus") == (0, "ex1: no answer yet")


def test_an_answer_that_only_fits_the_notebooks_inputs_is_rejected(graded_class: Graded):
    points, feedback = graded_class.said("dan")
    assert points == 0
    assert "an input that the notebook does not show" in feedback
    assert "expected" in feedback and "got 5" in feedback


def test_a_wrong_answer_scores_nothing_whatever_the_notebook_says(graded_class: Graded):
    points, feedback = graded_class.said("bob")
    assert points == 0
    assert "got 99" in feedback


def test_a_verdict_printed_by_the_answer_itself_is_none(graded_class: Graded):
    points, feedback = graded_class.said("eve")
    assert points == 0
    assert "SystemExit" in feedback


def test_what_an_answer_prints_or_warns_of_costs_no_points(graded_class: Graded):
    assert graded_class.said("fay") == (checks(LESSON).exercises["ex1"].points, "pass")


def test_a_class_is_graded_at_once(graded_class: Graded):
    assert graded_class.code == 1
    assert graded_class.unchanged
    students = ("ada", "bob", "dan", "eve", "fay", "gus", "cy")
    points = [graded_class.of(student)["points"] for student in students]
    assert points == ["1", "0", "0", "0", "1", "0", "0"]
    assert "not a readable notebook" in graded_class.of("cy")["problem"]
    assert "lesson's number" in graded_class.rows["notes.ipynb"]["problem"]
    assert "ex1  1/1  pass" in graded_class.printed and "got 99" in graded_class.printed


def test_nothing_to_grade_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert command_line(["grade", str(tmp_path / "none.ipynb")]) == 1
    assert "no notebook or folder" in capsys.readouterr().err
    assert command_line(["grade", str(tmp_path)]) == 1
    assert "no notebooks in" in capsys.readouterr().err
    with pytest.raises(MinicompileError, match="no lesson 99"):
        pristine("99")
