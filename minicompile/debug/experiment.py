"""`mc.what_if(fn, *args).run(...)`: compiled for real with something changed, beside the unchanged one.

    Experiment     := target, arguments, the unchanged Knobs
    Knobs          := fuse, forbid, backend, dynamic, options
    ExperimentSide := Knobs -> traces, accuracy against eager, a call to time, refusals
    Outcome        := before, after; seconds of calls; of each graph a WhatIf and the code that differs

Wishes enter through the fusion policy that is registered. What can't be done is refused with the reason;
every answer is compared with eager's. For other tiles register a plan rule (docs/extending.md).
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from typing import Any

from minicompile import api
from minicompile import extension as _extension  # noqa: F401  registers every built-in rule
from minicompile.codegen.plan import KernelSource
from minicompile.debug.variant import Case, VariantRun, timed
from minicompile.debug.why import WhatIf, Wishes, WishPolicy, only, wishes_of
from minicompile.dynamo.result import Capture
from minicompile.errors import OptionError
from minicompile.ops.display import Registered, Shown, aligned
from minicompile.ops.events import Event
from minicompile.ops.registry import scoped
from minicompile.options import Options, make_options
from minicompile.pipeline_result import CompiledStages, Trace
from minicompile.scheduling.fusion import FusionPolicy, fusion_rule
from minicompile.scheduling.nodes import Pair

HINT = """Change something: .run(forbid=[("buf0", "buf1")], fuse=[...], backend="aot_eager", dynamic=True,
inline="never"), or any other option. The stages are in .run(...).after.traces."""


@dataclass(frozen=True)
class Knobs:
    """What a compilation can be told. Pairs are as in `schedule.why`, of the first capture's `graph`."""

    fuse: Sequence[Pair] = ()
    forbid: Sequence[Pair] = ()
    graph: str = "forward"
    backend: str = "inductor"
    dynamic: bool | None = None
    options: Options = field(default_factory=Options)

    def changed(self, changes: Mapping[str, Any]) -> Knobs:
        """With other values: knobs by their names, any option by its own. Raises OptionError."""
        knobs = {name: changes[name] for name in vars(self) if name in changes}
        options = {name: value for name, value in changes.items() if name not in knobs}
        options = {"options": make_options(options={**vars(self.options), **options})}
        new = replace(self, **{**options, **knobs})
        if any(isinstance(pair, str) or len(pair) != 2 for pair in (*new.fuse, *new.forbid)):
            raise OptionError('fuse and forbid take pairs of names: [("buf0", "buf1")]')
        return new


class ExperimentSide:
    """The target compiled once with these knobs, in a scope with their rules, and compared with eager."""

    def __init__(self, knobs: Knobs, case: Case) -> None:
        self.knobs, self.traces = knobs, list[Trace]()
        self.graph, self.compiling = "", True
        changed = replace(case, dynamic=knobs.dynamic, options=knobs.options)
        self.backend = api.find_backend(knobs.backend, knobs.options)
        self.run = VariantRun(changed, replace(changed.by(self.compile), rules=self.rules))
        self.compiling = False  # from here on it is only timed
        [*_, self.accuracy] = case.compare({"what if": self.run})

    @property
    def graphs(self) -> dict[str, CompiledStages]:
        """The stages of the first capture, by the graph's name."""
        return self.traces[0].graphs if self.traces else {}

    def compile(self, capture: Capture) -> Any:
        """The backend, watched."""
        if self.compiling:
            self.traces.append(Trace.watching(capture))
            capture.watch.listeners.append(self.listen)
        return self.backend(capture)

    def listen(self, event: Event) -> None:
        self.graph = event.graph

    @contextmanager
    def rules(self) -> Iterator[None]:
        """The registries as the knobs want them."""
        with scoped():
            make = fusion_rule.get("policy")
            if make is not None and (self.knobs.fuse or self.knobs.forbid):
                fusion_rule("policy")(lambda: self.policy(make))
            yield

    def wishes(self, graph: str) -> Wishes:
        about = self.knobs.graph == graph
        return Wishes(tuple(self.knobs.fuse) * about, tuple(self.knobs.forbid) * about)

    def policy(self, make: Callable[[], FusionPolicy]) -> FusionPolicy:
        """The registered policy, with the wishes in the graph that they are about."""
        first = len(self.traces) == 1
        return WishPolicy(make(), self.wishes(self.graph)) if first else make()


