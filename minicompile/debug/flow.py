"""The source lines of a captured frame, each with its instructions and the graph nodes they made.

Passage := a source line, the instructions executed for it, the graph nodes they made
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from minicompile.dynamo.result import Capture, InstructionRecord
from minicompile.ops.display import Several, method
from minicompile.ops.graph import call_text
from minicompile.ops.origin import SourceLine

LONG_FLOW = 300
"""Flows with more instructions than this show only those that made nodes."""


@dataclass(frozen=True)
class Passage:
    """Instructions that were executed one after the other for one source line."""

    line: SourceLine | None
    depth: int
    """Call depth: 0 in the captured frame, more inside inlined calls."""
    instructions: tuple[InstructionRecord, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the graph nodes that they made."""
        return tuple(name for record in self.instructions for name in record.nodes)

    def __str__(self) -> str:
        steps = (f"\n    {record}" for record in self.instructions)
        return "  " * self.depth + f"{self.line or '(no line)'}{''.join(steps)}"


@method(Capture, "passages")
def passages(capture: Capture) -> Several[Passage]:
    """The executed instructions, by source line, without jumps and those that restore a cut frame."""
    plumbing = ("JUMP", "NOP", "RESUME")
    told = (
        record
        for record in capture.bytecode
        if record.opname not in plumbing and not record.argument.startswith("__stack")
    )
    same_line = itertools.groupby(told, key=lambda r: (r.line, r.depth))
    return Several(Passage(line, depth, tuple(group)) for (line, depth), group in same_line)


@method(Capture, "flow")
def flow(capture: Capture) -> str:
    """The executed instructions with the graph's nodes beside them, and where the frame was cut. A long
    flow shows only source lines that made nodes."""
    texts = {node.name: call_text(node) for node in capture.graph.nodes}
    short = len(capture.bytecode) <= LONG_FLOW
    lines: list[str] = []
    for passage in passages(capture):
        if not short and not passage.nodes:
            continue
        indent = "  " * passage.depth
        lines.append(f"{indent}{passage.line or '(no line)'}")
        for record in passage.instructions:
            made = "; ".join(f"{name} = {texts.get(name, '')}" for name in record.nodes)
            lines.append(f"{indent}    " + (f"{record!s:<40}  | {made}" if made else str(record)))
    if capture.stopped_by is not None:
        lines.append(f"----- cut here: {capture.stopped_by.reason} [{capture.stopped_by.id}]")
    return "\n".join(lines)
