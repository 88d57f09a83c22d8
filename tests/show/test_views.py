"""Every stage object has a picture: well-formed, self-contained, deterministic, and safe to show."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from minicompile.codegen.plan import CodeLine
from minicompile.dynamo.result import GraphBreak
from minicompile.lowering.ir import ExternKernel
from minicompile.ops.display import Several, Shown, renderer, to_html
from minicompile.ops.graph import Graph, PassRecord
from minicompile.ops.origin import Origin, SourceLine
from minicompile.show.palette import BAD, GOOD, line_colour
from tests.show import example

VOID = {"img", "br", "meta", "input", "hr", "col"}


class Balance(HTMLParser):
    """Raises where a tag is closed that isn't the innermost open one."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"


def parsed(page: str) -> Balance:
    parser = Balance()
    parser.feed(page)
    parser.close()
    assert not parser.open, f"never closed: {parser.open}"
    return parser


def test_what_has_no_picture_of_its_own_shows_the_text_of_a_terminal_coloured() -> None:
    class Report(Shown):
        def __str__(self) -> str:
            return "report: of <f>\n  + far from eager\n  less accurate than eager at m.py:3 in f"

    page = to_html(Report())
    parsed(page)
    line = line_colour(SourceLine("m.py", 3, "f"))
    assert "<b>report</b> <small>of &lt;f&gt;</small>" in page and f"4px solid {line}" in page
    assert (
        f'<span style="color:{GOOD}">  + <b style="color:{BAD}">far from eager</b></span>' in page
    )
    assert f'<b style="color:{BAD}">less accurate than eager</b>' in page


EVIL = '<script>alert("1")</script>&\'<img src=x onerror=alert(2)>'


def evil_origin(folder: Path) -> Origin:
    file = folder / "evil<b>.py"
    file.write_text(f"x = '{EVIL}'\n")
    return Origin("relu", f"torch.{EVIL}", (SourceLine(str(file), 1, EVIL),), EVIL)


def test_names_and_code_of_the_user_are_escaped(tmp_path: Path) -> None:
    origin = evil_origin(tmp_path)
    trace = example.trace()
    trace.name = trace.capture.name = EVIL
    trace.capture.inlined, trace.capture.result = (EVIL,), EVIL
    for node in trace.capture.graph.nodes:
        node.meta["origins"] = frozenset({origin})
    for operation in trace.loops.operations:
        operation.origins = frozenset({origin})
        if isinstance(operation, ExternKernel):
            operation.reason = EVIL
        else:
            operation.why = EVIL
    trace.kernels[0].lines[4] = CodeLine(EVIL, frozenset({origin}))
    shown: list[Any] = [
        trace,
        *trace.stages.values(),
        trace.steps(),
        trace.diff(example.trace()),
        PassRecord(EVIL, EVIL, "x" + EVIL, 1),
        GraphBreak(EVIL, origin.line, EVIL, EVIL),
    ]
    for obj in shown:
        page = to_html(obj)
        parser = parsed(page)
        assert EVIL not in page and "<img src=x" not in page and "evil<b>" not in page
        assert not [a for a in parser.attributes if a[1].startswith("on")]
    for page in trace.save(tmp_path).parent.glob("*.html"):
        assert EVIL not in page.read_text()
        parsed(page.read_text())


@dataclass
class Plain(Shown):
    def __str__(self) -> str:
        return "a < b"


def test_a_view_of_ones_own_replaces_the_built_in_one_everywhere() -> None:
    graph = example.trace().capture.graph
    with renderer.scoped():

        @renderer(Plain, Graph)
        def mine(obj: object) -> str:
            return f"<p>mine: {type(obj).__name__}</p>"

        assert to_html(Plain()) == "<p>mine: Plain</p>"
        assert to_html(Several([graph])).endswith("<p>mine: Graph</p>")
    assert "<b>a &lt; b</b>" in to_html(Plain())
    assert "mine" not in to_html(graph)


def test_a_line_has_one_colour_in_every_view() -> None:
    trace = example.trace()
    relu = _stripe_of(to_html(trace.capture.graph), "torch")
    assert (
        relu
        == _stripe_of(to_html(trace.kernels[0]), "tmp2 = tmp1 ?")
        == _stripe_of(to_html(trace), "tmp2 = tmp1 ?")
    )


def _stripe_of(page: str, content: str) -> str:
    """The stripe of the line about relu that contains `content`."""
    for stripe, inside in re.findall(
        r'<span class="ln" style="border-left:4px solid (\S+?)"(.*?)\n</span>', page, re.DOTALL
    ):
        if content in inside and "model.py:12" in inside:
            return str(stripe)
    raise AssertionError(f"no line with {content}")


def test_the_picture_of_a_memory_plan_has_a_rectangle_for_each_piece() -> None:
    memory = example.trace().schedule.memory
    (data,) = re.findall('base64,([^"]+)', to_html(memory))
    drawn = base64.b64decode(data).decode()
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    heights = {
        name: float(height)
        for height, name in re.findall(
            r'height="([\d.]+)"[^>]*stroke-width[^>]*><text[^>]*>(\w+)', drawn
        )
    }
    assert heights["buf0"] == pytest.approx(heights["buf4"], abs=0.2) and heights["buf0"] > 50
