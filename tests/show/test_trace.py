"""A trace links every stage to the source line it came from, as text, as a page, and in a browser."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile.ops.display import to_html
from minicompile.ops.origin import Origin, SourceLine, short_file
from minicompile.pipeline_result import Trace
from tests.show import example
from tests.show.model import block
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
    assert {p.name for p in found if p.stage == "aot.backward"} == {
        "relu",
        "le",
        "full",
        "expand_3",
        "where",
    }
    assert {p.name for p in found if p.stage == "forward.loops"} == {"buf1", "buf2"}
    kernel = [p.text.strip() for p in found if p.stage == "forward.kernels"]
    assert "float tmp2 = tmp1 ? 0.0f : tmp0;" in kernel


def test_a_call_stands_for_what_it_did(trace: Trace) -> None:
    inlined = {str(p) for p in trace.from_line(7)}
    assert inlined and inlined < {str(p) for p in trace.from_line(11)}


def test_a_line_number_of_several_files_needs_the_file() -> None:
    trace = example.trace()
    other = Origin("sin", "torch.sin", (SourceLine("other.py", 12, "g"),))
    next(n for n in trace.capture.graph.nodes if n.name == "softmax").meta["origins"] = frozenset(
        {other}
    )
    with pytest.raises(ValueError, match=r"several files.*other\.py"):
        trace.from_line(12)
    assert [p.name for p in trace.from_line(12, "other.py") if p.stage == "capture"] == ["softmax"]


def test_reasons_are_those_of_the_stages(trace: Trace) -> None:
    pieces = {(p.stage, p.name): p for p in trace.pieces()}
    assert pieces["forward.loops", "buf0"].why[0] == "extern: library matrix product"
    assert "fused" in pieces["forward.loops", "buf1"].why[0]
    assert "never in memory: it lives inside one kernel" in pieces["forward.loops", "buf2"].why
    saved = "saved for backward (256 KiB): aten.mm.default is expensive to compute again"
    assert pieces["aot.forward", "mm"].why == (saved,)
    again = "computed again instead of saved: cheaper than keeping it: 65536 FLOPs, from mm"
    assert again in pieces["aot.backward", "relu"].why


def test_the_summary_counts_each_room_and_says_where_to_look(trace: Trace) -> None:
    text = str(trace)
    assert re.search(r"Kernels +1 kernel, 36 lines +trace\.kernels", text)
    assert re.search(r"Loops \(backward\) +3 buffers, 1 extern +trace\.backward\.loops", text)


def test_saving_writes_the_explorer_and_two_files_per_stage(trace: Trace, tmp_path: Path) -> None:
    page = trace.save(tmp_path / "deep" / "out")
    folder, content = page.parent, page.read_text()
    names = {p.name for p in folder.iterdir()}
    assert {"01_capture.txt", "01_capture.html", "07_forward_wrapper.txt"} < names
    assert (folder / "06_forward_kernels.txt").read_text().rstrip() == str(trace.kernels).rstrip()
    assert set(re.findall(r'<a href="([^"]*)"', content)) == names - {"index.html"}
    assert to_html(trace) in content
    for file in folder.glob("*.html"):
        parsed(file.read_text().removeprefix("<!doctype html>"))
    again = example.trace().save(tmp_path / "again").parent
    for name in names:
        assert (again / name).read_text() == (folder / name).read_text(), "not deterministic"


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


def test_a_trace_that_stops_early_opens_what_it_has(trace: Trace) -> None:
    with pytest.raises(ValueError, match="no pane 'ptx' in the trace of block; it has: source"):
        trace.explore(["ptx"])
    stopped = Trace("block", trace.capture)
    assert list(stopped.explore().open) == ["source"]
    parsed(to_html(stopped))
    with pytest.raises(AttributeError, match="no forward graph"):
        _ = stopped.loops
    empty = mc.trace(lambda x: x, torch.ones(2)).capture
    assert parsed(to_html(empty)).attributes and parsed(to_html(Trace("f", empty))).attributes


@pytest.mark.long
def test_assembly_lines_have_the_origins_of_their_kernel_lines() -> None:
    pytest.importorskip("triton", reason="no Triton to cross-compile with")
    options = {"device_codegen": "triton"}
    made = mc.trace(mc.compile(block, options=options), torch.ones(8, 16), torch.ones(16, 4))
    explorer = made.explore(assembly=True)
    kernels = {kernel.name: kernel for kernel in made.kernels}
    assert explorer.open[:3] == ("source", "kernels", "ptx")
    (section,) = explorer.pane("ptx").sections
    found = [p for p in section.pieces if p.origins]
    assert any("ex2.approx" in p.text for p in found), "the exponential of softmax"
    for piece in found:
        kernel, number = piece.name.split(":")[0], int(piece.detail.split()[1])
        assert piece.origins == kernels[kernel].lines[number - 1].origins
    parsed(to_html(explorer))


def test_places_are_the_same_on_every_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert short_file("/tmp/ipykernel_123/456.py") == "<cell>"
    assert short_file("<string>") == "<string>"
    assert short_file(str(tmp_path / "nowhere" / "m.py")) == "m.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    assert short_file(str(tmp_path / "package" / "m.py")) == "package/m.py"
