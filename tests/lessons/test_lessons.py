"""Every lesson of the repository keeps the rules of the lint, and the glossary is that of its terms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from notebooks import glossary, lint
from notebooks.reading import Course, read_course

for module in ("jupytext", "spellchecker"):
    pytest.importorskip(module, reason="the extras `lessons` and `dev` are not installed")

FOLDER = Path(__file__).parents[2] / "notebooks"
LESSONS = sorted(path.stem for path in (FOLDER / "src").glob("*.py"))


@pytest.fixture(scope="module")
def course() -> Course:
    return read_course(FOLDER)


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_keeps_the_rules(name: str, course: Course) -> None:
    assert [str(finding) for finding in lint.findings(course, [name])] == []


def test_every_lesson_is_built(course: Course) -> None:
    assert [lesson.number for lesson in course.lessons if not lesson.built] == []


@pytest.mark.parametrize("name", LESSONS)
def test_a_shipped_notebook_holds_no_output(name: str) -> None:
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code
    for cell in code:
        assert (cell["outputs"], cell["execution_count"]) == ([], None), cell["id"]


def test_the_shared_lists_hold_nothing_in_vain(course: Course) -> None:
    assert [str(finding) for finding in lint.shared_faults(course)] == []


def test_the_glossary_is_up_to_date_and_every_term_has_its_file(course: Course) -> None:
    written = FOLDER / "GLOSSARY.md"
    assert written.exists() and written.read_text(encoding="utf-8") == glossary.written(FOLDER)
    lessons = {lesson.number for lesson in course.lessons}
    assert {term.lesson for term in course.glossary.terms} <= lessons
    for term in course.glossary.terms:
        here = (FOLDER.parent / term.file).exists()
        assert here or term.file.startswith("torch/"), f"{term.name}: {term.file}"
