"""The fusion stepper: the scheduler's questions as a slide show, the groups that are asked about marked."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import groupby

from minicompile.debug.fusion_steps import FusionSteps, Question
from minicompile.ops.display import count_text
from minicompile.scheduling.explain import FusionStep, Groups
from minicompile.show.html import box, code, columns, details, heading, shows, steps, text
from minicompile.show.palette import BAD, FORWARD, GOOD
from minicompile.show.schedule import decision_table, operation_lines

MOST_FRAMES = 150
"""With more questions, a slide stands for a fusion; the refusals before it are in a table that folds."""

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


def question_view(question: Question, loops: bool = True) -> str:
    """The answer and its numbers, what the two compute, and the groups before and after."""
    decision = question.decision
    fused, hue = decision.fused, GOOD if decision.fused else BAD
    sides = (
        heading(name) + operation_lines(nodes)
        for name, nodes in (("producer", decision.producers), ("consumer", decision.consumers))
    )
    before = heading("groups before" if fused else "groups before and after")
    before += group_line(question.before, question.asked, FORWARD if fused else BAD)
    after = heading("groups after") + group_line(question.after, question.joined, GOOD)
    return (
        f'<p style="border-left:4px solid {hue};padding-left:6px">{text(decision.reason)}<br>'
        f"<small>{text(decision.numbers)}</small><br><b>{text(question.totals)}</b></p>"
        f"{columns(*sides) if loops else ''}{before}{after if fused else ''}"
    )


def title(question: Question) -> str:
    decision = question.decision
    verdict = "fused" if decision.fused else "kept apart"
    return f"{question.number}: {verdict} {decision.producer} + {decision.consumer}"


shows(Question)(lambda question: box(title(question), question.totals, question_view(question)))


def slides(run: FusionSteps) -> Iterator[tuple[object, object, str]]:
    """A slide for each question; in a long run for each fusion, with the refusals since the last one."""
    if len(run) <= MOST_FRAMES:
        yield from ((title(question), question.totals, question_view(question)) for question in run)
        return
    refused: list[Question] = []
    for question in run:
        if not question.decision.fused:
            refused.append(question)
            if question is not run[-1]:
                continue
        told = ""
        if refused:
            numbers = [q.number for q in refused]
            told = decision_table([q.decision for q in refused], numbers)
            told = details("kept apart before it", count_text(len(refused), "question"), told)
        yield title(question), question.totals, question_view(question, loops=False) + told
        refused = []


@shows(FusionSteps)
def steps_view(run: FusionSteps) -> str:
    shown, step, notes = steps(slides(run)), f'trace.fusion_steps("{run.graph}")[i]', []
    if len(run) > MOST_FRAMES:
        notes.append("A slide for each fusion, with the refusals before it in a table that folds.")
        notes.append(f"{step} shows question i and the loops it is about.")
    if " groups … |" in shown:
        notes.append(f"Groups far from those asked about are counted: print({step}) names all.")
    return box(
        f"fusion of {run.graph}", run.counts, shown, f"<small>{text(' '.join(notes))}</small>"
    )


@shows(FusionStep)
def step_view(step: FusionStep) -> str:
    about = "before fusion" if step.decision is None else step.decision.reason
    new = {node.name for node in step.decision.nodes} if step.decision is not None else set()
    made = {group for group in step.groups if not new.isdisjoint(group)}
    return box(f"step {step.number}", about, group_line(step.groups, made, GOOD))
