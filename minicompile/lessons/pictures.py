"""Pictures that only lessons need: the corridor as a strip, slides on a slider, a walk through memory."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from minicompile.errors import OptionError
from minicompile.ops.display import Shown, to_html
from minicompile.ops.plugins import Plugin, available
from minicompile.scheduling.body import LoopBody
from minicompile.shapes.expr import index_text
from minicompile.shapes.symnode import evaluate
from minicompile.show.graphviz import EDGE, Diagram, Edge, Node, picture
from minicompile.show.html import box, code, shows, steps, table, text
from minicompile.show.palette import GOOD, NEUTRAL

ROOMS = ("dynamo", "aot", "lowering", "scheduling", "codegen", "runtime")


@dataclass(frozen=True)
class Corridor(Shown):
    """The rooms from the Python frame to the running kernel; some of them lit."""

    lit: tuple[str, ...]

    def __str__(self) -> str:
        return " > ".join(f"[{room}]" if room in self.lit else room for room in ROOMS)


def corridor(*lit: str) -> Corridor:
    """The strip with these rooms lit. Raises ValueError for a room that there is not."""
    for room in lit:
        if room not in ROOMS:
            raise OptionError(f"no room {room!r}; there are {', '.join(ROOMS)}")
    return Corridor(lit)


@shows(Corridor)
def corridor_strip(strip: Corridor) -> str:
    def door(room: str) -> str:
        lit = room in strip.lit
        look = "background:#2563eb;color:white" if lit else "background:#e5e7eb;color:#6b7280"
        return f'<span style="{look};padding:4px 12px;border-radius:4px">{room}</span>'

    arrow = ' <span style="color:#9ca3af">&rarr;</span> '
    return f'<div style="margin:8px 0">{arrow.join(map(door, ROOMS))}</div>'


@dataclass(frozen=True)
class Slides(Shown):
    """Pictures of which a slider shows one: (title, remark, content). Content is a stage object or text."""

    title: str
    frames: tuple[tuple[str, str, object], ...]

    def __str__(self) -> str:
        lines = [f"{self.title}: {len(self.frames)} slides"]
        for number, (title, remark, content) in enumerate(self.frames, 1):
            lines += [f"--- {number} {title}" + (f": {remark}" if remark else ""), str(content)]
        return "\n".join(lines)


def slides(title: str, *frames: tuple[str, str, object]) -> Slides:
    """A slide show of stage objects, or of plain text: each frame is (title, remark, content)."""
    return Slides(title, frames)


@shows(Slides)
def slide_show(show: Slides) -> str:
    def content(obj: object) -> str:
        return (
            to_html(obj)
            if isinstance(obj, Shown)
            else f'<pre style="font-family:monospace">{text(obj)}</pre>'
        )

    frames = [(title, remark, content(obj)) for title, remark, obj in show.frames]
    return box(show.title, "move the slider", steps(frames))


STEPS = {0: ("the same", "#d1d5db"), 1: ("contiguous", "#86efac")}
"""What a step from one address to the next is called and coloured; any other is strided."""
STRIDED = ("strided", "#fdba74")


@dataclass(frozen=True)
class Walk(Shown):
    """The addresses that a loop body touches, one iteration after the other, the innermost loop fastest."""

    body: LoopBody
    most: int = 24

    def rows(self) -> list[tuple[str, str, list[int]]]:
        """What is done to which buffer, the index, and its first addresses."""
        loops = self.body.all_ranges
        places = itertools.islice(
            itertools.product(*map(range, map(int, loops.values()))), self.most
        )
        at = [dict(zip(loops, place, strict=True)) for place in places]
        accesses = [*self.body.loads, *self.body.stores]
        return [
            (
                f"{v.op} {v.buffer}",
                index_text(v.index),
                [evaluate(v.index, values) for values in at],
            )
            for v in accesses
            if v.index is not None and not v.indirect
        ]

    def __str__(self) -> str:
        lines = [f"{what}[{index}]: {' '.join(map(str, at))}" for what, index, at in self.rows()]
        return "\n".join([f"addresses of {self.body.name}", *lines])


@shows(Walk)
def walk_strip(walk: Walk) -> str:
    def cells(addresses: list[int]) -> str:
        parts = []
        for before, now in itertools.pairwise([addresses[0] - 1, *addresses]):
            colour = STEPS.get(now - before, STRIDED)[1]
            look = f"background:{colour};display:inline-block;width:26px;text-align:center"
            parts.append(f'<span style="{look}">{now}</span>')
        return "".join(parts)

    legend = " ".join(
        f'<span style="background:{colour};padding:0 6px">{name}</span>'
        for name, colour in (*STEPS.values(), STRIDED)
    )
    rows = ([code(what), code(index), cells(at)] for what, index, at in walk.rows())
    about = f"the first {walk.most} iterations at most"
    head = ("access", "index", "addresses, in order")
    return box(f"walk of {walk.body.name}", about, table(head, rows), legend)


@dataclass(frozen=True)
class Boxes(Shown):
    """Named boxes, each with a word below its name, and arrows between them; some marked, others faint."""

    title: str
    words: Mapping[str, str]
    arrows: tuple[tuple[str, str], ...]
    marked: frozenset[str]
    faint: frozenset[str]

    def __str__(self) -> str:
        lines = [f"{self.title}: {len(self.words)} boxes"]
        for name, word in self.words.items():
            to = [end for start, end in self.arrows if start == name]
            sign = "*" if name in self.marked else " "
            lines.append(f"{sign} {name} ({word})" + (f" -> {', '.join(to)}" if to else ""))
        return "\n".join(lines)


def boxes(
    title: str,
    words: Mapping[str, str],
    arrows: Collection[tuple[str, str]],
    marked: Collection[str] = (),
    faint: Collection[str] = (),
) -> Boxes:
    """A drawing of what `words` names; arrows are (from, to)."""
    return Boxes(title, dict(words), tuple(arrows), frozenset(marked), frozenset(faint))


@shows(Boxes)
def boxes_drawn(drawing: Boxes) -> str:
    nodes = [
        Node(
            name,
            name,
            word,
            hue=GOOD if name in drawing.marked else NEUTRAL * (name in drawing.faint),
            border=GOOD if name in drawing.marked else EDGE,
            rounded=True,
            bold=name in drawing.marked,
        )
        for name, word in drawing.words.items()
    ]
    edges = [Edge(start, end) for start, end in drawing.arrows]
    drawn = picture(Diagram(drawing.title, tuple(nodes), tuple(edges)))
    return box(drawing.title, "", drawn or f"<pre>{text(drawing)}</pre>")


@dataclass(frozen=True)
class PriceList(Shown):
    """The list that `minicompile plugins` prints, as a table."""

    plugins: tuple[Plugin, ...]

    def __str__(self) -> str:
        from minicompile.bench.prices import markdown

        return markdown(self.plugins)


def price_list() -> PriceList:
    """What each plug-in costs in tokens, and what it buys on its own cases where they were measured."""
    return PriceList(tuple(available().values()))


@shows(PriceList)
def price_table(prices: PriceList) -> str:
    from minicompile.bench.prices import MEASURED, figures, head

    rows = []
    for plugin in prices.plugins:
        name, default, tokens, purpose = head(plugin)
        measured = (
            f"{case} [{device}]: " + ", ".join(f"{w} {c}" for w, c in zip(MEASURED, cells) if c)
            for case, device, cells in figures(plugin)
        )
        shown = "<br>".join(map(text, measured)) or text("not measured")
        rows.append([code(name), default, tokens, text(purpose), shown])
    columns = ("plug-in", "default", "tokens", "what it does", "measured, off → on")
    return box("plug-ins", "", table(columns, rows, numbers=(2,)))
