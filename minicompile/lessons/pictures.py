"""Pictures that only lessons need: the corridor as a strip, slides on a slider, a walk through memory."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from minicompile.ops.display import Shown, to_html
from minicompile.scheduling.body import LoopBody
from minicompile.shapes.expr import index_text
from minicompile.shapes.symnode import evaluate
from minicompile.show.graphviz import EDGE, Diagram, Edge, Node, picture
from minicompile.show.html import box, code, shows, steps, table, text
from minicompile.show.palette import GOOD, NEUTRAL

ROOMS = ("dynamo", "aot", "lowering", "scheduling", "codegen", "runtime")


@dataclass(frozen=True)
class Picture(Shown):
    """What a notebook shows of something (`html`), and what a terminal does (`text`)."""

    text: str
    html: str

    def __str__(self) -> str:
        return self.text


shows(Picture)(lambda picture: picture.html)


def corridor(*lit: str) -> Picture:
    """The strip with these rooms lit."""

    def door(room: str) -> str:
        look = "#2563eb;color:white" if room in lit else "#e5e7eb;color:#6b7280"
        return f'<span style="background:{look};padding:4px 12px;border-radius:4px">{room}</span>'

    arrow = ' <span style="color:#9ca3af">&rarr;</span> '
    return Picture(
        " > ".join(f"[{room}]" if room in lit else room for room in ROOMS),
        f'<div style="margin:8px 0">{arrow.join(map(door, ROOMS))}</div>',
    )


def slides(title: str, *frames: tuple[str, str, object]) -> Picture:
    """Pictures of which a slider shows one: (title, remark, content). Content is a stage object or text."""
    lines, parts = [f"{title}: {len(frames)} slides"], []
    for number, (name, remark, content) in enumerate(frames, 1):
        lines += [f"--- {number} {name}" + f": {remark}" * bool(remark), str(content)]
        plain = f'<pre style="font-family:monospace">{text(content)}</pre>'
        parts.append((name, remark, to_html(content) if isinstance(content, Shown) else plain))
    return Picture("\n".join(lines), box(title, "move the slider", steps(parts)))


STEPS = {0: ("the same", "#d1d5db"), 1: ("contiguous", "#86efac")}
"""What a step from one address to the next is called and coloured; any other is strided."""
STRIDED = ("strided", "#fdba74")


def Walk(body: LoopBody, most: int = 24) -> Picture:  # noqa: N802 (lessons call it like a class)
    """The addresses that a loop body touches, one iteration after the other, the innermost loop fastest."""
    loops = body.all_ranges
    places = itertools.islice(itertools.product(*map(range, map(int, loops.values()))), most)
    at = [dict(zip(loops, place, strict=True)) for place in places]
    lines, rows = [f"addresses of {body.name}"], []
    for access in (*body.loads, *body.stores):
        if access.index is None or access.indirect:
            continue
        addresses = [evaluate(access.index, values) for values in at]
        what, index = f"{access.op} {access.buffer}", index_text(access.index)
        lines.append(f"{what}[{index}]: {' '.join(map(str, addresses))}")
        rows.append([code(what), code(index), "".join(steps_along(addresses))])
    legend = " ".join(
        f'<span style="background:{colour};padding:0 6px">{name}</span>'
        for name, colour in (*STEPS.values(), STRIDED)
    )
    shown = table(("access", "index", "addresses, in order"), rows)
    about = f"the first {most} iterations at most"
    return Picture("\n".join(lines), box(f"walk of {body.name}", about, shown, legend))


def steps_along(addresses: list[int]) -> Iterator[str]:
    """Each address on the colour of the step that leads to it."""
    for before, now in itertools.pairwise([addresses[0] - 1, *addresses]):
        look = f"background:{STEPS.get(now - before, STRIDED)[1]}"
        yield f'<span style="{look};display:inline-block;width:26px;text-align:center">{now}</span>'


def boxes(
    title: str,
    words: Mapping[str, str],
    arrows: Collection[tuple[str, str]],
    marked: Collection[str] = (),
    faint: Collection[str] = (),
) -> Picture:
    """A drawing of named boxes, each with a word below its name, and of arrows (from, to); some boxes marked,
    others faint."""
    lines, nodes = [f"{title}: {len(words)} boxes"], []
    for name, word in words.items():
        to = ", ".join(end for start, end in arrows if start == name)
        bold = name in marked
        lines.append(f"{'*' if bold else ' '} {name} ({word})" + f" -> {to}" * bool(to))
        hue, border = (GOOD, GOOD) if bold else (NEUTRAL * (name in faint), EDGE)
        nodes.append(Node(name, name, word, hue, border, True, bold))
    drawn = picture(Diagram(title, tuple(nodes), tuple(Edge(*arrow) for arrow in arrows)))
    said = "\n".join(lines)
    return Picture(said, box(title, "", drawn or f"<pre>{text(said)}</pre>"))
