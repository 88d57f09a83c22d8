"""Lines of code as every view shows them: coloured, with the stripe and the title of their source line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minicompile.codegen.plan import CodeLine
from minicompile.ops.origin import Origins, SourceLine, source_lines
from minicompile.show.html import cut, text
from minicompile.show.palette import line_colour
from minicompile.show.syntax import highlight


def from_text(lines: Iterable[SourceLine]) -> str:
    """Where something comes from, in one line of text."""
    told = "; ".join(map(str, lines))
    return f"from {told}" if told else ""


def headline(obj: object) -> tuple[str, str]:
    """Title and summary: the first line of what a terminal prints."""
    title, _, about = str(obj).split("\n")[0].partition(": ")
    return title, about


def source_cell(made: Origins | SourceLine | None) -> str:
    """The user's lines as a table cell, each with its colour; places without their folders."""
    lines = source_lines(made) if isinstance(made, frozenset) else filter(None, [made])
    return "<br>".join(
        f'<span title="{text(line)}" style="border-left:4px solid {line_colour(line)};padding-left:6px;'
        f'white-space:nowrap">{text(line.place.rsplit("/", 1)[-1])} '
        f"<code>{text(cut(line.text))}</code></span>"
        for line in lines
    )


def stripe(
    content: str,
    lines: Sequence[SourceLine] = (),
    number: object = None,
    title: str = "",
    tint: str = "",
) -> str:
    """One line of a listing. `content` is HTML; the stripe's colour is that of its last source line."""
    colour = tint or (line_colour(lines[-1]) if lines else "transparent")
    gutter = f"<i>{text(number):>4} </i>" if number is not None else ""
    told = title or from_text(lines)
    shown = f' title="{text(told)}"' if told else ""
    return (
        f'<span class="ln" style="border-left:4px solid {colour}"{shown}>{gutter}{content}\n</span>'
    )


def listing(lines: Iterable[str], tall: bool = True) -> str:
    """Stripes, one below the other."""
    return f'<pre class="code{" tall" if tall else ""}">{"".join(lines)}</pre>'


def code_listing(
    lines: Iterable[CodeLine], language: str = "python", first: int | None = None
) -> str:
    """Syntax-coloured lines, numbered from `first`."""
    return listing(
        stripe(
            highlight(line.text, language)[0],
            source_lines(line.origins),
            None if first is None else number,
        )
        for number, line in enumerate(lines, first or 0)
    )


def plain_code(source: str, language: str = "python", numbered: bool = True) -> str:
    """Code that has no origins."""
    coloured = highlight(source.rstrip("\n"), language)
    return listing(stripe(c, number=i if numbered else None) for i, c in enumerate(coloured, 1))
