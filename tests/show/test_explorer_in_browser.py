"""The explorer in Chromium: what is lit is what shares an operation, in every pane, drawn or not."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minicompile.ops.display import Shown, to_html
from minicompile.pipeline_result import Trace
from minicompile.show.explorer import Explorer
from tests.show import example

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright to open the page with")
if CHROMIUM is None:
    pytest.skip("no Chromium to open the page with", allow_module_level=True)

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def trace() -> Trace:
    return example.trace()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Open objects, one below the other, in a page that may fetch nothing and must raise nothing."""
    problems: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda r: r.url.startswith("file:") or problems.append(r.url))

    def open_page(*objects: Shown, at: str = "") -> Any:
        file = tmp_path / "page.html"
        views = "".join(map(to_html, objects))
        file.write_text(f"<!doctype html><meta charset='utf-8'><body>{views}", encoding="utf-8")
        page.goto(file.as_uri() + at)
        return page

    yield open_page
    page.close()
    assert problems == []


def lit(page: Any, number: int = 0) -> set[tuple[str, int]]:
    roots = "[...document.querySelectorAll('.mc.trace')]"
    return {tuple(found) for found in page.evaluate(f"{roots}[{number}].explorer.lit()")}


def line(page: Any, pane: str, number: int, copy: int = 0) -> Any:
    root = page.locator(".mc.trace").nth(copy)
    return root.locator(f'.pane[data-p="{pane}"] .ln[data-n="{number}"]')


def sharing(explorer: Explorer, pane: str, number: int) -> set[tuple[str, int]]:
    """Which lines share an operation with a line: by the origins, without any of the view's data."""
    lines = {
        (shown.key, n): piece
        for shown in explorer.panes
        for n, piece in enumerate(p for section in shown.sections for p in section.pieces)
    }
    asked = lines[pane, number].origins
    return {at for at, piece in lines.items() if piece.origins & asked} | {(pane, number)}


def test_pointing_lights_exactly_what_shares_an_operation(show: Open, trace: Trace) -> None:
    explorer, page = trace.explore(), show(trace)
    for pane in explorer.open:
        for number in range(explorer.pane(pane).lines):
            line(page, pane, number).hover()
            assert lit(page) == sharing(explorer, pane, number), (pane, number)
    drawn = {
        (found.evaluate("e => e.closest('.pane').dataset.p"), int(found.get_attribute("data-n")))
        for found in page.locator(".ln.hot, .ln.warm").all()
    }
    assert drawn == {at for at in lit(page) if at[0] in explorer.open}
