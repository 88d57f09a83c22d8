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
from minicompile.show.html import box, columns, details, heading, shows, text
from minicompile.show.listing import listing, plain_code, stripe
from minicompile.show.modules import AGAIN, FULL_PICTURE, MOST_BOXES, Part, diagram, parts_of
from minicompile.show.palette import BACKWARD, FORWARD, GOOD, line_colour
from minicompile.show.syntax import highlight

FEWEST_BOXES = 3
"""With fewer boxes a picture tells nothing."""


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


def graph_beside(graph: Graph, name: str, partition: Partition | None = None) -> str:
    """A graph below those that it is made of: of a large one its cut alone, and where its lines are."""
    nodes = list(graph.nodes)
    if len(nodes) <= FULL_PICTURE:
        return graph_parts(graph, partition)
    drawn = ModuleTree(partition).html(nodes, code=False) if partition else ""
    return f"{legend(graph, partition)}{drawn}<p><small>{text(name)} shows its lines</small></p>"


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


class ModuleTree:
    """A graph as its modules, folded one inside the other: the drawing of each, and its code.

    Modules that are alike are drawn once.
    """

    def __init__(self, partition: Partition | None) -> None:
        self.partition, self.marks = partition, marks_of(partition)
        self.drawn: dict[str, str] = {}
        """The path of what was drawn, by its drawing without names."""

    def html(self, nodes: Sequence[fx.Node], code: bool = True) -> str:
        out, parts = "", []
        nodes = [node for node in nodes if node.op != "placeholder"]
        for phase, run in itertools.groupby(nodes, lambda n: n.meta.get("phase")):
            found = parts_of(list(run))
            while len(found) == 1 and found[0].parts:
                found = list(found[0].parts)
            if code:
                out += heading(f"{phase} pass") * (phase is not None) + self.parts(found, "")
            parts += found
        but = " but those that are saved" if self.partition is not None else ""
        told = (
            f"the graph's inputs are not drawn here{but}: each module's picture has those it reads"
        )
        return self.picture("the whole", parts, whole=True) + f"<small>{told}</small>" + out

    def parts(self, parts: Sequence[Part], path: str) -> str:
        out = ""
        for part in parts:
            if not part.name:
                out += listing(node_lines(part.nodes, self.marks))
                continue
            inside, here = part.parts or [Part("", part.nodes)], f"{path} › {part.name}".strip(" ›")
            content = self.picture(here, inside) + self.parts(inside, here)
            about = f"{count_text(part.calls, 'operation')}: {part.nodes[0]} … {part.nodes[-1]}"
            out += details(part.name, about, content, named=True)
        return out

    def picture(self, path: str, parts: Sequence[Part], whole: bool = False) -> str:
        """A drawing of these parts, or a word why there is none."""
        boxes = sum(1 if part.name else part.calls for part in parts)
        if boxes < FEWEST_BOXES:
            return ""
        if boxes > MOST_BOXES:
            return f"<p><small>{boxes} boxes are too many to draw</small></p>"
        cut = self.partition if whole else None
        alike = diagram(path, parts, cut, named=False, outside=not whole).dot()
        if alike in self.drawn:
            return f"<p><small>drawn like {text(self.drawn[alike])}</small></p>"
        shown = diagram(path, parts, cut, outside=not whole)
        drawn = picture(shown, f"{path}: {count_text(boxes, 'part')}")
        if drawn:
            self.drawn[alike] = path
        return drawn


def graph_parts(graph: Graph, partition: Partition | None = None) -> str:
    """Code beside picture; a large graph by module."""
    nodes = list(graph.nodes)
    inputs = len(placeholders(graph.gm.graph))
    code = plain_code(graph.signature, numbered=False)
    if inputs > 13:
        code = details("inputs", f"{inputs} tensors and sizes", code)
    if len(nodes) > FULL_PICTURE:
        return legend(graph, partition) + code + ModuleTree(partition).html(nodes)
    code += listing(node_lines(nodes[inputs:], marks_of(partition)))
    alt = f"graph {graph.name}: {graph.op_count} operations"
    drawn = picture(diagram(graph.name, [Part("", nodes)], partition), alt)
    return legend(graph, partition) + columns(code, drawn)


def legend(graph: Graph, partition: Partition | None) -> str:
    if not any(n.meta.get("phase") == "backward" for n in graph.nodes):
        return ""
    marks = [(FORWARD, "■ forward"), (BACKWARD, "■ backward")]
    if partition is not None:
        marks += [(GOOD, "▬ saved across the cut"), (BACKWARD, f"{AGAIN} computed again")]
    shown = " · ".join(f'<span style="color:{hue}">{mark}</span>' for hue, mark in marks)
    return f"<small>{shown}</small>"


@shows(Graph)
def graph_view(graph: Graph) -> str:
    inputs = len(placeholders(graph.gm.graph))
    about = f"by {graph.made_by} · {graph.op_count} operations, {inputs} inputs"
    return box(graph.name, about, graph_parts(graph))
