"""What changed between two stages, by a pass, or between two traces.

    Point   := name, subject, the point that it is compared with: a place in the corridor
    DiffRow := part, status, before | None, after | None, cause, note
    Diff    := title, rows, facts about both sides
    Steps   := a Diff for each step of the corridor

`trace.diff` and `trace.steps` give these. Both sides are lists of pieces (debug/provenance.py), which difflib
aligns: first by their text, and what that leaves by their text without names, by name, and by source line.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import SequenceMatcher
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

from minicompile.codegen.plan import Code, CodeLine
from minicompile.debug import provenance
from minicompile.debug.provenance import Piece
from minicompile.debug.why import asks
from minicompile.dynamo.result import Guard
from minicompile.errors import OptionError
from minicompile.lowering.ir import LoopGraph
from minicompile.ops.display import Shown, aligned, count_text, method
from minicompile.ops.graph import Listing, PassRecord
from minicompile.ops.origin import NO_ORIGINS, Origins
from minicompile.pipeline_result import Trace
from minicompile.scheduling.nodes import FusedSchedulerNode, Schedule

# Alignment ----------------------------------------------------------------------------------------

WORD = re.compile(r"(?<![\w.'\"])[A-Za-z_]\w*(?!\w|=[^=])")


@dataclass(frozen=True)
class DiffRow:
    """One thing on both sides, or on one. `note`: its old name, or that it reads other values."""

    part: str
    status: Literal["same", "changed", "removed", "added"]
    before: Piece | None
    after: Piece | None
    cause: str = ""
    note: str = ""

    @property
    def piece(self) -> Piece:
        """The thing as it is after, or as it was before it was removed."""
        piece = self.after or self.before
        assert piece is not None
        return piece

    def __str__(self) -> str:
        sides = [f"  {sign} {p.text}" for sign, p in zip("-+", (self.before, self.after)) if p]
        notes = "; ".join(filter(None, [self.cause, self.note]))
        return "\n".join(sides) + f"  # {notes}" * bool(notes)


class Listed:
    """A piece in its listing: its text without names (`form`), and these names in order."""

    def __init__(self, piece: Piece, names: set[str]) -> None:
        self.piece, self.names = piece, list[str]()
        text = (
            piece.text if isinstance(piece.subject, CodeLine) else f"{piece.text}  {piece.detail}"
        )

        def blank(word: re.Match[str]) -> str:
            if word.group() not in names:
                return word.group()
            self.names.append(word.group())
            return "\0"

        self.text, self.form = text, WORD.sub(blank, text)
        self.source = frozenset((o.target, o.line and o.line.text) for o in piece.origins)


KEYS: tuple[Callable[[Listed], Hashable], ...] = (
    lambda item: item.text,
    lambda item: item.form,
    lambda item: item.piece.name if item.piece.name.isidentifier() else object(),
    lambda item: item.source or object(),
)
"""What makes two pieces a pair, the surest first."""


def paired(
    before: Sequence[Listed], after: Sequence[Listed], keys: Any = KEYS
) -> Iterator[tuple[Listed, Listed]]:
    """Pairs by the first key; in the gaps between them, pairs by the next one, at last by position."""
    if not (keys and before and after):
        yield from zip(before, after) if len(before) == len(after) else ()
        return
    old, new = ([keys[0](item) for item in side] for side in (before, after))
    matcher = SequenceMatcher[Hashable](None, old, new, autojunk=False)
    for kind, a, a_end, b, b_end in matcher.get_opcodes():
        if kind == "equal":
            yield from zip(before[a:a_end], after[b:b_end])
        else:
            yield from paired(before[a:a_end], after[b:b_end], keys[1:])


def rows_of(before: Sequence[Piece], after: Sequence[Piece], part: str = "") -> list[DiffRow]:
    """One listing beside another. A pair is the same if it computes the same from the same pairs."""
    names = {piece.name for piece in (*before, *after)}
    old, new = ([Listed(piece, names) for piece in side] for side in (before, after))
    # From the end: of several candidates the last one holds the result.
    pairs = list(paired(old[::-1], new[::-1]))[::-1]
    partner = {a.piece.name: b.piece.name for a, b in pairs}
    rows = list[DiffRow]()
    for a, b in [*pairs, (None, None)]:
        while old and old[0] is not a:
            rows.append(DiffRow(part, "removed", old.pop(0).piece, None))
        while new and new[0] is not b:
            rows.append(DiffRow(part, "added", None, new.pop(0).piece))
        if a is None or b is None:
            break
        del old[0], new[0]
        same = a.form == b.form and [*map(partner.get, a.names)] == b.names
        note = "of other values" if a.text == b.text and not same else ""
        if a.piece.name != b.piece.name and a.piece.name.isidentifier():
            note = f"was {a.piece.name}"
        rows.append(DiffRow(part, "same" if same else "changed", a.piece, b.piece, note=note))
    return rows


# The corridor as steps ----------------------------------------------------------------------------


def pieces_of(stage: str, subject: Any) -> Iterator[Piece]:
    """A stage object line by line."""
    if isinstance(subject, Listing):
        yield from provenance.of_graph(stage, subject)
    elif isinstance(subject, LoopGraph):
        for buffer in subject.given:
            yield Piece(stage, buffer.name, f"{buffer.name}: {buffer.layout}", NO_ORIGINS, buffer)
        for operation in subject.operations:
            yield provenance.of_operation(stage, operation)
        outputs = ", ".join(map(str, subject.outputs))
        yield Piece(stage, "output", f"return {outputs}", NO_ORIGINS, subject)
    elif isinstance(subject, Schedule):
        yield from of_schedule(stage, subject)
    elif isinstance(subject, Code):
        yield from provenance.of_code(stage, subject.name, subject.lines)
    elif isinstance(subject, Guard):
        text, at = subject.expression, subject.user_line
        yield Piece(stage, text, text, NO_ORIGINS, subject, why=(subject.reason,), line=at)
    elif isinstance(subject, list):
        for element in subject:
            yield from pieces_of(stage, element)
    else:
        for number, line in enumerate(str(subject).split("\n"), 1):
            yield Piece(stage, f"{stage}:{number}", line, NO_ORIGINS, line)


def of_schedule(stage: str, schedule: Schedule) -> Iterator[Piece]:
    """Loops in running order: in which kernel, and the decisions that brought them there."""
    pieces = {piece.name: piece for piece in pieces_of(stage, schedule.graph)}
    yield from (pieces[buffer.name] for buffer in schedule.graph.given)
    for node in schedule.nodes:
        parts = node.nodes if isinstance(node, FusedSchedulerNode) else [node]
        yield pieces[parts[0].name]
        for part in parts[1:]:
            joined = [d for d in schedule.fused if asks(d, [part.name], [parts[0].name])]
            text = f"{pieces[part.name].text}  # in the kernel of {parts[0].name}"
            yield replace(pieces[part.name], text=text, why=tuple(map(str, joined)))
    yield pieces["output"]


@dataclass(eq=False)
class Point:
    """The program at one place of the corridor; `base`: the place that it is compared with."""

    name: str
    subject: Any
    base: Point | None = None
    applied: Mapping[Any, Collection[Origins]] = field(default_factory=dict)
    """Of a decomposition, the operators that rules replaced, with the origins of each call."""

    @cached_property
    def pieces(self) -> list[Piece]:
        return list(pieces_of(self.name, self.subject))

    @property
    def count(self) -> str:
        if isinstance(self.subject, Listing):
            return count_text(self.subject.op_count, "op")
        return count_text(len(self.pieces), "line") if self.pieces else ""

    def cause(self, piece: Piece) -> str:
        """The rule of an operator or the reason of a piece, and its source lines."""
        rules = [str(op) for op, calls in self.applied.items() if piece.origins in calls]
        reasons = [why for why in piece.why if not why.startswith("backward:")]
        why = f"rule of {' or '.join(rules)}" if rules else "".join(reasons[:1])
        places = ", ".join(dict.fromkeys(line.place for line in piece.lines))
        return ", ".join(filter(None, [why, places]))

    def beside(self, before: Point | None, part: str = "") -> list[DiffRow]:
        rows = rows_of(before.pieces if before is not None else [], self.pieces, part)
        return [r if r.status == "same" else replace(r, cause=self.cause(r.piece)) for r in rows]


def corridor(trace: Trace) -> tuple[dict[str, Point], dict[str, Point]]:
    """Every pass and step by name, each beside the one before; and every stage beside the stage before."""
    steps, stages, aot = dict[str, Point](), dict[str, Point](), trace.aot

    def stage(name: str, graph: Any, step: str, base: Point | None, of: str = "") -> Point:
        kind = {"capture": "pre_grad", "full": "joint", "prims": "prims"}.get(
            name, of and "post_grad"
        )
        ran = [r for r in aot.passes if kind and r.name.startswith(kind)] if aot is not None else []
        ran = [r for r in ran if not of or f"{getattr(r.before, 'name', '')}." == of]
        rules = getattr(graph, "applied", {})
        at = Point(of + step, ran[0].before if ran else graph, base, rules)
        steps[at.name] = at
        for r in ran:
            at = steps[of + r.name] = Point(of + r.name, r.after, at)
        stages[name] = Point(name, graph, base, rules)
        return stages[name]

    def both(name: str, subject: Any, base: Point | None = None) -> Point:
        steps[name] = stages[name] = Point(name, subject, base)
        return stages[name]

    stages["guards"] = Point("guards", list(trace.capture.guards))
    at = stage("capture", trace.capture.graph, "symbolic evaluation", None)
    for level, graph in aot.levels.items() if aot is not None else ():
        step = "functionalization" if level == "full" else f"decomposition to {level}"
        at = stage(level, graph, step, at)
    for name in ("forward", "backward"):
        half = getattr(aot, name, None)
        if half is None:
            continue
        whole = stage(f"aot.{name}", half, "partition", at, f"{name}.")
        if (compiled := trace.graphs.get(name)) is not None:
            loops = both(f"{name}.loops", compiled.loops, whole)
            both(f"{name}.schedule", compiled.schedule, loops)
            for key in ("kernels", "wrapper"):
                both(f"{name}.{key}", getattr(compiled, key))
    return steps, stages


# Differences --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Diff(Shown):
    """Two listings side by side, piece by piece. `facts`: what is counted, before, after."""

    title: str
    rows: tuple[DiffRow, ...]
    facts: tuple[tuple[str, str, str], ...] = ()

    @property
    def changes(self) -> list[DiffRow]:
        return [row for row in self.rows if row.status != "same"]

    @property
    def summary(self) -> str:
        """`1 changed, 3 removed`."""
        counts = Counter(row.status for row in self.changes)
        return ", ".join(f"{n} {status}" for status, n in sorted(counts.items())) or "no difference"

    @property
    def runs(self) -> Iterator[tuple[str, list[DiffRow], str]]:
        """Neighbours of one part: its name, rows, and a headline if they are all equal."""
        for (part, same), group in groupby(self.rows, lambda r: (r.part, r.status == "same")):
            rows = list(group)
            renamed = sum(row.note.startswith("was") for row in rows)
            headline = f"… {len(rows)} equal" + f" · {renamed} renamed" * bool(renamed)
            yield part, rows, headline * same

    def __str__(self) -> str:
        lines, shown = [f"{self.title}: {self.summary}"], ""
        if self.facts:
            lines += [f"  {line}" for line in aligned([("", "before", "after"), *self.facts])]
        for part, rows, headline in self.runs:
            lines += [f"{part}:"] * (part != shown)
            lines += [f"    {headline}"] if headline else map(str, rows)
            shown = part
        return "\n".join(lines)


@dataclass(frozen=True)
class Steps(Shown):
    """Every step of the corridor in order, as what it changed."""

    title: str
    steps: tuple[Diff, ...]

    @property
    def overview(self) -> list[tuple[str, str, str]]:
        """Step, what it takes and gives, what it changed."""
        return [(d.title, " → ".join(filter(None, d.facts[0])), d.summary) for d in self.steps]

    def __str__(self) -> str:
        lines = [self.title, *(f"  {line}" for line in aligned(self.overview, left=3))]
        for diff in self.steps:
            lines += [f"\n{diff.title}: {diff.summary}"] * bool(diff.changes)
            lines += map(str, diff.changes)
        return "\n".join(lines)


def alone(point: Point) -> Diff:
    """A step or a stage beside the one before it."""
    facts = (("", point.base.count if point.base is not None else "", point.count),)
    return Diff(point.name, tuple(point.beside(point.base)), facts)


def of_pass(record: PassRecord) -> Diff:
    """A pass alone, of whatever graph."""
    return alone(Point(record.name, record.after, Point("before", record.before)))


@method(Trace, "steps")
def steps(trace: Trace) -> Steps:
    """Every pass and stage in order, with what it changed."""
    made = tuple(map(alone, corridor(trace)[0].values()))
    return Steps(f"{trace.name}: {count_text(len(made), 'step')}", made)


@method(Trace, "diff")
def diff(trace: Trace, before: str | Trace, after: str | None = None) -> Diff:
    """Side by side: what a pass or stage changed ("prims.cse"), two stages ("full", "core"), or this trace
    and another, all stages or the one that `after` names. Raises ValueError that lists the names."""
    if isinstance(before, Trace):
        return across(trace, before, after)
    steps, stages = corridor(trace)
    known = {**steps, **stages}
    if after is not None:
        start, end = (known[full_name(known, name)] for name in (before, after))
        return Diff(f"{before} → {after}", tuple(end.beside(start)))
    chosen = [point for name, point in steps.items() if f".{name}".endswith(f".{before}")]
    if before in stages or not chosen:
        return alone(known[full_name(known, before)])
    return Diff(
        before, tuple(row for point in chosen for row in point.beside(point.base, point.name))
    )


def full_name(known: Collection[str], name: str) -> str:
    """The whole name of a stage or step. Raises OptionError that lists what there is."""
    for full in (name, f"forward.{name}", f"aot.{name}"):
        if full in known:
            return full
    raise OptionError(f"nothing is called {name!r} in this trace; it has {', '.join(known)}")


def across(first: Trace, second: Trace, only: str | None) -> Diff:
    """Two traces, stage by stage: the stages that differ, or the one that is asked for."""
    traces = [corridor(trace)[1] for trace in (first, second)]
    names = {**traces[0], **traces[1]}
    chosen = [asdict(trace.capture.watch.of.options) for trace in (first, second)]
    changed = [name for name, value in chosen[0].items() if value != chosen[1][name]]
    facts = [(f"option {name}", str(chosen[0][name]), str(chosen[1][name])) for name in changed]
    rows = list[DiffRow]()
    for name in [full_name(names, only)] if only else names:
        old, new = (stages.get(name, Point(name, [])) for stages in traces)
        facts.append((name, old.count, new.count))
        made = new.beside(old, name)
        if only or any(row.status != "same" for row in made):
            rows += made
    return Diff(f"{first.name} → {second.name}", tuple(rows), tuple(facts))
