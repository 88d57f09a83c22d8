"""Graphs as pictures and as code: nodes with types, colours by phase and source line, folded when large."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Sequence

from torch import fx

from minicompile.aot.result import Partition
from minicompile.ops.dtypes import value_text
from minicompile.ops.graph import Graph, PassRecord, call_text, origins_of, target_name
from minicompile.ops.origin import source_lines
from minicompile.provenance import node_detail
from minicompile.show.graphviz import EDGE, Diagram, Edge, Node, picture, unique
from minicompile.show.html import (
    box,
    columns,
    details,
    from_text,
    heading,
    listing,
    shows,
    stripe,
    text,
)
from minicompile.show.palette import BACKWARD, BAD, FORWARD, GOOD, NEUTRAL, colour
from minicompile.show.syntax import highlight

FULL_PICTURE = 48
"""Graphs with more nodes than this are drawn by block, one box for a module or user function."""

FOLD_CODE = 80
"""Listings with more nodes than this fold by block."""

MOST_BLOCKS = 120
"""Beyond this many blocks a picture would not be readable, and only the code is shown."""


def phase_colour(node: fx.Node) -> str:
    """Blue before the loss, orange after it, grey for what is neither."""
    if node.op in ("placeholder", "output", "get_attr"):
        return NEUTRAL
    return BACKWARD if node.meta.get("phase") == "backward" else FORWARD


def short_target(node: fx.Node) -> str:
    """`relu` for `torch.relu` and `aten.relu.default`."""
    if node.op in ("placeholder", "get_attr", "output"):
        return node.op
    parts = target_name(node.target).split(".")
    if parts[0] == "aten" and len(parts) > 1:
        return parts[1]
    return parts[-1]


def node_title(node: fx.Node) -> str:
    """What a pointer over a node tells."""
    told = [
        node_detail(node) if node.op != "output" else "",
        from_text(source_lines(origins_of(node))),
    ]
    return "\n".join(line for line in told if line)


def block_of(node: fx.Node) -> str:
    """The module a node belongs to, else the user's function."""
    found = sorted(origins_of(node))
    if not found:
        return ""
    origin = found[0]
    if origin.module:
        return origin.module
    return origin.line.function if origin.line is not None else ""


def blocks(nodes: Sequence[fx.Node]) -> list[tuple[str, list[fx.Node]]]:
    """Runs of neighbours of one block: whatever order a graph has, runs never form a cycle."""
    runs: list[tuple[str, list[fx.Node]]] = []
    for node in nodes:
        name = block_of(node) or (runs[-1][0] if runs else "")
        if runs and runs[-1][0] == name:
            runs[-1][1].append(node)
        else:
            runs.append((name, [node]))
    return runs


def box_of(node: fx.Node, saved: frozenset[str]) -> Node:
    is_saved, target = node.name in saved, short_target(node)
    return Node(
        node.name,
        node.name if target in (node.name, "placeholder") else f"{node.name} = {target}",
        value_text(node.meta.get("val")) if node.op != "output" else "",
        colour(origins_of(node)) or "",
        GOOD if is_saved else phase_colour(node),
        node.op != "placeholder",
        is_saved,
    )


def diagram(graph: Graph, partition: Partition | None = None) -> Diagram | None:
    """The graph as a drawing; with a partition, what crosses the cut is bold. None if too large to read."""
    saved = frozenset(v.name for v in partition.saved) if partition is not None else frozenset()
    nodes = [n for n in graph.nodes if n.op != "output" and (n.users or n.op != "placeholder")]
    if len(nodes) > FULL_PICTURE:
        return block_diagram(graph.name, nodes)
    edges = []
    for node in nodes:
        for user in node.users:
            crosses = node.name in saved and user.meta.get("phase") == "backward"
            edges.append(Edge(node.name, user.name, GOOD if crosses else EDGE, crosses))
    return Diagram(graph.name, tuple(box_of(n, saved) for n in nodes), unique(edges))


def block_diagram(title: str, nodes: Sequence[fx.Node]) -> Diagram | None:
    """One box for each block, with how many operations it has."""
    runs = blocks([n for n in nodes if n.op not in ("placeholder", "get_attr")])
    if len(runs) > MOST_BLOCKS:
        return None
    place = {node: f"block{i}" for i, (_, run) in enumerate(runs) for node in run}
    boxes = []
    for i, (name, run) in enumerate(runs):
        kinds = list(dict.fromkeys(short_target(n) for n in run if n.op.startswith("call")))
        few = ", ".join(kinds[:4]) + (", …" if len(kinds) > 4 else "")
        boxes.append(
            Node(
                f"block{i}",
                f"{name or 'main'}: {len(run)} ops",
                few,
                colour(origins_of(run[0])) or "",
                phase_colour(run[-1]),
                True,
            )
        )
    edges = [
        Edge(place[node], place[user])
        for node in nodes
        if node in place
        for user in node.users
        if user in place and place[user] != place[node]
    ]
    return Diagram(title, tuple(boxes), unique(edges))


