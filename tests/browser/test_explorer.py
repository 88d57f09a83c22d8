"""The explorer in Chromium: what is lit is what shares an operation, in every pane, drawn or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minicompile.codegen.plan import CodeLine
from minicompile.ops.display import Shown, to_html
from minicompile.ops.origin import Origin
from minicompile.pipeline_result import Trace
from minicompile.show.explorer import Explorer, is_weak
from tests.browser.pages import Pages
from tests.show import example

pytestmark = pytest.mark.long

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def trace() -> Trace:
    return example.trace(training=False)


@pytest.fixture
def show(pages: Pages, tmp_path: Path) -> Iterator[Open]:
    """Open objects, one below the other, in a page that asks for nothing else and raises nothing."""
    page, asked, complained = None, len(pages.requests), len(pages.complaints)

    def open_page(*objects: Shown) -> Any:
        nonlocal page
        file = tmp_path / "page.html"
        views = "".join(map(to_html, objects))
        file.write_text(f"<!doctype html><meta charset='utf-8'><body>{views}", encoding="utf-8")
        page = pages.open(file.as_uri())
        return page

    yield open_page
    if page is not None:
        page.close()
    # a notebook of another test may still be open, which asks its own server now and then
    more = [
        url for url in pages.requests[asked:] if not url.startswith(("http://127.", "ws://127."))
    ]
    assert len(more) <= 1 and pages.complaints[complained:] == []


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


def number(trace: Trace, pane: str, text: str) -> int:
    """The number of the first line of a pane that holds a text."""
    pieces = (p for section in trace.explore().pane(pane).sections for p in section.pieces)
    return next(n for n, piece in enumerate(pieces) if text in piece.text)


def operation(trace: Trace, name: str) -> frozenset[Origin]:
    """The origins of a node of the captured graph."""
    return next(n.meta["origins"] for n in trace.capture.graph.nodes if n.name == name)


@pytest.fixture
def long() -> Trace:
    """A trace whose wrapper has 3,000 lines, the last of which has the operation of source line 13."""
    trace = example.trace(training=False)
    trace.forward.wrapper.lines[:] = [CodeLine(f"    pass  # {n}") for n in range(2999)]
    trace.forward.wrapper.lines.append(CodeLine("    last = 1", operation(trace, "softmax")))
    return trace


MIDDLE_IS_A_LINE = """() => {
    const view = document.querySelector(".pane[data-p=wrapper] .view").getBoundingClientRect();
    const at = document.elementFromPoint(view.left + 60, view.top + view.height / 2);
    return at && at.closest(".ln");
}"""


def test_only_lines_in_sight_are_drawn_and_none_is_missing(show: Open, long: Trace) -> None:
    page = show(long.explore(["source", "wrapper"]))
    assert page.locator(".ln").count() < 120
    texts = page.evaluate("document.querySelector('.mc.trace').explorer.lines('wrapper')")
    wrapped = [code.text for graph in long.graphs.values() for code in graph.wrapper.lines]
    assert texts == wrapped
    view = page.locator(".pane[data-p=wrapper] .view")
    for part in (0.25, 0.5, 1.0, 0.1):
        view.evaluate("(view, part) => { view.scrollTop = part * view.scrollHeight; }", part)
        page.wait_for_function(MIDDLE_IS_A_LINE)
        assert page.locator(".ln").count() < 160
    assert page.locator(".pane[data-p=wrapper] h4").inner_text().endswith("forward")


def test_a_click_pins_and_brings_the_lines_into_sight(show: Open, long: Trace) -> None:
    page = show(long.explore(["source", "wrapper"]))
    line(page, "source", 3).click()
    assert line(page, "wrapper", 2999).is_visible(), "every pane scrolls to a lit line"
    assert "pinned" in line(page, "source", 3).get_attribute("class")
    before = lit(page)
    line(page, "source", 2).hover()
    assert lit(page) == before
    assert page.locator("path").count() > 0
    page.keyboard.press("Escape")
    assert lit(page) == set() and page.locator(".pinned, .hot, path").count() == 0


def focused(page: Any) -> tuple[str, int]:
    found = page.evaluate(
        "[document.activeElement.closest('.pane')?.dataset.p, document.activeElement.dataset.n]"
    )
    return found[0], int(found[1])


def test_arrow_keys_move_within_and_across_panes(show: Open, trace: Trace) -> None:
    page, explorer = show(trace), trace.explore()
    line(page, "source", 1).focus()
    at = ("source", 1)
    for key, pane, down in (
        ("ArrowDown", "source", 1),
        ("ArrowRight", "aot", 0),
        ("ArrowRight", "loops", 0),
        ("ArrowRight", "kernels", 0),
        ("ArrowDown", "kernels", 1),
        ("ArrowLeft", "loops", 0),
        ("ArrowUp", "loops", -1),
    ):
        page.keyboard.press(key)
        linked = sorted(n for there, n in sharing(explorer, *at) if there == pane)
        pieces = [p for section in explorer.pane(pane).sections for p in section.pieces]
        first = next(n for n in linked if not is_weak(pieces[n]))
        at = (pane, at[1] + down if down else first)
        assert focused(page) == at, key
        assert lit(page) == sharing(explorer, *at)
    style = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(style) == "solid", "where the focus is can be seen"
    page.keyboard.press("Enter")
    assert "pinned" in line(page, *at).get_attribute("class")


def test_search_jumps_from_match_to_match(show: Open, long: Trace) -> None:
    page = show(long.explore(["source", "wrapper"]))
    page.locator("input[aria-label=search]").fill("2 softmax")
    assert "0 found" in page.locator(".bar").inner_text()
    page.locator("input[aria-label=search]").fill("# 199")
    assert "11 found" in page.locator(".bar").inner_text()
    for key, at in (("Enter", 199), ("Enter", 1990), ("Enter", 1991), ("Shift+Enter", 1990)):
        page.keyboard.press(key)
        assert line(page, "wrapper", at).is_visible()
        assert "found" in line(page, "wrapper", at).get_attribute("class")


def test_the_filter_hides_what_does_not_match(show: Open, long: Trace) -> None:
    page = show(long.explore(["source", "wrapper"]))
    page.locator("input[aria-label=filter]").fill("RELU")
    shown = [found.inner_text() for found in page.locator(".ln").all()]
    assert shown and all("relu" in found.lower() for found in shown)
    wrapped = [line.text for graph in long.graphs.values() for line in graph.wrapper.lines]
    told = f"{sum('relu' in text for text in wrapped)} of {len(wrapped)} lines"
    assert page.locator(".pane[data-p=wrapper] h4").inner_text().endswith(told)
    page.locator("input[aria-label=filter]").fill("")
    assert line(page, "source", 3).is_visible() and line(page, "wrapper", 3).is_visible()


def opened(page: Any) -> list[str]:
    return page.locator(".pane").evaluate_all("(panes) => panes.map((pane) => pane.dataset.p)")


def test_rooms_and_menus_choose_up_to_four_panes(show: Open, trace: Trace) -> None:
    page = show(trace.explore(["source", "kernels"]))
    assert opened(page) == ["source", "kernels"]
    for room in ("loops", "bytecode"):
        page.locator(f".room[data-p={room}]").click()
    assert opened(page) == ["source", "bytecode", "loops", "kernels"]
    page.locator(".room[data-p=aot]").click()  # the one open longest makes room
    assert opened(page) == ["bytecode", "aot", "loops", "kernels"]
    page.locator(".pane[data-p=aot] select").select_option("wrapper")
    assert opened(page) == ["bytecode", "wrapper", "loops", "kernels"]
    page.locator(".pane[data-p=wrapper] select").select_option("kernels")  # they change places
    assert opened(page) == ["bytecode", "kernels", "loops", "wrapper"]
    page.locator(".room[data-p=loops]").press("Enter")
    pressed = page.locator(".room[aria-pressed=true]")
    assert pressed.count() == 3 and opened(page) == ["bytecode", "kernels", "wrapper"]
