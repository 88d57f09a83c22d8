"""What changed between two stages, by a pass, or between two traces, and what changed it.

    Point := name, its lines, the point before it and the step in between: a place in the corridor
    Row   := part, status, before | None, after | None, cause, note
    Diff  := title, rows, facts about both sides
    Steps := a Diff for each step of the corridor

`trace.diff` and `trace.steps` give these. A cause is found by walking from point to point.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any, Literal

from minicompile.aot.levels import LevelGraph
from minicompile.codegen.plan import Code
from minicompile.debug import provenance
from minicompile.debug.align import Alignment, Item, items_of
from minicompile.debug.provenance import Piece
from minicompile.debug.roofline import costs_of
from minicompile.dynamo.result import Guard
from minicompile.errors import OptionError
from minicompile.lowering.ir import LoopGraph
from minicompile.ops.display import Shown, aligned, bytes_text, count_text, method
from minicompile.ops.graph import Listing, PassRecord
from minicompile.ops.origin import NO_ORIGINS, Origins
from minicompile.pipeline_result import Trace
from minicompile.scheduling.nodes import Schedule


def pieces_of(stage: str, subject: Any) -> Iterator[Piece]:
    """Any stage object line by line."""
    if isinstance(subject, Listing):
        yield from provenance.of_graph(stage, subject)
    elif isinstance(subject, Code):
        yield from provenance.of_code(stage, subject.name, subject.lines)
    elif isinstance(subject, list):
        for one in subject:
            yield from pieces_of(stage, one)
    elif isinstance(subject, Guard):
        told, at = subject.expression, subject.user_line
        yield Piece(stage, stage, told, NO_ORIGINS, told, subject.reason, line=at)
    else:
        for number, line in enumerate(str(subject).split("\n"), 1):
            yield Piece(stage, f"{stage}:{number}", line, NO_ORIGINS, line)


def of_loops(stage: str, loops: LoopGraph, schedule: Schedule) -> Iterator[Piece]:
    """What is given, the buffers with the reasons why they are some, what is returned."""
    for given in loops.given:
        detail = provenance.layout_text(given.layout)
        yield Piece(stage, given.name, f"{given.name}: {given.layout}", NO_ORIGINS, given, detail)
    for piece in provenance.of_loops(stage, loops, schedule):
        why = tuple(w for w in piece.why if w.startswith(("extern: ", "realized: ")))
        yield replace(piece, detail=piece.detail.partition(", ")[2], why=why)
    outputs = ", ".join(map(str, loops.outputs))
    yield Piece(stage, "output", f"return {outputs}", NO_ORIGINS, loops)


def of_schedule(stage: str, schedule: Schedule, loops: Point) -> Iterator[Piece]:
    """The same in running order: in which kernel, and the decision that brought it there."""
    pieces = {item.name: replace(item.piece, stage=stage) for item in loops.items}
    kernels = [getattr(node, "nodes", [node]) for node in schedule.nodes]
    first = {part.name: parts[0].name for parts in kernels for part in parts[1:]}
    given = [buffer.name for buffer in schedule.graph.given]
    for name in [*given, *(part.name for parts in kernels for part in parts), "output"]:
        piece = pieces[name]
        if name in first:
            made = [d for d in schedule.fused if d.asks([name], [first[name]])]
            text = f"{piece.text}  # in the kernel of {first[name]}"
            piece = replace(piece, text=text, why=tuple(map(str, made)))
        yield piece


# The corridor as steps --------------------------------------------------------------------------


@dataclass(eq=False)
class Point:
    """The program at one place of the corridor, and the step that led there from its parent."""

    name: str
    subject: Any
    step: str = ""
    parent: Point | None = None
    pieces: Callable[[str, Any], Iterable[Piece]] = pieces_of
    rule: Callable[[Item], str] = lambda item: ""
    """What of the step it was, of an item that it changed."""
    gone: str = ""
    """What it means that the step took something away."""
    about: str = ""

    @cached_property
    def items(self) -> list[Item]:
        if self.parent is not None and self.subject is self.parent.subject:
            return self.parent.items
        return items_of(list(self.pieces(self.name, self.subject)))

    @cached_property
    def alignment(self) -> Alignment:
        """With the parent: another trace's where no step lies between."""
        before = self.parent.items if self.parent is not None else []
        return Alignment(before, self.items, frozenset if self.step else by_text)

    def path(self, since: Collection[Point] = ()) -> list[Point]:
        """The points that lead here, from the last of some on, or from the first."""
        way = [self]
        while (at := way[0].parent) is not None and (way[0] is self or way[0] not in since):
            way.insert(0, at)
        return way

    @property
    def count(self) -> str:
        """How much it is."""
        if isinstance(self.subject, Listing):
            return count_text(self.subject.op_count, "op")
        return self.about

    def cause(self, item: Item) -> str:
        """What the step did, or the stage's own reason, and the lines it is about."""
        here, reasons = item.piece.stage == self.name, item.piece.why
        own = next((why for why in reasons if not why.startswith("backward:")), "")
        told = ": ".join(filter(None, [self.step, self.rule(item) or (own if here else self.gone)]))
        places = ", ".join(dict.fromkeys(line.place for line in item.piece.lines))
        return f"{told} at {places}" if told and places else told

    def beside(self, other: Point, part: str = "") -> list[Row]:
        """The other's items beside these, with no step in between."""
        copy = Point(self.name, self.subject, parent=other)
        copy.items = self.items
        return rows_along([other, copy], part)


