"""A person opens JupyterLab by `make lab`, runs lesson 00, solves an exercise and sees it turn green."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nbformat
import pytest

from tests.browser.pages import PANEL, Lab, Pages

pytestmark = pytest.mark.long

LESSON = "00_one_model_top_to_bottom.ipynb"
SOURCE = Path(__file__).parents[2] / "notebooks/src/00_one_model_top_to_bottom.py"
GREEN, RED, GREY = "rgb(22, 163, 74)", "rgb(220, 38, 38)", "rgb(156, 163, 175)"
SLOWEST_CELL = 180_000
"""Milliseconds: lesson 00 trains a model and calls torch.compile."""


class Notebook:
    """A lesson in JupyterLab, its cells by the names that the lesson gives them."""

    def __init__(self, page: Any, file: Path) -> None:
        self.page = page
        cells = nbformat.read(file, 4).cells
        self.places = {cell.id: number for number, cell in enumerate(cells)}

    def cell(self, name: str) -> Any:
        return self.page.locator(f"{PANEL} .jp-Cell").nth(self.places[name])

    def click(self, name: str) -> None:
        """Put the cursor into a cell."""
        cell = self.cell(name)
        cell.scroll_into_view_if_needed()
        cell.locator(".cm-content").click()

    def menu(self, *items: str) -> None:
        for item in items:
            self.page.get_by_role("menuitem", name=item, exact=True).click()

    def run(self, name: str) -> Any:
        """Run a cell as a learner does; its output when it is done."""
        self.click(name)
        self.page.keyboard.press("Control+Enter")
        prompt = self.cell(name).locator(".jp-InputArea-prompt")
        self.page.wait_for_function(
            "(prompt) => /\\d/.test(prompt.textContent)", arg=prompt.element_handle()
        )
        return self.cell(name).locator(".jp-OutputArea-output").last

    def write(self, name: str, text: str) -> None:
        """Put a text in place of what a cell holds."""
        self.click(name)
        self.page.keyboard.press("Control+a")
        self.page.keyboard.insert_text(text)


@pytest.fixture(scope="module")
def lesson(make_lab: Lab, pages: Pages) -> Notebook:
    """Lesson 00 where `make lab` opens it, every cell above the first exercise's answer run."""
    page = make_lab.ready(pages.open(opened(make_lab)))
    page.set_default_timeout(SLOWEST_CELL)
    make_lab.await_kernel(page)
    notebook = Notebook(page, make_lab.folder / LESSON)
    notebook.click("ex1-answer")
    notebook.menu("Run", "Run All Above Selected Cell")
    return notebook


def opened(lab: Lab) -> str:
    """The page that JupyterLab sent to the reader's browser: one that leads on to the lesson."""
    file, end = lab.folder.parent / "opened", time.monotonic() + 20
    while not file.exists() or not file.read_text().strip():
        assert time.monotonic() < end, "JupyterLab opened no browser"
        time.sleep(0.1)
    return file.read_text().strip()


def colour(card: Any) -> str:
    """The colour of a verdict's card, at its left edge."""
    edge = "element => getComputedStyle(element).borderLeftColor"
    return str(card.locator("div[style*=border-left]").evaluate(edge))


def solution(name: str) -> str:
    """The reference answer of a cell of lesson 00."""
    builder = pytest.importorskip("notebooks.build")
    cells = {cell["id"]: cell.source for cell in builder.read_source(SOURCE).cells}
    return str(builder.MARKERS.sub("", cells[name]))


def test_make_lab_opens_lesson_00(lesson: Notebook, make_lab: Lab) -> None:
    assert (
        urlsplit(lesson.page.url)._replace(query="").geturl() == f"{make_lab.url}/lab/tree/{LESSON}"
    )


def test_an_exercise_of_the_lesson_turns_green_when_it_is_solved(
    lesson: Notebook, pages: Pages
) -> None:
    assert "NotImplementedError" in lesson.cell("ex1-answer").inner_text()
    lesson.run("ex1-answer")
    seen = lesson.run("ex1-check")
    seen.get_by_text("ex1 no answer yet").wait_for()
    assert colour(seen) == GREY
    pages.shot(lesson.page, "lesson_unanswered")

    lesson.write("ex1-answer", "def kernels_saved(fused, unfused):\n    return len(fused.kernels)")
    lesson.run("ex1-answer")
    seen = lesson.run("ex1-check")
    seen.get_by_text("expected").first.wait_for()
    assert re.search(r"ex1 wrong.+: expected .+, got .+", seen.inner_text(), re.S)
    assert colour(seen) == RED
    pages.shot(lesson.page, "lesson_wrong")

    lesson.write("ex1-answer", solution("ex1-answer"))
    lesson.run("ex1-answer")
    seen = lesson.run("ex1-check")
    seen.get_by_text("ex1 pass").wait_for()
    assert colour(seen) == GREEN
    pages.shot(lesson.page, "lesson_green")
    assert pages.complaints == []
