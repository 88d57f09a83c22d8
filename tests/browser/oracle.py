"""What a trace's linked view should light, from `trace.pieces()` alone: no view, no script."""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from typing import Any

from minicompile.debug.roofline import costs_of
from minicompile.ops.display import bytes_text
from minicompile.ops.origin import Origin
from minicompile.pipeline_result import Trace
from minicompile.scheduling.nodes import Schedule


@dataclass(frozen=True)
class Line:
    """One line of a pane: its code, and the operations of the captured graph that it came from."""

    graph: str
    text: str
    origins: frozenset[Origin]


def pane_lines(trace: Trace) -> dict[str, list[Line]]:
    """Every line that came from somewhere, by pane, in the order of the pieces."""
    found: dict[str, list[Line]] = {}
    for piece in trace.pieces():
        first, _, last = piece.stage.rpartition(".")
        aot = first == "aot" and last != "joint"
        pane, graph = ("aot", last) if aot else (last, first)
        found.setdefault(pane, []).append(Line(graph, piece.text.strip(), piece.origins))
    origins = {origin for lines in found.values() for line in lines for origin in line.origins}
    source: dict[tuple[str, int], set[Origin]] = {}
    for origin in origins:
        for at in origin.stack:
            source.setdefault((at.file, at.line), set()).add(origin)
    found["source"] = [
        Line("", linecache.getline(*at).strip(), frozenset(made)) for at, made in source.items()
    ]
    return found


def lines_as_numbers(trace: Trace) -> dict[str, list[Any]]:
    """The same with operations as numbers."""
    lines = pane_lines(trace)
    every = {origin for pane in lines.values() for line in pane for origin in line.origins}
    number = {origin: i for i, origin in enumerate(sorted(every))}
    return {
        pane: [[line.graph, line.text, sorted(number[o] for o in line.origins)] for line in shown]
        for pane, shown in lines.items()
    }


def costs(found: Schedule) -> dict[str, str]:
    """Kernels and memory traffic of a schedule, as the views write them."""
    moved = (cost.bytes for cost in costs_of(found))
    return {"kernels": str(len(found.kernels)), "bytes moved": bytes_text(sum(moved))}


def expected(trace: Trace) -> dict[str, Any]:
    """What the views of a trace should show, to be read by another process."""
    steps = [
        [f"{d.producer} + {d.consumer}", d.reason, f"{bytes_text(d.score)} of traffic"]
        for d in trace.schedule.decisions
    ]
    first = next(d for d in trace.schedule.decisions if d.fused)
    pair = (first.producers[-1].name, first.consumers[0].name)
    return {
        "lines": lines_as_numbers(trace),
        "steps": steps,
        "pair": " + ".join(pair),
        "as decided": costs(trace.schedule),
        "apart": costs(trace.schedule.what_if(forbid=[pair]).after),
    }
