"""Capture: bytecode beside the graph it made, guards as a table, and why anything ran in eager."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from minicompile.dynamo.result import (
    Capture,
    Explanation,
    GraphBreak,
    Guard,
    GuardFailure,
    InstructionRecord,
)
from minicompile.ops.dtypes import value_text
from minicompile.ops.graph import origins_of
from minicompile.ops.origin import SourceLine, source_lines
from minicompile.show.graphs import drawing, graph_code
from minicompile.show.html import box, code, columns, details, facts, heading, shows, table, text
from minicompile.show.listing import headline, listing, source_cell, stripe
from minicompile.show.palette import NEUTRAL, line_colour
from minicompile.show.syntax import highlight


def guard_table(guards: Sequence[Guard]) -> str:
    rows = (
        [code(g.expression, wrap=True), text(g.kind), text(g.reason), source_cell(g.user_line)]
        for g in guards
    )
    return table(("check", "kind", "why", "line"), rows)


def grouped_guards(guards: Sequence[Guard]) -> str:
    """Guards by kind: a model has hundreds, most of them alike."""
    if len(guards) <= 12:
        return guard_table(guards)
    kinds: dict[str, list[Guard]] = {}
    for guard in guards:
        kinds.setdefault(guard.kind, []).append(guard)
    return "".join(
        details(kind, f"{len(group)} guards", guard_table(group)) for kind, group in kinds.items()
    )


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
    rows = ([text(b.kind), text(b.reason), source_cell(b.user_line), text(b.hint)] for b in breaks)
    return table(("ran in eager", "reason", "line", "way out"), rows)


shows(Guard)(lambda g: box("guard", "must hold for the capture to be used again", guard_table([g])))
shows(GuardFailure)(
    lambda f: box("guard failed", "the captured graph could not be used again", failure_table([f]))
)
shows(GraphBreak)(lambda b: box("graph break", f"{b.kind} ran in eager", break_table([b])))


def bytecode_lines(records: Sequence[InstructionRecord]) -> Iterator[str]:
    """Instructions as they were interpreted: under their source line, indented by call depth, with the
    nodes they made as chips."""
    shown = None
    for record in records:
        indent, line = "  " * record.depth, record.line
        at, hue = ([], NEUTRAL) if line is None else ([line], line_colour(line))
        if line is not None and line != shown:
            shown = line
            comment = f"{indent}# {line.place} {line.text}"
            yield stripe(highlight(comment, "python")[0], at, "")
        chip = f' <span class="chip" style="border:1px solid {hue}">'
        made = "".join(f"{chip}{text(name)}</span>" for name in record.nodes)
        name = f'{indent}<span class="fn">{text(record.opname)}</span>'
        about = f"call depth {record.depth}, {record.stack_after} values on the stack after it"
        told = f"{line or ''}\n{about}".strip()
        yield stripe(f"{name} {text(record.argument)}{made}", at, record.offset, told)


def user_lines(capture: Capture) -> str:
    """Each line of source with the nodes it became."""
    made: dict[SourceLine, list[str]] = {}
    for node in capture.graph.nodes:
        for line in source_lines(origins_of(node)):
            made.setdefault(line, []).append(node.name)
    rows = ([source_cell(line), code(", ".join(made[line]), wrap=True)] for line in sorted(made))
    return table(("line", "nodes"), rows)


def input_table(capture: Capture) -> str:
    values = {n.name: n.meta.get("val") for n in capture.graph.nodes if n.op == "placeholder"}
    rows = (
        [code(i.name), code(value_text(values.get(i.name, i.fake))), code(i.source.name)]
        for i in capture.inputs
    )
    return table(("input", "type", "where it comes from"), rows)


@shows(Capture)
def capture_view(capture: Capture) -> str:
    inlined, guards = capture.inlined, capture.guards
    beside = graph_code(capture.graph)
    if capture.bytecode:
        count = heading(f"bytecode, {len(capture.bytecode)} instructions")
        bytecode = count + listing(bytecode_lines(capture.bytecode))
        beside = columns(bytecode, heading("graph") + beside)
    calls = listing(stripe(text(name)) for name in inlined)
    return box(
        *headline(capture),
        beside,
        heading("source lines"),
        user_lines(capture),
        details("picture", "the graph, drawn", drawing(capture.graph)),
        details("inputs", f"{len(capture.inputs)} tensors and sizes", input_table(capture)),
        details("guards", f"{len(guards)} checks before reuse", grouped_guards(guards)),
        details("inlined calls", len(inlined), calls) if inlined else "",
        facts(
            [
                ("returns", capture.result),
                *(("afterwards", effect) for effect in capture.side_effects),
            ]
        ),
    )


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
    if explanation.failures:
        parts += [heading("why it was captured again"), failure_table(explanation.failures)]
    for capture in captures:
        about = f"{capture.graph.op_count} operations, {len(capture.guards)} guards"
        content = graph_code(capture.graph) + grouped_guards(capture.guards)
        parts.append(details(f"graph of {capture.name}", about, content, opened=len(captures) == 1))
    return box(*headline(explanation), *parts)
