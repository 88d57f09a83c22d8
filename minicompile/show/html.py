"""The small HTML vocabulary of all views: lines with a stripe, tables, foldable parts.

Everything that comes from outside passes `text()`. A view is a function from an object to a fragment;
`@shows(Type)` registers it, wrapped with the style sheet, as the renderer of that type.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from minicompile.ops.display import renderer, to_html
from minicompile.ops.origin import NO_ORIGINS, Origins, SourceLine, source_lines
from minicompile.show.palette import line_colour
from minicompile.show.style import CSS, SCRIPT
from minicompile.show.syntax import highlight

T = TypeVar("T")
View = Callable[[T], str]

STYLE = f"<style>{CSS}</style>"


def text(value: object) -> str:
    """Any value as HTML text, safe in attributes too."""
    return html.escape(str(value), quote=True)


def output(fragment: str, script: bool = False) -> str:
    """A fragment with what it needs to stand alone."""
    return STYLE + fragment + (f"<script>{SCRIPT}</script>" if script else "")


def shows(*types: type | str, script: bool = False) -> Callable[[View[T]], View[T]]:
    """Register a view of these types. The function itself stays a plain fragment maker.

    A type whose module may not be importable here (it needs Triton, say) is given by its full name.
    """

    def add(view: View[T]) -> View[T]:
        renderer(*types)(lambda obj: output(view(obj), script))
        return view

    return add


def inside(obj: Any) -> str:
    """An object's picture as part of a larger one: the style sheet is there already."""
    return to_html(obj).removeprefix(STYLE)


def box(title: object, about: object, *parts: str, kind: str = "") -> str:
    """A view's outer frame: a headline, a summary in small letters, and its parts."""
    body = "".join(parts)
    return (
        f'<div class="mc {kind}"><div class="head"><b>{text(title)}</b> <small>{text(about)}</small></div>'
        f'<div class="body">{body}</div></div>'
    )


def heading(title: object) -> str:
    return f"<h4>{text(title)}</h4>"


def columns(*parts: str) -> str:
    """Side by side where there is room, below each other where not."""
    return '<div class="cols">' + "".join(f"<div>{part}</div>" for part in parts if part) + "</div>"


def details(title: object, about: object, content: str, opened: bool = False) -> str:
    """A part that folds, without any script."""
    state = " open" if opened else ""
    return (
        f"<details{state}><summary>{text(title)} <small>{text(about)}</small></summary>"
        f'<div class="in">{content}</div></details>'
    )


def table(
    head: Sequence[object], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()
) -> str:
    """Rows of ready-made HTML cells; the columns in `numbers` are aligned right."""
    top = "".join(f"<th>{text(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="n" style="text-align:right">{cell}</td>'
            if i in numbers
            else f"<td>{cell}</td>"
            for i, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f'<table class="t"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'


def facts(rows: Iterable[tuple[object, object]]) -> str:
    """Two columns: a name and its value, both plain."""
    body = "".join(
        f'<tr><td style="color:#7a8594">{text(name)}</td><td>{text(value)}</td></tr>'
        for name, value in rows
    )
    return f'<table class="t"><tbody>{body}</tbody></table>' if body else ""


def code(value: object, colour: str | None = None, wrap: bool = False) -> str:
    """A short piece of code; with a colour, marked by a bar on its left."""
    bar = f' style="border-left:4px solid {colour};padding-left:6px"' if colour else ""
    return f"<code{' class=wrap' if wrap else ''}{bar}>{text(value)}</code>"


def chip(value: object, colour: str) -> str:
    """A name with its colour around it."""
    return f'<span class="chip" style="border:1px solid {colour}">{text(value)}</span>'


def bar(value: int, most: int, colour: str, width: int = 32) -> str:
    """A bar of block characters: it survives where style sheets don't."""
    full = round(width * value / most) if most else 0
    return f'<span style="color:{colour};letter-spacing:0px;font-family:monospace">{"█" * full or "▏"}</span>'


def from_text(lines: Iterable[SourceLine]) -> str:
    """Where something comes from, in one line of text."""
    found = [f"{line.place} in {line.function}: {line.text}".removesuffix(": ") for line in lines]
    return "from " + "; ".join(found) if found else ""


LONGEST_CODE = 56
"""Source lines in table cells are cut here; their title has all of it."""


def source_cell(origins: Origins, at: SourceLine | None = None) -> str:
    """The user's lines as a table cell, each with its colour."""
    lines = source_lines(origins) or ((at,) if at is not None else ())
    return "<br>".join(
        f'<span title="{text(line)}" style="border-left:4px solid {line_colour(line)};padding-left:6px;'
        f'white-space:nowrap">{text(short_place(line))} <code>{text(cut(line.text))}</code></span>'
        for line in lines
    )


def cut(value: str, longest: int = LONGEST_CODE) -> str:
    return value if len(value) <= longest else value[: longest - 1] + "…"


def short_place(line: SourceLine) -> str:
    """`model.py:12`, without folders."""
    return line.place.rsplit("/", 1)[-1]


def stripe(
    content: str,
    lines: Sequence[SourceLine] = (),
    number: object = None,
    title: str = "",
    data: str = "",
    tint: str = "",
) -> str:
    """One line of a listing. `content` is HTML; the stripe's colour is that of its last source line."""
    colour = tint or (line_colour(lines[-1]) if lines else "transparent")
    gutter = f"<i>{text(number):>4} </i>" if number is not None else ""
    told = title or from_text(lines)
    shown = f' title="{text(told)}"' if told else ""
    return f'<span class="ln" style="border-left:4px solid {colour}"{shown}{data}>{gutter}{content}\n</span>'


def listing(lines: Iterable[str], tall: bool = True) -> str:
    """Stripes, one below the other."""
    return f'<pre class="code{" tall" if tall else ""}">{"".join(lines)}</pre>'


def code_listing(
    lines: Sequence[tuple[str, Origins]], language: str = "python", tall: bool = True
) -> str:
    """Numbered, syntax-coloured code with the source line of each line as stripe and title."""
    coloured = highlight("\n".join(line for line, _ in lines), language)
    return listing(
        (
            stripe(content, source_lines(origins), number)
            for number, (content, (_, origins)) in enumerate(zip(coloured, lines, strict=True), 1)
        ),
        tall,
    )


def plain_code(source: str, language: str = "python") -> str:
    """Syntax-coloured code that has no origins."""
    return code_listing([(line, NO_ORIGINS) for line in source.rstrip("\n").split("\n")], language)