def by_text(origins: Origins) -> Hashable:
    """What stays of origins when lines move."""
    return frozenset((o.module, o.target, o.line.text if o.line else "") for o in origins)


def rule_of(graph: LevelGraph, before: Any) -> Callable[[Item], str]:
    """Tells the operator whose rule made an item, or took it away."""
    rules: dict[Hashable, dict[str, None]] = {}
    for node in before.nodes:
        if node.target in graph.applied:
            key = node.meta.get("origins"), node.meta.get("phase")
            rules.setdefault(key, {})[str(node.target)] = None

    def rule(item: Item) -> str:
        meta = item.piece.subject.meta
        names = rules.get((meta.get("origins"), meta.get("phase")), ())
        return f"rule of {' or '.join(names)}" * bool(names)

    return rule


def points(trace: Trace) -> dict[str, Point]:
    """Every place of the corridor by name, each after the one that it comes from."""
    found: dict[str, Point] = {}
    aot, nothing = trace.aot, Point("", [])

    def add(name: str, *made: Any, **how: Any) -> Point:
        return found.setdefault(name, Point(name, *made, **how))

    def stage(step: str, graph: Any, at: Any, passes: str, of: str = "", **how: Any) -> Point:
        """A step that gives a graph, and the passes over it."""
        ran = [r for r in aot.passes if r.name.startswith(passes)] if aot is not None else []
        ran = [r for r in ran if not of or f"{getattr(r.before, 'name', '')}." == of]
        at = add(of + step, ran[0].before if ran else graph, step, at, **how)
        for r in ran:
            at = add(of + r.name, r.after, r.name, at)
        last, final = ([(n.name, n.target) for n in g.nodes] for g in (at.subject, graph))
        if passes != "pre_grad." and last != final:
            at = add(f"{of}rewrites expanded", graph, "rewrites expanded", at)
        return at

    guards = list(trace.capture.guards)
    add("guards", guards, "", nothing, about=count_text(len(guards), "guard"))
    at = stage("capture", trace.capture.graph, nothing, "pre_grad.")
    if aot is None:
        return found
    for level, graph in aot.levels.items():
        step = "functionalization" if level == "full" else f"decomposition to {level}"
        passes = {"full": "joint.", "prims": "prims."}.get(level, "no pass")
        at = found[level] = stage(step, graph, at, passes, rule=rule_of(graph, at.subject))
    for name in ("forward", "backward"):
        if (final := getattr(aot, name)) is None:
            continue
        step = "partition" if aot.partition is not None else "forward alone"
        pieces, gone = partial(provenance.of_graph, partition=aot.partition), f"not in the {name}"
        whole = stage(step, final, at, "post_grad.", f"{name}.", pieces=pieces, gone=gone)
        found[f"aot.{name}"] = whole
        if (compiled := trace.graphs.get(name)) is None:
            continue
        buffers = partial(of_loops, schedule=compiled.schedule)
        here = add(f"{name}.loops", compiled.loops, "lowering", whole, buffers)
        here.gone = "no buffer of its own"
        buffers = partial(of_schedule, loops=here)
        add(f"{name}.schedule", compiled.schedule, "scheduling", here, buffers)
        for key in ("plans", "kernels", "wrapper"):
            add(f"{name}.{key}", getattr(compiled, key), "code generation", nothing)
        found[f"{name}.plans"].about = count_text(len(compiled.plans), "plan")
        for room in compiled.rooms():
            found[f"{name}.{room.stage}"].about = room.count
    return found


