"""A call's time, line by line of the generated Python: bars by the clock, and the lines."""

from __future__ import annotations

from minicompile.debug.launches import KINDS, Launch, Launches, Timeline
from minicompile.ops.origin import source_lines
from minicompile.show.html import box, drawing, heading, shows, text
from minicompile.show.listing import from_text, headline, listing
from minicompile.show.palette import NEUTRAL, colour
from minicompile.show.reports import text_line

LEFT, WIDTH, LANE = 64, 1100, 30
LANES = ("kernels", "library", "Python")


def picture(timeline: Timeline) -> str:
    """A bar for each line, at its time: kernels, library calls and what Python does between them. On a GPU a
    lane more, of the times that it measured itself, one after the other."""
    on_gpu = [(step, step.device) for step in timeline.launches if step.device is not None]
    whole = max(timeline.seconds, sum(seconds for _, seconds in on_gpu)) or 1.0
    scale = (WIDTH - LEFT) / whole
    names = [*LANES, *["GPU"] * bool(on_gpu)]
    out = "".join(
        f'<text x="0" y="{LANE * i + 19}">{name}</text><path d="M{LEFT} {LANE * i + 29.5}H{WIDTH}"'
        ' stroke="currentColor" stroke-opacity="0.2"/>'
        for i, name in enumerate(names)
    )

    def rectangle(step: Launch, lane: int, start: float, seconds: float) -> str:
        told = "\n".join(filter(None, [str(step), from_text(source_lines(step.origins))]))
        return (
            f'<rect x="{LEFT + start * scale:.1f}" y="{LANE * lane + 4}" height="{LANE - 6}" '
            f'width="{max(seconds * scale, 0.8):.1f}" fill="{colour(step.origins) or NEUTRAL}">'
            f"<title>{text(told)}</title></rect>"
        )

    for step in timeline.launches:
        out += rectangle(step, KINDS.index(step.kind), step.start, step.seconds)
    done = 0.0
    for step, seconds in on_gpu:
        out += rectangle(step, len(LANES), done, seconds)
        done += seconds
    ground = LANE * len(names)
    for i in range(5):
        x, anchor = LEFT + (WIDTH - LEFT) * i / 4, ("start", "middle", "middle", "middle", "end")[i]
        out += f'<text x="{x}" y="{ground + 14}" text-anchor="{anchor}">{whole * i * 2.5e5:,.0f} us</text>'
    return drawing(timeline.graph, WIDTH, ground + 20, out, letters=11)


def timeline_parts(timeline: Timeline) -> str:
    """The picture, and the lines with their times."""
    return picture(timeline) + listing(map(text_line, str(timeline).split("\n")[1:]))


shows(Timeline)(lambda t: box(f"{t.graph} of {t.name}", t.summary, timeline_parts(t)))


@shows(Launches)
def launches_view(launches: Launches) -> str:
    parts = (
        heading(f"{t.graph} of {t.name}: {t.summary}") + timeline_parts(t)
        for t in launches.timelines
    )
    return box(*headline(launches), *parts)
