"""What became of a line of source: every object of every stage, with the operations it came from.

    Piece := stage, name, text, origins, subject, detail, why

A `Piece` is one graph node, instruction, buffer, fusion decision or line of generated code. The linked
views (`show/explorer.py`) and `Trace.from_line` read nothing else. The real compiler answers these questions
with torch/_inductor/debug.py (node mappings) and the tlparse tool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from minicompile.aot.result import Partition
from minicompile.codegen.plan import CodeLine
from minicompile.dynamo.result import Capture
from minicompile.errors import OptionError
from minicompile.lowering.ir import (
    ComputedBuffer,
    ExternKernel,
    Layout,
    LoopGraph,
    Operation,
    Reduction,
    Scan,
    Scatter,
    formulas,
    loop_ranges,
    written_by,
)
from minicompile.ops.display import Several, Shown, bytes_text, method
from minicompile.ops.dtypes import value_text
from minicompile.ops.graph import Listing, call_text, origins_of
from minicompile.ops.origin import (
    NO_ORIGINS,
    Origins,
    SourceLine,
    short_file,
    source_lines,
    union,
)
from minicompile.pipeline_result import CompiledStages, Trace
from minicompile.scheduling.nodes import Schedule


@dataclass(frozen=True)
class Piece(Shown):
    """One thing of one stage.

    `stage` names the stage ("capture", "aot.forward", "forward.kernels"), `name` the thing in it,
    `subject` is the object itself, `detail` its type and size, `why` the reasons of the decisions about it.
    """

    stage: str
    name: str
    text: str
    origins: Origins
    subject: Any = field(compare=False, repr=False)
    detail: str = ""
    why: tuple[str, ...] = ()
    line: SourceLine | None = None
    """Its own source line, where it has one: an instruction's, that of the user's code itself."""

    @property
    def lines(self) -> tuple[SourceLine, ...]:
        """The user lines it came from: its own, or the innermost of its origins."""
        return (self.line,) if self.line is not None else source_lines(self.origins)

    def __str__(self) -> str:
        return f"{self.stage:<18} {self.text.strip()}"


def layout_bytes(layout: Layout) -> int | None:
    """Memory of a buffer's elements; None if symbolic."""
    numel = sympy.sympify(layout.numel)
    return int(numel) * layout.dtype.itemsize if numel.is_Integer else None


def layout_text(layout: Layout) -> str:
    """A layout with its bytes, where they are known."""
    size = layout_bytes(layout)
    return str(layout) if size is None else f"{layout}, {bytes_text(size)}"


def node_line(node: fx.Node) -> str:
    """One graph node as text: `relu = torch.relu(h)`, an input by its type."""
    if node.op == "placeholder":
        return f"{node.name}: {value_text(node.meta.get('val'))}"
    if node.op == "output":
        return f"return {node.args[0]}"
    return f"{node.name} = {call_text(node)}"


