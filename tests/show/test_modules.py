"""Large graphs by module: every node is listed once, modules are drawn, and what is saved is marked."""

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
from minicompile.show import graph_pictures as graphs
from minicompile.show.modules import Part, diagram, parts_of, path_of
from minicompile.show.palette import GOOD
from tests.show import example


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
        (place[value], place[node])
        for node in place
        for value in node.all_input_nodes
        if value in place
    }
    assert {(e.start, e.end) for e in drawn.edges} == {(a, b) for a, b in expected if a != b}
    assert {node.name for node in drawn.nodes} == set(place.values())


def test_what_is_saved_is_framed_and_what_the_backward_computes_again_is_marked() -> None:
    aot = example.trace().aot
    assert aot is not None
    assert aot.joint is not None and aot.partition is not None
    drawn = diagram("joint", [Part("", list(aot.joint.nodes))], aot.partition)
    saved = {value.name for value in aot.partition.saved}
    assert (
        saved and {node.name for node in drawn.nodes if node.border == GOOD and node.bold} == saved
    )
    again = [value.name for value in aot.partition.recomputed]
    assert [node.name for node in drawn.nodes if node.label.startswith("↻")] == again
    page = plain(graphs.graph_parts(aot.joint, aot.partition))
    assert "↻ computed again in backward" in page
    inputs = {node.name for node in aot.joint.nodes if node.op == "placeholder"}
    for value in (v for v in aot.partition.saved if v.name not in inputs):
        assert f"▬ saved for backward, {bytes_text(value.bytes or 0)}" in page
