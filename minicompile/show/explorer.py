"""The stages of a trace side by side, as lines that know the operations they came from.

    Explorer := trace, open: names of panes, panes: [Pane], in the order of the corridor
    Pane     := key, title, about, width, [Section]
    Section  := title, [Piece], first number, language, graph, framed

What `trace.explore()` returns. `show/trace.py` makes a linked page of it; a terminal gets its first lines.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch import fx

from minicompile.codegen.plan import CodeLine, KernelSource
from minicompile.errors import MinicompileError
from minicompile.ops.display import Shown, count_text
from minicompile.ops.origin import Origin, SourceLine, short_file
from minicompile.pipeline_result import CompiledStages, Trace
from minicompile.provenance import Piece
from minicompile.show.html import cut, few
from minicompile.show.schedule import node_title, operations

OPEN_AT_FIRST = ("source", "aot", "loops", "kernels")
OPEN_WITH_ASSEMBLY = ("source", "kernels", "ptx", "sass")
MOST_OPEN = 4

LEVELS = {"ttir": 1.4, "ttgir": 1.4, "llir": 1.4, "ptx": 1.2, "sass": 1.4}
"""Panes below a Triton kernel, and their widths."""

DEF_SEARCH = 60
"""How far above a function's first used line its `def` is looked for."""

AROUND = 4
"""Lines shown on either side of one that did something."""

SHORT = 12
"""Lines of a pane in the text form."""


@dataclass
class Section:
    """Lines below one headline. `first` numbers them; `graph` is "forward", "backward" or ""."""

    title: str
    pieces: Sequence[Piece]
    first: int | None = None
    language: str = "python"
    graph: str = ""
    framed: bool = False


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
        near = {n for line in used for n in range(line - AROUND, line + AROUND + 1)} & {*code}
        title, lines = f"{function} · {short_file(file)}", list[Piece]()
        for number in sorted(near | {first}):
            at, made = SourceLine(file, number, function), frozenset(used.get(number, ()))
            if lines and number > first + len(lines):
                yield Section(title, lines, first)
                left_out = number - first - len(lines)
                title, lines, first = f"⋯ {left_out} lines without operations", [], number
            calls = few(sorted(o.target for o in made), 6)
            told = f"{count_text(len(made), 'operation')}: {calls}" if made else ""
            text, own = code[number][margin:], at if made else None
            lines.append(Piece("source", at.place, text, made, at, told, line=own))
        yield Section(title, lines, first)


def loop_sections(graph: str, compiled: CompiledStages, pieces: list[Piece]) -> Iterator[Section]:
    """The loop IR in the frames of the kernels that compute it."""
    left = {piece.name: piece for piece in pieces}
    for node in compiled.schedule.nodes:
        inside = [left.pop(o.name) for o in operations(node) if o.name in left]
        yield Section(node_title(node), inside, graph=graph, framed=True)
    if left:
        yield Section("in no kernel", list(left.values()), graph=graph)


def kernel_sections(graph: str, compiled: CompiledStages, pieces: list[Piece]) -> Iterator[Section]:
    """The kernels of one graph, numbered line by line."""
    left = iter(pieces)
    for kernel in compiled.kernels:
        title, lines = f"{kernel.name} · {kernel.language}", list(islice(left, len(kernel.lines)))
        yield Section(title, lines, 1, kernel.language, graph)


def plain(first: int) -> Callable[[str, CompiledStages, list[Piece]], list[Section]]:
    return lambda graph, compiled, pieces: [Section(graph, pieces, first, graph=graph)]


AFTER_AOT = (
    ("loops", "Loops, scheduled", "by kernel", 1.3, loop_sections),
    ("schedule", "Fusion decisions", "in order", 1.0, plain(0)),
    ("kernels", "Kernels", "generated code", 1.4, kernel_sections),
    ("wrapper", "Wrapper", "Python", 1.2, plain(1)),
)
"""Panes with the forward above the backward: key, title, remark, width, sections of one graph."""


def trace_panes(trace: Trace) -> Iterator[Pane]:
    """The panes of a trace, without assembly."""
    by_stage: dict[str, list[Piece]] = {}
    for piece in trace.pieces():
        by_stage.setdefault(piece.stage, []).append(piece)
    everything = [piece for pieces in by_stage.values() for piece in pieces]
    bytecode, captured = by_stage.get("bytecode", []), by_stage.get("capture", [])
    yield Pane("source", "Python", trace.name, 1.1, list(source_sections(everything)))
    about = count_text(len(bytecode), "instruction")
    yield Pane("bytecode", "Bytecode", about, 0.9, [Section("", bytecode, 0)])
    yield Pane("capture", "Graph", "captured", 1.1, [Section("", captured)])
    if trace.aot is not None:
        if joint := by_stage.get("aot.joint"):
            yield Pane("joint", "Joint graph", "forward and backward", 1.2, [Section("", joint)])
        graphs = [Section("forward", by_stage.get("aot.forward", []), graph="forward")]
        if backward := by_stage.get("aot.backward"):
            graphs.append(Section("backward", backward, graph="backward"))
        yield Pane("aot", "ATen graph", f"by {trace.aot.forward.made_by}", 1.2, graphs)
    for key, title, about, width, view in AFTER_AOT if trace.graphs else ():
        sections: list[Section] = []
        for graph, compiled in trace.graphs.items():
            parts = list(view(graph, compiled, by_stage.get(f"{graph}.{key}", [])))
            if len(trace.graphs) > 1 and parts and parts[0].title != graph:
                sections.append(Section(graph, (), graph=graph))
            sections += parts
        yield Pane(key, title, about, width, sections)


