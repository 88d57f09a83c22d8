"""A trace links every stage to the source line it came from, as text, as a page, and in a browser."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

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


def test_data_behind_the_links_is_the_origins(trace: Trace) -> None:
    page = to_html(trace)
    origins = sorted({o for p in trace.pieces() for o in p.origins})
    lines = re.findall(
        r'<span class="ln"[^>]*?data-o="([\d ]+)"[^>]*>(.*?)\n</span>', page, re.DOTALL
    )
    shown = {html.unescape(re.sub("<.*?>", "", content)).strip(): ids for ids, content in lines}
    for piece in trace.pieces():
        if piece.stage.startswith("aot.") and piece.origins:
            assert shown[piece.text] == " ".join(
                str(origins.index(o)) for o in sorted(piece.origins)
            )


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


CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to open the page with")
def test_in_a_browser_pointing_lights_exactly_what_shares_an_origin(
    trace: Trace, tmp_path: Path
) -> None:
    page = tmp_path / "two.html"
    view = to_html(trace)
    page.write_text(f"<!doctype html><meta charset='utf-8'><body>{view}{view}", encoding="utf-8")
    done = subprocess.run(
        [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--disable-background-networking",
            "--window-size=1400,900",
            "--dump-dom",
            f"{page.as_uri()}#hover=aten.exp",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    body = done.stdout[done.stdout.index("<body") :]
    first, second = body.split('<div class="mc trace')[1:]
    for copy in (first, second):
        assert copy.startswith(" live lit")
        hot = re.findall(r'<span class="ln hot"[^>]*>(.*?)\n</span>', copy, re.DOTALL)
        softmax = {o for p in trace.pieces() for o in p.origins if o.target == "torch.softmax"}
        wanted = [p for p in trace.pieces() if p.origins & softmax]
        assert len(hot) == len(wanted) + 1, "every piece of softmax, and its line of source"
        assert any("return torch.softmax(h, -1)" in re.sub("<.*?>", "", h) for h in hot)
        assert "<path" in copy and "<input" in copy
        assert "256 KiB" in copy[copy.index('class="foot"') :]
