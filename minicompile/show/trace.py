"""A trace as one linked view: the corridor as a strip, the stages side by side, the reason at the foot.

Each pane lists the `Piece`s of one stage. A piece knows the operations of the captured graph it came from
(`data-o`), and its title holds what it is, where it is from and why, so that the view reads without scripts;
with them, pointing at a line lights all that shares an operation with it, in every pane.
"""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import fx

from minicompile import provenance
from minicompile.codegen.plan import CodeLine
from minicompile.ops.display import Several, bytes_text, count_text, renderer
from minicompile.ops.origin import Origin, SourceLine, short_file
from minicompile.pipeline_result import CompiledStages, Trace, saving
from minicompile.provenance import Piece
from minicompile.show.html import (
    STYLE,
    box,
    code,
    details,
    few,
    inside,
    several_of,
    shows,
    shows_many,
    table,
    text,
)
from minicompile.show.listing import code_lines, headline, listing, stripe
from minicompile.show.palette import GOOD, NEUTRAL, colour
from minicompile.show.schedule import group, operations
from minicompile.show.syntax import highlight

OPEN_AT_FIRST = ("source", "aot", "loops", "kernels")
"""The panes a trace opens with; the strip shows and hides them."""

SEPARATOR = ' <span class="sep">›</span> '

DEF_SEARCH = 60
"""How far above a function's first used line its `def` is looked for."""


def pane(key: str, title: str, about: str, width: float, content: str) -> str:
    """A column; `key` says which room of the corridor opens it."""
    return (
        f'<div class="pane" data-p="{key}" data-w="{width}"><h4>{text(title)} '
        f"<span>{text(about)}</span></h4>{content}</div>"
    )


class Links:
    """The pieces of a trace by stage, and numbers for the captured operations: what joins the panes."""

    def __init__(self, trace: Trace) -> None:
        self.by_stage: dict[str, list[Piece]] = {}
        pieces = list(trace.pieces())
        for piece in pieces:
            self.by_stage.setdefault(piece.stage, []).append(piece)
        # Functions come in the order in which the captured graph first needed them.
        pieces = [*self.stage("capture"), *pieces]
        origins = [origin for piece in pieces for origin in sorted(piece.origins)]
        self.numbers = {origin: i for i, origin in enumerate(sorted(set(origins)))}
        self.functions: dict[tuple[str, str], dict[int, set[Origin]]] = {}
        """What each used line of source did, calls included: by file and function, then by line."""
        for origin in dict.fromkeys(origins):
            for line in origin.stack:
                used = self.functions.setdefault((line.file, line.function), {})
                used.setdefault(line.line, set()).add(origin)

    def stage(self, name: str) -> list[Piece]:
        return self.by_stage.get(name, [])

    def operations(self, origins: Iterable[Origin]) -> str:
        """The operations' numbers, for the script."""
        ids = " ".join(str(i) for i in sorted(self.numbers[o] for o in origins))
        return f' data-o="{ids}"' if ids else ""

    def data(self, piece: Piece) -> str:
        """What the script reads: operations, graph, a name if not the text, and whether it is an input."""
        graphs = {"forward", "backward"}.intersection(piece.stage.split("."))
        data = self.operations(piece.origins) + "".join(f' data-g="{graph}"' for graph in graphs)
        if not isinstance(piece.subject, CodeLine):
            data += f' data-t="{text(piece.name)}"'
        if isinstance(piece.subject, fx.Node) and piece.subject.op == "placeholder":
            data += ' data-i="1"'
        return data

    def listing(
        self, pieces: Iterable[Piece], first: int | None = None, language: str = "python"
    ) -> str:
        return listing(code_lines(pieces, language, first, self.data), tall=False)


def sub(title: object) -> str:
    return f'<div class="sub">{text(title)}</div>'


def function_start(file: str, function: str, first: int) -> int:
    """The line of the `def` above a used line, or that line itself."""
    name = function.rsplit(".", 1)[-1]
    heads = (f"def {name}(", f"async def {name}(")
    for number in range(first, max(first - DEF_SEARCH, 0), -1):
        if linecache.getline(file, number).lstrip().startswith(heads):
            return number
    return first


def source_code(links: Links) -> str:
    """The user's functions; a line has the operations of everything it did, calls included."""
    out = ""
    for (file, function), used in links.functions.items():
        first = function_start(file, function, min(used))
        code = [linecache.getline(file, n).rstrip("\n") for n in range(first, max(used) + 1)]
        margin = min((len(c) - len(c.lstrip()) for c in code if c.strip()), default=0)
        coloured = highlight("\n".join(c[margin:] for c in code), "python")
        lines = []
        for number, content in enumerate(coloured, first):
            if number not in used:
                lines.append(stripe(content, number=number))
                continue
            at, origins = SourceLine(file, number, function), used[number]
            calls = few(sorted(o.target for o in origins), 6)
            told = f"{count_text(len(origins), 'operation')}: {calls}\n{at.place} in {function}"
            lines.append(stripe(content, [at], number, told, links.operations(origins)))
        out += sub(f"{function} · {short_file(file)}") + listing(lines, tall=False)
    return out


