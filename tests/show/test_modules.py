"""Large graphs by module: every node is listed once, alike modules are drawn once, and the cut is drawn."""

from __future__ import annotations

import collections
import html
import re
from typing import Any

import pytest
import torch
from torch import nn

import minicompile as mc
from minicompile.ops.display import bytes_text, to_html
from minicompile.ops.graph import statement
from minicompile.show import graphs
from minicompile.show.graphviz import svg
from minicompile.show.modules import Part, diagram, in_backward, parts_of, path_of
from tests.show import example

needs_dot = pytest.mark.skipif(
    svg("digraph G { a }") is None, reason="nothing here can draw graphs"
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.widen, self.narrow = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.tanh(self.widen(self.norm(x))))


@pytest.fixture(scope="module")
def aot() -> Any:
    """Three equal layers in a row, forward and backward: some 200 operations."""
    model = nn.Sequential(Layer(), Layer(), Layer())
    return mc.trace(model, torch.ones(4, 8)).aot


def plain(page: str) -> str:
    return html.unescape(re.sub("<.*?>", "", page))


@pytest.mark.parametrize("name", ["forward", "backward", "joint"])
def test_each_line_of_a_folded_graph_is_there_once(aot: Any, name: str) -> None:
    graph = getattr(aot, name)
    assert len(list(graph.nodes)) > graphs.FULL_PICTURE
    shown = collections.Counter(
        re.sub(" [▬↻].*", "", line).strip() for line in plain(to_html(graph)).split("\n")
    )
    for node in graph.nodes:
        if node.op != "placeholder":
            assert shown[statement(node)] == 1, statement(node)


@pytest.mark.parametrize("name", ["forward", "backward", "joint"])
def test_parts_hold_every_node_in_order_each_in_its_module(aot: Any, name: str) -> None:
    nodes = [node for node in getattr(aot, name).nodes if node.op != "placeholder"]

    def flat(parts: Any, path: tuple[str, ...]) -> list[Any]:
        found = []
        for part in parts:
            here = (*path, part.name) if part.name else path
            assert not part.parts or flat(part.parts, here) == list(part.nodes)
            if not part.parts:
                assert all(path_of(n)[: len(here)] == here for n in part.nodes if path_of(n))
            found += part.nodes
        return found

    assert flat(parts_of(nodes), ()) == nodes


def test_modules_fold_inside_the_modules_that_hold_them(aot: Any) -> None:
    for graph in (aot.forward, aot.backward):
        page = to_html(graph)
        for number in range(3):
            start = page.index(f"<summary><code>{number}</code> <small>")
            assert 0 < page.find("<summary><code>widen</code> <small>", start) - start < 100_000


@needs_dot
def test_modules_that_are_alike_are_drawn_once_and_said_to_be(aot: Any) -> None:
    page = to_html(aot.forward)
    assert page.count("drawn like 0 › ") + page.count("drawn like 1") >= 3
    assert page.count("<img") < 3 * 5


def test_boxes_and_arrows_of_a_drawing_are_those_of_the_graph(aot: Any) -> None:
    """By an independent walk over all edges of the graph."""
    parts = parts_of([n for n in aot.forward.nodes if n.op not in ("placeholder", "output")])
    drawn = diagram("forward", parts)
    place = {
        node: f"part {i}" if part.name else node.name
        for i, part in enumerate(parts)
        for node in part.nodes
    }
    expected = {
        (place.get(value, f"in {value.name}"), place[node])
        for node in place
        for value in node.all_input_nodes
    }
    assert {(e.start, e.end) for e in drawn.edges} == {(a, b) for a, b in expected if a != b}
    assert {node.name for node in drawn.nodes} == {name for edge in expected for name in edge}


