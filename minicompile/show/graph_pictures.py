"""Graphs as pictures and as code: nodes with types, colours by phase and source line, folded when large."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import fx

from minicompile.aot.result import Partition
from minicompile.debug.provenance import node_size
from minicompile.ops.display import bytes_text, count_text
from minicompile.ops.graph import Graph, origins_of, placeholders, statement
from minicompile.ops.origin import source_lines
from minicompile.show.graphviz import picture
from minicompile.show.html import box, columns, details, shows, text
from minicompile.show.listing import listing, plain_code, stripe
from minicompile.show.modules import AGAIN, FULL_PICTURE, Part, diagram, parts_of
from minicompile.show.palette import BACKWARD, FORWARD, GOOD, line_colour
from minicompile.show.syntax import highlight

OVERLOAD = re.compile(r'(aten\.\w+\.)<span class="fn">(\w+)</span>')
"""An overload's name is no function's, and has no colour."""


def node_lines(nodes: Iterable[fx.Node], marks: Mapping[str, str]) -> Iterator[str]:
    """The graph's code: a stripe for what came from one place, below the source lines as comments. `marks`
    are remarks about nodes, as HTML."""
    phase = "forward"
    for at, group in itertools.groupby(nodes, key=lambda node: source_lines(origins_of(node))):
        lines = [f'    <span class="com"># {text(line)}</span>' for line in at]
        for node in group:
            if phase != (phase := node.meta.get("phase") or phase):
                lines.append(f'    <span class="com"># {phase} pass</span>')
            shown, size = highlight(f"    {statement(node)}", "python")[0], node_size(node)
            shown = OVERLOAD.sub(r"\1\2", shown)
            told = f'<span title="{size}">{shown}</span>' if size else shown
            lines.append(told + marks.get(node.name, ""))
        yield stripe("\n".join(lines), tint=line_colour(at[-1]) if at else "")


def marks_of(partition: Partition | None) -> dict[str, str]:
    """What a partition decided about values, to stand behind their lines."""
    if partition is None:
        return {}
    told = {v.name: (BACKWARD, f"{AGAIN} computed again in backward") for v in partition.recomputed}
    for value in partition.saved:
        size = "symbolic size" if value.bytes is None else bytes_text(value.bytes)
        told[value.name] = GOOD, f"▬ saved for backward, {size}"
    return {
        name: f' <b style="color:{hue}">{text(words)}</b>' for name, (hue, words) in told.items()
    }


def code_of(parts: Sequence[Part], marks: Mapping[str, str]) -> str:
    """The code of a large graph, its modules folded one inside the other."""
    out = ""
    for part in parts:
        if not part.name:
            out += listing(node_lines(part.nodes, marks))
            continue
        content = code_of(part.parts or [Part("", part.nodes)], marks)
        about = f"{count_text(part.calls, 'operation')}: {part.nodes[0]} … {part.nodes[-1]}"
        out += details(part.name, about, content, named=True)
    return out


def graph_parts(graph: Graph, partition: Partition | None = None) -> str:
    """Code beside picture; of a large graph the picture of its modules, and its code folded by module."""
    nodes = list(graph.nodes)
    inputs = len(placeholders(graph.gm.graph))
    code, marks = plain_code(graph.signature, numbered=False), marks_of(partition)
    if inputs > 13:
        code = details("inputs", f"{inputs} tensors and sizes", code)
    large = len(nodes) > FULL_PICTURE
    parts = [Part("", nodes)]
    if large:
        phases = itertools.groupby(nodes[inputs:], lambda n: n.meta.get("phase"))
        parts = [part for _, run in phases for part in parts_of(list(run))]
    while len(parts) == 1 and parts[0].parts:
        parts = list(parts[0].parts)
    drawn = picture(diagram(graph.name, parts, partition))
    if large:
        return legend(graph, partition) + code + drawn + code_of(parts, marks)
    code += listing(node_lines(nodes[inputs:], marks))
    return legend(graph, partition) + columns(code, drawn)


def legend(graph: Graph, partition: Partition | None) -> str:
    if not any(n.meta.get("phase") == "backward" for n in graph.nodes):
        return ""
    marks = [(FORWARD, "■ forward"), (BACKWARD, "■ backward")]
    if partition is not None:
        marks += [(GOOD, "▬ saved for backward"), (BACKWARD, f"{AGAIN} computed again")]
    shown = " · ".join(f'<span style="color:{hue}">{mark}</span>' for hue, mark in marks)
    return f"<small>{shown}</small>"


@shows(Graph)
def graph_view(graph: Graph) -> str:
    inputs = len(placeholders(graph.gm.graph))
    about = f"by {graph.made_by} · {graph.op_count} operations, {inputs} inputs"
    return box(graph.name, about, graph_parts(graph))