# Differences ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One thing on both sides, or on one. `note`: its old name, or that it stands elsewhere now."""

    part: str
    status: Literal["same", "changed", "removed", "added"]
    before: Piece | None
    after: Piece | None
    cause: str = ""
    note: str = ""

    def __str__(self) -> str:
        sides = [f"  {sign} {p.text}" for sign, p in zip("-+", (self.before, self.after)) if p]
        told = "; ".join(filter(None, [self.cause, self.note]))
        return "\n".join(sides) + f"  # {told}" * bool(told)


def rows_along(path: Sequence[Point], part: str = "") -> list[Row]:
    """The first point beside the last; the steps between them are the causes."""
    before, after = path[0].items, path[-1].items
    start = {i: i for i in range(len(before))}
    """Places now -> places at first."""
    causes: dict[int, list[str]] = {}
    gone: dict[int, list[str]] = {}
    for point in path[1:]:
        step, told = point.alignment, dict[int, list[str]]()
        for i, j in step.found.items():
            told[j] = list(causes.get(i, ()))
            if not step.is_same(i, j):
                told[j].append(point.cause(step.after[j]))
        for j in step.free:
            told[j] = [point.cause(step.after[j])]
        for i in start.keys() - step.found.keys():
            gone[start[i]] = [*causes.get(i, ()), point.cause(step.before[i])]
        start = {step.found[i]: first for i, first in start.items() if i in step.found}
        causes = told
    whole = Alignment(before, after, frozenset, {i: j for j, i in start.items()})
    stays, last = whole.in_order(), -1
    rows: dict[tuple[int, int], Row] = {}
    """By the place after; what is gone comes after what stood before it."""
    for i, item in enumerate(before):
        last = whole.found[i] if whole.found.get(i) in stays else last
        if i in gone:
            rows[last, i + 1] = Row(part, "removed", item.piece, None, "; ".join(gone[i]))
    for j, item in enumerate(after):
        cause = "; ".join(dict.fromkeys(filter(None, causes.get(j, ()))))
        if j not in start:
            rows[j, 0] = Row(part, "added", None, item.piece, cause)
            continue
        old, same = before[start[j]], whole.is_same(start[j], j)
        note = [f"was {old.name}"] * (old.name != item.name) + ["moved"] * (j not in stays)
        note += ["of other values"] * (not same and old.piece.text == item.piece.text)
        row = Row(part, "changed", old.piece, item.piece, cause, ", ".join(note))
        rows[j, 0] = replace(row, status="same", cause="") if same else row
    return [row for _, row in sorted(rows.items())]


@dataclass(frozen=True)
class Diff(Shown):
    """Two listings side by side, item by item. `facts`: what is counted, before, after."""

    title: str
    rows: tuple[Row, ...]
    facts: tuple[tuple[str, str, str], ...] = ()

    @property
    def changes(self) -> list[Row]:
        return [row for row in self.rows if row.status != "same"]

    @property
    def summary(self) -> str:
        """`1 changed, 3 removed`."""
        counts = Counter(row.status for row in self.changes)
        return ", ".join(f"{n} {status}" for status, n in sorted(counts.items())) or "no difference"

    @property
    def runs(self) -> Iterator[tuple[str, list[Row], str]]:
        """Neighbours of one part: its name, rows, and a headline if they are all equal."""
        for (part, same), group in groupby(self.rows, lambda r: (r.part, r.status == "same")):
            rows = list(group)
            notes = [note.split()[0] for row in rows for note in row.note.split(", ") if note]
            told = [f"{n} {note}".replace("was", "renamed") for note, n in Counter(notes).items()]
            yield part, rows, " · ".join([f"… {len(rows)} equal", *told]) * same

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


def alone(point: Point, since: Collection[Point] = (), part: str = "") -> Diff:
    """What led to a point: the last step, or all since one of these."""
    path = point.path(since) if since else point.path()[-2:]
    facts = (("", path[0].count, point.count),)
    return Diff(point.name, tuple(rows_along(path, part)), facts)


