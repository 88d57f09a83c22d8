"""`mc.what_if(fn, *args).run(...)`: compiled for real with something changed, beside the unchanged one.

    Experiment := target, arguments, the unchanged Knobs
    Knobs      := fuse, forbid, tiles, backend, dynamic, options: what can be changed
    Side       := Knobs -> traces, accuracy against eager, a call to time, refusals
    Outcome    := before, after: Sides; medians of calls timed in turns; a WhatIf of each graph

Wishes enter through the fusion policy that is registered, tiles through a plan rule that runs after all
others. What can't be done is refused with the reason; every answer is compared with eager's.
"""

from __future__ import annotations

import copy
import dataclasses
import html
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from minicompile import api
from minicompile.codegen import cpp_rules, triton_rules
from minicompile.codegen.plan import KernelPlan, KernelSource, plan_rule, power_of_two
from minicompile.debug.accuracy import (
    EAGER,
    REFERENCE,
    Copier,
    StageAccuracy,
    accuracy,
    accuracy_stage,
    leaves,
)
from minicompile.dynamo.module import original_of
from minicompile.errors import OptionError
from minicompile.ops.display import Shown, aligned, to_html
from minicompile.ops.events import Event, observer
from minicompile.ops.registry import ALL, scoped
from minicompile.options import Options, make_options
from minicompile.pipeline_result import CompiledStages, Trace
from minicompile.scheduling.explain import WhatIf, parts
from minicompile.scheduling.fusion import FusionPolicy, Wishes, fusion_rule
from minicompile.scheduling.nodes import Pair

FEWEST_CALLS, MOST_CALLS, SECONDS = 5, 200, 0.2
"""How often each side is called for its median: until the time is up, within these limits."""

LARGEST_SQUARE = 128
"""Side of a square of a transposition: its elements lie on the stack."""


HINT = """Change something: .run(forbid=[("buf0", "buf1")], fuse=[...], tiles={"x": 64}, backend="aot_eager",
dynamic=True, inline="never"), or any other option. The stages are in .run(...).after.traces."""


@dataclass(frozen=True)
class Knobs:
    """What a compilation can be told. Pairs are names as in `schedule.why`, of `graph` of the first capture.

    `tiles` are sizes by axis ("x", "r", "square"), of all kernels that have it, or by "kernel.axis".
    """

    fuse: tuple[Pair, ...] = ()
    forbid: tuple[Pair, ...] = ()
    tiles: tuple[tuple[str, int], ...] = ()
    graph: str = "forward"
    backend: str = "inductor"
    dynamic: bool | None = None
    options: Options = field(default_factory=Options)

    def changed(self, changes: Mapping[str, Any]) -> Knobs:
        """With other values: the knobs by their names, and any option by its own."""
        names = {knob.name for knob in dataclasses.fields(self)} - {"options"}
        options = {**vars(self.options)} | {n: v for n, v in changes.items() if n not in names}
        knobs = {name: value for name, value in changes.items() if name in names}
        for name in ("fuse", "forbid", "tiles"):
            given = knobs.get(name) or ()
            items = given.items() if isinstance(given, Mapping) else given
            knobs[name] = tuple((first, second) for first, second in items)
        return replace(self, **knobs, options=make_options(options=options))

    def told(self, other: Knobs) -> str:
        """What differs from the other ones."""
        wishes = [f"fuse {a} + {b}" for a, b in self.fuse]
        wishes += [f"keep apart {a} + {b}" for a, b in self.forbid]
        wishes += [f"tile {axis} = {size}" for axis, size in self.tiles]
        new, old = ({**vars(k), **vars(k.options)} for k in (self, other))
        plain = (n for n in new if n not in ("fuse", "forbid", "tiles", "options"))
        wishes += [f"{n} = {new[n]!r}" for n in plain if new[n] != old[n]]
        return ", ".join(wishes) or "nothing changed"


