"""Ahead-of-time autograd: operator levels, the joint graph and its cut, what is saved or computed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from minicompile.aot.levels import LevelGraph
from minicompile.aot.result import AotResult, ForwardValue, OutputSpec, Partition, RuntimeMetadata
from minicompile.debug.diff import of_pass
from minicompile.ops.display import bytes_text, count_text
from minicompile.ops.graph import Graph, PassRecord
from minicompile.ops.origin import NO_ORIGINS, Origins
from minicompile.show.diff import diff_html
from minicompile.show.graphs import graph_beside, graph_parts
from minicompile.show.html import (
    bar,
    box,
    code,
    details,
    facts,
    heading,
    shows,
    shows_many,
    size,
    table,
    text,
)
from minicompile.show.listing import headline, source_cell
from minicompile.show.palette import GOOD, NEUTRAL, colour


def value_table(title: str, values: Sequence[ForwardValue], made: Mapping[str, Origins]) -> str:
    """What is saved or computed again, the largest first."""
    largest = max((v.bytes or 0 for v in values), default=0)
    rows = []
    for value in sorted(values, key=lambda v: (-(v.bytes or 0), v.name)):
        origins = made.get(value.name, NO_ORIGINS)
        name, length = code(value.name, colour(origins)), bar(value.bytes or 0, largest, GOOD, 16)
        rows.append([name, size(value.bytes), length, text(value.reason), source_cell(origins)])
    return table((title, "bytes", "", "why", "line"), rows, numbers=(1,)) if rows else ""


shows_many(lambda values: value_table("value", values, {}), "value", ForwardValue)


def partition_parts(partition: Partition) -> str:
    """Bytes kept, against keeping everything; each saved value; what is computed again."""
    totals = [
        (f"this partition ({partition.method})", partition.saved_bytes, GOOD),
        ("everything backward reads", partition.default_bytes, NEUTRAL),
    ]
    most = max(partition.saved_bytes, partition.default_bytes)
    compare = ([text(what), bytes_text(n), bar(n, most, hue)] for what, n, hue in totals)
    shown = table(("kept for backward, beside inputs", "bytes", ""), compare, numbers=(1,))
    shown += value_table("saved", partition.saved, partition.origins)
    return shown + value_table(
        "computed again in backward", partition.recomputed, partition.origins
    )


shows(Partition)(lambda partition: box(*headline(partition), partition_parts(partition)))


def output_row(number: int, spec: OutputSpec) -> list[str]:
    of = f"number {spec.base}" if spec.base >= 0 else ""
    if spec.kind == "constant":
        of = repr(spec.value)
    shape = f"{list(spec.size)} strides {list(spec.stride)} offset {spec.offset}"
    layout = text(shape if spec.size else "")
    return [str(number), text(spec.kind), text(of), layout, _plain(spec.requires_grad)]


def metadata_parts(metadata: RuntimeMetadata) -> str:
    outputs = table(
        ("output", "how it is made", "of", "layout", "gets a gradient"),
        (output_row(i, spec) for i, spec in enumerate(metadata.outputs)),
    )
    others = [field.name for field in fields(metadata) if field.name != "outputs"]
    values = ((name.replace("_", " "), _plain(getattr(metadata, name))) for name in others)
    return outputs + facts(values)


def _plain(value: object) -> str:
    """A field for a reader: `0, 2`, `none`, `yes`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | list):
        return ", ".join(map(_plain, value)) or "none"
    return str(value)


shows(RuntimeMetadata)(lambda metadata: box(*headline(metadata), metadata_parts(metadata)))


def graph_details(name: str, graph: Graph) -> str:
    return details(name, f"{graph.op_count} operations", graph_parts(graph), name == "forward")


def level_parts(graph: LevelGraph, shown: str) -> str:
    """The rules that led to the level, busiest first, then its graph."""
    rows = ([code(op), str(count), text(at)] for op, count, at in graph.steps)
    head = ("replaced by its rule", "calls", "lines")
    return (table(head, rows, numbers=(1,)) if graph.applied else "") + shown


shows(LevelGraph)(lambda g: box(f"level {g.level}", g.summary, level_parts(g, graph_parts(g))))


def pass_parts(record: PassRecord, number: int) -> tuple[str, str]:
    """What a pass changed, without the lines around it."""
    if str(record.before) == str(record.after):
        return "no change", "no difference"
    difference = of_pass(record)
    rows = tuple(row for row in difference.rows if row.status != "same")
    same = count_text(len(difference.rows) - len(rows), "equal line")
    about = f"{count_text(record.changed, 'change')}; {same} more in aot.passes[{number}]"
    return about, diff_html(replace(difference, rows=rows))


@shows(AotResult)
def aot_view(aot: AotResult) -> str:
    headline = f"forward {aot.forward.op_count} operations"
    if aot.backward is None:
        parts = [graph_parts(aot.forward)]
    else:
        headline += f" · backward {aot.backward.op_count}"
        parts = [graph_details("forward", aot.forward), graph_details("backward", aot.backward)]
    if aot.joint is not None:
        about = f"{aot.joint.op_count} operations: forward, backward and the cut between them"
        shown = graph_beside(aot.joint, "aot.joint", aot.partition)
        parts.append(details("joint graph", about, shown))
    if aot.partition is not None:
        parts.append(heading("saved or computed again"))
        parts.append(partition_parts(aot.partition))
    for name, level in aot.levels.items():
        shown = graph_beside(level, f"aot.levels[{name!r}]")
        parts.append(details(f"level {level.level}", level.summary, level_parts(level, shown)))
    for number, record in enumerate(aot.passes):
        parts.append(details(f"pass {record.name}", *pass_parts(record, number)))
    metadata = metadata_parts(aot.metadata)
    parts.append(details("runtime metadata", "what the wrapper does around the graphs", metadata))
    levels = ", ".join(f"{name} {graph.op_count}" for name, graph in aot.levels.items())
    return box(
        "ahead-of-time autograd", f"{headline} · by level: {levels}" if levels else headline, *parts
    )
