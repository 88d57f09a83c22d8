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
import torch

from minicompile.codegen.plan import CodeLine
from minicompile.debug.roofline import DeviceSpec
from minicompile.dynamo.history import Explanation, Miss, Timeline
from minicompile.dynamo.result import Capture, GraphBreak, GuardFailure
from minicompile.lowering.ir import ConstantBuffer, ExternKernel, InputBuffer, Layout, LoopGraph
from minicompile.ops.display import Several, Shown, renderer, to_html
from minicompile.ops.graph import Graph, PassRecord
from minicompile.ops.origin import Origin, SourceLine
from minicompile.ops.registry import scoped
from minicompile.pipeline_result import Trace
from minicompile.show.palette import BAD, GOOD, line_colour
from tests.show import example

CPU = torch.device("cpu")
VOID = {"img", "br", "meta", "input", "hr", "col"}


def stage_objects() -> dict[str, Any]:
    """One object of each type that a room hands on."""
    trace = example.trace()
    schedule, capture, aot = trace.schedule, trace.capture, trace.aot
    assert aot is not None and aot.partition is not None
    node = schedule.kernels[0]
    found = [
        trace,
        trace.forward,
        trace.roofline(DeviceSpec("toy", 1e9, 1e10)),
        capture,
        capture.graph,
        capture.guards[0],
        GuardFailure(capture.guards[0], 3),
        GraphBreak("a generator is compiled directly", example.CALL, "call it from a function"),
        aot,
        aot.partition,
        aot.metadata,
        aot.joint,
        PassRecord("fold", "a\nb\nc", "a\nx\nc\nd", 2),
        trace.loops,
        trace.loops.inputs[0],
        trace.loops.operations[0],
        trace.loops.operations[1],
        ConstantBuffer("c0", Layout.contiguous(CPU, torch.float32, (2,)), value=torch.ones(2)),
        schedule.before[0],
        schedule.before[1],
        schedule.before[1].body,
        node,
        schedule,
        schedule.decisions[0],
        schedule.memory,
        trace.plans,
        trace.plans[0],
        trace.kernels[0],
        trace.wrapper,
        trace.from_line(12),
        trace.from_line(12)[0],
        trace.diff("core", "aot.forward"),
        trace.steps(),
    ]
    return {f"{i:02} {type(obj).__name__}": obj for i, obj in enumerate(found)}


OBJECTS = stage_objects()


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


@pytest.mark.parametrize("name", OBJECTS)
def test_html_is_well_formed_and_styled(name: str) -> None:
    page = to_html(OBJECTS[name])
    parsed(page)
    assert page.startswith("<style>") and page.count("<style>") == 1


@pytest.mark.parametrize("name", OBJECTS)
def test_html_fetches_nothing_and_has_no_ids(name: str) -> None:
    page = to_html(OBJECTS[name])
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    for tag, attribute, value in parsed(page).attributes:
        assert attribute != "id"
        assert not attribute.startswith("on"), f"<{tag} {attribute}>"
        if attribute in ("src", "href"):
            assert value.startswith("data:image/svg+xml;base64,")


def test_equal_objects_give_equal_pages() -> None:
    again = stage_objects()
    for name, obj in OBJECTS.items():
        assert to_html(obj) == to_html(again[name]), name
        assert str(obj) == str(again[name]), name


@pytest.mark.parametrize("name", OBJECTS)
def test_text_is_what_a_terminal_prints(name: str) -> None:
    bundle = OBJECTS[name]._repr_mimebundle_()
    assert bundle["text/plain"] == str(OBJECTS[name])
    assert not re.search(r"0x[0-9a-f]{6,}|object at", bundle["text/plain"])
    assert str(Path(__file__).parent) not in bundle["text/plain"] + bundle["text/html"]


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


@pytest.mark.long
def test_importing_a_room_alone_is_enough_for_its_picture() -> None:
    import subprocess
    import sys

    program = (
        "from minicompile.dynamo.result import GraphBreak\n"
        "import sys; assert 'minicompile.show' not in sys.modules\n"
        "page = GraphBreak('why', None)._repr_mimebundle_()['text/html']\n"
        "assert 'class=\"mc ' in page, page\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


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


def test_views_loaded_inside_a_scope_stay() -> None:
    graph = example.trace().capture.graph
    with scoped():
        to_html(graph)
    assert to_html(graph).startswith("<style>")


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


def test_neighbouring_lines_differ_in_colour() -> None:
    colours = [line_colour(SourceLine("m.py", n, "f")) for n in range(1, 9)]
    assert len(set(colours)) == len(colours)


def test_long_graphs_fold_by_block() -> None:
    made = example.GraphMaker()
    node = made.input("x", 4)
    for i in range(90):
        origin = Origin(f"n{i}", "torch.relu", (SourceLine("m.py", i, "f"),), f"layers.{i // 30}")
        node = made.call(f"n{i}", torch.relu, (node,), (4,), frozenset({origin}))
    page = to_html(made.finish("long", "capture", "n89"))
    assert all(f"<summary><code>layers.{i}</code> " in page for i in range(3))


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


def test_an_explanation_tells_breaks_and_recompiles() -> None:
    capture = example.trace().capture
    first = Miss({0: 0}, made=1)
    failures = (GuardFailure(capture.guards[0], 7),)
    second = Miss({0: 2, 1: 2}, failures, 2)
    explanation = Explanation(
        "f",
        (capture,),
        (GraphBreak("no rule", example.CALL, "rewrite"),),
        2,
        3,
        True,
        (Timeline("f", (first, second), {0: 2, 1: 3, 2: 0}),),
    )
    page = to_html(explanation)
    parsed(page)
    assert "no rule" in page and "recompile limit" in page and "failed" in page
    assert "from call 5" in page and "✗" in page


def test_a_type_can_be_shown_by_its_full_name() -> None:
    """Assembly lives beside Triton, which may be missing: its view imports nothing."""
    kernel = example.trace().kernels[0]

    class Assembly(Shown):
        source, levels = kernel, {"ptx": ".visible <entry>\n\tld.global\n\tret;"}

        def kernel_lines(self, level: str) -> list[int | None]:
            return [None, 4, None]

        def __str__(self) -> str:
            return "softmax for cuda 90: 4 warps\n  ptx: 3 lines"

    Assembly.__module__, Assembly.__qualname__ = "minicompile.debug.gpu_assembly", "Assembly"
    page = to_html(Assembly())
    parsed(page)
    assert "3 lines, 1 of them from a source line" in page and ".visible &lt;entry&gt;" in page


def test_symbolic_sizes_are_shown() -> None:
    from minicompile.shapes.expr import size_symbol

    s0 = size_symbol("s0")
    layout = Layout.contiguous(CPU, torch.float32, (s0, 4))
    graph = LoopGraph("g", [s0, InputBuffer("x", layout)], [], [], [], {s0: 8})
    page = to_html(graph)
    assert "symbolic" in page and "8 when compiling" in page


def test_a_trace_that_stops_after_capture_shows_what_it_has() -> None:
    trace = Trace("f", example.trace().capture)
    parsed(to_html(trace))
    assert "bytecode" in str(trace).lower()
    with pytest.raises(AttributeError, match="no forward graph"):
        _ = trace.loops


def test_an_empty_capture_has_a_picture() -> None:
    made = example.GraphMaker()
    capture = Capture("f", made.finish("f", "capture"), [], ())
    parsed(to_html(capture))
    parsed(to_html(Trace("f", capture)))
