"""Pictures that only lessons need: the corridor as a strip, and slides moved by a slider."""

from __future__ import annotations

from dataclasses import dataclass

from minicompile.ops.display import Shown, to_html
from minicompile.show.html import box, shows, steps, text

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
            raise ValueError(f"no room {room!r}; there are {', '.join(ROOMS)}")
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
