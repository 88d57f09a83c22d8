"""The small HTML vocabulary of all views: boxes, tables, foldable parts; lines of code are in listing.py.

Everything that comes from outside passes `text()`. A view is a function from an object to a fragment;
`@shows(Type)` registers it, wrapped with the style sheet, as the renderer of that type. Nothing is fetched
by the reader's browser. Notebooks that aren't trusted lose style sheet and script: what must survive is in
inline styles (in the forms that JupyterLab's sanitizer lets through) and titles.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from minicompile.ops.display import bytes_text, count_text, full_name, renderer, to_html

T = TypeVar("T")
View = Callable[[T], str]


def _squeezed(file: str) -> str:
    """The file without indentation, blank lines and comment lines: it goes into every output."""
    source = Path(__file__).with_name(file).read_text(encoding="utf-8")
    source = re.sub(r"/\*.*?\*/", "", source, flags=re.DOTALL)
    lines = (line.strip() for line in source.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))


STYLE = f"<style>{_squeezed('view.css')}</style>"
SCRIPT = f"<script>{_squeezed('view.js')}</script>"


def text(value: object) -> str:
    """Any value as HTML text, safe in attributes too."""
    return html.escape(str(value))


def shows(*types: type[T] | str, script: bool = False) -> Callable[[View[T]], View[T]]:
    """Register a view of these types. The function itself stays a plain fragment maker.

    A type whose module may not be importable here (it needs Triton, say) is given by its full name.
    """

    def add(view: View[T]) -> View[T]:
        renderer(*types)(lambda obj: STYLE + view(obj) + (SCRIPT if script else ""))
        return view

    return add


def several_of(cls: type[Any] | str) -> str:
    """The key under which the view of several objects of a type is registered."""
    return f"several {cls if isinstance(cls, str) else full_name(cls)}"


def shows_many(view: Callable[[Any], str], one: str, *types: type[Any] | str) -> None:
    """Register a view of several objects of these types at once; `one` is what a single one is called."""
    shows(*map(several_of, types))(lambda items: box(count_text(len(items), one), "", view(items)))
    shows(*types)(lambda item: box(one, "", view([item])))


def inside(obj: Any) -> str:
    """An object's picture as part of a larger one: the style sheet is there already."""
    return to_html(obj).removeprefix(STYLE)


def box(title: object, about: object, *parts: str) -> str:
    """A view's outer frame: a headline, a summary in small letters, and its parts."""
    return (
        f'<div class="mc "><div class="head"><b>{text(title)}</b> <small>{text(about)}</small></div>'
        f'<div class="body">{"".join(parts)}</div></div>'
    )


def heading(title: object) -> str:
    return f"<h4>{text(title)}</h4>"


def columns(*parts: str) -> str:
    """Side by side where there is room, below each other where not."""
    return '<div class="cols">' + "".join(f"<div>{part}</div>" for part in parts if part) + "</div>"


def beside(*sides: tuple[object, str | Iterable[Any]]) -> str:
    """Stage objects (or what shows them) side by side, each side below its title."""
    return columns(
        *(
            heading(title) + (side if isinstance(side, str) else "".join(map(inside, side)))
            for title, side in sides
        )
    )


def details(
    title: object, about: object, content: str, opened: bool = False, named: bool = False
) -> str:
    """A part that folds, without any script. `named`: its title is a name of the user's program."""
    state, shown = " open" if opened else "", code(title) if named else text(title)
    return (
        f"<details{state}><summary>{shown} <small>{text(about)}</small></summary>"
        f'<div class="in">{content}</div></details>'
    )


def steps(frames: Iterable[tuple[object, object, str]]) -> str:
    """Pictures of which one is seen, chosen by a slider: (title, remark, content) each. Where scripts don't
    run they fold instead."""
    parts = (details(*frame, opened=i == 0) for i, frame in enumerate(frames))
    return f'<div class="steps">{"".join(parts)}</div><script>{_squeezed("steps.js")}</script>'


def table(
    head: Sequence[object], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()
) -> str:
    """Rows of ready-made HTML cells; the columns in `numbers` are aligned right."""
    right = dict.fromkeys(numbers, ' class="n" style="text-align:right"')
    top = "".join(f"<th>{text(cell)}</th>" for cell in head)
    body = ""
    for row in rows:
        cells = (f"<td{right.get(i, '')}>{cell}</td>" for i, cell in enumerate(row))
        body += f"<tr>{''.join(cells)}</tr>"
    return f'<table class="t"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'


def size(count: int | None) -> str:
    """Bytes, where they are known."""
    return bytes_text(count) if count is not None else "symbolic"


def facts(rows: Iterable[tuple[object, object]]) -> str:
    """Two columns: a name and its value, both plain."""
    cells = [[f'<span style="color:#7a8594">{text(n)}</span>', text(value)] for n, value in rows]
    return table((), cells) if cells else ""


def code(value: object, colour: str | None = None, wrap: bool = False) -> str:
    """A short piece of code; with a colour, marked by a bar on its left."""
    bar = f' style="border-left:4px solid {colour};padding-left:6px"' if colour else ""
    return f"<code{' class=wrap' if wrap else ''}{bar}>{text(value)}</code>"


def bar(value: int, most: int, colour: str, width: int = 32) -> str:
    """A bar of block characters: it survives where style sheets don't."""
    full = round(width * value / most) if most else 0
    return f'<span style="color:{colour};letter-spacing:0px;font-family:monospace">{"█" * full or "▏"}</span>'


def image(svg: str, alt: str) -> str:
    """A drawing that stands alone: nothing in it reaches the page."""
    data = base64.b64encode(svg.encode()).decode()
    return (
        f'<img class="pic" style="max-width:100%" alt="{text(alt)}" '
        f'src="data:image/svg+xml;base64,{data}">'
    )


def drawing(title: object, width: int, height: int, content: str, letters: int = 10) -> str:
    """A picture in the page's own colours, drawn in pixels, as an inline SVG."""
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" style="max-width:100%" role="img" '
        f'font-size="{letters}" fill="currentColor"><title>{text(title)}</title>{content}</svg>'
    )


def few(names: Iterable[str], most: int) -> str:
    """The first names, and whether there are more."""
    found = list(dict.fromkeys(names))
    return ", ".join(found[:most]) + (", …" if len(found) > most else "")


def cut(value: str, longest: int = 56) -> str:
    """At most `longest` characters."""
    return value if len(value) <= longest else value[: longest - 1] + "…"


def page(title: str, content: str) -> str:
    """A whole HTML document."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        "<style>:root{color-scheme:light dark}body{margin:16px;font-family:system-ui,sans-serif;"
        "--tall:max(320px,calc(100vh - 290px))}h2{font-size:15px}ul{font-size:13px}li{margin:3px 0}</style>"
        f"</head><body>\n{content}</body></html>\n"
    )
