"""The fusion stepper: the scheduler's steps as a slide show, the groups that are asked about marked."""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby

from minicompile.debug.why import FusionStep, FusionSteps, Groups
from minicompile.ops.display import count_text
from minicompile.show.html import beside, box, code, heading, shows, steps, text
from minicompile.show.palette import BAD, FORWARD, GOOD
from minicompile.show.schedule import operation_lines

MOST_LOOPS = 150
"""With more steps, a slide leaves out the loops that it is about."""

NEAR = 3
"""Groups shown on either side of a marked one, where there are many."""

FRAME = "border:2px solid {};border-radius:4px;padding:0px 4px"


def group_line(groups: Groups, marked: Collection[tuple[str, ...]], hue: str) -> str:
    """Groups in order, the marked ones framed; those far from a marked one are counted."""
    parts = []
    for framed, same in groupby(groups, marked.__contains__):
        names = [" + ".join(group) for group in same]
        if framed:
            parts += [
                f'<span style="{FRAME.format(hue)}">{code(n, wrap=True)}</span>' for n in names
            ]
            continue
        far = len(names) - 2 * NEAR
        if far > NEAR:
            names[NEAR:-NEAR] = [f"… {count_text(far, 'group')} …"]
        parts.append(code(" | ".join(names), wrap=True))
    return f"<p>{' | '.join(parts)}</p>"


def step_view(step: FusionStep, loops: bool = True) -> str:
    """The answer and its numbers, what the two compute, and the groups before and after."""
    decision = step.decision
    fused, hue = decision.fused, GOOD if decision.fused else BAD
    producers, consumers = map(operation_lines, (decision.producers, decision.consumers))
    sides = beside(("producer", producers), ("consumer", consumers)) if loops else ""
    before = heading("groups before" if fused else "groups before and after")
    before += group_line(step.before, step.asked, FORWARD if fused else BAD)
    after = heading("groups after") + group_line(step.after, step.joined, GOOD)
    return (
        f'<p style="border-left:4px solid {hue};padding-left:6px">{text(decision.reason)}<br>'
        f"<small>{text(decision.numbers)}</small><br><b>{text(step.totals)}</b></p>"
        f"{sides}{before}{after if fused else ''}"
    )


def title(step: FusionStep) -> str:
    decision = step.decision
    verdict = "fused" if decision.fused else "kept apart"
    return f"{step.number}: {verdict} {decision.producer} + {decision.consumer}"


shows(FusionStep)(lambda step: box(title(step), step.totals, step_view(step)))


@shows(FusionSteps)
def run_view(run: FusionSteps) -> str:
    loops = len(run) <= MOST_LOOPS
    shown = steps((title(step), step.totals, step_view(step, loops)) for step in run)
    name = f'trace.fusion_steps("{run.schedule.graph.name}")[i]'
    note = "" if loops else f"print({name}) names all groups of step i"
    return box(run.title, run.counts, shown, f"<small>{text(note)}</small>")
