"""What if: an experiment's outcome, and its knobs as a panel of ipywidgets.

A change of a control compiles at once. What goes wrong is told in the panel.
"""

from __future__ import annotations

from typing import Any

from minicompile.api import backends
from minicompile.debug.experiment import HINT, Experiment, ExperimentSide, Outcome
from minicompile.ops.display import bytes_text, count_text, method, to_html
from minicompile.options import CHOICES
from minicompile.scheduling.nodes import Pair, Schedule
from minicompile.show.html import beside, details, shows, text
from minicompile.show.reports import text_view


@shows(Outcome)
def outcome_view(outcome: Outcome) -> str:
    """Before and after, as a terminal has it, and the code that differs."""
    changes = (
        details(graph, count_text(count, "kernel"), beside(*zip(("before", "after"), code)))
        for graph, (_, code) in outcome.graphs.items()
        if (count := sum(map(len, code)))
    )
    return text_view(outcome) + "".join(changes)


shows(Experiment)(lambda experiment: outcome_view(experiment.run()))


def panel(experiment: Experiment) -> Any:
    """The controls of an experiment, a widget. Raises ImportError where ipywidgets is missing."""
    import ipywidgets

    def chooser(kind: Any, name: str, options: Any, **more: Any) -> Any:
        return kind(description=name, options=options, layout={"width": "98%"}, **more)

    base, result = experiment.base, ipywidgets.HTML()
    stages = ExperimentSide(base, experiment.case).graphs.get(base.graph)
    pairs = [(told, pair) for pair, told in asked_of(stages.schedule).items()] if stages else []
    pick, many = ipywidgets.Dropdown, ipywidgets.SelectMultiple
    controls = {
        "backend": chooser(pick, "backend", list(backends), value=base.backend),
        "dynamic": chooser(pick, "dynamic", ["automatic", "yes", "no"]),
        "inline": chooser(pick, "inline", CHOICES["inline"], value=base.options.inline),
        "forbid": chooser(many, "force apart", pairs),
        "fuse": chooser(many, "together", pairs),
    }

    def update(_: object) -> None:
        changes = {name: control.value for name, control in controls.items()}
        changes["dynamic"] = {"yes": True, "no": False}.get(changes["dynamic"], base.dynamic)
        result.value = "<p>compiling …</p>"
        try:
            result.value = to_html(experiment.run(**changes))
        except Exception as error:
            result.value = f"<pre>{text(f'{type(error).__name__}: {error}')}</pre>"

    for control in controls.values():
        control.observe(update, "value")
    return ipywidgets.VBox([*controls.values(), result])


@method(Experiment, "_ipython_display_")
def display_panel(experiment: Experiment) -> None:
    """Display the unchanged state, an output of its own that needs no kernel; below it the panel."""
    from IPython.display import display

    display(experiment.run())  # type: ignore[no-untyped-call]
    try:
        display(panel(experiment))  # type: ignore[no-untyped-call]
    except ImportError:
        print("There is no panel: ipywidgets is not installed (pip install ipywidgets).", HINT)


def asked_of(schedule: Schedule) -> dict[Pair, str]:
    """What was decided of two nodes, for each decision about loops: of either side the first node that
    touches what it is about."""
    decisions = {}
    for decision in schedule.decisions:
        about = {buffer for buffer, _ in decision.saved[:1]}
        if decision.cause != "extern":
            a, b = (
                next((n for n in s if about & {d.buffer for d in (*n.reads, *n.writes)}), s[0])
                for s in (decision.producers, decision.consumers)
            )
            verdict = "fused" if decision.fused else "kept apart"
            told = (
                f"{a.name} + {b.name}: {verdict}, {bytes_text(decision.score)}. {decision.reason}"
            )
            decisions[a.name, b.name] = told
    return decisions