def tile_refusal(plan: KernelPlan, axis: str, size: int) -> str:
    """Why a kernel that has such a tile can't have one of that size; empty where it can."""
    if type(size) is not int or size < 1:
        return "a tile has at least one element"
    if plan.language == "triton":
        largest, whole = triton_rules.LARGEST_BLOCK, plan.reduction == "persistent"
        if plan.device.type == "cpu":
            return "the Triton interpreter takes tiles of its own"
        if size != power_of_two(size):
            return "Triton's tiles are powers of two"
        if whole and axis == "r":
            return "the kernel holds whole rows"
        block = math.prod({**plan.tiles, axis: size}.values())
        return f"Triton's blocks have at most {largest} elements" if block > largest else ""
    if plan.language != "cpp":
        return f"what {plan.language} kernels can take is not known here"
    if axis == "square":
        fits = size % 16 == 0 and size <= LARGEST_SQUARE
        return "" if fits else f"squares are multiples of 16, up to {LARGEST_SQUARE}"
    if axis == "x":
        most = cpp_rules.WIDEST_TILE
        return f"columns lie on the stack, {most} at most" if size > most else ""
    length, most = next(n for n in plan.reduction_ranges.values() if n != 1), plan.tiles["chunks"]
    few = not isinstance(length, int) or -(-length // size) <= most
    return "" if few else f"{length} of them would be more than {most} chunks"


class Side:
    """The target compiled once with these knobs, in a scope with their rules, and compared with eager."""

    def __init__(self, knobs: Knobs, target: Any, args: Any, kwargs: Any) -> None:
        self.knobs, self.traces = knobs, list[Trace]()
        self.graph = ""
        self.refused: list[str] = []
        self.unheard = {asked for asked, _ in knobs.tiles}
        compiled: list[Any] = []

        def prepare(copied: Any) -> Any:
            options, dynamic = knobs.options, knobs.dynamic
            made = api.compile(copied, backend=knobs.backend, dynamic=dynamic, options=options)
            compiled.append(made)
            return made

        with self.rules():
            observer("what if")(self.listen)
            accuracy_stage.rules = {name: accuracy_stage[name] for name in (REFERENCE, EAGER)}
            accuracy_stage("what if")(prepare)
            self.accuracy: StageAccuracy = accuracy(target, *args, **kwargs)["what if"]
        self.refused += [f"tile {asked}: no kernel has one" for asked in sorted(self.unheard)]
        copier = Copier()
        self.compiled, self.args, self.kwargs = compiled[0], copier(args), copier(kwargs)

    def listen(self, event: Event) -> None:
        if event.kind == "capture":
            self.traces.append(Trace(event.subject.name, event.subject))
        elif event.kind == "loops":
            self.graph = event.graph
        if self.traces:
            self.traces[-1].keep(event)

    @contextmanager
    def rules(self) -> Iterator[None]:
        """The registries as the knobs want them."""
        with scoped():
            if self.knobs.fuse or self.knobs.forbid:
                make = fusion_rule["policy"]
                fusion_rule("policy")(lambda: self.policy(make))
            if self.knobs.tiles:
                plan_rule("any:what_if")(self.set_tiles)
            yield

    def policy(self, make: Callable[[], FusionPolicy]) -> FusionPolicy:
        """The registered policy, with the wishes in the graph that they are about."""
        found = copy.copy(make())
        if len(self.traces) == 1:
            found.wishes = self.wishes(self.graph)
        return found

    def set_tiles(self, plan: KernelPlan, options: Options) -> None:
        """The plan rule. What is asked of all kernels goes to those that have such a tile."""
        squares = plan.language == "cpp" and not plan.reduction_ranges
        axes = {"square": tuple(plan.tiles)} if squares else {name: (name,) for name in plan.tiles}
        axes.pop("chunks", None)
        for asked, size in self.knobs.tiles:
            name, _, axis = asked.rpartition(".")
            if name not in ("", plan.name) or not axes.get(axis):
                continue
            self.unheard.discard(asked)
            if why := tile_refusal(plan, axis, size):
                self.refused.append(f"{plan.name}: tile {axis} = {size}: {why}")
            else:
                plan.tiles = {**plan.tiles, **dict.fromkeys(axes[axis], size)}

    @property
    def graphs(self) -> dict[str, CompiledStages]:
        """The stages of the first capture, by the graph's name."""
        return self.traces[0].graphs if self.traces else {}

    def wishes(self, graph: str) -> Wishes:
        asked = self.knobs.graph == graph
        return Wishes(self.knobs.fuse * asked, self.knobs.forbid * asked)

    def seconds(self) -> float:
        """Of one call, and of its backward."""
        with self.rules():
            began = time.perf_counter()
            found = self.compiled(*self.args, **self.kwargs)
            outputs = [v for v in leaves(found).values() if isinstance(v, torch.Tensor)]
            differentiable = [v for v in outputs if v.requires_grad]
            torch.autograd.backward(differentiable, [torch.ones_like(v) for v in differentiable])
            if any(v.is_cuda for v in outputs):
                torch.cuda.synchronize()
            return time.perf_counter() - began


@dataclass(frozen=True, eq=False)
class Outcome(Shown):
    """Both sides of an experiment, and what was measured."""

    name: str
    before: Side
    after: Side
    seconds: list[list[float]]
    graphs: dict[str, WhatIf]
    """Of each graph that both have: costs, kernels and decisions that differ, wishes that were refused."""

    @property
    def title(self) -> str:
        return f"what if of {self.name}: {self.after.knobs.told(self.before.knobs)}"

    @property
    def refused(self) -> list[str]:
        """What was asked for and not done, and why."""
        wishes = [answer.headline for found in self.graphs.values() for answer in found.refused]
        return [*wishes, *self.after.refused]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Name, before, after."""
        answers = (f"{s.accuracy.verdict} {s.accuracy.note}" for s in (self.before, self.after))
        times = (f"{statistics.median(s) * 1e6:,.1f} us" if s else "none" for s in self.seconds)
        calls = f"time, median of {len(self.seconds[1])} calls"
        return [("answer", *answers), (calls, *times)]

    def kernels(self, graph: str) -> list[list[KernelSource]]:
        """Kernels that only the one side has, and those that only the other has, whatever their names."""
        both = [side.graphs[graph].kernels for side in (self.before, self.after)]
        texts = [{kernel_text(kernel) for kernel in kernels} for kernels in both]
        return [[k for k in both[i] if kernel_text(k) not in texts[1 - i]] for i in (0, 1)]

    def __str__(self) -> str:
        rows = [("", "before", "after"), *self.rows]
        lines = [self.title, *aligned(rows), *(f"refused: {why}" for why in self.after.refused)]
        for graph, found in self.graphs.items():
            changed = (", ".join(k.name for k in ks) or "none" for ks in self.kernels(graph))
            lines.append("{}: kernels before {}; after {}".format(graph, *changed))
            lines += str(found).splitlines()[1:]
        return "\n".join(lines)


def kernel_text(kernel: KernelSource) -> tuple[object, ...]:
    """What a kernel is, but for its name."""
    return kernel.text.replace(kernel.name, ""), *kernel.plan.tiles.items(), kernel.plan.num_warps


class Experiment(Shown):
    """A function with arguments, to be compiled with changes: `experiment.run(forbid=[("buf0", "buf1")])`."""

    def __init__(self, target: Any, args: Any, kwargs: Any) -> None:
        found, self.target = api.dispatcher_of(target), original_of(target)
        self.call, self.base = (self.target, args, kwargs), Knobs()
        self.name = getattr(self.target, "__qualname__", type(self.target).__qualname__)
        if found is not None:
            self.base = Knobs(dynamic=found.dynamic, options=found.options)
        self.sides: dict[Knobs, Side] = {}
        self.known: object = None

    def side(self, knobs: Knobs) -> Side:
        """The target with these knobs; compiled again when a rule has been registered since."""
        known = {name: dict(registry.rules) for name, registry in ALL.items()}
        if known != self.known:
            self.sides, self.known = {}, known
        if knobs not in self.sides:
            self.sides[knobs] = Side(knobs, *self.call)
        return self.sides[knobs]

    def run(self, **changes: Any) -> Outcome:
        """Compile with changes: the `Knobs` by name, any option by its own. Without, it is measured twice.

        Raises ValueError for a name that no node has, OptionError for an option that doesn't exist.
        """
        knobs = self.base.changed(changes)
        if knobs.fuse or knobs.forbid:
            plain = self.plain(knobs).graphs.get(knobs.graph)
            if plain is None:
                told = f"with backend {knobs.backend!r} there is no {knobs.graph} graph of kernels"
                raise OptionError(f"{told}: fuse and forbid have nothing to work on")
            fuse, forbid = (
                tuple(
                    (parts(plain.schedule, a)[0].name, parts(plain.schedule, b)[0].name)
                    for a, b in pairs
                )
                for pairs in (knobs.fuse, knobs.forbid)
            )
            knobs = replace(knobs, fuse=fuse, forbid=forbid)
        before, after = self.side(self.base), self.side(knobs)
        graphs = {
            name: WhatIf(after.wishes(name), one.schedule, after.graphs[name].schedule)
            for name, one in before.graphs.items()
            if name in after.graphs
        }
        return Outcome(self.name, before, after, in_turns((before, after)), graphs)

    def plain(self, knobs: Knobs) -> Side:
        """With these knobs, but for the wishes."""
        return self.side(replace(knobs, fuse=(), forbid=()))

    def panel(self) -> Any:
        """The knobs as widgets. Raises ImportError where ipywidgets is missing."""
        from minicompile.show.widgets import Panel

        return Panel(self, self.run()).box

    def __str__(self) -> str:
        return f"{self.run()}\n\n{HINT}"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """The panel where ipywidgets is there; elsewhere, and when it is opened again, its first state."""
        from minicompile.show.widgets import Panel

        first, hint = self.run(), HINT
        bundle: dict[str, Any] = {}
        try:
            bundle = Panel(self, first).box._repr_mimebundle_()
        except ImportError:
            hint += "\nThere is no panel: ipywidgets is not installed (pip install ipywidgets)."
        note = f"<pre>{html.escape(hint)}</pre>"
        return {**bundle, "text/plain": f"{first}\n\n{hint}", "text/html": to_html(first) + note}


def in_turns(sides: Sequence[Side]) -> list[list[float]]:
    """Seconds of calls of each side, in turns; who begins alternates. None of a side that raised."""
    seconds: list[list[float]] = [[] for _ in sides]
    ready = [(s, times) for s, times in zip(sides, seconds) if s.accuracy.verdict != "raised"]
    end = time.perf_counter() + SECONDS
    for turn in range(-1, MOST_CALLS):
        if turn >= FEWEST_CALLS and time.perf_counter() > end:
            break
        for side, times in ready[:: 1 if turn % 2 else -1]:
            times.append(side.seconds())
    for _, times in ready:
        del times[:1]  # warms up
    return seconds


def what_if(target: Any, *args: Any, **kwargs: Any) -> Experiment:
    """An experiment with one call of a function or module: in a notebook a panel, else `.run(...)`.

    What `mc.compile` returned is compared with its own options. Neither the target nor the arguments change.
    """
    return Experiment(target, args, kwargs)
