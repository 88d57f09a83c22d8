"""A call's time, line by line of the generated Python: bars by the clock, and the lines."""

from __future__ import annotations

from minicompile.debug.launch_times import KINDS, Launch, LaunchTimeline
from minicompile.ops.origin import source_lines
from minicompile.show.html import box, drawing, shows, text
from minicompile.show.listing import from_text, listing
from minicompile.show.palette import NEUTRAL, colour
from minicompile.show.reports import text_line

LEFT, WIDTH, LANE = 64, 1100, 30
LANES = ("kernels", "library", "Python")


def picture(timeline: LaunchTimeline) -> str:
    """A bar for each line, at its time: kernels, library calls and what Python does between them."""
    whole = timeline.seconds or 1.0
    scale = (WIDTH - LEFT) / whole
    out = "".join(
        f'<text x="0" y="{LANE * i + 19}">{name}</text><path d="M{LEFT} {LANE * i + 29.5}H{WIDTH}"'
        ' stroke="currentColor" stroke-opacity="0.2"/>'
        for i, name in enumerate(LANES)
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
    ground = LANE * len(LANES)
    for i in range(5):
        x, anchor = LEFT + (WIDTH - LEFT) * i / 4, ("start", "middle", "middle", "middle", "end")[i]
        out += f'<text x="{x}" y="{ground + 14}" text-anchor="{anchor}">{whole * i * 2.5e5:,.0f} us</text>'
    return drawing(timeline.graph, WIDTH, ground + 20, out, letters=11)


def timeline_parts(timeline: LaunchTimeline) -> str:
    """The picture, and the lines with their times."""
    return picture(timeline) + listing(map(text_line, str(timeline).split("\n")[1:]))


shows(LaunchTimeline)(lambda t: box(f"{t.graph} of {t.name}", t.summary, timeline_parts(t)))
