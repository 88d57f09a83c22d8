"""Differences as pictures: row by row, nothing left out, readable without a style sheet."""

from __future__ import annotations

import html
import re

import pytest
import torch

import minicompile as mc
from minicompile.debug.diff import Diff
from minicompile.ops.display import to_html
from minicompile.pipeline_result import Trace
from minicompile.show.palette import BAD, GOOD, line_colour
from tests.show import example


def mixed(x):
    y = torch.softmax(x, -1)
    z = torch.sin(x) + torch.sin(x)
    return y * 2 + z


@pytest.fixture(scope="module")
def trace() -> Trace:
    return mc.trace(mixed, torch.randn(4, 8, requires_grad=True))


def plain(page: str) -> str:
    """What a reader sees: no tags, no style sheet, no script."""
    page = re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]*>", "", page))


def rows_of(page: str) -> list[str]:
    return re.findall(r"<tr>.*?</tr>", page, flags=re.DOTALL)


@pytest.mark.parametrize(
    "names", [("prims.cse",), ("core", "prims"), ("capture", "backward.loops")]
)
def test_every_row_is_there_with_its_sides_cause_and_line(
    trace: Trace, names: tuple[str, ...]
) -> None:
    diff = trace.diff(*names)
    rows = rows_of(to_html(diff))
    assert len(rows) == len(diff.rows)
    for row, shown in zip(diff.rows, rows):
        cells = re.findall(r"<td.*?</td>", shown, flags=re.DOTALL)
        sides = [row.after] if row.status == "same" else [row.before, row.after]
        for piece, cell in zip(sides, cells):
            text = plain(cell)
            assert text.startswith(piece.text) if piece is not None else text == ""
            if piece is not None and piece.lines:
                assert f"border-left:4px solid {line_colour(piece.lines[-1])}" in cell
            hue = {"same": ""}.get(row.status, BAD if cell is cells[0] else GOOD)
            assert piece is None or (hue in cell and (hue or BAD not in cell))
        assert row.note in plain(shown)
    page = plain(to_html(diff))
    assert all(row.cause in page for row in diff.rows)


def test_only_the_words_that_changed_are_marked(trace: Trace) -> None:
    [row] = [
        r for r in trace.diff("prims.cse").changes if r.status == "changed" and "sin" in str(r)
    ]
    page = to_html(Diff("one", (row,)))
    marks = re.findall(r'<span style="background-color:(#......)66">(.*?)</span>', page)
    assert [(hue, plain(mark)) for hue, mark in marks] == [(BAD, "sin_1"), (GOOD, "sin")]


def test_the_steps_are_slides_after_a_table_of_them_all(trace: Trace) -> None:
    steps = trace.steps()
    page = to_html(steps)
    slides = page.split('<div class="steps">')[1].split("<script>")[0]
    outer, depth = [], 0
    for tag, title in re.findall(r"<(/?)details[^>]*>(?:<summary>(.*?)</summary>)?", slides):
        depth += -1 if tag else 1
        outer += [plain(title)] if not tag and depth == 1 else []
    changed = [f"{i} {diff.title}" for i, diff in enumerate(steps.steps) if diff.changes]
    assert len(outer) == len(changed) + 1 and outer[0].startswith("overview")
    assert all(title.startswith(f"{name} ") for name, title in zip(changed, outer[1:]))
    overview = plain(slides[: slides.index("</details>")])
    assert all(diff.title in overview for diff in steps.steps)
    assert "ops → " in outer[2] and " added" in outer[2]


ALLOWED = {
    "background-color": r"#[0-9a-f]{8}",
    "border-left": r"4px solid (#[0-9a-f]{6}|transparent)",
    "color": r"#[0-9a-f]{6}",
    "white-space": "pre-wrap",
    "width": r"\d+%",
    "table-layout": "fixed",
    "vertical-align": "top",
    "text-align": "right",
}
"""In these forms a notebook that isn't trusted keeps them."""


def test_inline_styles_are_those_that_survive_in_an_untrusted_notebook(trace: Trace) -> None:
    other = example.trace()
    for obj in (trace.steps(), trace.diff("core", "prims"), trace.diff(other)):
        for style in re.findall(r'style="([^"]*)"', to_html(obj)):
            for rule in style.split(";"):
                name, _, value = rule.partition(":")
                assert re.fullmatch(ALLOWED[name], value), rule
