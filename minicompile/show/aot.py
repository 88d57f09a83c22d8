"""Ahead-of-time autograd: operator levels, the joint graph and its cut, what is saved or computed again."""

from __future__ import annotations

from dataclasses import fields

from minicompile.aot.result import AotResult, OutputSpec, Partition, RuntimeMetadata
from minicompile.ops.display import bytes_text
from minicompile.ops.graph import origins_of
from minicompile.ops.origin import NO_ORIGINS, Origins
from minicompile.show.graphs import graph_parts, pass_diff
from minicompile.show.html import (
    bar,
    box,
    code,
    details,
    facts,
    heading,
    shows,
    source_cell,
    table,
    text,
)
from minicompile.show.palette import GOOD, NEUTRAL, colour


def saved_table(partition: Partition, origins: dict[str, Origins]) -> str:
    most = max((v.bytes or 0 for v in partition.saved), default=0)
    rows = []
    for value in sorted(partition.saved, key=lambda v: (-(v.bytes or 0), v.name)):
        made = origins.get(value.name, NO_ORIGINS)
        size = bytes_text(value.bytes) if value.bytes is not None else "symbolic"
        length = bar(value.bytes or 0, most, GOOD, 16)
        rows.append(
            [code(value.name, colour(made)), size, length, text(value.reason), source_cell(made)]
        )
    return table(("saved", "bytes", "", "why", "line"), rows, numbers=(1,))


def recomputed_table(partition: Partition, origins: dict[str, Origins]) -> str:
    rows = []
    for name in partition.recomputed:
        made = origins.get(name, NO_ORIGINS)
        rows.append([code(name, colour(made)), source_cell(made)])
    return table(("computed again in backward", "line"), rows)


def partition_parts(partition: Partition, origins: dict[str, Origins]) -> str:
    most = max(partition.saved_bytes, partition.default_bytes)
    compare = table(
        ("kept for backward", "bytes", ""),
        [
            [
                f"this partition ({text(partition.method)})",
                bytes_text(partition.saved_bytes),
                bar(partition.saved_bytes, most, GOOD),
            ],
            [
                "everything backward reads",
                bytes_text(partition.default_bytes),
                bar(partition.default_bytes, most, NEUTRAL),
            ],
        ],
        numbers=(1,),
    )
    again = recomputed_table(partition, origins) if partition.recomputed else ""
    return compare + saved_table(partition, origins) + again


@shows(Partition)
def partition_view(partition: Partition) -> str:
    about = (
        f"saves {len(partition.saved)} values, {bytes_text(partition.saved_bytes)} · "
        f"computes {len(partition.recomputed)} operations again"
    )
    return box(f"{partition.method} partition", about, partition_parts(partition, {}))


def output_row(number: int, spec: OutputSpec) -> list[str]:
    of = f"number {spec.base}" if spec.base >= 0 else ""
    if spec.kind == "constant":
        of = repr(spec.value)
    shape = (
        f"{list(spec.size)} strides {list(spec.stride)} offset {spec.offset}" if spec.size else ""
    )
    return [
        str(number),
        text(spec.kind),
        text(of),
        text(shape),
        "yes" if spec.requires_grad else "no",
    ]


def metadata_parts(metadata: RuntimeMetadata) -> str:
    outputs = table(
        ("output", "how it is made", "of", "layout", "gets a gradient"),
        (output_row(i, spec) for i, spec in enumerate(metadata.outputs)),
    )
    others = [field.name for field in fields(metadata) if field.name != "outputs"]
    return outputs + facts(
        (name.replace("_", " "), _plain(getattr(metadata, name))) for name in others
    )


def _plain(value: object) -> str:
    """A field for a reader: `0, 2`, `none`, `yes`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | list):
        return ", ".join(map(_plain, value)) or "none"
    return str(value)


@shows(RuntimeMetadata)
def metadata_view(metadata: RuntimeMetadata) -> str:
    about = f"{len(metadata.outputs)} outputs · {metadata.saved} saved"
    return box("runtime metadata", about, metadata_parts(metadata))


def node_origins(aot: AotResult) -> dict[str, Origins]:
    """Origins by node name, over all graphs."""
    found: dict[str, Origins] = {}
    for graph in (aot.forward, aot.backward, aot.joint):
        if graph is not None:
            found.update({node.name: origins_of(node) for node in graph.nodes})
    return found


@shows(AotResult)
def aot_view(aot: AotResult) -> str:
    levels = ", ".join(f"{name} {graph.op_count}" for name, graph in aot.levels.items())
    parts = [graph_parts(aot.forward)]
    headline = f"forward {aot.forward.op_count} operations"
    if aot.backward is not None:
        headline += f" · backward {aot.backward.op_count}"
        parts = [
            details("forward", f"{aot.forward.op_count} operations", parts[0], opened=True),
            details("backward", f"{aot.backward.op_count} operations", graph_parts(aot.backward)),
        ]
    if aot.joint is not None:
        about = f"{aot.joint.op_count} operations: forward, backward and the cut between them"
        parts.append(details("joint graph", about, graph_parts(aot.joint, aot.partition)))
    if aot.partition is not None:
        parts += [
            heading("saved or computed again"),
            partition_parts(aot.partition, node_origins(aot)),
        ]
    parts += [
        details(f"level {name}", f"{graph.op_count} operations", graph_parts(graph))
        for name, graph in aot.levels.items()
    ]
    for record in aot.passes:
        about = f"{record.changed} changes" if record.changed else "no change"
        parts.append(details(f"pass {record.name}", about, pass_diff(record)))
    parts.append(
        details(
            "runtime metadata",
            "what the wrapper does around the graphs",
            metadata_parts(aot.metadata),
        )
    )
    return box(
        "ahead-of-time autograd", f"{headline} · by level: {levels}" if levels else headline, *parts
    )
