"""The same lines of source at every operator level, side by side: which operators each became."""

from __future__ import annotations

from collections import Counter
from itertools import starmap

from minicompile.lessons.pictures import Picture
from minicompile.ops.display import count_text
from minicompile.ops.graph import user_line
from minicompile.pipeline_result import Trace
from minicompile.show.html import box, code, table, text

TITLES = ("Full ATen", "Core ATen", "Prims")

COLOURS = {
    "pointwise": "#bfdbfe", "reduction": "#fdba74", "view": "#e5e7eb", "creation": "#e9d5ff",
    "cast": "#fde68a", "indexing": "#bbf7d0", "fused": "#fecaca", "library": "#c7d2fe",
}  # fmt: skip


def chip(name: str, kind: str) -> str:
    look = f"background-color:{COLOURS.get(kind, '#f3f4f6')};color:#111827"
    look += ";padding:0px 5px;margin:2px;border-radius:4px;display:inline-block"
    return f'<span style="{look}" title="{text(kind)}">{text(name)}</span>'


def fall(trace: Trace) -> Picture:
    """What each line of a traced function became at the levels full, core and prims; forward only."""
    assert trace.aot is not None
    levels = trace.aot.levels
    rows: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for level, graph in levels.items():
        for node, op in graph.calls:
            at = user_line(node)
            if at is not None and node.meta.get("phase") != "backward":
                row = rows.setdefault(at.text, {name: [] for name in levels})
                row[level].append((op.overloadpacket.__name__, graph.family(op)))
    whole = f"{trace.name}, level by level"
    lines, cells, counts = [whole], [], Counter[str]()
    for line, row in rows.items():
        lines.append(line)
        for title, calls in zip(TITLES, row.values()):
            names = " ".join(name for name, _ in calls)
            lines.append(f"  {title:<9} {len(calls):>2}: {names}")
            counts[title] += len(calls)
        cells.append([code(line, wrap=True), *("".join(starmap(chip, c)) for c in row.values())])
    about = ", ".join(f"{title} {count_text(n, 'operation')}" for title, n in counts.items())
    legend = "".join(chip(kind, kind) for kind in COLOURS)
    shown = table(("line", *TITLES), cells)
    return Picture("\n".join(lines), box(whole, about, f"<p>{legend}</p>", shown))
