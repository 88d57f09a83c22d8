"""Scheduling: kernels before and after fusion, decisions with reasons, as slides too, memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minicompile.codegen.plan import CodeLine
from minicompile.debug.provenance import operation_line
from minicompile.debug.why import FusionSteps
from minicompile.lowering.ir import Operation
from minicompile.ops.display import bytes_text, count_text
from minicompile.scheduling.nodes import (
    Block,
    ExternKernelSchedulerNode,
    FusedSchedulerNode,
    FusionDecision,
    MemoryPlan,
    Schedule,
    ScheduledNode,
    SchedulerNode,
)
from minicompile.show.graphviz import Cluster, Diagram, Edge, Node, picture
from minicompile.show.html import (
    beside,
    box,
    code,
    details,
    heading,
    image,
    shows,
    shows_many,
    steps,
    table,
    text,
)
from minicompile.show.listing import code_listing
from minicompile.show.loop_tables import ranges_text
from minicompile.show.palette import BAD, FORWARD, GOOD, NEUTRAL, colour, tint

FULL_PICTURE = 60
"""Schedules with more nodes than this are not drawn."""

AnyNode = SchedulerNode | ScheduledNode


def decision_table(decisions: Sequence[FusionDecision]) -> str:
    verdicts = {True: (GOOD, "fused"), False: (BAD, "kept apart")}
    rows = (
        [
            str(number),
            '<b style="color:{}">{}</b>'.format(*verdicts[d.fused]),
            code(d.producer, wrap=True),
            code(d.consumer, wrap=True),
            text(d.kind.replace("_", " ")),
            bytes_text(d.score),
            str(d.distance),
            text("" if d.operations is None else str(d.operations)),
            text(d.reason),
        ]
        for number, d in enumerate(decisions)
    )
    asked = ("verdict", "producer", "consumer", "kind")
    return table(("", *asked, "saves", "distance", "operations", "why"), rows, (0, 5, 6, 7))


shows_many(decision_table, "fusion decision", FusionDecision)


WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 960, 320, 70, 8, 44
"""The picture of a memory plan in pixels, and the room for its axes."""

HOMES = {"own": FORWARD, "library": NEUTRAL, "output": GOOD}


def memory_view(memory: MemoryPlan, names: Sequence[str]) -> str:
    """Everything about a plan but its headline; `names` says what runs in each step."""
    asked, done = memory.decisions, sum(d.done for d in memory.decisions)
    about = f"{done} taken, {len(asked) - done} not"
    lines = "<br>".join(f"<small>{text(fact)}</small>" for fact in memory.facts()[1:])
    rows = "<br>".join(text(decision) for decision in asked)
    return (
        lines
        + (timeline(memory) if memory.blocks else "")
        + memory_table(memory, names)
        + (details("in place", about, f"<code>{rows}</code>", len(asked) <= 20) if asked else "")
    )


def offsets_of(blocks: Sequence[Block]) -> list[int]:
    """Where each block would begin if all were one piece of memory: those alive at the same time lie apart.

    The largest first, each at the lowest place that is free all its life.
    """
    offsets: dict[int, int] = {}
    for number in sorted(range(len(blocks)), key=lambda n: -blocks[n].bytes):
        block, offset = blocks[number], 0
        for low, n in sorted((low, n) for n, low in offsets.items()):
            other = blocks[n]
            together = other.born <= block.dies and block.born <= other.dies
            if together and low < offset + block.bytes:
                offset = max(offset, low + other.bytes)
        offsets[number] = offset
    return [offsets[n] for n in range(len(blocks))]


def timeline(memory: MemoryPlan) -> str:
    """Memory over time: one rectangle for each piece, as wide as its life, as high as its size."""
    count, ground = max(len(memory.live_bytes), 1), HEIGHT - BOTTOM
    places = list(zip(memory.blocks, offsets_of(memory.blocks)))
    top = max([1, memory.peak_bytes, *(offset + block.bytes for block, offset in places)])
    across, up = (WIDTH - LEFT) / count, (ground - TOP) / top
    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']

    def label(x: float, y: float, words: str, anchor: str = "start") -> None:
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text(words)}</text>')

    for block, offset in places:
        x, width = LEFT + block.born * across, (block.dies - block.born + 1) * across
        y, height = ground - (offset + block.bytes) * up, block.bytes * up
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        hue = HOMES[block.home]
        parts.append(f'<rect {place} fill="{tint(hue)}" stroke="{hue}" stroke-width="0.6"/>')
        words = next(
            (n for n in (" → ".join(block.buffers), block.buffers[0]) if 6 * len(n) < width), ""
        )
        if height >= 11 and words:
            label(x + 3, y + height / 2 + 4, words)
    edges = [(step + side, live) for step, live in enumerate(memory.live_bytes) for side in (0, 1)]
    line = " ".join(f"{LEFT + x * across:.1f},{ground - live * up:.1f}" for x, live in edges)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{BAD}" stroke-width="1.5"/>')
    for level in sorted({0, memory.peak_bytes}):
        label(LEFT - 4, ground - level * up + 4, bytes_text(level), "end")
    for step in range(0, count, max(count // 16, 1)):
        label(LEFT + (step + 0.5) * across, ground + 13, str(step), "middle")
    for number, (name, hue) in enumerate([*HOMES.items(), ("alive in all", BAD)]):
        x, y = LEFT + 110 * number, HEIGHT - 18
        parts.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{hue}"/>')
        label(x + 14, y + 9, name)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        'font-family="sans-serif" font-size="10" fill="#334155">'
    )
    about = f"{count_text(len(memory.blocks), 'piece')} of memory over {count_text(count, 'step')}"
    return image("".join([head, *parts, "</svg>"]), about)


def memory_table(memory: MemoryPlan, names: Sequence[str]) -> str:
    """One row a step: what runs, what it allocates and frees, and what is alive while it runs."""
    rows = (
        [
            str(i),
            code(name),
            code(", ".join(map(str, new))),
            code(", ".join(dead)),
            bytes_text(live),
        ]
        for i, (name, new, dead, live) in enumerate(
            zip(names, memory.allocate, memory.free, memory.live_bytes)
        )
    )
    return table(("step", "runs", "allocates", "frees", "alive"), rows, numbers=(0, 4))


@shows(MemoryPlan)
def plan_view(memory: MemoryPlan) -> str:
    return box("memory plan", memory.facts()[0], memory_view(memory, [""] * len(memory.allocate)))


def operations(node: AnyNode) -> list[Operation]:
    """What a node computes, in the loop IR."""
    if isinstance(node, ExternKernelSchedulerNode):
        return [node.kernel]
    return [n.buffer for n in (node.nodes if isinstance(node, FusedSchedulerNode) else [node])]


def caption(node: AnyNode) -> str:
    """An extern call's operator, or a kernel's loops: `512 × 128`."""
    if isinstance(node, ExternKernelSchedulerNode):
        return str(node.kernel.op)
    loops = node.body if isinstance(node, SchedulerNode) else node
    return ranges_text(loops.ranges.values(), list(loops.reduction_ranges.values()) or None)


def operation_lines(nodes: Iterable[AnyNode]) -> str:
    found = [operation for node in nodes for operation in operations(node)]
    return code_listing([CodeLine(operation_line(o), o.origins) for o in found])


def node_title(node: ScheduledNode) -> str:
    """What a scheduled node is, in one line."""
    if isinstance(node, ExternKernelSchedulerNode):
        return f"extern · {caption(node)} · {node.kernel.reason}"
    count = len(node.nodes)
    return f"kernel · {caption(node)}" + (f" · {count} fused" if count > 1 else "")


def frame(title: str, lines: str) -> str:
    return f'<div class="grp"><em>{text(title)}</em>{lines}</div>'


def group(node: ScheduledNode) -> str:
    """A scheduled node as a frame around the lines of what it computes."""
    return frame(node_title(node), operation_lines([node]))


def diagram(schedule: Schedule) -> Diagram:
    """Nodes and what flows between them, framed by kernel."""
    clusters = tuple(
        Cluster(f"kernel {i}", tuple(n.name for n in kernel.nodes))
        for i, kernel in enumerate(schedule.nodes)
        if isinstance(kernel, FusedSchedulerNode) and len(kernel.nodes) > 1
    )
    boxes, written = [], {}
    for node in schedule.before:
        rounded, hue = isinstance(node, SchedulerNode), colour(node.origins) or ""
        boxes.append(Node(node.name, node.name, caption(node), hue, rounded=rounded))
        written.update({w.buffer: node.name for w in node.writes})
    edges = tuple(
        Edge(written[read.buffer], node.name)
        for node in schedule.before
        for read in node.reads
        if written.get(read.buffer, node.name) != node.name
    )
    return Diagram(f"schedule of {schedule.graph.name}", tuple(boxes), edges, clusters)


@shows(Schedule)
def schedule_view(schedule: Schedule) -> str:
    kernels, decisions, fused = len(schedule.kernels), schedule.decisions, len(schedule.fused)
    counts = (
        f"{len(schedule.before)} nodes → {count_text(kernels, 'kernel')} and "
        f"{count_text(len(schedule.nodes) - kernels, 'extern call')} · "
        f"fusion saves {bytes_text(schedule.saved_bytes)} of traffic"
    )
    asked = f"{fused} fused, {len(decisions) - fused} kept apart, in the order they were made"
    small = len(schedule.before) <= FULL_PICTURE
    drawn = picture(diagram(schedule)) if small else ""
    names = [" + ".join(o.name for o in operations(node)) for node in schedule.nodes]
    return box(
        f"schedule of {schedule.graph.name}",
        counts,
        beside(
            ("before: one node for each buffer", operation_lines(schedule.before)),
            ("after: one frame for each kernel or call", "".join(map(group, schedule.nodes))),
        ),
        details("picture", "what flows between the nodes", drawn) if drawn else "",
        details("fusion decisions", asked, decision_table(decisions), len(decisions) <= 40),
        heading(f"memory plan, {schedule.memory.facts()[0]}"),
        memory_view(schedule.memory, names),
    )


MOST_LOOPS = 150
"""With more steps, a slide leaves out the loops that it is about."""


def slide(decision: FusionDecision, loops: bool) -> str:
    """The answer and its numbers, and what the two compute."""
    producers, consumers = map(operation_lines, (decision.producers, decision.consumers))
    return (
        f'<p style="border-left:4px solid {GOOD if decision.fused else BAD};padding-left:6px">'
        f"{text(decision.reason)}<br><small>{text(decision.numbers())}</small></p>"
        + (beside(("producer", producers), ("consumer", consumers)) if loops else "")
    )


@shows(FusionSteps)
def run_view(run: FusionSteps) -> str:
    slides = []
    for number, decision in enumerate(run):
        verdict = "fused" if decision.fused else "kept apart"
        title = f"{number}: {verdict} {decision.producer} + {decision.consumer}"
        saved = f"{bytes_text(decision.score)} of traffic"
        slides.append((title, saved, slide(decision, len(run) <= MOST_LOOPS)))
    return box(run.title, run.counts, steps(slides))