def changed_code(
    before: CompiledStages, after: CompiledStages
) -> tuple[list[KernelSource], list[KernelSource]]:
    """Kernels that only one of two graphs has, whatever their names and places."""

    def code(kernel: KernelSource) -> tuple[object, ...]:
        return (
            kernel.text.replace(kernel.name, ""),
            str(kernel.plan.tiles),
            getattr(kernel.plan, "num_warps", 0),
        )

    return only(before.kernels, after.kernels, code)


@dataclass(frozen=True, eq=False)
class Outcome(Shown):
    """Both sides of an experiment, and what was measured."""

    name: str
    changes: Mapping[str, Any]
    before: ExperimentSide
    after: ExperimentSide
    times: list[list[float]]
    """Seconds of the calls of both."""
    graphs: dict[str, tuple[WhatIf, tuple[list[KernelSource], list[KernelSource]]]]
    """Of each graph that both have: costs, decisions, refused wishes; the code."""

    @property
    def title(self) -> str:
        changes = (f"{name} = {value!r}" for name, value in self.changes.items())
        return f"what if of {self.name}: {', '.join(changes) or 'nothing changed'}"

    @property
    def refused(self) -> list[str]:
        """What was asked for and not done, and why."""
        return [answer.headline for costs, _ in self.graphs.values() for answer in costs.refused]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Name, before, after."""
        sides = (self.before, self.after)
        answers = (f"{side.accuracy.verdict} {side.accuracy.note}".strip() for side in sides)
        times = (f"{statistics.median(s) * 1e6:,.1f} us" if s else "none" for s in self.times)
        return [("answer", *answers), (f"time, median of {len(self.times[1])} calls", *times)]

    def __str__(self) -> str:
        lines = [self.title, *aligned([("", "before", "after"), *self.rows])]
        for graph, (costs, code) in self.graphs.items():
            names = (", ".join(kernel.name for kernel in side) or "none" for side in code)
            lines.append(f"{graph}: code that differs: before {next(names)}; after {next(names)}")
            lines += str(costs).splitlines()[1:]
        return "\n".join(lines)


class Experiment(Shown):
    """A function with arguments, to be compiled with changes: `experiment.run(forbid=[("buf0", "buf1")])`."""

    _ipython_display_ = Registered()
    """A panel of controls."""

    def __init__(self, target: Any, args: Any, kwargs: Any) -> None:
        self.case = Case.of(target, [args], kwargs)
        self.base = Knobs(dynamic=self.case.dynamic, options=self.case.options)

    def run(self, **changes: Any) -> Outcome:
        """Compile with changes: `Knobs` by name, any option by its own. Without, it is measured twice.

        What the target prints is printed where answers are compared, not by the calls that are timed.
        Raises ValueError for a name that no node has, OptionError for an option that doesn't exist.
        """
        knobs, before = self.base.changed(changes), ExperimentSide(self.base, self.case)
        plain = replace(knobs, fuse=(), forbid=())
        unwished = before if plain == self.base else ExperimentSide(plain, self.case)
        after = unwished
        if knobs != plain:
            stages = unwished.graphs.get(knobs.graph)
            if stages is None:
                missing = f"with backend {knobs.backend!r} there is no {knobs.graph} graph"
                raise OptionError(f"{missing} of kernels: fuse and forbid have nothing to work on")
            wishes = wishes_of(stages.schedule, knobs.fuse, knobs.forbid)
            after = ExperimentSide(
                replace(knobs, fuse=wishes.fuse, forbid=wishes.forbid), self.case
            )
        graphs = {}
        for name in filter(after.graphs.__contains__, before.graphs):
            old, new = before.graphs[name], after.graphs[name]
            costs = WhatIf(after.wishes(name), old.schedule, new.schedule)
            graphs[name] = costs, changed_code(old, new)
        with redirect_stdout(io.StringIO()):
            times = timed([before.run, after.run])
        usual = {**vars(self.base.options), **vars(self.base)}
        told = {name: value for name, value in changes.items() if value != usual[name]}
        return Outcome(self.case.name, told, before, after, times, graphs)

    def __str__(self) -> str:
        return f"{self.run()}\n\n{HINT}"


def what_if(target: Any, *args: Any, **kwargs: Any) -> Experiment:
    """An experiment with one call of a function or module: in a notebook a panel, else `.run(...)`.

    What `mc.compile` returned is compared with its own options. Neither the target nor the arguments change.
    """
    return Experiment(target, args, kwargs)