def kernel_groups(name: str, compiled: CompiledStages, links: Links) -> str:
    """The loop IR in the frames of the kernels that compute it."""
    pieces = {piece.name: piece for piece in links.stage(f"{name}.loops")}
    out = ""
    for node in compiled.schedule.nodes:
        inside = [pieces.pop(o.name) for o in operations(node) if o.name in pieces]
        out += group(node, links.listing(inside))
    return out + (links.listing(pieces.values()) if pieces else "")


def kernels_code(name: str, compiled: CompiledStages, links: Links) -> str:
    """The kernels of one graph, numbered line by line."""
    out = ""
    for kernel in compiled.kernels:
        pieces = provenance.of_kernel(f"{name}.kernels", kernel)
        out += sub(f"{kernel.name} · {kernel.language}")
        out += links.listing(pieces, 1, kernel.language)
    return out


def plain_stage(stage: str, first: int) -> Callable[[str, CompiledStages, Links], str]:
    return lambda name, compiled, links: links.listing(links.stage(f"{name}.{stage}"), first)


AFTER_AOT = (
    ("loops", "Loops, scheduled", "by kernel", 1.3, kernel_groups),
    ("schedule", "Fusion decisions", "in order", 1.0, plain_stage("schedule", 0)),
    ("kernels", "Kernels", "generated code", 1.4, kernels_code),
    ("wrapper", "Wrapper", "Python", 1.2, plain_stage("wrapper", 1)),
)
"""Panes with the forward above the backward: key, title, remark, width, content of one graph."""


def panes(trace: Trace) -> list[str]:
    """All panes, in the order of the corridor."""
    links, aot = Links(trace), trace.aot
    bytecode = links.stage("bytecode")
    count = f"{len(bytecode)} instructions"
    found = [
        pane("source", "Python", trace.name, 1.1, source_code(links)),
        pane("bytecode", "Bytecode", count, 0.9, links.listing(bytecode, first=0)),
        pane("capture", "Graph", "captured", 1.1, links.listing(links.stage("capture"))),
    ]
    if aot is not None:
        if aot.joint is not None:
            joint = links.listing(links.stage("aot.joint"))
            found.append(pane("joint", "Joint graph", "forward and backward", 1.2, joint))
        content = links.listing(links.stage("aot.forward"))
        if aot.backward is not None:
            backward = links.listing(links.stage("aot.backward"))
            content = sub("forward") + content + sub("backward") + backward
        found.append(pane("aot", "ATen graph", f"by {aot.forward.made_by}", 1.2, content))
    for key, title, about, width, view in AFTER_AOT if trace.graphs else ():
        content = ""
        for name, compiled in trace.graphs.items():
            content += sub(name) if len(trace.graphs) > 1 else ""
            content += view(name, compiled, links)
        found.append(pane(key, title, about, width, content))
    return found


def strip(trace: Trace) -> str:
    """The corridor: one button a room, which opens and closes its pane."""
    rooms: dict[str, tuple[str, list[str]]] = {}
    for room in trace.rooms():
        graph, _, key = room.stage.rpartition(".")
        count = f"backward {room.count}" if graph == "backward" else room.count
        rooms.setdefault(key, (room.title, []))[1].append(text(count))
    buttons = (
        f'<span class="room{" on" if key in OPEN_AT_FIRST else ""}" data-p="{key}">'
        f"<b>{text(title)}</b> <small>{'<br>'.join(counts)}</small></span>"
        for key, (title, counts) in rooms.items()
    )
    return f'<div class="corridor">{SEPARATOR.join(buttons)}</div>'


def foot(trace: Trace) -> str:
    """What is shown while nothing is pointed at: fusions, memory, extern calls, what is saved."""
    lines = []
    for name, compiled in trace.graphs.items():
        schedule = compiled.schedule
        fused = [d for d in schedule.decisions if d.fused]
        saved, peak = sum(d.score for d in fused), schedule.memory.peak_bytes
        lines.append(
            f"{name}: {len(fused)} of {len(schedule.decisions)} fusions taken, saving "
            f"{bytes_text(saved)} of memory traffic; peak {bytes_text(peak)}"
        )
        externs = Counter((str(extern.op), extern.reason) for extern in schedule.graph.externs)
        for (op, reason), count in externs.items():
            lines.append(f"{name}: {count} × extern {op}: {reason}")
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


@shows(Trace, script=True)
def trace_view(trace: Trace) -> str:
    shown = "".join(panes(trace))
    wires = '<svg class="wires" aria-hidden="true"></svg>'
    return (
        f'<div class="mc trace" role="group" aria-label="{text(trace.name)} through the compiler">'
        f'{strip(trace)}<div class="panes">{shown}{wires}</div>{foot(trace)}</div>'
    )


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


shows(Piece)(lambda piece: box(piece.name, piece.stage, piece_table([piece])))
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
