"""The loop IR as a table, and loop bodies as listings."""

from __future__ import annotations

from minicompile.lowering.ir import (
    Buffer,
    ComputedBuffer,
    ExternKernel,
    LoopGraph,
    Operation,
    Reduction,
    written_by,
)
from minicompile.ops.display import bytes_text
from minicompile.ops.dtypes import short
from minicompile.ops.origin import source_lines
from minicompile.provenance import (
    formula,
    layout_bytes,
    operation_kind,
    operation_line,
)
from minicompile.scheduling.body import LoopBody, iterate_indices
from minicompile.show.html import (
    box,
    code,
    details,
    facts,
    from_text,
    heading,
    listing,
    shows,
    source_cell,
    stripe,
    table,
    text,
)
from minicompile.show.palette import colour
from minicompile.show.syntax import highlight

LOOP_HEAD = ("buffer", "layout", "bytes", "kind", "ranges", "formula", "why in memory", "line")
LOOP_NUMBERS = (2,)


def size_text(buffer: Buffer) -> str:
    size = layout_bytes(buffer.layout)
    return bytes_text(size) if size is not None else "symbolic"


def ranges_text(operation: Operation) -> str:
    if isinstance(operation, ExternKernel):
        return ""
    ranges = " × ".join(map(str, operation.loops.ranges)) or "1"
    if isinstance(operation.loops, Reduction):
        ranges += " over " + (" × ".join(map(str, operation.loops.reduction_ranges)) or "1")
    return ranges


def operation_row(operation: Operation) -> list[str]:
    stripe_colour, written = colour(operation.origins), written_by(operation)
    if isinstance(operation, ExternKernel):
        does, why = operation_line(operation), f"extern: {operation.reason}"
    else:
        does, why = formula(operation), operation.why
    names = [b.name for b in written] or [operation.name]
    return [
        "<br>".join(code(name, stripe_colour) for name in names),
        "<br>".join(code(b.layout) for b in written),
        "<br>".join(size_text(b) for b in written),
        text(operation_kind(operation)),
        text(ranges_text(operation)),
        code(does, wrap=True),
        text(why),
        source_cell(operation.origins),
    ]


def operation_table(operations: list[Operation]) -> str:
    return table(LOOP_HEAD, map(operation_row, operations), LOOP_NUMBERS)


def buffer_table(buffers: list[Buffer]) -> str:
    return table(
        ("name", "layout", "bytes"),
        ([code(b.name), code(b.layout), size_text(b)] for b in buffers),
        numbers=(2,),
    )


@shows(LoopGraph)
def loop_graph_view(graph: LoopGraph) -> str:
    externs = len(graph.externs)
    looped = len(graph.operations) - externs
    about = f"by lowering · {looped} buffers defined by loops, {externs} extern calls"
    inputs: list[Buffer] = [b for b in graph.inputs if isinstance(b, Buffer)]
    sizes = [b for b in graph.inputs if not isinstance(b, Buffer)]
    parts = [details("inputs", f"{len(inputs)} tensors, {len(sizes)} sizes", buffer_table(inputs))]
    if sizes:
        parts.append(
            facts((s, f"size; {graph.size_hints.get(s, '?')} when compiling") for s in sizes)
        )
    if graph.constants:
        parts.append(
            details("constants", len(graph.constants), buffer_table(list(graph.constants)))
        )
    parts.append(operation_table(graph.operations))
    parts.append(facts([("returns", ", ".join(map(str, graph.outputs)))]))
    return box(graph.name, about, *parts)


@shows(ComputedBuffer, ExternKernel)
def operation_view(operation: Operation) -> str:
    return box(operation.name, operation_kind(operation), operation_table([operation]))


@shows(Buffer)
def buffer_view(buffer: Buffer) -> str:
    return box(buffer.name, type(buffer).__name__, buffer_table([buffer]))


def body_listing(body: LoopBody) -> str:
    """The body's text, each operation with the stripe of its source line."""
    origins = [v.origins for v in body.values if v.op != "constant"]
    lines = str(body).split("\n")
    head, work = lines[: len(lines) - len(origins)], lines[len(lines) - len(origins) :]
    out = [stripe(content) for content in highlight("\n".join(head), "python")]
    for line, made in zip(work, origins, strict=True):
        at = source_lines(made)
        out.append(stripe(highlight(line, "python")[0], at, title=from_text(at)))
    return listing(out)


@shows(LoopBody)
def body_view(body: LoopBody) -> str:
    indices = list(iterate_indices(body))
    about = f"{len(body.values)} operations · {len(body.loads)} loads, {len(body.stores)} stores"
    loops = [[code(v), text(s), "parallel"] for v, s in body.ranges.items()]
    loops += [[code(v), text(s), "reduction"] for v, s in body.reduction_ranges.items()]
    used = table(
        ("index", "expression", "buffers"),
        (
            [
                f"index{i}",
                code(index),
                code(
                    ", ".join(
                        dict.fromkeys(
                            f"{v.op} {v.buffer}".strip() for v in body.values if v.index == index
                        )
                    )
                ),
            ]
            for i, index in enumerate(indices)
        ),
    )
    values = sorted({short(v.dtype) for v in body.values})
    return box(
        f"loop body of {body.name}",
        f"{about} · {', '.join(values)}",
        body_listing(body),
        heading("loops"),
        table(("variable", "extent", "kind"), loops),
        heading("indices"),
        used,
    )