def node_lines(nodes: Sequence[fx.Node]) -> Iterator[str]:
    """The graph's code, one stripe a node; the source line is a comment where it changes."""
    shown: object = None
    for node in nodes:
        at = source_lines(origins_of(node))
        if at and at != shown:
            for line in at:
                yield stripe(
                    f'    <span class="com"># {text(line)}</span>', at, title=from_text(at)
                )
            shown = at
        if node.op == "output":
            code = f"    return {_returned(node)}"
        else:
            code = f"    {node.name}: '{value_text(node.meta.get('val'))}' = {call_text(node)}"
        yield stripe(highlight(code, "python")[0], at, title=node_title(node))


def _returned(node: fx.Node) -> str:
    return str(node.args[0]).removeprefix("[").removesuffix("]") if node.args else ""


def signature(graph: Graph) -> str:
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    typed = [f"{n.name}: '{value_text(n.meta.get('val'))}'" for n in inputs]
    if len(inputs) > 2:
        return f"def {graph.name}(\n    " + ",\n    ".join(typed) + ",\n):"
    return f"def {graph.name}({', '.join(typed)}):"


def graph_code(graph: Graph) -> str:
    """The listing of a graph, folded by block when it is long."""
    nodes = [n for n in graph.nodes if n.op != "placeholder"]
    head = signature(graph)
    many = head.count("\n") > 14
    top = listing(map(stripe, highlight(head, "python")))
    if many:
        count = sum(1 for n in graph.nodes if n.op == "placeholder")
        top = details("inputs", f"{count} tensors and sizes", top)
    if len(nodes) <= FOLD_CODE:
        return top + listing(node_lines(nodes))
    parts = []
    for (name, run), opened in zip(
        blocks(nodes), itertools.chain([True], itertools.repeat(False)), strict=False
    ):
        count = sum(1 for n in run if n.op.startswith("call"))
        about = f"{count} operations: {run[0].name} … {run[-1].name}"
        parts.append(details(name or "main", about, listing(node_lines(run)), opened))
    return top + "".join(parts)


def legend(graph: Graph, partition: Partition | None = None) -> str:
    if not any(n.meta.get("phase") == "backward" for n in graph.nodes):
        return ""
    cut = (
        f' · <span style="color:{GOOD}">▬ saved across the cut</span>'
        if partition is not None
        else ""
    )
    return (
        f'<small><span style="color:{FORWARD}">■ forward</span> · '
        f'<span style="color:{BACKWARD}">■ backward</span>{cut}</small>'
    )


def drawing(graph: Graph, partition: Partition | None = None) -> str:
    """The graph's picture; "" where it would be too large, or nothing can draw it."""
    drawn = diagram(graph, partition)
    return (
        picture(drawn, f"graph {graph.name}: {graph.op_count} operations")
        if drawn is not None
        else ""
    )


def graph_parts(graph: Graph, partition: Partition | None = None) -> str:
    """Code beside picture."""
    return legend(graph, partition) + columns(graph_code(graph), drawing(graph, partition))


@shows(Graph)
def graph_view(graph: Graph) -> str:
    inputs = sum(1 for n in graph.nodes if n.op == "placeholder")
    about = f"by {graph.made_by} · {graph.op_count} operations, {inputs} inputs"
    return box(graph.name, about, graph_parts(graph))


SAME_RUN = 3
"""Equal lines kept around a difference."""


def diff_lines(before: str, after: str) -> Iterator[tuple[str, str, str]]:
    """Pairs of lines side by side: kind ("same", "changed", "skip"), left, right."""
    old, new = before.split("\n"), after.split("\n")
    for kind, i1, i2, j1, j2 in difflib.SequenceMatcher(
        None, old, new, autojunk=False
    ).get_opcodes():
        if kind == "equal":
            pairs = list(zip(old[i1:i2], new[j1:j2], strict=True))
            if len(pairs) <= 2 * SAME_RUN + 1:
                yield from (("same", a, b) for a, b in pairs)
                continue
            head = pairs[:SAME_RUN] if i1 else []
            tail = pairs[-SAME_RUN:] if i2 < len(old) or j2 < len(new) else []
            yield from (("same", a, b) for a, b in head)
            note = f"… {len(pairs) - len(head) - len(tail)} equal lines"
            yield "skip", note, note
            yield from (("same", a, b) for a, b in tail)
            continue
        for a, b in itertools.zip_longest(old[i1:i2], new[j1:j2], fillvalue=""):
            yield "changed", a, b


def diff_view(before: str, after: str) -> str:
    """Two texts side by side; what went is red, what came is green."""
    left: list[str] = []
    right: list[str] = []
    for kind, a, b in diff_lines(before, after):
        for side, value, tint, sign in ((left, a, BAD, "−"), (right, b, GOOD, "+")):
            if kind == "skip":
                side.append(stripe(text(value), number=" "))
            elif kind == "same" or not value:
                side.append(stripe(highlight(value, "python")[0], number=" "))
            else:
                side.append(stripe(highlight(value, "python")[0], number=sign, tint=tint))
    return (
        f'<div class="diff"><div>{heading("before")}{listing(left)}</div>'
        f"<div>{heading('after')}{listing(right)}</div></div>"
    )


@shows(PassRecord)
def pass_view(record: PassRecord) -> str:
    changes = f"{record.changed} changes" if record.changed else "no change"
    return box(f"pass {record.name}", changes, pass_diff(record))


def pass_diff(record: PassRecord) -> str:
    before, after = str(record.before), str(record.after)
    return diff_view(before, after) if before != after else "no difference"
