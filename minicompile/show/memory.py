"""The memory plan: a picture of what lives when and how large it is, a table of steps, in-place decisions."""

from __future__ import annotations

from collections.abc import Sequence

from minicompile.ops.display import bytes_text, count_text
from minicompile.scheduling.nodes import Block, InPlaceDecision, MemoryPlan
from minicompile.show.html import bar, box, code, details, image, shows, table, text
from minicompile.show.listing import headline
from minicompile.show.palette import BAD, FORWARD, GOOD, NEUTRAL, tint

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 960, 320, 70, 8, 44
"""The picture in pixels, and the room for its axes."""

HOMES = {"own": FORWARD, "pool": "#8b5cf6", "library": NEUTRAL, "output": GOOD}


def memory_view(memory: MemoryPlan, names: Sequence[str]) -> str:
    """Everything about a plan; `names` says what runs in each step."""
    asked, done = memory.decisions, sum(d.done for d in memory.decisions)
    about = f"{done} taken, {len(asked) - done} not"
    lines = str(memory).split("\n")[1:2]
    return (
        "".join(f"<div><small>{text(line)}</small></div>" for line in lines)
        + (timeline(memory) if memory.blocks else "")
        + memory_table(memory, names)
        + (details("in place", about, decision_table(asked), len(asked) <= 20) if asked else "")
    )


def timeline(memory: MemoryPlan) -> str:
    """Memory over time: one rectangle for each piece, as wide as its life, as high as its size."""
    steps = len(memory.live_bytes)
    top = max([1, *(b.offset + b.bytes for b in memory.blocks)])
    across, up = (WIDTH - LEFT) / max(steps, 1), (HEIGHT - TOP - BOTTOM) / top
    ground = HEIGHT - BOTTOM
    homes = {b.home for b in memory.blocks}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        'font-family="sans-serif" font-size="10" fill="#334155">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    parts += [_rectangle(b, across, up, ground) for b in memory.blocks]
    alive = " ".join(
        f"{LEFT + edge * across:.1f},{ground - live * up:.1f}"
        for step, live in enumerate(memory.live_bytes)
        for edge in (step, step + 1)
    )
    parts.append(f'<polyline points="{alive}" fill="none" stroke="{BAD}" stroke-width="1.5"/>')
    for level in sorted({0, memory.peak_bytes, top}):
        label = f'<text x="{LEFT - 4}" y="{ground - level * up + 4:.1f}" text-anchor="end">'
        parts.append(f"{label}{bytes_text(level)}</text>")
    for step in range(0, steps, max(steps // 16, 1)):
        place = LEFT + (step + 0.5) * across
        parts.append(f'<text x="{place:.1f}" y="{ground + 13}" text-anchor="middle">{step}</text>')
    legend = [(HOMES[home], home) for home in HOMES if home in homes] + [(BAD, "alive in all")]
    for number, (colour, name) in enumerate(legend):
        x, y = LEFT + 110 * number, HEIGHT - 18
        parts.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14}" y="{y + 9}">{name}</text>')
    about = f"{count_text(len(memory.blocks), 'piece')} of memory over {count_text(steps, 'step')}"
    return image("".join([*parts, "</svg>"]), about)


def _rectangle(block: Block, across: float, up: float, ground: float) -> str:
    """A piece of memory, with the names of its buffers where there is room."""
    x, width = LEFT + block.born * across, (block.dies - block.born + 1) * across
    height = block.bytes * up
    y = ground - block.offset * up - height
    colour = HOMES[block.home]
    drawn = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{tint(colour)}" stroke="{colour}" stroke-width="0.6"/>'
    )
    room = int(width / 6)
    name = next((n for n in (" → ".join(block.buffers), block.buffers[0]) if len(n) <= room), "")
    if height < 11 or not name:
        return drawn
    return f'{drawn}<text x="{x + 3:.1f}" y="{y + height / 2 + 4:.1f}">{text(name)}</text>'


def memory_table(memory: MemoryPlan, names: Sequence[str]) -> str:
    """One row a step: what runs, what it allocates and frees, and what is alive while it runs."""
    rows = []
    for i, (name, new, dead, live) in enumerate(
        zip(names, memory.allocate, memory.free, memory.live_bytes)
    ):
        made, freed = ", ".join(map(str, new)), ", ".join(dead)
        alive = bar(live, memory.peak_bytes, BAD if live == memory.peak_bytes else FORWARD)
        rows.append([str(i), name and code(name), code(made), code(freed), bytes_text(live), alive])
    return table(("step", "runs", "allocates", "frees", "alive", ""), rows, numbers=(0, 4))


def decision_table(decisions: Sequence[InPlaceDecision]) -> str:
    verdicts = {True: (GOOD, "in place of"), False: (BAD, "not in place of")}
    rows = (
        [
            str(d.step),
            code(d.new),
            '<b style="color:{}">{}</b>'.format(*verdicts[d.done]),
            code(d.old),
            text(d.reason),
        ]
        for d in decisions
    )
    return table(("step", "written", "", "last read", "why"), rows, numbers=(0,))


shows(MemoryPlan)(
    lambda memory: box(*headline(memory), memory_view(memory, [""] * len(memory.allocate)))
)
IN_PLACE = "may a kernel write a buffer into the memory of one that dies in it?"
shows(InPlaceDecision)(lambda d: box("in-place decision", IN_PLACE, decision_table([d])))
