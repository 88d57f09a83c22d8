"""Every view in a browser: in JupyterLab live, received from somebody else, and as a file; nothing leaves the
machine. One JupyterLab and one execution of one notebook serve all tests."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nbformat
import pytest

from minicompile.show.trace import STATIC_LINES
from tests.browser.explorer import Explorer, Oracle
from tests.browser.pages import PANEL, Lab, Pages

pytestmark = pytest.mark.long

CELLS = (
    "import json\nfrom pathlib import Path\n"
    "import minicompile as mc\n"
    "from tests.browser.model import block, example\n"
    "from tests.browser.oracle import expected",
    "trace = mc.trace(block, *example())\ntrace.explore()",
    "trace",
    "trace.fusion_steps()",
    "trace.steps()",
    "mc.what_if(block, *example())",
    "Path('expected.json').write_text(json.dumps(expected(trace)))\n_ = trace.save('saved')",
)
PLACES = [
    ("source", "weights = torch.softmax(h, -1)", ""),
    ("source", "h = torch.relu(", ""),
    ("bytecode", "BINARY_OP @", ""),
    ("capture", "softmax = ", ""),
    ("joint", "aten.exp", ""),
    ("aot", "aten.le.Scalar", "backward"),
    ("loops", "max[", "forward"),
    ("schedule", "fused", "backward"),
    ("kernels", "mc_exp(", "forward"),
    ("kernels", "? 0.0f", "backward"),
    ("wrapper", "torch.mm(", "backward"),
]
"""Lines that are pointed at: pane, what the line holds, in the forward or the backward."""


@pytest.fixture(scope="module")
def live(lab: Lab, pages: Pages) -> Any:
    """The notebook with two copies of a trace, executed in JupyterLab and saved."""
    lab.write("live.ipynb", *CELLS)
    page = lab.open(pages, "live.ipynb")
    lab.run_all(page, "live.ipynb")
    page.wait_for_function("() => document.querySelectorAll('.mc.trace.live').length === 2")
    pages.shot(page, "live")
    return page


@pytest.fixture(scope="module")
def told(live: Any, lab: Lab) -> dict[str, Any]:
    """What Python told of the trace, in the kernel."""
    return json.loads((lab.folder / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def oracle(live: Any, told: dict[str, Any]) -> Oracle:
    found = Oracle.of(told["lines"])
    found.number_source(Explorer(live.locator(".mc.trace").first).lines("source"))
    return found


@pytest.fixture(scope="module")
def saved(live: Any, lab: Lab, pages: Pages) -> Any:
    """The file of `trace.save`, opened from disk."""
    page = pages.open((lab.folder / "saved" / "index.html").as_uri())
    page.wait_for_selector(".mc.trace.live")
    pages.shot(page, "saved")
    return page


@pytest.fixture
def first(live: Any, oracle: Oracle) -> Explorer:
    """The first copy, with nothing lit, pinned or filtered."""
    return fresh(live, 0)


@pytest.fixture
def second(live: Any, oracle: Oracle) -> Explorer:
    return fresh(live, 1)


def fresh(page: Any, number: int) -> Explorer:
    page.bring_to_front()
    view = Explorer(page.locator(".mc.trace").nth(number))
    view.reset()
    return view


def test_every_pane_has_every_line_of_its_stage(first: Explorer, oracle: Oracle) -> None:
    assert set(oracle.panes) == set(first.panes())
    for pane in oracle.panes:
        assert first.lines(pane) == oracle.code(pane), pane


def test_pointing_at_a_line_lights_what_shares_an_origin_in_every_pane(
    first: Explorer, second: Explorer, oracle: Oracle
) -> None:
    for pane, code, graph in PLACES:
        number = oracle.find(pane, code, graph)
        wanted = oracle.shares(pane, number)
        assert len(wanted) > 3
        assert sum(map(len, wanted.values())) < sum(map(len, oracle.panes.values()))
        first.point(pane, number)
        assert first.lit() == wanted, (pane, code)
        glowing, dark = first.drawn()
        assert pane in glowing
        assert all(lines <= wanted[pane] for pane, lines in glowing.items())
        assert not any(lines & wanted.get(pane, set()) for pane, lines in dark.items())
    assert second.lit() == {} and second.drawn()[0] == {}


def test_the_notebook_takes_no_keys_of_the_view_but_those_with_ctrl(
    first: Explorer, live: Any, lab: Lab
) -> None:
    cells = live.locator(f"{PANEL} .jp-Cell").count()
    first.filter.click()
    live.keyboard.type("bamdd y")  # insert below, above, to Markdown, delete, to code
    assert first.filter.input_value() == "bamdd y"
    first.filter.fill("")
    first.bring("kernels", 20).click()
    live.keyboard.type("bamdd y")
    assert live.locator(f"{PANEL} .jp-Cell").count() == cells
    assert live.locator(f"{PANEL} .jp-MarkdownCell").count() == 0
    lab.save(live, "live.ipynb")


class Slides:
    """A slide show of a page, driven from its first slide on."""

    def __init__(self, page: Any, number: int) -> None:
        self.root = page.locator(".mc .steps.live").nth(number)
        self.slider = self.root.get_by_role("slider").first
        self.slider.press("Home")

    @property
    def shown(self) -> str:
        """The text of the one slide that can be seen."""
        seen = self.root.locator(":scope > details").evaluate_all(
            "(all) => all.filter((one) => one.open && one.checkVisibility()).map((one) => one.textContent)"
        )
        assert len(seen) == 1
        return " ".join(seen[0].split())


def test_the_fusion_stepper_shows_each_decision_in_order(
    live: Any, told: dict[str, Any], pages: Pages
) -> None:
    slides = Slides(live, 0)
    for number, (pair, reason, left) in enumerate(told["steps"]):
        assert f"{number}: " in slides.shown and pair in slides.shown
        assert reason in slides.shown and left in slides.shown
        pages.shot(slides.root, f"fusion_step_{number}")
        slides.slider.press("ArrowRight")
    slides.root.get_by_role("button", name="‹").first.click()
    assert told["steps"][-2][0] in slides.shown and told["steps"][-2][2] in slides.shown
    slides.root.get_by_role("button", name="›").first.click()
    assert told["steps"][-1][2] in slides.shown


def test_the_what_if_panel_compiles_what_its_controls_say(
    live: Any, told: dict[str, Any], pages: Pages
) -> None:
    panel = live.locator(".jp-OutputArea-output .widget-vbox").first
    beside = live.locator(".jp-OutputArea-child").filter(has_text="nothing changed").last

    def shown(title: str, where: Any = panel) -> dict[str, str]:
        """The last column of the forward's costs, when the panel's headline says that."""
        where.locator(".head small", has_text=title).first.wait_for()
        where.scroll_into_view_if_needed()
        lines = where.locator(".ln").all_inner_texts()
        costs: dict[str, str] = {}
        for name, *cells in (re.split(r"\s{2,}", line.strip()) for line in lines):
            costs.setdefault(name, cells[-1] if cells else "")
        return {name: costs[name] for name in told["apart"]}

    assert told["apart"] != told["as decided"]
    assert shown("nothing changed", beside) == told["as decided"]
    assert panel.get_by_label("dynamic").input_value() == "automatic"
    apart = panel.get_by_label("force apart")
    apart.select_option(apart.locator("option", has_text=told["pair"]).inner_text())
    assert shown("forbid = ") == told["apart"]
    pages.shot(panel, "what_if_apart")
    apart.select_option([])
    assert shown("nothing changed") == told["as decided"]
    panel.get_by_label("backend").select_option("aot_eager")
    panel.get_by_text("backend = 'aot_eager'").wait_for()
    pages.shot(panel, "what_if_backend")


def test_a_notebook_received_from_somebody_shows_colours_and_titles_without_scripts(
    live: Any, first: Explorer, lab: Lab, pages: Pages, oracle: Oracle
) -> None:
    notebook = nbformat.read(lab.folder / "live.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_markdown_cell("changed, so nobody vouches for it"))
    nbformat.write(notebook, lab.folder / "received.ipynb")
    page = lab.open(pages, "received.ipynb")
    page.wait_for_function("() => document.querySelectorAll('.mc.trace').length === 2")
    pages.shot(page, "received")
    assert page.locator(".mc.trace.live").count() == 0
    assert page.locator(f"{PANEL} .jp-OutputArea script").count() == 0
    view = page.locator(".mc.trace").first
    lines, panes = view.locator(".ln"), ("source", "aot", "loops", "kernels")
    wanted = [line for pane in panes for line in oracle.panes[pane][:STATIC_LINES]]
    left_out = [f"and {len(oracle.panes[pane]) - STATIC_LINES} more lines" for pane in panes]
    assert [more for more in left_out if more in view.inner_text()] == left_out[1::2]
    seen = lines.evaluate_all(
        """(lines) => lines.map((line) => ({
            text: line.innerText.trim(), title: line.title,
            height: line.getBoundingClientRect().height,
            colour: getComputedStyle(line).borderLeftColor,
            width: getComputedStyle(line).borderLeftWidth}))"""
    )
    assert len(seen) == len(wanted)
    for line, (_, code, made) in zip(seen, wanted, strict=True):
        assert line["text"].endswith(code) and line["height"] > 0
        if made:
            assert line["title"] and line["width"] == "4px", line
            assert line["colour"] not in ("rgba(0, 0, 0, 0)", "rgb(0, 0, 0)"), line
    assert len({line["colour"] for line in seen}) > 4, "a colour for each line of source"
    relu = next(line for line in seen if "aten.relu" in line["text"])
    assert "h = torch.relu(" in relu["title"] and "f32[64, 16]" in relu["title"]


def test_no_request_leaves_the_machine(live: Any, saved: Any, lab: Lab, pages: Pages) -> None:
    asked = {urlsplit(url)[:2] for url in pages.requests}
    assert {("http", urlsplit(lab.url).netloc), ("file", "")} <= asked, "the recording works"
    assert outside(pages.requests) == []
    assert pages.complaints == []


def test_a_request_that_leaves_the_machine_would_be_seen(pages: Pages, tmp_path: Path) -> None:
    page = tmp_path / "leaks.html"
    page.write_text("<img src='http://example.invalid/pixel.png'>")
    before = len(pages.requests)
    pages.open(page.as_uri()).close()
    found = pages.requests[before:]
    del pages.requests[before:]
    assert outside(found) == ["http://example.invalid/pixel.png"]


def outside(requests: list[str]) -> list[str]:
    """The requests that are neither to this machine nor to a file or the page itself."""
    inside = ("file", "data", "blob", "about")
    split = [(urlsplit(url), url) for url in requests]
    return [url for at, url in split if at.scheme not in inside and at.hostname != "127.0.0.1"]
