"""A trace as one linked view: the corridor as a strip, the stages side by side, the reason at the foot.

The view is written twice. `data` is all of it, as JSON in which nothing is said twice: `view.js` draws
from it the lines that are in sight. Before it stands a static form of the panes that are open, short, with
colours and titles inline, for notebooks that aren't trusted and run no scripts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minicompile.debug.overview import saving
from minicompile.debug.provenance import Piece
from minicompile.ops.display import Several, bytes_text, count_text, method, renderer, to_html
from minicompile.ops.origin import NO_ORIGINS
from minicompile.pipeline_result import CompiledStages, Trace
from minicompile.show.explorer import Explorer, Pane, Section, is_weak
from minicompile.show.html import (
    STYLE,
    box,
    code,
    details,
    inside,
    page,
    several_of,
    shows,
    shows_many,
    table,
    text,
)
from minicompile.show.listing import from_text, headline, listing, stripe
from minicompile.show.palette import GOOD, NEUTRAL, colour, line_colour
from minicompile.show.schedule_pictures import frame
from minicompile.show.syntax import script_patterns

SEPARATOR = ' <span class="sep">›</span> '

STATIC_LINES = 40
"""Lines of a pane in the static form."""


class Numbers(dict[Any, int]):
    """A number for each different thing, in the order in which they were first asked for."""

    def __missing__(self, thing: Any) -> int:
        self[thing] = len(self)
        return self[thing]


def data(explorer: Explorer) -> dict[str, Any]:
    """The view as plain data.

    A section's `rows` are columns: numbers of a line's text, origins, detail, reasons and, where it has one
    of its own, source line. Number 0 is "none" in each; a column without any other number is left out.
    """
    strings, sets, whys, places = (Numbers({none: 0}) for none in ("", NO_ORIGINS, (), None))

    def section_data(section: Section) -> dict[str, Any]:
        columns: dict[str, list[int]] = {
            "text": [strings[piece.text] for piece in section.pieces],
            "set": [sets[piece.origins] for piece in section.pieces],
            "detail": [strings[piece.detail] for piece in section.pieces],
            "why": [whys[piece.why] for piece in section.pieces],
            "place": [places[piece.line] for piece in section.pieces],
        }
        return {
            **{name: value for name, value in vars(section).items() if name != "pieces"},
            "count": len(section.pieces),
            "weak": [i for i, piece in enumerate(section.pieces) if is_weak(piece)],
            "rows": {name: column for name, column in columns.items() if any(column)},
        }

    panes = [{**vars(p), "sections": list(map(section_data, p.sections))} for p in explorer.panes]
    operations = sorted({origin for origins in sets for origin in origins})
    numbers = {origin: i for i, origin in enumerate(operations)}
    lines = sorted({*(o.line for o in operations), *places} - {None})
    line_numbers = {line: i for i, line in enumerate(lines, 1)}
    languages = {section.language for pane in explorer.panes for section in pane.sections}
    return {
        "open": list(explorer.open),
        "panes": panes,
        "operations": [line_numbers.get(o.line, 0) for o in operations],
        "sets": [sorted(numbers[o] for o in origins) for origins in sets],
        "lines": [["", ""], *([str(line), line_colour(line)] for line in lines)],
        "places": [line_numbers.get(line, 0) for line in places],
        "whys": [[strings[reason] for reason in why] for why in whys],
        "strings": list(strings),
        "syntax": {k: v for k, v in script_patterns().items() if k in languages},
    }


def static_pane(pane: Pane) -> str:
    """The first lines of a pane, readable without scripts; the last one says what is left out."""
    content, left = "", STATIC_LINES
    for section in pane.sections:
        if left <= 0:
            break
        lines = []
        for number, piece in enumerate(section.pieces[:left], section.first or 0):
            told = "\n".join([piece.detail, from_text(piece.lines), *piece.why]).rstrip()
            shown = None if section.first is None else number
            lines.append(stripe(text(piece.text), piece.lines, shown, told))
        left -= len(lines)
        body = listing(lines, tall=False) if lines else ""
        if section.framed:
            content += frame(section.title, body)
        else:
            content += sub(section.title) * bool(section.title) + body
    if pane.lines > STATIC_LINES:
        more = f"and {count_text(pane.lines - STATIC_LINES, 'more line')}: where scripts run (a trusted "
        content += sub(more + "notebook, trace.save(folder)) all are here")
    return (
        f'<div class="pane" data-p="{pane.key}"><h4>{text(pane.title)} '
        f"<span>{text(pane.about)}</span></h4>{content}</div>"
    )


def sub(title: object) -> str:
    return f'<div class="sub">{text(title)}</div>'


def strip(explorer: Explorer) -> str:
    """The corridor: one button a room, which opens and closes its pane; ↩ marks the backward's count."""
    counts: dict[str, list[str]] = {}
    titles: dict[str, str] = {}
    for room in explorer.trace.rooms():
        graph, _, key = room.stage.rpartition(".")
        count = f"↩ {room.count}" if graph.startswith("backward") else room.count
        titles.setdefault(key, room.title)
        counts.setdefault(key, []).append(text(count))
    for pane in explorer.panes:
        titles.setdefault(pane.key, pane.title)
        counts.setdefault(pane.key, [count_text(pane.lines, "line")])
    buttons = (
        f'<span class="room{" on" if key in explorer.open else ""}" data-p="{key}">'
        f"<b>{text(title)}</b> <small>{'<br>'.join(counts[key])}</small></span>"
        for key, title in titles.items()
    )
    return f'<div class="corridor">{SEPARATOR.join(buttons)}</div>'


