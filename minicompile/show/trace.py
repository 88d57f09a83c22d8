"""A trace as one linked view: the corridor as a strip, the stages side by side, the reason at the foot.

Each pane lists the `Piece`s of one stage. A piece knows the operations of the captured graph it came from
(`data-o`), and its title holds what it is, where it is from and why, so that the view reads without scripts;
with them, pointing at a line lights all that shares an operation with it, in every pane.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from minicompile import provenance
from minicompile.ops.display import Several, bytes_text, count_text
from minicompile.ops.origin import Origin, Origins, SourceLine, short_file
from minicompile.pipeline_result import CompiledStages, Room, Trace, saving
from minicompile.provenance import Piece
from minicompile.scheduling.nodes import ExternKernelSchedulerNode, Schedule
from minicompile.show.html import (
    box,
    details,
    from_text,
    inside,
    listing,
    shows,
    stripe,
    table,
    text,
)
from minicompile.show.palette import GOOD, NEUTRAL, colour
from minicompile.show.schedule import ranges_of
from minicompile.show.syntax import highlight

OPEN_AT_FIRST = ("source", "aot", "loops", "kernels")
"""The panes a trace opens with; the strip shows and hides them."""

SEPARATOR = ' <span class="sep">›</span> '

DEF_SEARCH = 60
"""How far above a function's first used line its `def` is looked for."""


@dataclass(frozen=True)
class Pane:
    """A column: its key (which room opens it), title, remark, width and content."""

    key: str
    title: str
    about: str
    width: float
    content: str


class Links:
    """The pieces of a trace by stage, and numbers for the captured operations: what joins the panes."""

    def __init__(self, trace: Trace) -> None:
        self.pieces = list(trace.pieces())
        self.by_stage: dict[str, list[Piece]] = {}
        found: set[Origin] = set()
        for piece in self.pieces:
            self.by_stage.setdefault(piece.stage, []).append(piece)
            found |= piece.origins
        self.numbers = {origin: i for i, origin in enumerate(sorted(found))}

    def stage(self, name: str) -> list[Piece]:
        return self.by_stage.get(name, [])

    def data(self, origins: Origins | set[Origin], name: str, stage: str = "") -> str:
        """What the script reads: operations, graph ("forward", "backward"), and a name if not the text."""
        ids = " ".join(str(i) for i in sorted(self.numbers[o] for o in origins))
        graph = next((g for g in ("forward", "backward") if g in stage.split(".")), "")
        return (
            (f' data-o="{ids}"' if ids else "")
            + (f' data-g="{graph}"' if graph else "")
            + (f' data-t="{text(name)}"' if name else "")
        )

    def line(self, piece: Piece, number: object = None, language: str = "python") -> str:
        title = "\n".join([piece.detail, from_text(piece.lines), *piece.why]).rstrip()
        content = highlight(piece.text, language)[0]
        data = self.data(piece.origins, piece.name, piece.stage)
        if isinstance(piece.subject, fx.Node) and piece.subject.op == "placeholder":
            data += ' data-i="1"'
        return stripe(content, piece.lines, number, title, data)

    def listing(self, pieces: Iterable[Piece], numbered: bool = False) -> str:
        return listing(
            (self.line(piece, i if numbered else None) for i, piece in enumerate(pieces)),
            tall=False,
        )


def sub(title: object) -> str:
    return f'<div class="sub">{text(title)}</div>'


def functions(links: Links) -> dict[tuple[str, str], dict[int, SourceLine]]:
    """Used lines by file and function; functions in the order in which the graph first needed them."""
    found: dict[tuple[str, str], dict[int, SourceLine]] = {}
    for piece in (*links.stage("capture"), *links.pieces):
        for origin in sorted(piece.origins) if len(piece.origins) > 1 else piece.origins:
            for line in origin.stack:
                found.setdefault((line.file, line.function), {})[line.line] = line
    return found


def function_start(file: str, function: str, first: int) -> int:
    """The line of the `def` above a used line, or that line itself."""
    name = function.rsplit(".", 1)[-1]
    for number in range(first, max(first - DEF_SEARCH, 0), -1):
        if (
            linecache.getline(file, number)
            .lstrip()
            .startswith((f"def {name}(", f"async def {name}("))
        ):
            return number
    return first


