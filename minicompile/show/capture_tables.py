"""Capture: bytecode beside the graph it made, guards as a table, and why anything ran in eager."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from minicompile.debug.flow import LONG_FLOW
from minicompile.debug.history import Explanation, Timeline
from minicompile.dynamo.result import (
    Capture,
    GraphBreak,
    GraphInput,
    Guard,
    GuardFailure,
    InstructionRecord,
)
from minicompile.ops.display import count_text
from minicompile.ops.dtypes import value_text
from minicompile.ops.graph import call_text
from minicompile.show.graph_pictures import graph_parts
from minicompile.show.html import (
    bar,
    box,
    code,
    cut,
    details,
    facts,
    heading,
    shows,
    shows_many,
    table,
    text,
)
from minicompile.show.listing import headline, listing, source_cell, stripe
from minicompile.show.palette import BAD, FORWARD, GOOD, NEUTRAL, line_colour
from minicompile.show.reports import text_line


def guard_table(guards: Sequence[Guard]) -> str:
    rows = (
        [code(g.expression, wrap=True), text(g.kind), text(g.reason), source_cell(g.user_line)]
        for g in guards
    )
    return table(("check", "kind", "why", "line"), rows)


def failure_table(failures: Sequence[GuardFailure]) -> str:
    rows = (
        [
            text(f"recompile {f.recompile}, version {f.version}"),
            code(str(f).split("\n")[0], wrap=True),
            text(f.guard.reason),
            source_cell(f.user_line),
        ]
        for f in failures
    )
    return table(("where", "what happened", "why it is checked", "line"), rows)


def break_table(breaks: Sequence[GraphBreak]) -> str:
    rows = (
        [
            code(b.id),
            text(b.reason) + (f"<br><small>{text(b.explanation)}</small>" if b.explanation else ""),
            source_cell(b.user_line),
            text(b.hint),
            text(b.kind),
        ]
        for b in breaks
    )
    return table(("reason", "what happened", "line", "usual fix", "ran in eager"), rows)


shows_many(guard_table, "guard", Guard)
shows_many(failure_table, "failed guard", GuardFailure)
shows_many(break_table, "graph break", GraphBreak)


@shows("minicompile.dynamo.world.InstructionLog")
def bytecode_view(log: Sequence[InstructionRecord]) -> str:
    lines = map(text_line, str(log).split("\n"))
    return box("bytecode", count_text(len(log), "instruction"), listing(lines))


def flow_table(capture: Capture) -> str:
    """Each passage of the frame: its source line and instructions, beside the nodes that they made; then
    where the frame was cut. A long one shows the passages that made nodes."""
    nodes = {node.name: node for node in capture.graph.nodes}
    rows, long = [], len(capture.bytecode) > LONG_FLOW
    for passage in capture.passages():
        if long and not passage.nodes:
            continue
        hue = line_colour(passage.line) if passage.line is not None else NEUTRAL
        steps = (f"{r.opname} {r.argument}".strip() for r in passage.instructions)
        names = " · ".join(step.replace(" ", "\u00a0") for step in steps)
        left = (
            f'<div style="padding-left:{18 * min(passage.depth, 8)}px">{source_cell(passage.line)}<br>'
            f'<small style="font-family:monospace">{text(names)}</small></div>'
        )
        made = [nodes[name] for name in passage.nodes if name in nodes]
        rows.append([left, "<br>".join(code(typed(n), hue, wrap=True) for n in made)])
    if (why := capture.stopped_by) is not None:
        cut = f'<b style="color:{BAD}">✂ cut here: {text(why.reason)}</b> {code(why.id)}<br>'
        rows.append([cut + f"<small>{text(why.explanation)}</small>", "Python runs this"])
    return table(("line and instructions", "graph"), rows)


def input_table(inputs: Sequence[GraphInput]) -> str:
    rows = ([code(i.name), code(value_text(i.fake)), code(i.source.name)] for i in inputs)
    return table(("input", "type", "where it comes from"), rows)


shows_many(input_table, "input", GraphInput)


def typed(node: fx.Node) -> str:
    return f"{node.name}: {value_text(node.meta.get('val'))} = {call_text(node)}"


def symbol_table(capture: Capture) -> str:
    """What each symbol stands for, and why."""
    if (env := capture.shape_env) is None:
        return ""
    rows = (
        [*map(code, (s, env.text(s))), *map(text, (env.values(s), env.wishes[s], env.cause(s)))]
        for s in env.everything
    )
    shown = table(("symbol", "where it is read", "values", "why symbolic", "what fixed it"), rows)
    return details("symbols", "numbers that may vary", shown, opened=True)


def capture_parts(capture: Capture) -> str:
    """Bytecode beside the nodes it made, the graph as code, the guards and the symbols."""
    instructions, guards = len(capture.bytecode), capture.guards
    short = 0 < instructions <= LONG_FLOW
    flow = details("bytecode", f"{instructions} instructions", flow_table(capture), opened=short)
    operations = count_text(capture.graph.op_count, "operation")
    graph = details("graph", operations, graph_parts(capture.graph), opened=not short)
    checks = details("guards", f"{len(guards)} checks before reuse", guard_table(guards))
    return flow + graph + checks + symbol_table(capture)


@shows(Capture)
def capture_view(capture: Capture) -> str:
    inlined = capture.inlined
    calls = listing(stripe(text(name)) for name in inlined)
    effects = [("afterwards", effect) for effect in capture.side_effects]
    return box(
        *headline(capture),
        capture_parts(capture),
        details("inputs", f"{len(capture.inputs)} tensors and sizes", input_table(capture.inputs)),
        details("inlined calls", len(inlined), calls) if inlined else "",
        facts([("returns", capture.result), *effects]),
    )


def timeline_picture(timeline: Timeline) -> str:
    """A row for each version and a column from each miss to the next: a cross where a guard failed, a dot
    where the version was made, a bar of the calls answered."""

    def mark(sign: str, colour: str, title: object, said: object) -> str:
        shown = f'<b style="color:{colour}">{sign}</b> <small>{text(cut(str(said), 40))}</small>'
        return f'<span title="{text(title)}">{shown}</span>'

    stretches, rows = timeline.stretches, []
    most = max((count for _, answered in stretches for count in answered.values()), default=0)
    for number in (*filter(None, timeline.answered), 0):
        colours = (GOOD, FORWARD) if number else (BAD, NEUTRAL)
        row = [text(f"version {number}" if number else "in eager")]
        for miss, answered in stretches:
            failed = (f for f in miss.failures if f.version == number)
            cell = [mark("✗", BAD, f, f.guard.expression) for f in failed]
            if miss.made == number:
                said = miss.why or " ".join(["symbolic", *miss.symbolic] * bool(miss.symbolic))
                cell.append(mark("●", colours[0], f"{miss.seconds:.2f} s {said}", said))
            if count := answered.get(number):
                cell.append(f"{bar(count, most, colours[1], 12)} {count_text(count, 'call')}")
            row.append("<br>".join(cell))
        rows.append(row)
    return table(("", *(f"from call {miss.call}" for miss, _ in stretches)), rows)


@shows(Timeline)
def timeline_view(timeline: Timeline) -> str:
    failures = [failure for miss in timeline.misses for failure in miss.failures]
    guards = failure_table(failures) if failures else ""
    return box(*headline(timeline), timeline_picture(timeline), guards)


@shows(Explanation)
def explanation_view(explanation: Explanation) -> str:
    """What ran compiled and what in eager, why, and each graph."""
    captures, breaks = explanation.captures, explanation.breaks
    compiled = ("calls compiled", explanation.compiled_calls)
    parts = [facts([compiled, ("calls in eager", explanation.eager_calls)])]
    if explanation.limit_reached:
        parts.append("<p>The recompile limit is reached: new inputs run in eager.</p>")
    if breaks:
        parts += [heading("what ran in eager"), break_table(breaks)]
    for timeline in explanation.timelines:
        if len(timeline.misses) > 1:
            parts += [heading(f"the calls of {timeline.name}"), timeline_picture(timeline)]
    if explanation.failures:
        parts += [heading("why it was captured again"), failure_table(explanation.failures)]
    for number, capture in enumerate(captures, 1):
        operations = count_text(capture.graph.op_count, "operation")
        about = f"{operations}, {count_text(len(capture.guards), 'guard')}"
        if capture.stopped_by is not None:
            about += f", cut at [{capture.stopped_by.id}]"
        title, content = f"{number}. {capture.name}", capture_parts(capture)
        parts.append(details(title, about, content, opened=len(captures) < 8))
    return box(*headline(explanation), *parts)
