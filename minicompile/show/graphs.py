"""Graphs as pictures and as code: nodes with types, colours by phase and source line, folded when large."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from minicompile.aot.result import Partition
from minicompile.ops.dtypes import value_text
from minicompile.ops.graph import (
    Graph,
    origins_of,
    placeholders,
    statement,
    target_name,
)
from minicompile.ops.origin import source_lines
from minicompile.provenance import node_detail
from minicompile.show.graphviz import EDGE, Diagram, Edge, Node, picture
from minicompile.show.html import box, columns, details, few, shows, text
from minicompile.show.listing import from_text, listing, plain_code, stripe
from minicompile.show.palette import BACKWARD, FORWARD, GOOD, NEUTRAL, colour
from minicompile.show.syntax import highlight

FULL_PICTURE = 48
"""Graphs with more nodes than this are drawn by block, one box for a module or user function."""

FOLD_CODE = 80
"""Listings with more nodes than this fold by block."""

MOST_BLOCKS = 120
"""Beyond this many blocks a picture would not be readable, and only the code is shown."""


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
    return parts[1] if parts[0] == "aten" and len(parts) > 1 else parts[-1]


def block_of(node: fx.Node) -> str:
    """The module a node belongs to, else the user's function."""
    origin = min(origins_of(node), default=None)
    if origin is None:
        return ""
    return origin.module or (origin.line.function if origin.line is not None else "")


def blocks(nodes: Sequence[fx.Node]) -> list[tuple[str, list[fx.Node]]]:
    """Runs of neighbours of one block: whatever order a graph has, runs never form a cycle."""
    runs: list[tuple[str, list[fx.Node]]] = []
    for node in nodes:
        name = block_of(node) or (runs[-1][0] if runs else "")
        if not runs or runs[-1][0] != name:
            runs.append((name, []))
        runs[-1][1].append(node)
    return runs


def diagram(graph: Graph, partition: Partition | None = None) -> Diagram | None:
    """The graph as a drawing; with a partition, what crosses the cut is bold. None if too large to read."""
    saved = {v.name for v in partition.saved} if partition is not None else set()
    nodes = [n for n in graph.nodes if n.op != "output" and (n.users or n.op != "placeholder")]
    if len(nodes) > FULL_PICTURE:
        return block_diagram(graph.name, nodes)
    boxes, edges = [], []
    for node in nodes:
        is_saved, target = node.name in saved, short_target(node)
        label = node.name if target in (node.name, "placeholder") else f"{node.name} = {target}"
        boxes.append(
            Node(
                node.name,
                label,
                value_text(node.meta.get("val")),
                colour(origins_of(node)) or "",
                GOOD if is_saved else phase_colour(node),
                node.op != "placeholder",
                is_saved,
            )
        )
        for user in node.users:
            crosses = is_saved and user.meta.get("phase") == "backward"
            edges.append(Edge(node.name, user.name, GOOD if crosses else EDGE, crosses))
    return Diagram(graph.name, tuple(boxes), tuple(edges))


def block_diagram(title: str, nodes: Sequence[fx.Node]) -> Diagram | None:
    """One box for each block, with how many operations it has."""
    runs = blocks([n for n in nodes if n.op not in ("placeholder", "get_attr")])
    if len(runs) > MOST_BLOCKS:
        return None
    place, boxes = {}, []
    for i, (block, run) in enumerate(runs):
        name = f"block{i}"
        place.update(dict.fromkeys(run, name))
        kinds = few((short_target(n) for n in run if n.op.startswith("call")), 4)
        label, hue = f"{block or 'main'}: {len(run)} ops", colour(origins_of(run[0])) or ""
        boxes.append(Node(name, label, kinds, hue, phase_colour(run[-1]), True))
    edges = tuple(
        Edge(start, place[user])
        for node, start in place.items()
        for user in node.users
        if place.get(user, start) != start
    )
    return Diagram(title, tuple(boxes), edges)


def node_lines(nodes: Sequence[fx.Node]) -> Iterator[str]:
    """The graph's code, one stripe a node; the source line is a comment where it changes."""
    shown: object = None
    phase = "forward"
    for node in nodes:
        if phase != (phase := node.meta.get("phase") or phase):
            yield stripe(f'    <span class="com"># {phase} pass</span>')
        at = source_lines(origins_of(node))
        if at and at != shown:
            for line in at:
                yield stripe(f'    <span class="com"># {text(line)}</span>', at)
            shown = at
        detail = "" if node.op == "output" else node_detail(node)
        told = "\n".join(filter(None, [detail, from_text(at)]))
        yield stripe(highlight(f"    {statement(node)}", "python")[0], at, title=told)


def graph_code(graph: Graph) -> str:
    """The listing of a graph, folded by block when it is long."""
    nodes = [n for n in graph.nodes if n.op != "placeholder"]
    inputs = len(placeholders(graph.gm.graph))
    top = plain_code(graph.signature, numbered=False)
    if inputs > 13:
        top = details("inputs", f"{inputs} tensors and sizes", top)
    if len(nodes) <= FOLD_CODE:
        return top + listing(node_lines(nodes))
    for number, (name, run) in enumerate(blocks(nodes)):
        count = sum(1 for n in run if n.op.startswith("call"))
        about = f"{count} operations: {run[0].name} … {run[-1].name}"
        top += details(name or "main", about, listing(node_lines(run)), opened=number == 0)
    return top


def legend(graph: Graph, partition: Partition | None) -> str:
    if not any(n.meta.get("phase") == "backward" for n in graph.nodes):
        return ""
    marks = [(FORWARD, "■ forward"), (BACKWARD, "■ backward")]
    if partition is not None:
        marks.append((GOOD, "▬ saved across the cut"))
    shown = " · ".join(f'<span style="color:{hue}">{mark}</span>' for hue, mark in marks)
    return f"<small>{shown}</small>"


def drawing(graph: Graph, partition: Partition | None = None) -> str:
    """The graph's picture; "" where it would be too large, or nothing can draw it."""
    drawn = diagram(graph, partition)
    alt = f"graph {graph.name}: {graph.op_count} operations"
    return picture(drawn, alt) if drawn is not None else ""


def graph_parts(graph: Graph, partition: Partition | None = None) -> str:
    """Code beside picture."""
    return legend(graph, partition) + columns(graph_code(graph), drawing(graph, partition))


@shows(Graph)
def graph_view(graph: Graph) -> str:
    inputs = len(placeholders(graph.gm.graph))
    about = f"by {graph.made_by} · {graph.op_count} operations, {inputs} inputs"
    return box(graph.name, about, graph_parts(graph))
