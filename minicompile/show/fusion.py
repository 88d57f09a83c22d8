"""The fusion stepper: the scheduler's steps as a slide show, the groups that are asked about marked."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import groupby

from minicompile.ops.display import count_text
from minicompile.scheduling.explain import FusionStep, FusionSteps, Groups
from minicompile.show.html import box, code, columns, details, heading, shows, steps, text
from minicompile.show.palette import BAD, FORWARD, GOOD
from minicompile.show.schedule import decision_table, operation_lines

MOST_FRAMES = 150
"""With more steps, a slide stands for a fusion; the refusals before it are in a table that folds."""

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
    sides = (
        heading(name) + operation_lines(nodes)
        for name, nodes in (("producer", decision.producers), ("consumer", decision.consumers))
    )
    before = heading("groups before" if fused else "groups before and after")
    before += group_line(step.before, step.asked, FORWARD if fused else BAD)
    after = heading("groups after") + group_line(step.after, step.joined, GOOD)
    return (
        f'<p style="border-left:4px solid {hue};padding-left:6px">{text(decision.reason)}<br>'
        f"<small>{text(decision.numbers)}</small><br><b>{text(step.totals)}</b></p>"
        f"{columns(*sides) if loops else ''}{before}{after if fused else ''}"
    )


def title(step: FusionStep) -> str:
    decision = step.decision
    verdict = "fused" if decision.fused else "kept apart"
    return f"{step.number}: {verdict} {decision.producer} + {decision.consumer}"


shows(FusionStep)(lambda step: box(title(step), step.totals, step_view(step)))


def slides(run: FusionSteps) -> Iterator[tuple[object, object, str]]:
    """A slide for each step; in a long run for each fusion, with the refusals since the last one."""
    if len(run) <= MOST_FRAMES:
        yield from ((title(step), step.totals, step_view(step)) for step in run)
        return
    refused: list[FusionStep] = []
    for step in run:
        if not step.decision.fused:
            refused.append(step)
            if step is not run[-1]:
                continue
        told = ""
        if refused:
            numbers = [q.number for q in refused]
            told = decision_table([q.decision for q in refused], numbers)
            told = details("kept apart before it", count_text(len(refused), "step"), told)
        yield title(step), step.totals, step_view(step, loops=False) + told
        refused = []


@shows(FusionSteps)
def run_view(run: FusionSteps) -> str:
    shown, step, notes = (
        steps(slides(run)),
        f'trace.fusion_steps("{run.schedule.graph.name}")[i]',
        [],
    )
    if len(run) > MOST_FRAMES:
        notes.append("A slide for each fusion, with the refusals before it in a table that folds.")
        notes.append(f"{step} shows step i and the loops it is about.")
    if " groups … |" in shown:
        notes.append(f"Groups far from those asked about are counted: print({step}) names all.")
    return box(run.title, run.counts, shown, f"<small>{text(' '.join(notes))}</small>")
