"""Scheduling: kernels before and after fusion, every decision with its reason, memory over time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minicompile.lowering.ir import Operation
from minicompile.ops.display import bytes_text, count_text
from minicompile.ops.origin import source_lines
from minicompile.provenance import operation_line
from minicompile.scheduling.nodes import (
    Dependency,
    ExternKernelSchedulerNode,
    FusedSchedulerNode,
    FusionDecision,
    MemoryPlan,
    Schedule,
    ScheduledNode,
    SchedulerNode,
)
from minicompile.show.graphviz import Cluster, Diagram, Edge, Node, picture, unique
from minicompile.show.html import (
    bar,
    box,
    code,
    columns,
    details,
    heading,
    listing,
    shows,
    source_cell,
    stripe,
    table,
    text,
)
from minicompile.show.loops import body_listing
from minicompile.show.palette import BAD, FORWARD, GOOD, colour
from minicompile.show.syntax import highlight

FULL_PICTURE = 60
"""Schedules with more nodes than this are drawn by kernel."""


def ranges_of(node: SchedulerNode | FusedSchedulerNode) -> str:
    """`512 × 128`, with `over` before what is reduced."""
    if isinstance(node, SchedulerNode):
        ranges, reduced = node.body.ranges, node.body.reduction_ranges
    else:
        ranges, reduced = node.ranges, node.reduction_ranges
    shown = " × ".join(map(str, ranges.values())) or "1"
    return shown + (f" over {' × '.join(map(str, reduced.values()))}" if reduced else "")


def dependency_table(reads: Sequence[Dependency], writes: Sequence[Dependency]) -> str:
    def row(kind: str, dep: Dependency) -> list[str]:
        ranges = ", ".join(f"{v} < {s}" for v, s in dep.ranges)
        return [
            kind,
            code(dep.buffer),
            code(dep.index if dep.index is not None else "any"),
            code(ranges),
        ]

    rows = [row("reads", d) for d in reads] + [row("writes", d) for d in writes]
    return table(("", "buffer", "elements", "for"), rows)


@shows(SchedulerNode)
def node_view(node: SchedulerNode) -> str:
    about = f"{'reduction' if node.is_reduction else 'pointwise'} · {ranges_of(node)}"
    return box(node.name, about, dependency_table(node.reads, node.writes), body_listing(node.body))


@shows(ExternKernelSchedulerNode)
def extern_view(node: ExternKernelSchedulerNode) -> str:
    about = f"extern {node.kernel.op} · {node.kernel.reason}"
    return box(
        node.name, about, dependency_table(node.reads, node.writes), source_cell(node.origins)
    )


@shows(FusedSchedulerNode)
def fused_view(node: FusedSchedulerNode) -> str:
    about = f"one kernel · {ranges_of(node)}"
    rows = [
        [
            code(n.name, colour(n.origins)),
            level,
            code(operation_line(n.buffer), wrap=True),
            source_cell(n.origins),
        ]
        for n, level in zip(node.nodes, node.levels, strict=True)
    ]
    bodies = "".join(
        details(
            f"body of {n.name}", f"{level} level, over the common variables", body_listing(body)
        )
        for n, body, level in zip(node.nodes, node.bodies, node.levels, strict=True)
    )
    inside = table(("node", "level", "computes", "line"), rows)
    return box(
        " + ".join(n.name for n in node.nodes),
        about,
        inside,
        dependency_table(node.reads, node.writes),
        bodies,
    )


def decision_row(number: int, decision: FusionDecision) -> list[str]:
    verdict = (
        f'<b style="color:{GOOD}">fused</b>'
        if decision.fused
        else f'<b style="color:{BAD}">kept apart</b>'
    )
    return [
        str(number),
        verdict,
        code(decision.producer, wrap=True),
        code(decision.consumer, wrap=True),
        text(decision.kind.replace("_", " ")),
        bytes_text(decision.score),
        text(decision.reason),
    ]


DECISION_HEAD = ("", "verdict", "producer", "consumer", "kind", "saves", "why")


def decision_table(decisions: Sequence[FusionDecision], first: int = 0) -> str:
    rows = (decision_row(i, d) for i, d in enumerate(decisions, first))
    return table(DECISION_HEAD, rows, numbers=(0, 5))


@shows(FusionDecision)
def decision_view(decision: FusionDecision) -> str:
    return box("fusion decision", "may these two run as one kernel?", decision_table([decision]))


def memory_table(memory: MemoryPlan, names: Sequence[str] = ()) -> str:
    """One row a step: what runs, what it allocates and frees, and what is alive while it runs."""
    rows = []
    for i, (new, dead) in enumerate(zip(memory.allocate, memory.free, strict=True)):
        made = ", ".join(a.buffer + (f" in {a.reuses}" if a.reuses else "") for a in new)
        live = memory.live_bytes[i] if i < len(memory.live_bytes) else 0
        peak = BAD if live == memory.peak_bytes else FORWARD
        rows.append(
            [
                str(i),
                code(names[i]) if i < len(names) else "",
                code(made),
                code(", ".join(dead)),
                bytes_text(live),
                bar(live, memory.peak_bytes, peak),
            ]
        )
    return table(("step", "runs", "allocates", "frees", "alive", ""), rows, numbers=(0, 4))


def memory_about(memory: MemoryPlan) -> str:
    reused = sum(1 for step in memory.allocate for a in step if a.reuses)
    return (
        f"peak {bytes_text(memory.peak_bytes)} · {count_text(reused, 'buffer')} in reused memory · "
        f"{len(memory.internal)} never in memory"
    )


@shows(MemoryPlan)
def memory_view(memory: MemoryPlan) -> str:
    return box("memory plan", memory_about(memory), memory_table(memory))


def operations(node: SchedulerNode | ScheduledNode) -> list[Operation]:
    """What a node computes, in the loop IR."""
    if isinstance(node, ExternKernelSchedulerNode):
        return [node.kernel]
    return [n.buffer for n in (node.nodes if isinstance(node, FusedSchedulerNode) else [node])]


def caption(node: SchedulerNode | ScheduledNode) -> str:
    """An extern call's operator, or a kernel's loops."""
    return str(node.kernel.op) if isinstance(node, ExternKernelSchedulerNode) else ranges_of(node)


def operation_lines(nodes: Iterable[SchedulerNode | ScheduledNode]) -> str:
    found = (operation for node in nodes for operation in operations(node))
    return listing(
        stripe(highlight(operation_line(o), "python")[0], source_lines(o.origins)) for o in found
    )


def group(node: ScheduledNode) -> str:
    """A scheduled node as a frame around the buffers it computes."""
    if isinstance(node, ExternKernelSchedulerNode):
        head = f"extern · {caption(node)} · {node.kernel.reason}"
    else:
        count = len(node.nodes)
        head = f"kernel · {caption(node)}" + (f" · {count} fused" if count > 1 else "")
    return f'<div class="grp"><em>{text(head)}</em>{operation_lines([node])}</div>'


def diagram(schedule: Schedule) -> Diagram:
    """Nodes and what flows between them, framed by kernel; large schedules by kernel alone."""
    nodes: Sequence[SchedulerNode | ScheduledNode] = schedule.before
    clusters: list[Cluster] = []
    if len(nodes) > FULL_PICTURE:
        nodes = schedule.nodes
    else:
        clusters = [
            Cluster(f"kernel {i}", tuple(n.name for n in node.nodes))
            for i, node in enumerate(schedule.nodes)
            if isinstance(node, FusedSchedulerNode) and len(node.nodes) > 1
        ]
    names = [
        f"kernel {i}: {count_text(len(node.nodes), 'node')}"
        if isinstance(node, FusedSchedulerNode)
        else node.name
        for i, node in enumerate(nodes)
    ]
    written = {w.buffer: name for node, name in zip(nodes, names) for w in node.writes}
    boxes = tuple(
        Node(
            name,
            name,
            caption(node),
            colour(node.origins) or "",
            rounded=not isinstance(node, ExternKernelSchedulerNode),
        )
        for node, name in zip(nodes, names)
    )
    edges = [
        Edge(written[read.buffer], name)
        for node, name in zip(nodes, names)
        for read in node.reads
        if written.get(read.buffer, name) != name
    ]
    return Diagram(f"schedule of {schedule.graph.name}", boxes, unique(edges), tuple(clusters))


def step_names(schedule: Schedule) -> list[str]:
    return [" + ".join(o.name for o in operations(node)) for node in schedule.nodes]


def schedule_counts(schedule: Schedule) -> str:
    externs = len(schedule.nodes) - len(schedule.kernels)
    saved = sum(d.score for d in schedule.decisions if d.fused)
    return (
        f"{len(schedule.before)} nodes → {count_text(len(schedule.kernels), 'kernel')} and "
        f"{count_text(externs, 'extern call')} · "
        f"fusion saves {bytes_text(saved)} of traffic"
    )


@shows(Schedule)
def schedule_view(schedule: Schedule) -> str:
    decisions = schedule.decisions
    fused = [d for d in decisions if d.fused]
    apart = [d for d in decisions if not d.fused]
    asked = details(
        "fusion decisions",
        f"{len(fused)} fused, {len(apart)} kept apart, in the order they were made",
        decision_table(decisions),
        opened=len(decisions) <= 40,
    )
    drawn = picture(diagram(schedule), f"schedule: {schedule_counts(schedule)}")
    return box(
        f"schedule of {schedule.graph.name}",
        schedule_counts(schedule),
        columns(
            heading("before: one node for each buffer") + operation_lines(schedule.before),
            heading("after: one frame for each kernel or call")
            + "".join(map(group, schedule.nodes)),
        ),
        details("picture", "what flows between the nodes", drawn) if drawn else "",
        asked,
        heading(f"memory, {memory_about(schedule.memory)}"),
        memory_table(schedule.memory, step_names(schedule)),
    )
