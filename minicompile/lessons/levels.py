"""The same lines of source at every operator level, side by side: which operators each became."""

from __future__ import annotations

from dataclasses import dataclass

from minicompile.ops.display import Shown, count_text
from minicompile.ops.graph import user_line
from minicompile.pipeline_result import Trace
from minicompile.show.html import box, code, shows, table, text

TITLES = {"full": "Full ATen", "core": "Core ATen", "prims": "Prims"}

COLOURS = {
    "pointwise": "#bfdbfe", "reduction": "#fdba74", "view": "#e5e7eb", "creation": "#e9d5ff",
    "cast": "#fde68a", "indexing": "#bbf7d0", "fused": "#fecaca", "library": "#c7d2fe",
}  # fmt: skip


@dataclass(frozen=True)
class Fall(Shown):
    """Rows of (source line, level -> [(operator, its family)]), in the order of the source."""

    name: str
    rows: tuple[tuple[str, dict[str, list[tuple[str, str]]]], ...]

    def __str__(self) -> str:
        lines = [f"{self.name}, level by level"]
        for line, levels in self.rows:
            lines.append(line)
            for level, calls in levels.items():
                names = " ".join(name for name, _ in calls)
                lines.append(f"  {TITLES[level]:<9} {len(calls):>2}: {names}")
        return "\n".join(lines)


def fall(trace: Trace) -> Fall:
    """What each line of a traced function became at the levels full, core and prims; forward only."""
    assert trace.aot is not None
    rows: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for level, graph in trace.aot.levels.items():
        for node, op in graph.calls:
            at = user_line(node)
            if at is not None and node.meta.get("phase") != "backward":
                row = rows.setdefault(at.text, {name: [] for name in trace.aot.levels})
                row[level].append((op.overloadpacket.__name__, graph.family(op)))
    return Fall(trace.name, tuple(rows.items()))


def chip(name: str, kind: str) -> str:
    look = f"background-color:{COLOURS.get(kind, '#f3f4f6')};color:#111827"
    look += ";padding:0px 5px;margin:2px;border-radius:4px;display:inline-block"
    return f'<span style="{look}" title="{text(kind)}">{text(name)}</span>'


@shows(Fall)
def fall_html(made: Fall) -> str:
    rows = []
    for line, levels in made.rows:
        cells = ["".join(chip(*call) for call in calls) for calls in levels.values()]
        rows.append([code(line, wrap=True), *cells])
    counts = ", ".join(
        f"{TITLES[level]} {count_text(sum(len(row[level]) for _, row in made.rows), 'operation')}"
        for level in (made.rows[0][1] if made.rows else ())
    )
    legend = "".join(chip(kind, kind) for kind in COLOURS)
    head = ("line", *TITLES.values())
    return box(f"{made.name}, level by level", counts, f"<p>{legend}</p>", table(head, rows))