def assembly_lines(stage: str, level: str, assembly: Any) -> Iterator[Piece]:
    """The lines of one level below a kernel, with the origins of the kernel lines they came from."""
    kernel = assembly.source
    places = zip(assembly.levels[level].splitlines(), assembly.kernel_lines(level), strict=False)
    for number, (content, at) in enumerate(places, 1):
        line, told = CodeLine(content), ""
        if at is not None:
            above = kernel.lines[at]
            line = CodeLine(content, above.origins, above.scaffold)
            told = f"line {at + 1} of {kernel.name}: {above.text.strip()}"
        name = f"{kernel.name}:{number}"
        yield Piece(f"{stage}.{level}", name, content, line.origins, line, told)


def assembly_panes(trace: Trace) -> list[Pane]:
    """What the trace's Triton kernels become on their way to a GPU; none is needed.

    Raises MinicompileError where no kernel is Triton's, BackendError without Triton.
    """
    from minicompile.runtime.assembly import cross_compile

    sections: dict[str, list[Section]] = {}
    for graph, kernel in triton_kernels(trace):
        assembly = cross_compile(kernel)
        for level in (level for level in LEVELS if level in assembly.levels):
            pieces = list(assembly_lines(graph, level, assembly))
            title = f"{kernel.name} · {assembly.target}"
            part = Section(title, pieces, 1, level, graph)
            sections.setdefault(level, []).append(part)
    if not sections:
        how = "trace mc.compile(fn, options={'device_codegen': 'triton'}) and they are"
        raise MinicompileError(f"no kernel of {trace.name} is Triton's, which have PTX: {how}")
    about = "cross-compiled, no GPU"
    return [
        Pane(level, level.upper(), about, width, sections[level])
        for level, width in LEVELS.items()
        if level in sections
    ]


def triton_kernels(trace: Trace) -> Iterator[tuple[str, KernelSource]]:
    for graph, compiled in trace.graphs.items():
        for kernel in compiled.kernels:
            if kernel.language == "triton":
                yield graph, kernel


@dataclass(eq=False)
class Explorer(Shown):
    """The linked view of a trace. `open` names the panes it opens with, one to four; empty: the usual."""

    trace: Trace
    open: Sequence[str] = ()
    assembly: bool = False
    panes: list[Pane] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.panes = list(trace_panes(self.trace))
        if self.assembly:
            self.panes += assembly_panes(self.trace)
        known = [pane.key for pane in self.panes]
        usual = OPEN_WITH_ASSEMBLY if self.assembly else OPEN_AT_FIRST
        chosen = tuple(self.open) or tuple(key for key in usual if key in known)
        for key in chosen:
            if key not in known:
                needs = ", which assembly=True adds," * (key in LEVELS and not self.assembly)
                told = f"no pane {key!r}{needs} in the trace of {self.trace.name}"
                raise ValueError(f"{told}; it has: {', '.join(known)}")
        if len(set(chosen)) != len(chosen) or len(chosen) > MOST_OPEN:
            raise ValueError(f"open one to {MOST_OPEN} different panes, not {', '.join(chosen)}")
        self.open = chosen

    def pane(self, key: str) -> Pane:
        return next(pane for pane in self.panes if pane.key == key)

    def __str__(self) -> str:
        others = [pane.key for pane in self.panes if pane.key not in self.open]
        lines = [f"explorer of {self.trace.name}: {', '.join(self.open)}"]
        lines += [f"not open: {', '.join(others)}"] if others else []
        for pane in map(self.pane, self.open):
            lines += ["", f"{pane.title} ({count_text(pane.lines, 'line')})"]
            pieces = [piece for section in pane.sections for piece in section.pieces]
            for piece in pieces[:SHORT]:
                places = few((line.place for line in piece.lines), 3)
                lines.append(f"  {cut(piece.text, 64):<64}  {places}".rstrip())
            if len(pieces) > SHORT:
                stages = f'trace.explore(["{pane.key}"]) in a notebook or trace.save(folder)'
                lines.append(f"  and {len(pieces) - SHORT} more: {stages} shows all")
        return "\n".join(lines)
