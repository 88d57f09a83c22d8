"""The loop IR as a table, and loop bodies as listings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minicompile.codegen.plan import CodeLine
from minicompile.debug.provenance import formula, layout_bytes, operation_kind, operation_line
from minicompile.lowering.ir import (
    Buffer,
    ComputedBuffer,
    ExternKernel,
    LoopGraph,
    Operation,
    loop_ranges,
    written_by,
)
from minicompile.ops.dtypes import short
from minicompile.scheduling.body import LoopBody
from minicompile.show.html import (
    box,
    code,
    details,
    facts,
    shows,
    shows_many,
    size,
    table,
    text,
)
from minicompile.show.listing import code_listing, source_cell
from minicompile.show.palette import colour


def ranges_text(ranges: Iterable[object], reduced: Sequence[object] | None = None) -> str:
    """`512 × 128`, with `over` before what is reduced or scanned."""
    shown = " × ".join(map(str, ranges)) or "1"
    return shown if reduced is None else f"{shown} over {ranges_text(reduced)}"


def operation_row(operation: Operation) -> list[str]:
    written = written_by(operation)
    if isinstance(operation, ExternKernel):
        ranges, does, why = "", operation_line(operation), f"extern: {operation.reason}"
    else:
        loops, does, why = operation.loops, formula(operation), operation.why
        parallel, reduced = loop_ranges(loops)
        ranges = ranges_text(parallel.values(), list(reduced.values()) or None)
    names = [b.name for b in written] or [operation.name]
    return [
        "<br>".join(code(name, colour(operation.origins)) for name in names),
        "<br>".join(code(b.layout) for b in written),
        "<br>".join(size(layout_bytes(b.layout)) for b in written),
        text(operation_kind(operation)),
        text(ranges),
        code(does, wrap=True),
        text(why),
        source_cell(operation.origins),
    ]


def operation_table(operations: list[Operation]) -> str:
    head = ("buffer", "layout", "bytes", "kind", "ranges", "formula", "why in memory", "line")
    return table(head, map(operation_row, operations), numbers=(2,))


shows_many(operation_table, "buffer or call", ComputedBuffer, ExternKernel)


def buffer_table(buffers: Iterable[Buffer]) -> str:
    rows = ([code(b.name), code(b.layout), size(layout_bytes(b.layout))] for b in buffers)
    return table(("name", "layout", "bytes"), rows, numbers=(2,))


shows_many(buffer_table, "buffer", Buffer)


@shows(LoopGraph)
def loop_graph_view(graph: LoopGraph) -> str:
    externs = len(graph.externs)
    looped = len(graph.operations) - externs
    about = f"by lowering · {looped} buffers defined by loops, {externs} extern calls"
    inputs = [b for b in graph.inputs if isinstance(b, Buffer)]
    sizes = [b for b in graph.inputs if not isinstance(b, Buffer)]
    parts = [details("inputs", f"{len(inputs)} tensors, {len(sizes)} sizes", buffer_table(inputs))]
    parts.append(facts((s, f"size; {graph.size_hints.get(s, '?')} when compiling") for s in sizes))
    if graph.constants:
        parts.append(details("constants", len(graph.constants), buffer_table(graph.constants)))
    parts.append(operation_table(graph.operations))
    parts.append(facts([("returns", ", ".join(map(str, graph.outputs)))]))
    return box(graph.name, about, *parts)


def body_listing(body: LoopBody) -> str:
    """The body's text; its last lines are the operations."""
    origins = [value.origins for value in body.values if value.op != "constant"]
    lines = str(body).split("\n")
    head = len(lines) - len(origins)
    work = map(CodeLine, lines[head:], origins)
    return code_listing([*map(CodeLine, lines[:head]), *work])


@shows(LoopBody)
def body_view(body: LoopBody) -> str:
    dtypes = ", ".join(sorted({short(v.dtype) for v in body.values}))
    about = f"{len(body.values)} operations · {len(body.loads)} loads, {len(body.stores)} stores · {dtypes}"
    return box(f"loop body of {body.name}", about, body_listing(body))
