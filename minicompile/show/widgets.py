"""What if: an experiment's outcome as a picture, and its knobs as a panel of ipywidgets.

A change of a control compiles at once; while that runs, the controls are off. What goes wrong is told in
the panel.
"""

from __future__ import annotations

from typing import Any

from minicompile.api import backends
from minicompile.debug.experiment import HINT, Experiment, Outcome
from minicompile.ops.display import bytes_text, count_text, method, to_html
from minicompile.options import CHOICES
from minicompile.scheduling.nodes import FusionDecision, Pair, Schedule
from minicompile.show.html import before_after, beside, box, details, inside, shows, text

DYNAMIC = {"automatic": None, "yes": True, "no": False}
"""By names: to a widget None would be that nothing is chosen."""


@shows(Outcome)
def outcome_view(found: Outcome) -> str:
    """Before and after: answer, time, costs, kernels as loops and as code, decisions, refusals."""
    parts = [before_after(found.rows, found.after.refused)]
    for graph, (costs, code) in found.graphs.items():
        shown, count = inside(costs), sum(map(len, code))
        if count:
            sides = beside(*zip(("before", "after"), code))
            shown += details("code that differs", count_text(count, "kernel"), sides)
        same = not count and not any(costs.decisions)
        opened = not same or costs.before is costs.after
        parts.append(details(graph, "nothing differs" * same, shown, opened))
    if not found.graphs:
        parts.append("<p>One of the sides has no kernels: its backend stops before them.</p>")
    return box("what if", found.title.removeprefix("what if of "), *parts)


shows(Experiment)(lambda experiment: outcome_view(experiment.run()))


class Panel:
    """The controls of an experiment; `box` is the widget. Raises ImportError where ipywidgets is missing."""

    AS_DECIDED = "as decided"

    def __init__(self, experiment: Experiment, first: Outcome) -> None:
        import ipywidgets

        def choice(name: str, options: Any, value: Any) -> Any:
            return ipywidgets.Dropdown(description=name, options=options, value=value)

        self.experiment = experiment
        self.wishes: dict[Pair, str] = {}
        base = experiment.base
        self.knobs = {
            "graph": choice("graph", list(first.before.graphs) or [base.graph], base.graph),
            "backend": choice("backend", list(backends), base.backend),
            "dynamic": choice(
                "dynamic", list(DYNAMIC), {v: k for k, v in DYNAMIC.items()}[base.dynamic]
            ),
            "inline": choice("inline", CHOICES["inline"], base.options.inline),
        }
        wide = {"layout": ipywidgets.Layout(width="98%")}
        self.decision = ipywidgets.Select(rows=8, description="fusion", **wide)
        self.wish = ipywidgets.ToggleButtons(
            options=[self.AS_DECIDED, "force apart", "force together"]
        )
        self.axis = choice("tile", ["as planned", "x", "r", "square"], "as planned")
        sizes = [1 << i for i in range(15)]
        self.size = ipywidgets.SelectionSlider(
            description="its size", options=sizes, value=64, continuous_update=False
        )
        self.status, self.result = ipywidgets.HTML(), ipywidgets.HTML()
        self.controls = [*self.knobs.values(), self.decision, self.wish, self.axis, self.size]
        rows = ([*self.knobs.values()], [self.decision], [self.wish, self.axis, self.size])
        lines = (
            ipywidgets.HBox(row, layout=ipywidgets.Layout(flex_flow="row wrap")) for row in rows
        )
        self.box = ipywidgets.VBox([*lines, self.status, self.result])
        self.busy = True
        self.list_decisions(first)
        self.busy = False
        self.decision.observe(self.chosen, "value")
        for control in self.controls:
            if control is not self.decision:
                control.observe(self.update, "value")

    def changes(self) -> dict[str, Any]:
        """What the controls say, as `Experiment.run` takes it."""
        found = {name: control.value for name, control in self.knobs.items()}
        found["dynamic"] = DYNAMIC[found["dynamic"]]
        for name, wanted in (("forbid", "force apart"), ("fuse", "force together")):
            found[name] = tuple(pair for pair, wish in self.wishes.items() if wish == wanted)
        if self.axis.value != "as planned":
            found["tiles"] = {self.axis.value: self.size.value}
        return found

    def chosen(self, change: object) -> None:
        """Another decision is selected: the buttons show what is wished for it."""
        if not self.busy:
            self.busy = True
            self.wish.value = self.wishes.get(self.decision.value, self.AS_DECIDED)
            self.busy = False

    def update(self, change: dict[str, Any]) -> None:
        """A control was changed: compile and show."""
        if self.busy:
            return
        if change["owner"] is self.wish and self.decision.value is not None:
            self.wishes.pop(self.decision.value, None)
            if self.wish.value != self.AS_DECIDED:
                self.wishes[self.decision.value] = self.wish.value
        self.busy, self.status.value = True, "<p>compiling …</p>"
        for control in self.controls:
            control.disabled = True
        try:
            outcome = self.experiment.run(**self.changes())
            self.result.value, self.status.value = to_html(outcome), ""
            self.list_decisions(outcome)
        except Exception as error:
            told = f"{type(error).__name__}: {error}\nBelow is what was compiled last."
            self.status.value = f"<pre>{text(told)}</pre>"
        finally:
            for control in self.controls:
                control.disabled = False
            self.busy = False

    def list_decisions(self, outcome: Outcome) -> None:
        """The decisions that can be overruled."""
        knobs, kept = outcome.after.knobs, self.decision.value
        stages = outcome.unwished.graphs.get(knobs.graph)
        decisions = asked_of(stages.schedule) if stages is not None else {}
        self.wishes = {pair: wish for pair, wish in self.wishes.items() if pair in decisions}
        labels = []
        for pair, decision in decisions.items():
            verdict = self.wishes.get(pair) or ("fused" if decision.fused else "kept apart")
            told = f"{' + '.join(pair)}: {verdict}, {bytes_text(decision.score)}. {decision.reason}"
            labels.append((told, pair))
        self.decision.options = labels
        if kept in decisions:
            self.decision.value = kept
        self.wish.value = self.wishes.get(self.decision.value, self.AS_DECIDED)


@method(Experiment, "_ipython_display_")
def display_panel(experiment: Experiment) -> None:
    """Display the unchanged state, an output of its own that needs no kernel; below it the panel."""
    from IPython.display import display

    first = experiment.run()
    display(first)  # type: ignore[no-untyped-call]
    try:
        display(Panel(experiment, first).box)  # type: ignore[no-untyped-call]
    except ImportError:
        print("There is no panel: ipywidgets is not installed (pip install ipywidgets).", HINT)


def asked_of(schedule: Schedule) -> dict[Pair, FusionDecision]:
    """Two nodes for each decision about loops: of either side the first that touches what it is about."""
    found = {}
    for decision in schedule.decisions:
        about = {buffer for buffer, _ in decision.saved[:1]}
        if decision.cause != "extern":
            sides = (decision.producers, decision.consumers)
            a, b = (
                next((n for n in s if about & {d.buffer for d in (*n.reads, *n.writes)}), s[0])
                for s in sides
            )
            found[a.name, b.name] = decision
    return found
