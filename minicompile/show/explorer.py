"""The stages of a trace side by side, as lines that know the operations they came from.

    Explorer := trace, open: names of panes, panes: [Pane], in the order of the corridor
    Pane     := key, title, about, width, [Section]
    Section  := title, [Piece], first number, language, graph, framed

What `trace.explore()` returns. `show/trace.py` makes a linked page of it; a terminal gets a list of panes.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch import fx

from minicompile.codegen.plan import CodeLine, KernelSource
from minicompile.debug.provenance import Piece
from minicompile.errors import OptionError
from minicompile.ops.display import Shown, aligned, count_text, method
from minicompile.ops.origin import Origin, SourceLine, short_file
from minicompile.pipeline_result import Trace
from minicompile.show.html import few
from minicompile.show.schedule_pictures import node_title, operations

OPEN_AT_FIRST = ("source", "aot", "loops", "kernels")
OPEN_WITH_ASSEMBLY = ("source", "kernels", "ptx", "sass")

LEVELS = {"ttir": 1.4, "ttgir": 1.4, "llir": 1.4, "ptx": 1.2, "sass": 1.4}
"""Panes below a Triton kernel, and their widths."""

DEF_SEARCH = 60
"""How far above a function's first used line its `def` is looked for."""


@dataclass
class Section:
    """Lines below one headline. `first` numbers them; `graph` is "forward", "backward" or ""; `of`: the
    numbers of the kernel's lines that they came from, 0 for none."""

    title: str
    pieces: Sequence[Piece]
    first: int | None = None
    language: str = "python"
    graph: str = ""
    framed: bool = False
    of: Sequence[int] = ()


@dataclass
class Pane:
    """One stage as lines; `width` is relative to the other panes."""

    key: str
    title: str
    about: str
    width: float
    sections: list[Section]

    @property
    def lines(self) -> int:
        return sum(len(section.pieces) for section in self.sections)


def is_weak(piece: Piece) -> bool:
    """Whether it computes nothing itself: a loop's head, a brace, an input."""
    if isinstance(piece.subject, fx.Node):
        return piece.subject.op == "placeholder"
    return isinstance(piece.subject, CodeLine) and piece.subject.scaffold


def function_start(file: str, function: str, first: int) -> int:
    """The line of the `def` above a used line, or that line itself."""
    name = function.rsplit(".", 1)[-1]
    heads = (f"def {name}(", f"async def {name}(")
    for number in range(first, max(first - DEF_SEARCH, 0), -1):
        if linecache.getline(file, number).lstrip().startswith(heads):
            return number
    return first


def source_sections(pieces: Iterable[Piece]) -> Iterator[Section]:
    """The user's functions, in the order in which the captured graph first needed them; a line has the
    operations of everything it did, calls included."""
    functions: dict[tuple[str, str], dict[int, set[Origin]]] = {}
    captured_first = sorted(pieces, key=lambda piece: piece.stage != "capture")
    for origin in dict.fromkeys(o for piece in captured_first for o in sorted(piece.origins)):
        for line in origin.stack:
            used = functions.setdefault((line.file, line.function), {})
            used.setdefault(line.line, set()).add(origin)
    for (file, function), used in functions.items():
        first, last = function_start(file, function, min(used)), max(used)
        code = {n: linecache.getline(file, n).rstrip("\n") for n in range(first, last + 1)}
        margin = min((len(c) - len(c.lstrip()) for c in code.values() if c.strip()), default=0)
        lines = []
        for number, content in code.items():
            at, made = SourceLine(file, number, function), frozenset(used.get(number, ()))
            calls = few(sorted(o.target for o in made), 6)
            told = f"{count_text(len(made), 'operation')}: {calls}" if made else ""
            known = content[margin:] or (made and f"line {number}, whose source is not there")
            lines.append(
                Piece("source", at.place, known or "", made, at, told, line=at if made else None)
            )
        yield Section(f"{function} · {short_file(file)}", lines, first)


def loop_sections(graph: str, compiled: Any, pieces: list[Piece]) -> Iterator[Section]:
    """The loop IR in the frames of the kernels that compute it."""
    left = {piece.name: piece for piece in pieces}
    for node in compiled.schedule.nodes:
        inside = [left.pop(o.name) for o in operations(node) if o.name in left]
        yield Section(node_title(node), inside, graph=graph, framed=True)
    if left:
        yield Section("in no kernel", list(left.values()), graph=graph)


def kernel_sections(graph: str, compiled: Any, pieces: list[Piece]) -> Iterator[Section]:
    """The kernels of one graph, numbered line by line."""
    left = iter(pieces)
    for kernel in compiled.kernels:
        title, lines = f"{kernel.name} · {kernel.language}", list(islice(left, len(kernel.lines)))
        yield Section(title, lines, 1, kernel.language, graph)


def plain(first: int | None) -> Callable[[str, Any, list[Piece]], Iterator[Section]]:
    return lambda graph, compiled, pieces: iter([Section(graph, pieces, first, graph=graph)])


PANES = (
    ("bytecode", "Bytecode", "as interpreted", 0.9, plain(0)),
    ("capture", "Graph", "captured", 1.1, plain(None)),
    ("joint", "Joint graph", "forward and backward", 1.2, plain(None)),
    ("aot", "ATen graph", "functional", 1.2, plain(None)),
    ("loops", "Loops, scheduled", "by kernel", 1.3, loop_sections),
    ("schedule", "Fusion decisions", "in order", 1.0, plain(0)),
    ("kernels", "Kernels", "generated code", 1.4, kernel_sections),
    ("wrapper", "Wrapper", "Python", 1.2, plain(1)),
)
"""Panes with the forward above the backward: key, title, remark, width, sections of one graph."""


