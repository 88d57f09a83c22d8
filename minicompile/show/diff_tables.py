"""Differences: two columns, row by row, with the cause of each change; the steps of a trace as slides."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import groupby

from minicompile.debug.diff import Diff, DiffRow, Steps, of_pass
from minicompile.debug.provenance import Piece
from minicompile.ops.graph import PassRecord
from minicompile.show.html import box, details, heading, shows, steps, table, text
from minicompile.show.listing import from_text
from minicompile.show.palette import BAD, GOOD, line_colour
from minicompile.show.syntax import highlight

FAINT, STRONG = "1f", "66"
"""How much of a colour lies over the theme's own ground: in a line, and in its words that changed."""


def marked(old: str, new: str) -> list[str]:
    """Both lines, the words in which they differ on a coloured ground."""
    words: list[list[str]] = [re.findall(r"\w+|\s+|[^\w\s]", side) for side in (old, new)]
    sides = ["", ""]
    for kind, *bounds in SequenceMatcher(None, words[0], words[1], autojunk=False).get_opcodes():
        for side, hue in enumerate((BAD, GOOD)):
            part = "".join(words[side][slice(*bounds[2 * side : 2 * side + 2])])
            shown = highlight(part, "python")[0]
            if kind != "equal" and part:
                shown = f'<span style="background-color:{hue}{STRONG}">{shown}</span>'
            sides[side] += shown
    return sides


def side_html(piece: Piece | None, content: str, hue: str = "", wide: int = 1) -> str:
    """One side of a row, striped with the colour of its source line."""
    if piece is None:
        return "<td></td>"
    stripe = line_colour(piece.lines[-1]) if piece.lines else "transparent"
    ground = f";background-color:{hue}{FAINT}" * bool(hue)
    told = "\n".join(filter(None, [piece.detail, from_text(piece.lines), *piece.why]))
    style = f"border-left:4px solid {stripe};white-space:pre-wrap{ground}"
    span = f' colspan="{wide}"' if wide > 1 else ""
    return f'<td{span} style="{style}" title="{text(told)}"><code>{content}</code></td>'


def row_html(row: DiffRow) -> str:
    """Before and after; what is the same once, as it is after."""
    texts = [piece.text if piece is not None else "" for piece in (row.before, row.after)]
    shown = [highlight(side, "python")[0] for side in texts]
    if row.status == "changed":
        shown = marked(*texts)
    shown[1] += f"  <small>{text(row.note)}</small>" * bool(row.note)
    if row.status == "same":
        return side_html(row.after, shown[1], wide=2)
    return side_html(row.before, shown[0], BAD) + side_html(row.after, shown[1], GOOD)


def rows_html(rows: Sequence[DiffRow]) -> str:
    """A table; rows with one cause share its chip."""
    body = ""
    for cause, group in groupby(rows, lambda row: row.cause):
        cells = list(map(row_html, group))
        chip = f'<small class="chip" style="color:#d97706">{text(cause)}</small>'
        cells[0] += f'<td rowspan="{len(cells)}" style="vertical-align:top">{chip}</td>' * bool(
            cause
        )
        body += "".join(f"<tr>{cell}</tr>" for cell in cells)
    style, side = "width:100%;table-layout:fixed", '<col style="width:39%">'
    return f'<table class="t diff" style="{style}"><colgroup>{side}{side}<col></colgroup>{body}</table>'


def diff_html(diff: Diff) -> str:
    """All rows; what is equal is folded."""
    out, shown = "", ""
    if diff.facts:
        marks = ("{}", "<b>{}</b>")
        cells = (
            [text(n), *(marks[a != b].format(text(v)) for v in (a, b))] for n, a, b in diff.facts
        )
        out = table(("", "before", "after"), cells)
    for part, rows, headline in diff.runs:
        out += heading(part) * (part != shown)
        shown = part
        content = rows_html(rows)
        out += details(headline, "", content) if headline else content
    return out


shows(Diff)(lambda diff: box(diff.title, diff.summary, diff_html(diff)))


@shows(Steps)
def steps_view(made: Steps) -> str:
    """A table of all steps, and a slide for each that changed something."""
    rows = ([str(i), *map(text, row)] for i, row in enumerate(made.overview))
    frames = [("overview", made.title, table(("", "step", "holds", "changes"), rows, numbers=(0,)))]
    for i, (diff, (name, holds, changes)) in enumerate(zip(made.steps, made.overview)):
        if diff.changes:
            content = diff_html(replace(diff, facts=()))
            frames.append((f"{i} {name}", f"{holds} · {changes}", content))
    idle = len(made.steps) - len(frames) + 1
    return box(made.title, f"{idle} of them changed nothing: they have no slide", steps(frames))


def pass_parts(record: PassRecord) -> tuple[str, str, str]:
    """Title, summary and difference of a pass."""
    changes = f"{record.changed} changes" if record.changed else "no change"
    return f"pass {record.name}", changes, diff_html(of_pass(record))


shows(PassRecord)(lambda record: box(*pass_parts(record)))
