"""The fusion stepper: the scheduler's decisions as a slide show, with the loops that each is about."""

from __future__ import annotations

from minicompile.debug.why import FusionSteps
from minicompile.ops.display import bytes_text
from minicompile.scheduling.nodes import FusionDecision
from minicompile.show.html import beside, box, shows, steps, text
from minicompile.show.palette import BAD, GOOD
from minicompile.show.schedule_pictures import operation_lines

MOST_LOOPS = 150
"""With more steps, a slide leaves out the loops that it is about."""


def slide(decision: FusionDecision, loops: bool) -> str:
    """The answer and its numbers, and what the two compute."""
    producers, consumers = map(operation_lines, (decision.producers, decision.consumers))
    return (
        f'<p style="border-left:4px solid {GOOD if decision.fused else BAD};padding-left:6px">'
        f"{text(decision.reason)}<br><small>{text(decision.numbers())}</small></p>"
        + (beside(("producer", producers), ("consumer", consumers)) if loops else "")
    )


@shows(FusionSteps)
def run_view(run: FusionSteps) -> str:
    slides = []
    for number, decision in enumerate(run):
        verdict = "fused" if decision.fused else "kept apart"
        title = f"{number}: {verdict} {decision.producer} + {decision.consumer}"
        saved = f"{bytes_text(decision.score)} of traffic"
        slides.append((title, saved, slide(decision, len(run) <= MOST_LOOPS)))
    return box(run.title, run.counts, steps(slides))