def test_every_saved_value_crosses_the_cut_with_its_bytes() -> None:
    aot = example.aot()
    assert aot.joint is not None and aot.partition is not None
    drawn = diagram("joint", [Part("", list(aot.joint.nodes))], aot.partition)
    labels = {node.name: (node.label, node.sublabel) for node in drawn.nodes}
    by_name = {node.name: node for node in aot.joint.nodes}
    for value in aot.partition.saved:
        cut = f"cut {value.name}"
        assert labels[cut] == (value.name, bytes_text(value.bytes or 0))
        later = {user.name for user in by_name[value.name].users if in_backward(user)}
        assert {edge.end for edge in drawn.edges if edge.start == cut} == later
        assert [edge.start for edge in set(drawn.edges) if edge.end == cut] == [value.name]
    forward, kept, backward = drawn.clusters
    assert {"mm", "relu", "div"} <= set(forward.nodes) and "x" in forward.nodes
    assert {"mul", "mm_1", "tangents_1"} <= set(backward.nodes)
    assert set(kept.nodes) == {f"cut {value.name}" for value in aot.partition.saved}


def test_all_that_is_saved_crosses_and_nothing_else(aot: Any) -> None:
    nodes = [node for node in aot.joint.nodes if node.op != "output"]
    (_, kept, _) = diagram("joint", [Part("", nodes)], aot.partition).clusters
    assert set(kept.nodes) == {f"cut {value.name}" for value in aot.partition.saved}


def test_a_mask_of_the_backward_that_the_forward_saves_is_drawn_before_the_cut() -> None:
    x, y = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    aot = mc.trace(lambda a, b: torch.softmax(torch.relu(a @ b), -1), x, y).aot
    mask = next(node for node in aot.joint.nodes if "le.Scalar" in str(node.target))
    saved = {value.name for value in aot.partition.saved}
    assert mask.meta["phase"] == "backward" and mask.name in saved
    drawn = diagram("joint", [Part("", list(aot.joint.nodes))], aot.partition)
    forward, kept, backward = drawn.clusters
    assert mask.name in forward.nodes and mask.name not in backward.nodes
    assert set(kept.nodes) == {f"cut {name}" for name in saved}
    users = {user.name for user in mask.users}
    assert {e.end for e in drawn.edges if e.start == f"cut {mask.name}"} == users


def test_what_the_backward_computes_again_is_marked(aot: Any) -> None:
    model = example.aot()
    again = model.partition.recomputed[0].name  # type: ignore[union-attr]
    assert model.joint is not None
    drawn = diagram("joint", [Part("", list(model.joint.nodes))], model.partition)
    assert [n.name for n in drawn.nodes if n.label.startswith("↻")] == [again]
    assert "↻ computed again in backward" in plain(graphs.graph_parts(model.joint, model.partition))


def test_no_arrow_of_a_cut_large_graph_is_lost(aot: Any) -> None:
    """What flows between two boxes is an arrow between them or, from forward to backward, crosses the cut."""
    nodes = [n for n in aot.joint.nodes if n.op not in ("placeholder", "output")]
    parts = [
        p
        for later in (False, True)
        for p in parts_of([n for n in nodes if in_backward(n) is later])
    ]
    drawn = diagram("joint", parts, aot.partition, outside=False)
    place = {n: f"part {i}" if p.name else n.name for i, p in enumerate(parts) for n in p.nodes}
    arrows = {(edge.start, edge.end) for edge in drawn.edges}
    saved = {value.name for value in aot.partition.saved}
    for user, end in place.items():
        for value in user.all_input_nodes:
            start = place.get(value, "inputs")
            assert not (in_backward(value) and value.name in saved), "another test is about those"
            if in_backward(user) and value.name in saved:
                assert {(start, f"cut {start}"), (f"cut {start}", end)} <= arrows
            elif value in place and in_backward(user) == in_backward(value):
                assert start == end or (start, end) in arrows
            else:  # the backward computes it again
                assert (start, end) not in arrows


def test_large_graphs_below_others_say_where_their_lines_are(aot: Any) -> None:
    page = plain(to_html(aot))
    assert all(f"{at} shows its lines" in page for at in ("aot.joint", "aot.levels['core']"))


def test_long_functions_without_modules_fold_by_line() -> None:
    made = example.GraphMaker()
    node = made.input("x", 4)
    for i in range(90):
        line = example.SourceLine("m.py", i // 10, "f")
        origin = example.Origin(f"n{i}", "torch.relu", (line,))
        node = made.call(f"n{i}", torch.relu, (node,), (4,), frozenset({origin}))
    page = to_html(made.finish("long", "capture", "n89"))
    assert all(f"<summary><code>m.py:{i}</code> <small>10 operations" in page for i in range(9))
