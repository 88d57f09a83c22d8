"""A trace links every stage to the source line it came from, as text, as a page, and in a browser."""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from minicompile.ops.display import to_html
from minicompile.ops.origin import SourceLine, short_file
from minicompile.pipeline_result import Trace
from tests.show import example
from tests.show.test_views import parsed


@pytest.fixture(scope="module")
def trace() -> Trace:
    return example.trace()


def test_stages_stand_in_the_order_of_the_corridor(trace: Trace) -> None:
    after = ["loops", "schedule", "plans", "kernels", "wrapper"]
    names = [f"{graph}.{stage}" for graph in ("forward", "backward") for stage in after]
    assert list(trace.stages) == ["capture", "aot", *names]
    assert trace.stages["backward.loops"] is trace.backward.loops
    assert trace.stages["forward.kernels"] is trace.kernels


def test_a_line_is_followed_through_every_stage(trace: Trace) -> None:
    found = trace.from_line(12)
    assert {p.name for p in found if p.stage == "capture"} == {"relu"}
    assert {p.name for p in found if p.stage == "aot.backward"} == {"le", "where"}
    assert {p.name for p in found if p.stage == "forward.loops"} == {"buf1"}
    kernel = {p.name for p in found if p.stage == "forward.kernels"}
    assert kernel == {f"softmax_relu_0:{n}" for n in (5, 6, 7, 9)}


def test_a_call_stands_for_what_it_did(trace: Trace) -> None:
    assert [str(p) for p in trace.from_line(11)] == [str(p) for p in trace.from_line(7)]


def test_a_line_that_became_nothing_is_empty(trace: Trace) -> None:
    assert trace.from_line(3) == []
    assert trace.from_line(12, "other.py") == []


def test_a_line_number_of_several_files_needs_the_file() -> None:
    trace = example.trace()
    other = example.Origin("sin", "torch.sin", (SourceLine("other.py", 12, "g"),))
    next(n for n in trace.capture.graph.nodes if n.name == "softmax").meta["origins"] = frozenset(
        {other}
    )
    with pytest.raises(ValueError, match=r"several files.*other\.py"):
        trace.from_line(12)
    assert [p.name for p in trace.from_line(12, "other.py") if p.stage == "capture"] == ["softmax"]


def test_reasons_are_those_of_the_stages(trace: Trace) -> None:
    pieces = {(p.stage, p.name): p for p in trace.pieces()}
    assert pieces["forward.loops", "mm"].why[0] == "extern: library matrix product"
    assert "fused" in pieces["forward.loops", "buf1"].why[0]
    assert "never in memory: it lives inside one kernel" in pieces["forward.loops", "buf3"].why
    assert pieces["aot.forward", "relu"].why == (
        "saved for backward (256 KiB): cheaper than running the matrix product again",
    )
    again = "computed again instead of saved: cheaper to compute again"
    assert again in pieces["aot.backward", "le"].why


def test_the_summary_counts_each_room_and_says_where_to_look(trace: Trace) -> None:
    text = str(trace)
    assert re.search(r"Kernels +1 kernel, 11 lines +trace\.kernels", text)
    assert re.search(r"Loops \(backward\) +5 buffers, 1 extern +trace\.backward\.loops", text)


def test_saving_writes_a_page_and_a_text_file_per_stage(trace: Trace, tmp_path: Path) -> None:
    page = trace.save(tmp_path / "deep" / "out")
    names = sorted(p.name for p in page.parent.iterdir())
    assert names[0] == "01_capture.txt" and "index.html" in names
    assert "06_forward_kernels_softmax_relu_0.py" in names and "07_forward_wrapper.py" in names
    assert (page.parent / "06_forward_kernels_softmax_relu_0.py").read_text() == trace.kernels[
        0
    ].text
    content = page.read_text()
    parsed(content.removeprefix("<!doctype html>"))
    assert all(f"<summary>{name}</summary>" in content for name in trace.stages)
    assert example.trace().page() == content, "the page is not deterministic"


def model_of(view: str) -> Any:
    """The data that a view's script reads."""
    (found,) = re.findall(r'<script type="application/json">(.*?)</script>', view, re.DOTALL)
    return json.loads(found)


def texts(model: Any, section: Any, column: str) -> list[str]:
    numbers = section["rows"].get(column, [0] * section["count"])
    return [model["strings"][number] for number in numbers]


def test_data_behind_the_links_is_the_origins(trace: Trace) -> None:
    """All pieces of all stages are there, whole, each with exactly its operations."""
    model = model_of(to_html(trace))
    origins = sorted({o for p in trace.pieces() for o in p.origins})
    shown: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for pane in model["panes"]:
        for section in pane["sections"] if pane["key"] != "source" else ():
            sets = section["rows"].get("set", [0] * section["count"])
            operations = (tuple(model["sets"][number]) for number in sets)
            shown.update(zip(texts(model, section, "text"), operations, strict=True))
    wanted = Counter(
        (p.text, tuple(origins.index(o) for o in sorted(p.origins))) for p in trace.pieces()
    )
    assert shown == wanted


def test_titles_tell_without_scripts(trace: Trace) -> None:
    bare = re.sub(r"<(script|style)>.*?</\1>", "", to_html(trace), flags=re.DOTALL)
    titles = "\n".join(html.unescape(t) for t in re.findall(r'title="([^"]*)"', bare))
    assert (
        "saved for backward (256 KiB)" in titles
        and "from model.py:12 in block" in titles.replace("tests/show/", "")
    )
    assert "library matrix product" in bare


def test_places_are_the_same_on_every_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert short_file("/tmp/ipykernel_123/456.py") == "<cell>"
    assert short_file("<string>") == "<string>"
    assert short_file(str(tmp_path / "nowhere" / "m.py")) == "m.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    assert short_file(str(tmp_path / "package" / "m.py")) == "package/m.py"
