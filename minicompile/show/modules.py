"""Graphs by module: each level of the module tree as a list of parts, and as a drawing of them.

    Part := name, nodes, parts inside: neighbours of one module, function or source line

Parts are runs of neighbours: whatever order a graph has, arrows between them never form a cycle.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from minicompile.aot.result import Partition
from minicompile.ops.display import bytes_text, count_text
from minicompile.ops.dtypes import value_text
from minicompile.ops.graph import origins_of, target_name
from minicompile.show.graphviz import Cluster, Diagram, Edge, Node
from minicompile.show.html import few
from minicompile.show.palette import BACKWARD, FORWARD, GOOD, NEUTRAL, colour

FULL_PICTURE = 48
"""Graphs with more nodes than this are drawn by module."""

MOST_BOXES = 120
"""With more boxes than this a picture would not be readable."""


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


def place_of(node: fx.Node) -> str:
    """The source line a node came from: `model.py:12`."""
    origin = min(origins_of(node), default=None)
    return origin.line.place.rpartition("/")[2] if origin and origin.line else ""


def parts_of(nodes: Sequence[fx.Node]) -> list[Part]:
    """The nodes by module; long runs of one module by source line."""
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
        elif len(nodes) > FULL_PICTURE:
            yield from (Part(at, list(run)) for at, run in itertools.groupby(nodes, place_of))
        else:
            yield Part("", nodes)


def in_backward(node: fx.Node) -> bool:
    """Also of an input that the backward alone reads."""
    if node.op == "placeholder":
        return bool(node.users) and all(map(in_backward, node.users))
    return node.meta.get("phase") == "backward"


def computed_early(nodes: Iterable[fx.Node], saved: Container[str]) -> dict[fx.Node, None]:
    """Operations of the backward that the forward does: saved ones (a mask is smaller than what it is of) and
    what they are made of."""
    todo = [node for node in nodes if node.name in saved and in_backward(node)]
    for node in todo:
        todo += [v for v in node.all_input_nodes if in_backward(v) and v not in todo]
    return dict.fromkeys(reversed(todo))


def made_from(value: fx.Node, saved: Container[str]) -> Iterator[fx.Node]:
    """The saved values that the backward has or computes a forward's value from."""
    todo, seen = [value], {value}
    for node in todo:
        if node.name in saved:
            yield node
            continue
        todo += [one for one in node.all_input_nodes if one not in seen]
        seen.update(node.all_input_nodes)


def diagram(
    title: str,
    parts: Sequence[Part],
    partition: Partition | None = None,
    named: bool = True,
    outside: bool = True,
) -> Diagram:
    """Named parts as boxes, nodes of own runs one by one, and (`outside`) values from elsewhere.

    With a partition, forward and backward are framed, and what is saved crosses from one to the other in a
    box of its own. Without names, parts that are alike give equal diagrams.
    """
    saved = {v.name: v for v in partition.saved} if partition is not None else {}
    again = {v.name for v in partition.recomputed} if partition is not None else set()
    boxes: dict[str, Node] = {}
    place: dict[fx.Node, str] = {}
    for number, part in enumerate(parts):
        nodes = [n for n in part.nodes if n.op != "output" and (n.users or n.op != "placeholder")]
        for node in nodes:
            place[node] = f"part {number}" if part.name else node.name
            if not part.name:
                boxes[node.name] = _node_box(node, named, node.name in again)
        if part.name and nodes:
            twice = sum(node.name in again for node in nodes)
            about = count_text(part.calls, "op") + f", {twice} {AGAIN}" * bool(twice)
            label, kinds = f"{part.name}: " * named + about, few(map(short_target, nodes), 4)
            hue, made = colour(origins_of(nodes[0])) or "", place[nodes[0]]
            boxes[made] = Node(made, label, kinds, hue, phase_colour(nodes[-1]), True)
    early = computed_early(place, saved)
    for node in early:
        if place[node] != node.name:  # drawn in the module whose values it takes
            place[node] = next((place[v] for v in node.all_input_nodes if v in place), place[node])
    later = {node for node in place if in_backward(node) and node not in early}
    edges: list[Edge] = []
    cut: dict[str, dict[fx.Node, None]] = {}
    for user, end in place.items():
        for value in user.all_input_nodes:
            if partition is not None and user in later and value not in later:
                for kept in made_from(value, saved):
                    start = place.get(kept, "inputs")
                    cut.setdefault(start, {})[kept] = None
                    edges.append(Edge(start, f"cut {start}", GOOD, True))
                    edges.append(Edge(f"cut {start}", end, GOOD, True))
                continue
            start = place.get(value, f"in {value.name}")
            if start != end and (outside or value in place):
                edges.append(Edge(start, end))
                if value not in place:
                    label = value.name if named else ""
                    boxes[start] = Node(start, label, value_text(value.meta.get("val")))
    for start, values in cut.items():
        size = sum(saved[value.name].bytes or 0 for value in values)
        label = few((value.name for value in values), 2 if named else 0)
        about = f"{count_text(len(values), 'value')}, " * (len(values) > 1) + bytes_text(size)
        boxes[f"cut {start}"] = Node(f"cut {start}", label, about, GOOD, GOOD, bold=True)
    clusters: tuple[Cluster, ...] = ()
    if partition is not None:
        sides: dict[bool, list[str]] = {False: [], True: []}
        for node, name in place.items():
            sides[node in later].append(name)
        crossing = f"saved for backward: {bytes_text(partition.saved_bytes)}, and inputs"
        clusters = (
            Cluster("forward", tuple(dict.fromkeys(sides[False])), FORWARD),
            Cluster(crossing, tuple(f"cut {start}" for start in cut), GOOD),
            Cluster("backward", tuple(dict.fromkeys(sides[True])), BACKWARD),
        )
    return Diagram(title, tuple(boxes.values()), tuple(edges), clusters)


AGAIN = "↻"
"""Marks what the backward computes again."""


def _node_box(node: fx.Node, named: bool, twice: bool) -> Node:
    target = short_target(node)
    label = node.name if target in (node.name, "placeholder") else f"{node.name} = {target}"
    label = f"{AGAIN} " * twice + (label if named else target)
    hue, value = colour(origins_of(node)) or "", value_text(node.meta.get("val"))
    return Node(node.name, label, value, hue, phase_colour(node), node.op != "placeholder")
