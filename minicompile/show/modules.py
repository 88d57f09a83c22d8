"""Graphs by module: each level of the module tree as a list of parts, and one level as a drawing.

    Part := name, nodes, parts inside: neighbours of one module or function

Parts are runs of neighbours: whatever order a graph has, arrows between them never form a cycle.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from minicompile.aot.result import Partition
from minicompile.ops.display import count_text
from minicompile.ops.dtypes import value_text
from minicompile.ops.graph import origins_of, target_name
from minicompile.show.graphviz import Diagram, Edge, Node
from minicompile.show.html import few
from minicompile.show.palette import BACKWARD, FORWARD, GOOD, NEUTRAL, colour

FULL_PICTURE = 48
"""Graphs with more nodes than this are drawn by module."""

AGAIN = "↻"
"""Marks what the backward computes again."""


def phase_colour(node: fx.Node) -> str:
    """Blue before the loss, orange after it, grey for what is neither."""
    if not node.op.startswith("call"):
        return NEUTRAL
    return BACKWARD if node.meta.get("phase") == "backward" else FORWARD


def short_target(node: fx.Node) -> str:
    """`relu` for `torch.relu` and `aten.relu.default`."""
    if not node.op.startswith("call"):
        return node.op
    parts = target_name(node.target).split(".")
    return parts[1] if parts[0] in ("aten", "prims") and len(parts) > 1 else parts[-1]


@dataclass(frozen=True)
class Part:
    """Neighbouring nodes; an own run of the part around it has no name and nothing inside."""

    name: str
    nodes: Sequence[fx.Node]
    parts: tuple[Part, ...] = ()

    @property
    def calls(self) -> int:
        return sum(node.op.startswith("call") for node in self.nodes)


def path_of(node: fx.Node) -> tuple[str, ...]:
    """`("blocks.0", "attention", "qkv")`: the module a node belongs to, else the user's function."""
    origin = min(origins_of(node), default=None)
    if origin is None:
        return ()
    if origin.module:
        return tuple(re.split(r"\.(?!\d+(?:\.|$))", origin.module))
    return (origin.line.function,) if origin.line is not None else ()


def parts_of(nodes: Sequence[fx.Node]) -> list[Part]:
    """The nodes by module."""
    paths: list[tuple[str, ...]] = []
    for node in nodes:  # what has no origin goes with what stands before it
        paths.append(path_of(node) or (paths[-1] if paths else ()))
    return list(_parts(list(zip(nodes, paths)), 0))


def _parts(steps: Sequence[tuple[fx.Node, tuple[str, ...]]], depth: int) -> Iterator[Part]:
    for name, group in itertools.groupby(steps, lambda step: "".join(step[1][depth : depth + 1])):
        inside = list(group)
        nodes = [node for node, _ in inside]
        if name:
            yield Part(name, nodes, tuple(_parts(inside, depth + 1)))
        else:
            yield Part("", nodes)


def diagram(title: str, parts: Sequence[Part], partition: Partition | None = None) -> Diagram:
    """Named parts as boxes, nodes of own runs one by one; what the backward saves is framed in green."""
    saved = {v.name for v in partition.saved} if partition is not None else set()
    again = {v.name for v in partition.recomputed} if partition is not None else set()
    boxes: dict[str, Node] = {}
    place: dict[fx.Node, str] = {}
    for number, part in enumerate(parts):
        nodes = [n for n in part.nodes if n.op != "output" and (n.users or n.op != "placeholder")]
        for node in nodes if not part.name else ():
            place[node] = node.name
            boxes[node.name] = node_box(node, node.name in saved, node.name in again)
        if part.name and nodes:
            place |= dict.fromkeys(nodes, name := f"part {number}")
            label = f"{part.name}: {count_text(part.calls, 'op')}"
            kinds, hue = few(map(short_target, nodes), 4), colour(origins_of(nodes[0])) or ""
            boxes[name] = Node(name, label, kinds, hue, phase_colour(nodes[-1]), True)
    arrows = (
        (place[v], end) for user, end in place.items() for v in user.all_input_nodes if v in place
    )
    edges = tuple(Edge(start, end) for start, end in arrows if start != end)
    return Diagram(title, tuple(boxes.values()), edges)


def node_box(node: fx.Node, saved: bool, again: bool) -> Node:
    target = short_target(node)
    label = node.name if target in (node.name, "placeholder") else f"{node.name} = {target}"
    hue, value = colour(origins_of(node)) or "", value_text(node.meta.get("val"))
    border = GOOD if saved else phase_colour(node)
    return Node(
        node.name, f"{AGAIN} " * again + label, value, hue, border, node.op != "placeholder", saved
    )