def of_pass(record: PassRecord) -> Diff:
    """A pass alone, of whatever graph."""
    return alone(Point(record.name, record.after, record.name, Point("before", record.before)))


@method(Trace, "steps")
def steps(trace: Trace) -> Steps:
    """Every pass and stage in order, with what it changed."""
    made = [alone(point) for point in dict.fromkeys(points(trace).values()) if point.step]
    return Steps(f"{trace.name}: {count_text(len(made), 'step')}", tuple(made))


def place(found: dict[str, Point], name: str) -> str:
    """The whole name of a stage or step. Raises ValueError that lists what there is."""
    stem, dot, last = name.rpartition(".")
    last = {"joint": "prims", "pre_fusion": "loops", "aot": "aot.forward"}.get(last, last)
    for full in (stem + dot + last, f"forward.{last}", f"aot.{last}"):
        if full in found:
            return full
    raise OptionError(f"nothing is called {name!r} in this trace; it has {', '.join(found)}")


@method(Trace, "diff")
def diff(trace: Trace, before: str | Trace, after: str | None = None) -> Diff:
    """Side by side: what a pass or step changed ("prims.cse"), two stages ("full", "core"), or this trace
    and another, all stages or the one that `after` names. Raises ValueError that lists the names."""
    if isinstance(before, Trace):
        return across(trace, before, after)
    found = points(trace)
    if after is None:
        steps = [point for point in dict.fromkeys(found.values()) if point.step]
        chosen = [p for p in steps if f".{p.name}".endswith(f".{before}")]
        if not chosen:
            return alone(found[place(found, before)], stages_of(trace, found).values())
        return Diff(before, tuple(row for p in chosen for row in alone(p, part=p.name).rows))
    start, end = (found[place(found, name)] for name in (before, after))
    path = end.path([start])
    rows = rows_along(path) if path[0] is start else end.beside(start)
    return Diff(f"{before} → {after}", tuple(rows))


def stages_of(trace: Trace, found: dict[str, Point]) -> dict[str, Point]:
    """The points that every trace has, whatever its passes."""
    levels = trace.aot.levels if trace.aot is not None else ()
    after = ("loops", "schedule", "kernels", "wrapper")
    names = [f"{graph}.{stage}" for graph in trace.graphs for stage in after]
    first = ["guards", "capture", *levels, "aot.forward", "aot.backward"]
    return {name: found[name] for name in [*first, *names] if name in found}


def across(first: Trace, second: Trace, only: str | None) -> Diff:
    """Two traces, stage by stage. The cause of what the second has is the step that made it there."""
    traces = [stages_of(trace, points(trace)) for trace in (first, second)]
    only = only and place({**traces[0], **traces[1]}, only)
    chosen = [asdict(trace.capture.watch.of.options) for trace in (first, second)]
    changed = [name for name, value in chosen[0].items() if value != chosen[1][name]]
    facts = [(f"option {name}", str(chosen[0][name]), str(chosen[1][name])) for name in changed]
    rows = list[Row]()
    for name in dict.fromkeys([*traces[0], *traces[1]]):
        ends = [stages.get(name, Point(name, [])) for stages in traces]
        facts.append((name, ends[0].count, ends[1].count))
        made = ends[1].beside(ends[0], name)
        if differ := any(row.status != "same" for row in made):
            steps = rows_along(ends[1].path(traces[1].values()))
            causes = {id(row.after): row.cause for row in steps if row.status != "same"}
            made = [replace(row, cause=causes.get(id(row.after), row.cause)) for row in made]
        rows += made if name == only or (differ and not only) else []
        if name.endswith(".schedule"):
            facts += [(f"{name}: {what}", a, b) for (what, a), (_, b) in zip(*map(figures, ends))]
    title = f"{first.name} → {second.name}" + f": {only}" * bool(only)
    return Diff(title, tuple(rows), tuple(facts))


def figures(point: Point) -> list[tuple[str, str]]:
    """What a schedule moves through memory and how much it needs."""
    schedule = point.subject
    if not isinstance(schedule, Schedule):
        return [("bytes moved", ""), ("memory peak", "")]
    moved = sum(cost.bytes for cost in costs_of(schedule))
    peak = schedule.memory.peak_bytes
    return [("bytes moved", bytes_text(moved)), ("memory peak", bytes_text(peak))]
