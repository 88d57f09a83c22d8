"""Passes over graphs, registered by name, run in order, each leaving a record.

    @graph_pass("cse", stage="prims", order=30)
    def merge_equal_calls(gm, mode): ...; return number_of_changes

The real compiler: torch/_inductor/fx_passes/.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from minicompile.ops.graph import Graph, PassRecord, Snapshot
from minicompile.ops.registry import Registry

Run = Callable[[fx.GraphModule, Any], int]
"""(graph, its FakeTensorMode) -> number of changes. Edits the graph in place; nodes keep their metadata."""


@dataclass(frozen=True)
class Pass:
    """A pass: the stage it runs in and its place there (lower first)."""

    name: str
    stage: str
    order: int
    run: Run


passes: Registry[Pass] = Registry("pass", "name -> graph pass")


def graph_pass(name: str, *, stage: str, order: int = 50) -> Callable[[Run], Run]:
    """Decorator. Stages: "full" (after functionalization), "prims", "forward", "backward"."""

    def add(run: Run) -> Run:
        passes(f"{stage}.{name}")(Pass(name, stage, order, run))
        return run

    return add


def run_passes(stage: str, graph: Graph, mode: Any, records: list[PassRecord]) -> Graph:
    """Run a stage's passes on the graph, in place; `records` gets what each did."""
    before = Snapshot(graph)
    for entry in sorted((passes[key] for key in passes), key=lambda p: (p.order, p.name)):
        if entry.stage == stage:
            changed = entry.run(graph.gm, mode)
            if changed:
                graph.gm.recompile()
                graph.made_by = f"{stage}.{entry.name}"
            after = Snapshot(graph) if changed else before
            records.append(PassRecord(f"{stage}.{entry.name}", before, after, changed))
            before = after
    return graph