def foot(trace: Trace) -> str:
    """What is shown while nothing is pointed at: fusions, memory, what is saved."""
    lines = []
    for name, compiled in trace.graphs.items():
        schedule = compiled.schedule
        saved, peak = map(bytes_text, (schedule.saved_bytes, schedule.memory.peak_bytes))
        lines.append(
            f"{name}: {len(schedule.fused)} of {len(schedule.decisions)} fusions taken, saving "
            f"{saved} of memory traffic; peak {peak}"
        )
    if trace.aot is not None and trace.aot.partition is not None:
        lines.append(saving(trace.aot.partition))
    told = "".join(f"<small>{text(line)}</small>" for line in lines)
    guards, calls = len(trace.capture.guards), len(trace.capture.inlined)
    about = f"{count_text(guards, 'guard')}, {count_text(calls, 'call')} inlined"
    return (
        f'<div class="foot"><div class="what"><b>{text(trace.name)}</b><small>{about}</small></div>'
        f'<div class="why" style="border-left:3px solid {GOOD if lines else NEUTRAL};padding-left:10px">'
        f"{told}</div></div>"
    )


@shows(Explorer, script=True)
def explorer_view(explorer: Explorer) -> str:
    trace = explorer.trace
    shown = "".join(static_pane(explorer.pane(key)) for key in explorer.open)
    # In a script only "</script" and "<!--" could do harm, and both begin with the same character.
    model = json.dumps(data(explorer), separators=(",", ":"))
    model = model.replace("<", "\\u003c")
    return (
        f'<div class="mc trace" role="group" aria-label="{text(trace.name)} through the compiler">'
        f'{strip(explorer)}<div class="panes">{shown}</div>{foot(trace)}'
        f'<script type="application/json">{model}</script></div>'
    )


shows(Trace, script=True)(lambda trace: explorer_view(trace.explore()))


@shows(CompiledStages)
def compiled_view(compiled: CompiledStages) -> str:
    stages = (details(name, "", inside(stage)) for name, stage in compiled.stages.items())
    return box(compiled.loops.name, "lowering, scheduling and code generation", *stages)


def piece_table(pieces: Sequence[Piece]) -> str:
    rows = (
        [
            text(piece.stage),
            code(piece.text.strip(), colour(piece.origins) or NEUTRAL),
            text(piece.detail),
            "<br>".join(map(text, piece.why)),
        ]
        for piece in pieces
    )
    return table(("stage", "what it became", "type", "why"), rows)


shows_many(piece_table, "object", Piece)


OPEN_AT_MOST = 3
"""Longer lists of objects fold, one line each."""


@shows(Several)
def several_view(items: Several[Any]) -> str:
    """A list of stage objects: in the one view that their type has for several, else one below the other."""
    lists = (map(several_of, type(item).__mro__) for item in items)
    together = {next(filter(None, map(renderer.get, classes)), None) for classes in lists}
    view = together.pop() if len(together) == 1 else None
    if view is not None:
        return view(items).removeprefix(STYLE)
    folds = len(items) > OPEN_AT_MOST
    shown = (details(*headline(i), inside(i)) if folds else inside(i) for i in items)
    return "".join(shown) or "<p>none</p>"


@method(Trace, "save")
def save(trace: Trace, folder: str | Path) -> Path:
    """Write `index.html` (the explorer, and links to the rest; no network needed), and for each stage a
    picture as a page of its own and a text file.

    Returns the path of the first page.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    texts, links = {}, ""
    for number, (name, stage) in enumerate(trace.stages.items(), 1):
        file = f"{number:02}_{name.replace('.', '_')}"
        texts[f"{file}.html"] = page(f"{name} of {trace.name}", to_html(stage))
        texts[f"{file}.txt"] = str(stage)
        links += f'<li>{text(name)}: <a href="{file}.html">picture</a>, <a href="{file}.txt">text</a></li>\n'
    below = f"<h2>Stages</h2>\n<ul>\n{links}</ul>\n"
    texts["index.html"] = page(f"{trace.name} through minicompile", to_html(trace) + below)
    for name, content in texts.items():
        (target / name).write_text(content.rstrip("\n") + "\n", encoding="utf-8")
    return target / "index.html"