def node_size(node: fx.Node) -> str:
    """Bytes of a node's tensor; "" where they aren't known."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not all(type(s) is int for s in value.shape):
        return ""
    return bytes_text(value.numel() * value.element_size())


def of_graph(stage: str, graph: Listing, partition: Partition | None = None) -> Iterator[Piece]:
    """The nodes of a graph; with a partition, why a value is saved or computed again."""
    reasons: dict[str, str] = {}
    if partition is not None:
        for value in partition.saved:
            size = bytes_text(value.bytes) if value.bytes is not None else "symbolic size"
            reasons[value.name] = f"saved for backward ({size}): {value.reason}"
        for again in partition.recomputed:
            reasons[again.name] = f"computed again instead of saved: {again.reason}"
    for node in graph.nodes:
        why = [reasons[node.name]] if node.name in reasons else []
        if node.meta.get("phase") == "backward":
            why.append("backward: made by the gradient of this line")
        kind = "" if node.op == "output" else value_text(node.meta.get("val"))
        detail = ", ".join(filter(None, (kind, node_size(node))))
        yield Piece(stage, node.name, node_line(node), origins_of(node), node, detail, tuple(why))


def of_bytecode(capture: Capture) -> Iterator[Piece]:
    """The instructions that were interpreted; an instruction has the origins of the nodes it made."""
    made = {node.name: origins_of(node) for node in capture.graph.nodes}
    for record in capture.bytecode:
        text = "  " * record.depth + f"{record.opname} {record.argument}".rstrip()
        why = (f"made {', '.join(record.nodes)}",) if record.nodes else ()
        name, detail = f"offset {record.offset}", f"call depth {record.depth}, "
        detail += f"{record.stack_after} values on the stack after it"
        origins = union(made.get(node, NO_ORIGINS) for node in record.nodes)
        yield Piece("bytecode", name, text, origins, record, detail, why, record.line)


def formula(buffer: ComputedBuffer) -> str:
    """What one element of a buffer is: `relu(buf0[128*p0 + p1])`."""
    loops = buffer.loops
    value, _ = formulas(loops)
    if not isinstance(loops, Reduction | Scan):
        return value
    over = ", ".join(f"{v} < {s}" for v, s in loop_ranges(loops)[1].items())
    return f"{loops.kind}[{over if isinstance(loops, Reduction) else 'up to r0'}]({value})"


def operation_line(operation: Operation) -> str:
    """One operation of the loop IR as an assignment."""
    if isinstance(operation, ExternKernel):
        outputs = ", ".join(o.name if o is not None else "_" for o in operation.outputs)
        reads = ", ".join(view.buffer for view in operation.views())
        return f"{outputs} = {operation.op}({reads})"
    loops = operation.loops
    _, where = formulas(loops)
    sign = "+=" if isinstance(loops, Scatter) and loops.mode == "atomic_add" else "="
    return f"{operation.name}[{', '.join(map(str, where))}] {sign} {formula(operation)}"


def operation_kind(operation: Operation) -> str:
    """`Pointwise`, `Reduction`, `Scan`, `Scatter`, `extern`."""
    return "extern" if isinstance(operation, ExternKernel) else type(operation.loops).__name__


def of_operation(stage: str, operation: Operation, why: Sequence[str] = ()) -> Piece:
    """An operation of the loop IR, with why it is an extern call or a buffer, and more reasons."""
    layouts = "; ".join(layout_text(buffer.layout) for buffer in written_by(operation))
    text, detail = operation_line(operation), f"{operation_kind(operation)}, {layouts}"
    if isinstance(operation, ExternKernel):
        why = [f"extern: {operation.reason}", *why]
    elif operation.why:
        why = [*why, f"realized: {operation.why}"]
    return Piece(stage, operation.name, text, operation.origins, operation, detail, tuple(why))


MOST_REASONS = 4
"""How many fusion decisions a piece names; the schedule has all of them."""


def of_loops(stage: str, loops: LoopGraph, schedule: Schedule) -> Iterator[Piece]:
    """The operations of a loop graph, and what became of them in its schedule."""
    ordered = sorted(schedule.decisions, key=lambda d: (not d.fused, -d.score))
    for operation in loops.operations:
        asked = [str(d) for d in ordered if operation.name in {n.name for n in d.nodes}]
        why = asked[:MOST_REASONS]
        if operation.name in schedule.memory.internal:
            why.append("never in memory: it lives inside one kernel")
        yield of_operation(stage, operation, why)


def of_decisions(stage: str, schedule: Schedule) -> Iterator[Piece]:
    """The scheduler's questions and answers."""
    for decision in schedule.decisions:
        pair = f"{decision.producer} + {decision.consumer}"
        text = f"{'fused' if decision.fused else 'apart'} {pair}"
        detail = f"{decision.kind}, {bytes_text(decision.score)}"
        yield Piece(stage, pair, text, decision.origins, decision, detail, (decision.reason,))


def of_code(
    stage: str, name: str, lines: Sequence[CodeLine], why: tuple[str, ...] = ()
) -> Iterator[Piece]:
    """The lines of generated code, numbered from 1."""
    for number, line in enumerate(lines, 1):
        at = f"{name}:{number}"
        yield Piece(stage, at, line.text, line.origins, line, at, why)


def of_stages(name: str, stages: CompiledStages) -> Iterator[Piece]:
    """Everything in the stages after AOT; `name` is the graph's: "forward" or "backward"."""
    yield from of_loops(f"{name}.loops", stages.loops, stages.schedule)
    yield from of_decisions(f"{name}.schedule", stages.schedule)
    for kernel in stages.kernels:
        nodes = " + ".join(node.name for node in kernel.plan.node.nodes)
        why = (f"computes {nodes}; {kernel.plan.cost}",)
        yield from of_code(f"{name}.kernels", kernel.name, kernel.lines, why)
    yield from of_code(f"{name}.wrapper", stages.wrapper.name, stages.wrapper.lines)


@method(Trace, "pieces")
def pieces(trace: Trace) -> Iterator[Piece]:
    """Every object of every stage, with the operations it came from."""
    yield from of_bytecode(trace.capture)
    yield from of_graph("capture", trace.capture.graph)
    if trace.aot is not None:
        for name in ("joint", "forward", "backward"):
            if (graph := getattr(trace.aot, name)) is not None:
                yield from of_graph(f"aot.{name}", graph, trace.aot.partition)
    for name, compiled in trace.graphs.items():
        yield from of_stages(name, compiled)


@method(Trace, "from_line")
def from_line(trace: Trace, line: int, file: str | None = None) -> Several[Piece]:
    """Everything that came from a line of source, in the order of the corridor.

    A line that calls another function stands for all that the call did. `file` (its end is enough) is
    needed only where several files have such a line.
    """

    def matches(at: SourceLine) -> bool:
        return at.line == line and (file is None or at.file.endswith(file))

    everything = list(pieces(trace))
    made = {o for piece in everything for o in piece.origins if any(map(matches, o.stack))}
    files = {at.file for origin in made for at in origin.stack if matches(at)}
    if len(files) > 1:
        names = ", ".join(sorted(map(short_file, files)))
        raise OptionError(f"line {line} is in several files, say which: {names}")
    return Several(piece for piece in everything if piece.origins & made)
