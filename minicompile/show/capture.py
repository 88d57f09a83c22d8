"""Capture: bytecode beside the graph it made, guards as a table, and why anything ran in eager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minicompile.dynamo.result import Capture, GraphBreak, Guard, GuardFailure, InstructionRecord
from minicompile.ops.display import count_text
from minicompile.ops.dtypes import value_text
from minicompile.ops.graph import origins_of
from minicompile.ops.origin import NO_ORIGINS, SourceLine, source_lines
from minicompile.show.graphs import drawing, graph_code
from minicompile.show.html import (
    box,
    chip,
    code,
    columns,
    cut,
    details,
    facts,
    heading,
    listing,
    short_place,
    shows,
    source_cell,
    stripe,
    table,
    text,
)
from minicompile.show.palette import NEUTRAL, line_colour
from minicompile.show.syntax import highlight


def guard_row(guard: Guard) -> list[str]:
    at = source_cell(NO_ORIGINS, guard.user_line)
    return [code(guard.expression, wrap=True), text(guard.kind), text(guard.reason), at]


def guard_table(guards: Sequence[Guard]) -> str:
    return table(("check", "kind", "why", "line"), map(guard_row, guards))


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


@shows(Guard)
def guard_view(guard: Guard) -> str:
    return box("guard", "must hold for the capture to be used again", guard_table([guard]))


def failure_table(failures: Sequence[GuardFailure]) -> str:
    return table(
        ("what happened", "why it is checked", "line"),
        (
            [
                code(str(failure).split("\n")[0], wrap=True),
                text(failure.guard.reason),
                source_cell(NO_ORIGINS, failure.guard.user_line),
            ]
            for failure in failures
        ),
    )


@shows(GuardFailure)
def failure_view(failure: GuardFailure) -> str:
    about = "the captured graph could not be used again"
    return box("guard failed", about, failure_table([failure]))


def break_row(found: GraphBreak) -> list[str]:
    at = source_cell(NO_ORIGINS, found.user_line)
    return [text(found.kind), text(found.reason), at, text(found.hint)]


def break_table(breaks: Sequence[GraphBreak]) -> str:
    return table(("ran in eager", "reason", "line", "way out"), map(break_row, breaks))


@shows(GraphBreak)
def break_view(found: GraphBreak) -> str:
    return box("graph break", f"{found.kind} ran in eager", break_table([found]))


def instruction(record: InstructionRecord) -> str:
    """One instruction, indented by call depth, with the nodes it made as chips."""
    colour = line_colour(record.line) if record.line is not None else NEUTRAL
    made = "".join(" " + chip(name, colour) for name in record.nodes)
    indent = "  " * record.depth
    shown = f'{indent}<span class="fn">{text(record.opname)}</span> {text(record.argument)}{made}'
    at = [record.line] if record.line is not None else []
    depth = f"call depth {record.depth}, {record.stack_after} values on the stack after it"
    return stripe(shown, at, record.offset, f"{record.line or ''}\n{depth}".strip())


def bytecode_listing(records: Sequence[InstructionRecord]) -> str:
    """Instructions in the order they were interpreted, headed by the lines they belong to."""
    out, shown = [], None
    for record in records:
        if record.line is not None and record.line != shown:
            shown = record.line
            comment = f"# {record.line.place} {record.line.text}"
            out.append(
                stripe(highlight("  " * record.depth + comment, "python")[0], [record.line], "")
            )
        out.append(instruction(record))
    return listing(out)


def user_lines(capture: Capture) -> str:
    """Each line of source with the nodes it became."""
    made: dict[SourceLine, list[str]] = {}
    for node in capture.graph.nodes:
        for line in source_lines(origins_of(node)):
            made.setdefault(line, []).append(node.name)
    return table(
        ("line", "code", "nodes"),
        (
            [
                f'<span title="{text(line)}">{text(short_place(line))}</span>',
                code(cut(line.text or line.function), line_colour(line)),
                code(", ".join(made[line]), wrap=True),
            ]
            for line in sorted(made)
        ),
    )


def input_table(capture: Capture) -> str:
    types = {n.name: n for n in capture.graph.nodes if n.op == "placeholder"}
    rows = []
    for given in capture.inputs:
        node = types.get(given.name)
        shown = "" if node is None else value_text(node.meta.get("val", given.fake))
        rows.append([code(given.name), code(shown), code(given.source.name)])
    return table(("input", "type", "where it comes from"), rows)


@shows(Capture)
def capture_view(capture: Capture) -> str:
    about = (
        f"{count_text(capture.graph.op_count, 'operation')} · {count_text(len(capture.inputs), 'input')} · "
        f"{count_text(len(capture.guards), 'guard')} · {count_text(len(capture.inlined), 'call')} inlined"
    )
    beside = graph_code(capture.graph)
    if capture.bytecode:
        beside = columns(
            heading(f"bytecode, {len(capture.bytecode)} instructions")
            + bytecode_listing(capture.bytecode),
            heading("graph") + beside,
        )
    notes = facts(
        [
            ("returns", capture.result),
            *(("afterwards", effect) for effect in getattr(capture, "side_effects", ())),
            *(("note", note) for note in capture.notes),
        ]
    )
    parts = [
        beside,
        heading("source lines"),
        user_lines(capture),
        details("picture", "the graph, drawn", drawing(capture.graph)),
        details("inputs", f"{len(capture.inputs)} tensors and sizes", input_table(capture)),
        details(
            "guards", f"{len(capture.guards)} checks before reuse", grouped_guards(capture.guards)
        ),
    ]
    if capture.inlined:
        calls = listing([stripe(text(name)) for name in capture.inlined])
        parts.append(details("inlined calls", len(capture.inlined), calls))
    return box(f"capture of {capture.name}", about, *parts, notes)


@shows("minicompile.dynamo.result.Explanation")
def explanation_view(explanation: Any) -> str:
    """What ran compiled and what in eager, why, and each graph."""
    captures: Sequence[Capture] = explanation.captures
    calls = [
        ("calls compiled", explanation.compiled_calls),
        ("calls in eager", explanation.eager_calls),
    ]
    parts = [facts(calls)]
    if explanation.limit_reached:
        parts.append("<p>The recompile limit is reached: new inputs run in eager.</p>")
    if explanation.breaks:
        parts += [heading("what ran in eager"), break_table(explanation.breaks)]
    if explanation.failures:
        parts += [heading("why it was captured again"), failure_table(explanation.failures)]
    for capture in captures:
        about = f"{capture.graph.op_count} operations, {len(capture.guards)} guards"
        content = graph_code(capture.graph) + grouped_guards(capture.guards)
        parts.append(details(f"graph of {capture.name}", about, content, opened=len(captures) == 1))
    about = (
        f"{count_text(len(captures), 'graph')} · {count_text(explanation.op_count, 'operation')} · "
        f"{count_text(explanation.guard_count, 'guard')} · {count_text(len(explanation.breaks), 'break')}"
    )
    return box(f"explanation of {explanation.name}", about, *parts)