EMPTY = {
    "loops": "no loops: what is returned are inputs, views of them, or constants",
    "schedule": "no questions: fusion is off, or no two loops share data",
    "kernels": "no kernels: there are no loops",
}
"""What a pane says of a graph that has nothing for it."""


def trace_panes(trace: Trace) -> Iterator[Pane]:
    """The panes of a trace, without assembly. A stage that was reached has one, empty or not."""
    reached = ["bytecode", *trace.stages, *(["aot.joint"] if trace.aot and trace.aot.joint else [])]
    found: dict[str, dict[str, list[Piece]]] = {stage.split(".")[-1]: {} for stage in reached}
    for key in EMPTY if trace.graphs else ():
        found[key] = {graph: [] for graph in trace.graphs}
    pieces = list(trace.pieces())
    for piece in pieces:
        graph, _, key = piece.stage.rpartition(".")
        if graph == "aot":
            graph, key = ("", key) if key == "joint" else (key, graph)
        found.setdefault(key, {}).setdefault(graph, []).append(piece)
    yield Pane("source", "Python", trace.name, 1.1, list(source_sections(pieces)))
    for key, title, about, width, view in PANES:
        sections: list[Section] = []
        for graph, made in found.get(key, {}).items():
            parts = list(view(graph, trace.graphs.get(graph), made)) if made else []
            parts = parts or [Section(EMPTY[key], (), graph=graph)]
            if len(found[key]) > 1 and parts[0].title != graph:
                sections.append(Section(graph, (), graph=graph))
            sections += parts
        if key in found:
            yield Pane(key, title, about, width, sections)


def below(kernel: KernelSource, graph: str, level: str, assembly: Any) -> Section:
    """The lines of one level below a kernel, with the origins of the kernel lines they came from."""
    pieces, numbers = [], []
    places = zip(assembly.levels[level].splitlines(), assembly.kernel_lines(level), strict=False)
    for number, (content, at) in enumerate(places, 1):
        line, told = CodeLine(content), ""
        if at is not None:
            above, mark = kernel.lines[at], content.lstrip().startswith((".loc", "//"))
            line = CodeLine(content, above.origins, above.scaffold or mark)
            told = f"line {at + 1} of {kernel.name}: {above.text.strip()}"
        name = f"{kernel.name}:{number}"
        pieces.append(Piece(f"{graph}.{level}", name, content, line.origins, line, told))
        numbers.append(0 if at is None else at + 1)
    return Section(kernel.name, pieces, 1, level, graph, of=numbers)


def assembly_panes(trace: Trace) -> Iterator[Pane]:
    """What the trace's Triton kernels become on their way to a GPU; none is needed.

    Raises MinicompileError where no kernel is Triton's, BackendError without Triton.
    """
    graphs = {id(k): graph for graph, compiled in trace.graphs.items() for k in compiled.kernels}
    made = [(graphs[id(a.source)], a.source, a) for a in trace.assembly()]
    for level, width in LEVELS.items():
        if sections := [below(k, g, level, a) for g, k, a in made if level in a.levels]:
            about = f"cross-compiled for {made[0][2].target}"
            yield Pane(level, level.upper(), about, width, sections)


@dataclass(eq=False, repr=False)
class Explorer(Shown):
    """The linked view of a trace. `open` names the panes it opens with; empty: the usual."""

    trace: Trace
    open: Sequence[str] = ()
    assembly: bool = False
    panes: list[Pane] = field(init=False)

    def __post_init__(self) -> None:
        self.panes = list(trace_panes(self.trace))
        if self.assembly:
            self.panes += assembly_panes(self.trace)
        known = [pane.key for pane in self.panes]
        usual = OPEN_WITH_ASSEMBLY if self.assembly else OPEN_AT_FIRST
        asked = [self.open] if isinstance(self.open, str) else self.open
        self.open = tuple(dict.fromkeys(asked or (key for key in usual if key in known)))
        if missing := set(self.open) - set(known):
            told = f"no pane {min(missing)!r} in the trace of {self.trace.name}"
            more = "" if self.assembly else f"; assembly=True adds {', '.join(LEVELS)}"
            raise OptionError(f"{told}; it has: {', '.join(known)}{more}")

    def pane(self, key: str) -> Pane:
        return next(pane for pane in self.panes if pane.key == key)

    def __str__(self) -> str:
        lines = [f"explorer of {self.trace.name}: {', '.join(self.open)}"]
        panes = ((pane.key, pane.title, count_text(pane.lines, "line")) for pane in self.panes)
        return "\n".join([*lines, *aligned([*panes], left=2)])


@method(Trace, "explore")
def explore(trace: Trace, panes: Sequence[str] = (), assembly: bool = False) -> Explorer:
    """The stages side by side: pointing at a line lights all that shares an operation with it.

    `panes` are open first (default: source, aot, loops, kernels); the view has all others.
    `assembly` adds what Triton kernels become (ttir, ttgir, llir, ptx, sass), without a GPU. Raises
    ValueError for a pane that isn't there, MinicompileError where no kernel is Triton's.
    """
    return Explorer(trace, panes, assembly)
