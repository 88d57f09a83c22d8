"""Ahead-of-time autograd: operator levels, the joint graph and its cut, what is saved or computed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minicompile.aot.levels import LevelGraph
from minicompile.aot.result import AotResult, ForwardValue, Partition
from minicompile.ops.origin import NO_ORIGINS, Origins
from minicompile.show.diff_tables import pass_parts
from minicompile.show.graph_pictures import graph_parts
from minicompile.show.html import (
    bar,
    box,
    code,
    details,
    heading,
    inside,
    shows,
    shows_many,
    size,
    table,
    text,
)
from minicompile.show.listing import headline, source_cell
from minicompile.show.palette import GOOD, colour


def value_table(title: str, values: Sequence[ForwardValue], made: Mapping[str, Origins]) -> str:
    """What is saved or computed again, the largest first."""
    largest = max((v.bytes or 0 for v in values), default=0)
    rows = []
    for value in sorted(values, key=lambda v: (-(v.bytes or 0), v.name)):
        origins = made.get(value.name, NO_ORIGINS)
        name, length = code(value.name, colour(origins)), bar(value.bytes or 0, largest, GOOD, 16)
        rows.append([name, size(value.bytes), length, text(value.reason), source_cell(origins)])
    return table((title, "bytes", "", "why", "line"), rows, numbers=(1,)) if rows else ""


shows_many(lambda values: value_table("value", values, {}), "value", ForwardValue)


def partition_parts(partition: Partition) -> str:
    """Each saved value, and what is computed again."""
    shown = value_table("saved", partition.saved, partition.origins)
    return shown + value_table(
        "computed again in backward", partition.recomputed, partition.origins
    )


shows(Partition)(lambda partition: box(*headline(partition), partition_parts(partition)))


def level_parts(graph: LevelGraph) -> str:
    """The rules that led to the level, busiest first, then its graph."""
    rows = ([code(op), str(count), text(at)] for op, count, at in graph.steps)
    head = ("replaced by its rule", "calls", "lines")
    rules = table(head, rows, numbers=(1,)) if graph.applied else ""
    return rules + graph_parts(graph)


shows(LevelGraph)(lambda g: box(f"level {g.level}", g.summary, level_parts(g)))


@shows(AotResult)
def aot_view(aot: AotResult) -> str:
    graphs = {"forward": aot.forward, "backward": aot.backward, "joint graph": aot.joint}
    parts = [
        details(name, f"{g.op_count} operations", graph_parts(g, aot.partition), name == "forward")
        for name, g in graphs.items()
        if g is not None
    ]
    if aot.partition is not None:
        parts += [heading("saved or computed again"), partition_parts(aot.partition)]
    for level in aot.levels.values():
        parts.append(details(f"level {level.level}", level.summary, level_parts(level)))
    parts += [details(*pass_parts(record)) for record in aot.passes if record.changed]
    about = "what the wrapper does around the graphs"
    parts.append(details("runtime metadata", about, inside(aot.metadata)))
    counts = [f"{name} {graph.op_count}" for name, graph in aot.levels.items()]
    return box("ahead-of-time autograd", "operations by level: " + ", ".join(counts), *parts)