def source_pane(trace: Trace, links: Links) -> Pane:
    """The user's functions; a line has the operations of everything it did, calls included."""
    by_line: dict[SourceLine, set[Origin]] = {}
    for origin in links.numbers:
        for line in origin.stack:
            by_line.setdefault(line, set()).add(origin)
    parts = []
    for (file, function), used in functions(links).items():
        first = function_start(file, function, min(used))
        numbers = range(first, max(used) + 1)
        code = [linecache.getline(file, n).rstrip("\n") for n in numbers]
        margin = min((len(c) - len(c.lstrip()) for c in code if c.strip()), default=0)
        lines = []
        for number, content in zip(
            numbers, highlight("\n".join(c[margin:] for c in code), "python"), strict=True
        ):
            at = used.get(number)
            if at is None:
                lines.append(stripe(content, number=number))
                continue
            origins = by_line[at]
            calls = sorted({o.target for o in origins})
            few = ", ".join(calls[:6]) + (", …" if len(calls) > 6 else "")
            title = f"{count_text(len(origins), 'operation')}: {few}\n{at.place} in {function}"
            lines.append(stripe(content, [at], number, title, links.data(origins, "")))
        parts.append(sub(f"{function} · {short_file(file)}") + listing(lines, tall=False))
    return Pane("source", "Python", trace.name, 1.1, "".join(parts))


def bytecode_pane(trace: Trace, links: Links) -> Pane:
    pieces = links.stage("bytecode")
    return Pane(
        "bytecode",
        "Bytecode",
        f"{len(pieces)} instructions",
        0.9,
        links.listing(pieces, numbered=True),
    )


def graph_pane(trace: Trace, links: Links) -> Pane:
    return Pane("capture", "Graph", "captured", 1.1, links.listing(links.stage("capture")))


def aot_panes(trace: Trace, links: Links) -> Iterator[Pane]:
    aot = trace.aot
    if aot is None:
        return
    if aot.joint is not None:
        joint = links.listing(links.stage("aot.joint"))
        yield Pane("joint", "Joint graph", "forward and backward", 1.2, joint)
    content = links.listing(links.stage("aot.forward"))
    if aot.backward is not None:
        backward = links.listing(links.stage("aot.backward"))
        content = sub("forward") + content + sub("backward") + backward
    yield Pane("aot", "ATen graph", f"by {aot.forward.made_by}", 1.2, content)


def kernel_groups(name: str, compiled: CompiledStages, links: Links) -> str:
    """The loop IR in the frames of the kernels that compute it."""
    pieces = {piece.name: piece for piece in links.stage(f"{name}.loops")}
    out, seen = [], set()
    for node in compiled.schedule.nodes:
        if isinstance(node, ExternKernelSchedulerNode):
            head, names = f"extern · {node.kernel.op}", [node.name]
        else:
            head = ("fused · " if len(node.nodes) > 1 else "kernel · ") + ranges_of(node)
            names = [n.name for n in node.nodes]
        seen.update(names)
        lines = links.listing(pieces[n] for n in names if n in pieces)
        out.append(f'<div class="grp"><em>{text(head)}</em>{lines}</div>')
    rest = [piece for piece in pieces.values() if piece.name not in seen]
    return "".join(out) + (links.listing(rest) if rest else "")


def code_pane(name: str, compiled: CompiledStages, links: Links) -> str:
    """The kernels of one graph, numbered line by line."""
    parts = []
    for kernel in compiled.kernels:
        pieces = list(provenance.of_kernel(f"{name}.kernels", kernel))
        coloured = highlight("\n".join(p.text for p in pieces), kernel.language)
        lines = (
            stripe(content, p.lines, i, _title(p), links.data(p.origins, "", p.stage))
            for i, (content, p) in enumerate(zip(coloured, pieces, strict=True), 1)
        )
        parts.append(sub(f"{kernel.name} · {kernel.language}") + listing(lines, tall=False))
    return "".join(parts)


def _title(piece: Piece) -> str:
    return "\n".join([f"{piece.stage} {piece.name}", from_text(piece.lines), *piece.why])


def wrapper_code(name: str, compiled: CompiledStages, links: Links) -> str:
    return links.listing(links.stage(f"{name}.wrapper"), numbered=True)


def decisions(name: str, compiled: CompiledStages, links: Links) -> str:
    return links.listing(links.stage(f"{name}.schedule"), numbered=True)


def compiled_panes(trace: Trace, links: Links) -> Iterator[Pane]:
    """Loops, decisions, kernels and wrapper; forward above backward."""
    if not trace.graphs:
        return
    kinds = [
        ("loops", "Loops, scheduled", "by kernel", 1.3, kernel_groups),
        ("schedule", "Fusion decisions", "in order", 1.0, decisions),
        ("kernels", "Kernels", "generated code", 1.4, code_pane),
        ("wrapper", "Wrapper", "Python", 1.2, wrapper_code),
    ]
    for key, title, about, width, view in kinds:
        parts = []
        for name, compiled in trace.graphs.items():
            parts.append((sub(name) if len(trace.graphs) > 1 else "") + view(name, compiled, links))
        yield Pane(key, title, about, width, "".join(parts))


