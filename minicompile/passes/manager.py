"""Passes over graphs, registered by name, run in order, each leaving a record.

    @graph_pass("cse", stage="prims", order=30)
    def merge_equal_calls(gm, mode): ...; return number_of_changes

| stage | the graph |
| --- | --- |
| pre_grad | a copy of the captured one, of torch's functions: what is rewritten here is differentiated |
| joint | functional, full ATen: forward and backward in one, or the forward alone |
| prims | the same at prims level, before the partition |
| post_grad | each of forward and backward after the partition |

`options.disable_passes` and `mc.without("pass:prims.cse")` switch passes off by name.

The real compiler: torch/_inductor/fx_passes/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from minicompile.errors import OptionError
from minicompile.ops.graph import Graph, PassRecord, Rewrite, Snapshot
from minicompile.ops.registry import Registry
from minicompile.options import Options

STAGES = ("pre_grad", "joint", "prims", "post_grad")

Run = Callable[[fx.GraphModule, Any], int | list[Rewrite]]
"""(graph, its FakeTensorMode) -> number of changes, or what they were. Edits the graph in place; nodes keep
their metadata.
"""


@dataclass(frozen=True)
class Pass:
    """A pass: the stage it runs in and its place there (lower first)."""

    name: str
    stage: str
    order: int
    run: Run
    option: str = ""
    """The field of `Options` that switches it on; "": always on."""

    def runs(self, stage: str, options: Options) -> bool:
        wanted = not self.option or getattr(options, self.option)
        off = any(is_called(name, self.stage, self.name) for name in options.disable_passes)
        return self.stage == stage and wanted and not off


passes: Registry[Pass] = Registry("pass", "name -> graph pass")


def is_called(given: str, stage: str, name: str) -> bool:
    """ "cse", "prims.cse", and for a family of patterns its first name: "pattern:attention"."""
    return any(f"{full}.".startswith(f"{given}.") for full in (name, f"{stage}.{name}"))


def graph_pass(name: str, *, stage: str, order: int = 50, option: str = "") -> Callable[[Run], Run]:
    """Decorator. Raises OptionError for a stage that isn't one of STAGES."""
    if stage not in STAGES:
        raise OptionError(f"pass {name}: no stage {stage!r}; known: {', '.join(STAGES)}")

    def add(run: Run) -> Run:
        passes(f"{stage}.{name}")(Pass(name, stage, order, run, option))
        return run

    return add


def check_names(options: Options, known: Iterable[Pass]) -> None:
    """Raises OptionError for a name in `disable_passes` that no pass and no pattern has."""
    found = list(known)
    for given in options.disable_passes:
        if not any(is_called(given, entry.stage, entry.name) for entry in found):
            names = ", ".join(sorted({entry.name for entry in found}))
            raise OptionError(f"disable_passes: no pass {given!r}; known: {names}")


def run_passes(
    stage: str,
    graph: Graph,
    mode: Any,
    options: Options,
    records: list[PassRecord],
    known: Iterable[Pass],
) -> Graph:
    """Run those of the known passes that belong to a stage, in place; `records` gets what each did."""
    before = Snapshot(graph)
    for entry in sorted(known, key=lambda p: (p.order, p.name)):
        if entry.runs(stage, options):
            done = entry.run(graph.gm, mode)
            changed, rewrites = (done, ()) if isinstance(done, int) else (len(done), tuple(done))
            if changed:
                graph.gm.recompile()
                graph.made_by = f"{stage}.{entry.name}"
            after = Snapshot(graph) if changed else before
            records.append(PassRecord(f"{stage}.{entry.name}", before, after, changed, rewrites))
            before = after
    return graph
