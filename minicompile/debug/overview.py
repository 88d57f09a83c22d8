"""A trace in one screen: each stage with a count, and the most memory that eager would hold at once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import sympy
from torch import fx

from minicompile.aot.result import Partition
from minicompile.lowering.context import tensor_layouts
from minicompile.ops.display import bytes_text, count_text, method
from minicompile.ops.graph import Graph, unpacks
from minicompile.ops.nodes import is_view
from minicompile.pipeline_result import CompiledStages, Trace
from minicompile.shapes.expr import size_hint


@dataclass(frozen=True)
class Room:
    """One stop of the corridor: its stage's name, what it is called, and a count for the strip."""

    stage: str
    title: str
    count: str


def saving(partition: Partition) -> str:
    """A partition in one line."""
    return (
        f"{partition.method} partition: saves {count_text(len(partition.saved), 'value')}, "
        f"{bytes_text(partition.saved_bytes)} (backward reads {bytes_text(partition.default_bytes)}), "
        f"computes {count_text(len(partition.recomputed), 'operation')} again"
    )


def compiled_rooms(stages: CompiledStages) -> list[Room]:
    """The rooms after AOT of one graph."""
    schedule, externs = stages.schedule, len(stages.loops.externs)
    buffers = count_text(len(stages.loops.operations) - externs, "buffer")
    saved = schedule.saved_bytes
    nodes = f"{len(schedule.before)} → {count_text(len(schedule.nodes), 'node')}"
    kernels = count_text(len(stages.kernels), "kernel")
    lines = count_text(sum(len(kernel.lines) for kernel in stages.kernels), "line")
    return [
        Room("loops", "Loops", f"{buffers}, {externs} extern"),
        Room("schedule", "Schedule", nodes + (f", −{bytes_text(saved)}" if saved else "")),
        Room("kernels", "Kernels", f"{kernels}, {lines}"),
        Room("wrapper", "Wrapper", count_text(len(stages.wrapper.lines), "line")),
    ]


@method(Trace, "rooms")
def rooms(trace: Trace) -> list[Room]:
    """The corridor with its counts."""
    aot, graph = trace.aot, trace.capture.graph
    out = [
        Room("source", "Python", count_text(len(trace.source_lines()), "line")),
        Room("bytecode", "Bytecode", f"{len(trace.capture.bytecode)} instr"),
        Room("capture", "Graph", count_text(graph.op_count, "op")),
    ]
    if aot is not None:
        if aot.joint is not None:
            out.append(Room("joint", "Joint", count_text(aot.joint.op_count, "op")))
        backward = f" + {aot.backward.op_count} backward" if aot.backward is not None else ""
        out.append(Room("aot", "ATen", f"{aot.forward.op_count}{backward} ops"))
    for name, compiled in trace.graphs.items():
        out += [replace(room, stage=f"{name}.{room.stage}") for room in compiled_rooms(compiled)]
    return out


@method(Trace, "overview")
def overview(trace: Trace) -> str:
    """The rooms, and the expression that gives each one's object."""
    lines = [f"trace of {trace.name}"]
    access = {"source": "", "bytecode": "trace.capture.bytecode", "joint": "trace.aot.joint"}
    for room in rooms(trace):
        path = access.get(room.stage, f"trace.{room.stage.removeprefix('forward.')}")
        graph, _, stage = room.stage.rpartition(".")
        if "_" in graph:
            path = f'trace.graph("{graph}").{stage}'
        title = room.title + (" (backward)" if room.stage.startswith("backward") else "")
        lines.append(f"  {title:<20} {room.count:<28} {path}".rstrip())
    if trace.aot is not None and trace.aot.partition is not None:
        lines.append("  " + saving(trace.aot.partition))
    hint = "print a stage to read it; trace.from_line(n) follows a line of source; trace.explore() shows"
    return "\n".join(
        [*lines, "", hint + " stages side by side; trace.save(folder) writes everything"]
    )


# -- eager's memory


@method(Trace, "eager_bytes")
def eager_bytes(trace: Trace) -> int:
    """Most bytes alive at once if eager ran the forward graph, at the sizes of the trace."""
    assert trace.aot is not None
    return eager_peak(trace.aot.forward, trace.loops.size_hints)


def eager_peak(graph: Graph, hints: Mapping[sympy.Symbol, int]) -> int:
    """Most bytes alive at once if operators ran one by one: results until their last use, outputs to the end.

    Views keep what they look at alive. Inputs are the caller's.
    """

    def owner(node: fx.Node) -> fx.Node:
        looks_at_another = is_view(node) or unpacks(node)
        return owner(node.all_input_nodes[0]) if looks_at_another else node

    last_use = {owner(n): node for node in graph.nodes for n in (node, *node.all_input_nodes)}
    change: Counter[fx.Node] = Counter()
    for node, last in last_use.items():
        layouts = tensor_layouts(node.meta.get("val")) if node.op == "call_function" else []
        size = sum(size_hint(x.numel, hints) * x.dtype.itemsize for x in layouts if x is not None)
        change[node] += size
        change[last.next] -= size
    return max(itertools.accumulate(change[node] for node in graph.nodes))