def panes(trace: Trace) -> list[Pane]:
    """All panes, in the order of the corridor."""
    links = Links(trace)
    return [
        source_pane(trace, links),
        bytecode_pane(trace, links),
        graph_pane(trace, links),
        *aot_panes(trace, links),
        *compiled_panes(trace, links),
    ]


def merged_rooms(trace: Trace) -> list[Room]:
    """One room per pane: the forward's and the backward's counts together."""
    found: dict[str, Room] = {}
    for room in trace.rooms():
        key = room.stage.rsplit(".", 1)[-1]
        if key in found:
            both = f"{found[key].count}\nbackward {room.count}"
            found[key] = replace(found[key], count=both)
        else:
            found[key] = replace(room, stage=key)
    return list(found.values())


def strip(trace: Trace) -> str:
    """The corridor: one button a room, which opens and closes its pane."""
    rooms = []
    for room in merged_rooms(trace):
        on = " on" if room.stage in OPEN_AT_FIRST else ""
        count = "<br>".join(text(line) for line in room.count.split("\n"))
        rooms.append(
            f'<span class="room{on}" data-p="{room.stage}"><b>{text(room.title)}</b> '
            f"<small>{count}</small></span>"
        )
    return f'<div class="corridor">{SEPARATOR.join(rooms)}</div>'


def summary(schedule: Schedule) -> list[str]:
    """What was decided, in a few lines: fusions, extern calls with reasons, memory."""
    fused = [d for d in schedule.decisions if d.fused]
    saved = bytes_text(sum(d.score for d in fused))
    lines = [
        f"{len(fused)} of {len(schedule.decisions)} fusions taken, saving {saved} of memory traffic; "
        f"peak {bytes_text(schedule.memory.peak_bytes)}"
    ]
    externs: dict[tuple[str, str], int] = {}
    for extern in schedule.graph.externs:
        externs[str(extern.op), extern.reason] = externs.get((str(extern.op), extern.reason), 0) + 1
    lines += [f"{count} × extern {op}: {reason}" for (op, reason), count in externs.items()]
    return lines


def foot(trace: Trace) -> str:
    """What is shown while nothing is pointed at: the decisions of the whole trace."""
    lines = []
    for name, compiled in trace.graphs.items():
        lines += [f"{name}: {line}" for line in summary(compiled.schedule)]
    if trace.aot is not None and trace.aot.partition is not None:
        lines.append(saving(trace.aot.partition))
    told = "".join(f"<small>{text(line)}</small>" for line in lines)
    about = (
        f"{count_text(len(trace.capture.guards), 'guard')}, "
        f"{count_text(len(trace.capture.inlined), 'call')} inlined"
    )
    return (
        f'<div class="foot"><div class="what"><b>{text(trace.name)}</b><small>{about}</small></div>'
        f'<div class="why" style="border-left:3px solid {GOOD if lines else NEUTRAL};padding-left:10px">'
        f"{told}</div></div>"
    )


@shows(Trace, script=True)
def trace_view(trace: Trace) -> str:
    shown = "".join(
        f'<div class="pane" data-p="{pane.key}" data-w="{pane.width}"><h4>{text(pane.title)} '
        f"<span>{text(pane.about)}</span></h4>{pane.content}</div>"
        for pane in panes(trace)
    )
    wires = '<svg class="wires" aria-hidden="true"></svg>'
    return (
        f'<div class="mc trace" role="group" aria-label="{text(trace.name)} through the compiler">'
        f'{strip(trace)}<div class="panes">{shown}{wires}</div>{foot(trace)}</div>'
    )


@shows(CompiledStages)
def compiled_view(compiled: CompiledStages) -> str:
    return box(
        compiled.loops.name,
        "lowering, scheduling and code generation",
        *(details(name, "", inside(stage)) for name, stage in compiled.stages.items()),
    )


@shows(Piece)
def piece_view(piece: Piece) -> str:
    return box(piece.name, piece.stage, piece_table([piece]))


def piece_table(pieces: Iterable[Piece]) -> str:
    rows = (
        [
            text(piece.stage),
            f'<code style="border-left:4px solid {colour(piece.origins) or NEUTRAL};padding-left:6px">'
            f"{text(piece.text.strip())}</code>",
            text(piece.detail),
            "<br>".join(map(text, piece.why)),
        ]
        for piece in pieces
    )
    return table(("stage", "what it became", "type", "why"), rows)


@shows(Several)
def several_view(items: Several[Any]) -> str:
    """A list of stage objects; pieces of a trace share one table."""
    if items and all(isinstance(item, Piece) for item in items):
        return box(
            "one line through the corridor", count_text(len(items), "object"), piece_table(items)
        )
    return "".join(inside(item) for item in items) or "<p>none</p>"
