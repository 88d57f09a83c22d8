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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from minicompile.errors import OptionError
from minicompile.ops.gates import REFUSED, allowed
from minicompile.ops.graph import Graph, PassRecord, Rewrite, Snapshot, origins_of, statement
from minicompile.ops.origin import Origins, union
from minicompile.ops.registry import Registry
from minicompile.options import Options

STAGES = ("pre_grad", "joint", "prims", "post_grad")

Run = Callable[[fx.GraphModule, Any], int | list[Rewrite] | str]
"""(graph to edit, its FakeTensorMode) -> number of changes, or what they were, or why there are none. Nodes
keep their metadata."""


@dataclass(frozen=True)
class Pass:
    """A pass: the stage it runs in and its place there (lower first)."""

    name: str
    stage: str
    order: int
    run: Run
    option: str = ""
    """The field of `Options` that switches it on, with "not " before it: off; "field=value": only that value
    does; "": always on."""

    def is_called(self, given: str) -> bool:
        """By "cse" or "prims.cse"; a family of passes by its first name: "pattern:mine"."""
        names = (self.name, f"{self.stage}.{self.name}")
        return any(f"{name}.".startswith(f"{given}.") for name in names)

    def runs(self, stage: str, options: Options) -> bool:
        field, _, value = self.option.removeprefix("not ").partition("=")
        given = getattr(options, field) if field else True
        wanted = given == value if value else bool(given) != self.option.startswith("not ")
        return (
            self.stage == stage and wanted and not any(map(self.is_called, options.disable_passes))
        )


passes: Registry[Pass] = Registry("pass", "name -> graph pass")


def graph_pass(name: str, *, stage: str, order: int = 50, option: str = "") -> Callable[[Run], Run]:
    """Decorator. Raises OptionError for a stage that isn't one of STAGES."""
    if stage not in STAGES:
        raise OptionError(f"pass {name}: no stage {stage!r}; known: {', '.join(STAGES)}")

    def add(run: Run) -> Run:
        passes(f"{stage}.{name}")(Pass(name, stage, order, run, option))
        return run

    return add


def check_names(options: Options, known: Sequence[Pass]) -> None:
    """Raises OptionError for a name in `disable_passes` that no pass and no pattern has."""
    for given in options.disable_passes:
        if not any(entry.is_called(given) for entry in known):
            families = {entry.name.partition(".")[0] for entry in known}
            text = f"disable_passes: no pass {given!r}; known: {', '.join(sorted(families))}"
            raise OptionError(text)


def may_run(entry: Pass, before: Snapshot, records: list[PassRecord]) -> bool:
    """Do gates let a pass run? What it changes can be read off its record later."""
    number = len(records)

    def changed() -> Origins:
        after: Any = records[number].after
        nodes, kept = list[Any](before.kept), set(map(statement, after.nodes))
        return union(origins_of(node) for node in nodes if statement(node) not in kept)

    name = f"{entry.stage}.{entry.name}"
    after = lambda: records[number].after  # noqa: E731
    return allowed(f"{entry.stage} pass", name, lambda: before, after, changed)


def run_passes(passes: Sequence[Pass], graph: Graph, mode: Any, records: list[PassRecord]) -> None:
    """Run passes on the graph, in place; `records` gets what each did."""
    before = Snapshot(graph)
    for entry in sorted(passes, key=lambda p: (p.order, p.name)):
        done = entry.run(graph.gm, mode) if may_run(entry, before, records) else REFUSED
        rewrites = tuple(done) if isinstance(done, list) else ()
        changed = done if isinstance(done, int) else len(rewrites)
        reason = done if isinstance(done, str) else ""
        name = f"{entry.stage}.{entry.name}"
        if changed:
            graph.gm.recompile()
            graph.made_by = name
        after = Snapshot(graph) if changed else before
        records.append(PassRecord(name, before, after, changed, rewrites, reason))
        before = after
