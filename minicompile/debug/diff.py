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

from minicompile import provenance
from minicompile.aot.levels import LevelGraph
from minicompile.codegen.plan import Code, CodeLine
from minicompile.debug.align import Alignment, Item, Search, items_of
from minicompile.ops.display import Shown, aligned, count_text
from minicompile.ops.graph import Listing, PassRecord
from minicompile.ops.origin import NO_ORIGINS, Origins
from minicompile.pipeline_result import COMPILED, CompiledStages, Trace
from minicompile.provenance import Piece
from minicompile.scheduling.explain import totals
from minicompile.scheduling.nodes import FusedSchedulerNode


def pieces_of(stage: str, subject: Any) -> Iterator[Piece]:
    """Any stage object line by line."""
    if isinstance(subject, Listing):
        yield from provenance.of_graph(stage, subject)
    elif isinstance(subject, Code):
        yield from provenance.of_code(stage, subject.name, subject.lines)
    elif isinstance(subject, list | tuple):
        for one in subject:
            yield from pieces_of(stage, one)
    else:
        for number, line in enumerate(str(subject).split("\n"), 1):
            yield Piece(stage, f"{stage}:{number}", line, NO_ORIGINS, line)


def of_buffers(compiled: CompiledStages, fused: bool, stage: str) -> Iterator[Piece]:
    """The buffers of a graph as lowering made them, or in the kernels that compute them, with the reason."""
    loops, schedule = compiled.loops, compiled.schedule
    for given in loops.given:
        detail = provenance.layout_text(given.layout)
        yield Piece(stage, given.name, f"{given.name}: {given.layout}", NO_ORIGINS, given, detail)
    pieces = {piece.name: piece for piece in provenance.of_loops(stage, loops, schedule)}
    kernels = [node.nodes for node in schedule.nodes if isinstance(node, FusedSchedulerNode)]
    first = {part.name: nodes[0].name for nodes in kernels for part in nodes[1:]}
    order = [part.name for node in schedule.nodes for part in getattr(node, "nodes", [node])]
    for name in order if fused else pieces:
        piece = pieces[name]
        why = tuple(w for w in piece.why if w.startswith(("extern: ", "realized: ")))
        text, detail = piece.text, piece.detail.partition(", ")[2]
        if fused and name in first:
            made = [d for d in schedule.decisions if d.fused and d.asks([name], [first[name]])]
            text, why = f"{text}  # in the kernel of {first[name]}", tuple(map(str, made))
        yield replace(piece, text=text, detail=detail, why=why)
    outputs = ", ".join(map(str, loops.outputs))
    yield Piece(stage, "output", f"return {outputs}", NO_ORIGINS, loops)


# The corridor as steps --------------------------------------------------------------------------

Explain = Callable[[Item, str], str]
"""(what changed, the step) -> what the step did to it."""


@dataclass(eq=False)
class Point:
    """The program at one place of the corridor, and the step that led there from its parent."""

    name: str
    subject: Any
    step: str = ""
    parent: Point | None = None
    explain: Explain | None = None
    gone: str = ""
    """What to say of what the step took away."""
    count: str = ""
    pieces: Callable[[str], Iterable[Piece]] | None = None
    """The lines, where the subject alone doesn't give them."""

    @cached_property
    def items(self) -> list[Item]:
        if self.parent is not None and self.subject is self.parent.subject:
            return self.parent.items
        made = self.pieces(self.name) if self.pieces else pieces_of(self.name, self.subject)
        return items_of(list(made))

    @cached_property
    def alignment(self) -> Alignment:
        """With the parent; where no step lies between them, with another trace's."""
        before = self.parent.items if self.parent is not None else []
        return Search(before, self.items, frozenset if self.step else by_text)

    @property
    def path(self) -> list[Point]:
        return [*(self.parent.path if self.parent is not None else ()), self]

    def beside(self, other: Point, part: str = "") -> list[Row]:
        """The other's items beside these, with no step in between."""
        copy = Point(self.name, self.subject, parent=other)
        copy.items = self.items
        return rows_along([other, copy], part)

    def cause(self, item: Item) -> str:
        """What the step did, or the stage's own reason, and the lines it is about."""
        told, piece = self.step, item.piece
        reasons = [w for w in piece.why if not w.startswith("backward:")]
        if self.explain is not None:
            told = self.explain(item, self.step)
        elif found := self.gone if piece.stage != self.name else "".join(reasons[:1]):
            told += f": {found}"
        places = ", ".join(dict.fromkeys(line.place for line in piece.lines))
        return f"{told} at {places}" if told and places else told


def by_text(origins: Origins) -> Hashable:
    """What stays of origins when lines move."""
    return frozenset((o.module, o.target, o.line.text if o.line else "") for o in origins)


def by_pass(record: PassRecord) -> Explain:
    """The pass and, where it says so, which of its rewrites."""

    def explain(item: Item, step: str) -> str:
        start, origins = f"{item.name}: ", item.piece.origins
        for done in record.rewrites:
            lines = f"{done.before}\n{done.after}".split("\n")
            if any(line.startswith(start) for line in lines) or (
                origins and origins <= done.origins
            ):
                return step if done.pattern in step else f"{step} {done.pattern}"
        return step

    return explain


def by_rule(graph: LevelGraph, before: Any) -> Explain:
    """The operator that its rule replaced."""
    rules: dict[Hashable, dict[str, None]] = {}
    for node in before.nodes:
        if node.target in graph.applied:
            key = node.meta.get("origins"), node.meta.get("phase")
            rules.setdefault(key, {})[str(node.target)] = None

    def explain(item: Item, step: str) -> str:
        meta = item.piece.subject.meta
        names = rules.get((meta.get("origins"), meta.get("phase")), ())
        return f"{step}: rule of {' or '.join(names)}" if names else step

    return explain


def points(trace: Trace) -> dict[str, Point]:
    """Every place of the corridor by name, each after the one that it comes from."""
    found: dict[str, Point] = {}
    aot, nothing = trace.aot, Point("", [])

    def add(name: str, subject: Any, *made: Any, **how: Any) -> Point:
        if isinstance(subject, Listing):
            how["count"] = count_text(subject.op_count, "op")
        return found.setdefault(name, Point(name, subject, *made, **how))

    def stage(step: str, graph: Any, at: Any, passes: str, of: str = "", **how: Any) -> Point:
        """A step that gives a graph, and the passes over it."""
        ran = [r for r in aot.passes if r.name.startswith(passes)] if aot is not None else []
        ran = [r for r in ran if not of or getattr(r.before, "name", "") == of.rstrip(".")]
        at = add(of + step, ran[0].before if ran else graph, step, at, **how)
        for r in ran:
            at = add(of + r.name, r.after, r.name, at, by_pass(r))
        rewrote = passes != "pre_grad." and any(r.changed for r in ran)
        if rewrote and [p.text for p in pieces_of("", graph)] != [i.piece.text for i in at.items]:
            at = add(f"{of}rewrites expanded", graph, "rewrites expanded", at)
        return at

    guards = [str(guard) for guard in trace.capture.guards]
    add("guards", guards, "", nothing, count=count_text(len(guards), "guard"))
    at = stage("capture", trace.capture.graph, nothing, "pre_grad.")
    if aot is None:
        return found
    for level, graph in aot.levels.items():
        step = "functionalization" if level == "full" else f"decomposition to {level}"
        passes = {"full": "joint.", "prims": "prims."}.get(level, "no pass")
        at = stage(step, graph, at, passes, explain=by_rule(graph, at.subject))
        found[level] = at
    for name in ("forward", "backward"):
        if (final := getattr(aot, name)) is None:
            continue
        step = "partition" if aot.partition is not None else "forward alone"
        of_graph = partial(provenance.of_graph, graph=final, partition=aot.partition)
        gone = f"not in the {name}"
        here = stage(step, final, at, "post_grad.", f"{name}.", pieces=of_graph, gone=gone)
        found[f"aot.{name}"] = here
        if (compiled := trace.graphs.get(name)) is None:
            continue
        counts = {room.stage: room.count for room in compiled.rooms()}
        for key, step in (("loops", "lowering"), ("schedule", "scheduling")):
            buffers, made = partial(of_buffers, compiled, key == "schedule"), getattr(compiled, key)
            how = {"count": counts[key], "pieces": buffers, "gone": "no buffer of its own"}
            here = add(f"{name}.{key}", made, step, here, **how)
        for key in ("plans", "kernels", "wrapper"):
            step, made = "code generation" * (key != "plans"), getattr(compiled, key)
            add(f"{name}.{key}", made, step, nothing, count=counts.get(key, ""))
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

    @property
    def texts(self) -> tuple[str, str]:
        """Both sides, "" for none; with their types if these differ."""
        old, new = self.before, self.after
        if (
            old is None
            or new is None
            or isinstance(new.subject, CodeLine)
            or old.detail == new.detail
        ):
            return old.text if old is not None else "", new.text if new is not None else ""
        return f"{old.text}  ({old.detail})", f"{new.text}  ({new.detail})"

    def __str__(self) -> str:
        sides = zip("-+", self.texts, (self.before, self.after))
        lines = [f"  {sign} {text}" for sign, text, piece in sides if piece is not None]
        return "\n".join(lines) + f"  # {self.cause}" * bool(self.cause)


def rows_along(path: Sequence[Point], part: str = "") -> list[Row]:
    """The first point beside the last; the steps between them are the causes."""
    before, after = path[0].items, path[-1].items
    start = {i: i for i in range(len(before))}
    """Places now -> places at first."""
    causes: dict[int, list[str]] = {}
    gone: dict[int, list[str]] = {}
    for point in path[1:]:
        step = point.alignment
        told = {j: [point.cause(item)] for j, item in enumerate(step.after)}
        for i, j in step.found.items():
            told[j] = causes.get(i, []) + told[j] * (not step.is_same(i, j))
        for i in start.keys() - step.found.keys():
            gone[start[i]] = [*causes.get(i, []), point.cause(step.before[i])]
        start = {step.found[i]: first for i, first in start.items() if i in step.found}
        causes = told
    whole = Alignment(before, after, {i: j for j, i in start.items()})
    stays, last = whole.in_order(), -1
    rows: dict[tuple[int, int], Row] = {}
    """By the place after; what is gone comes after what stood before it."""
    for i, item in enumerate(before):
        j = whole.found.get(i, -1)
        last = j if j in stays else last
        if i in gone:
            rows[last, i + 1] = Row(part, "removed", item.piece, None, "; ".join(gone[i]))
    for j, item in enumerate(after):
        cause = "; ".join(dict.fromkeys(filter(None, causes.get(j, []))))
        if j not in start:
            rows[j, 0] = Row(part, "added", None, item.piece, cause)
            continue
        old, same = before[start[j]], whole.is_same(start[j], j)
        notes = [f"was {old.name}"] * (old.name != item.name) + ["moved"] * (j not in stays)
        notes += ["of other values"] * (not same and old.piece.text == item.piece.text)
        row = Row(part, "changed", old.piece, item.piece, cause, ", ".join(notes))
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
        """Rows in a row of one part: those that differ with "", those that are the same with a headline."""
        for (part, same), group in groupby(self.rows, lambda r: (r.part, r.status == "same")):
            rows = list(group)
            notes = Counter(
                note.split()[0] for row in rows for note in row.note.split(", ") if note
            )
            told = [f"{n} {'renamed' if note == 'was' else note}" for note, n in notes.items()]
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
        return [(d.title, " → ".join(d.facts[0][1:]).lstrip(" →"), d.summary) for d in self.steps]

    def __str__(self) -> str:
        lines = [self.title, *(f"  {line}" for line in aligned(self.overview, left=3))]
        for diff in self.steps:
            lines += [f"\n{diff.title}: {diff.summary}"] * bool(diff.changes)
            lines += map(str, diff.changes)
        return "\n".join(lines)


def steps(trace: Trace) -> Steps:
    """All passes and stages of a trace as steps."""
    made = [point for point in dict.fromkeys(points(trace).values()) if point.step]
    return Steps(f"{trace.name}: {len(made)} steps", tuple(map(step_of, made)))


def step_of(point: Point) -> Diff:
    assert point.parent is not None
    fact = ("", point.parent.count, point.count)
    return Diff(point.name, tuple(rows_along([point.parent, point])), (fact,))


def of_pass(record: PassRecord) -> Diff:
    """A pass alone, before and after."""
    start = Point("before", record.before)
    end = Point(record.name, record.after, record.name, start, by_pass(record))
    return Diff(f"pass {record.name}", tuple(rows_along([start, end])))


def of_texts(before: str, after: str) -> Diff:
    start = Point("before", before)
    return Diff("", tuple(rows_along([start, Point("after", after, "", start)])))


def place(found: dict[str, Point], name: str) -> str:
    """The whole name of a stage or step. Raises ValueError that lists what there is."""
    alias = {"joint": "prims", "pre_fusion": "loops", "aot": "aot.forward"}
    stem, dot, last = name.rpartition(".")
    given = alias.get(name, stem + dot + alias.get(last, last))
    for full in (given, f"forward.{given}", f"aot.{given}", f"aot.{stem}"):
        if full in found:
            return full
    raise ValueError(f"nothing is called {name!r} in this trace; it has {', '.join(found)}")


def diff(trace: Trace, before: str | Trace, after: str | None = None) -> Diff:
    """See `Trace.diff`."""
    found = points(trace)
    if isinstance(before, Trace):
        return across(trace, before, after)
    if after is None:
        steps = [point for point in dict.fromkeys(found.values()) if point.step]
        chosen = [p for p in steps if f".{p.name}".endswith(f".{before}")] or [
            found[place(found, before)]
        ]
        return Diff(before, tuple(row for p in chosen for row in rows_along(p.path[-2:], p.name)))
    start, end = (found[place(found, name)] for name in (before, after))
    title, path = f"{before} → {after}", end.path
    if start in path:
        return Diff(title, tuple(rows_along(path[path.index(start) :])))
    return Diff(title, tuple(end.beside(start)))


def stages_of(trace: Trace) -> dict[str, Point]:
    """The points that every trace has, whatever its passes."""
    levels = trace.aot.levels if trace.aot is not None else ()
    after = [stage for stage in COMPILED if stage != "plans"]
    graphs = [f"{name}.{stage}" for name in ("forward", "backward") for stage in after]
    found, names = points(trace), ["guards", "capture", *levels, "aot.forward", "aot.backward"]
    return {name: found[name] for name in [*names, *graphs] if name in found}


def across(first: Trace, second: Trace, only: str | None) -> Diff:
    """Two traces, stage by stage. A cause is a step that one of them took, or an earlier difference's."""
    traces = stages_of(first), stages_of(second)
    only = only and place({**traces[0], **traces[1]}, only)
    chosen = [asdict(trace.capture.watch.of.options) for trace in (first, second)]
    changed = [name for name, value in chosen[0].items() if value != chosen[1][name]]
    facts = [(f"option {name}", str(chosen[0][name]), str(chosen[1][name])) for name in changed]
    rows, beside = list[Row](), dict[int, Row]()
    for name in dict.fromkeys([*traces[0], *traces[1]]):
        ends = [stages.get(name, Point(name, [])) for stages in traces]
        facts.append((name, ends[0].count, ends[1].count))
        own = [history(end, stages.values()) for end, stages in zip(ends, traces)]
        made = ends[1].beside(ends[0], name)
        made = [replace(r, cause=told(r, own, beside)) if r.status != "same" else r for r in made]
        beside.update(
            {id(p): row for row in made for p in (row.before, row.after) if p is not None}
        )
        if only == name or (not only and any(row.status != "same" for row in made)):
            rows += made
        if name.endswith(".schedule") and all(end.subject for end in ends):
            costs = [totals(end.subject) for end in ends]
            facts += [(f"{name}: {what}", costs[0][what], costs[1][what]) for what in costs[0]]
    title = f"{first.name} → {second.name}" + (f": {only}" if only else "")
    return Diff(title, tuple(rows), tuple(facts))


def history(end: Point, stages: Collection[Point]) -> tuple[dict[int, Row], dict[int, Row]]:
    """What the steps since the stage before did, by what came of it and by what it was."""
    at = max((i for i, point in enumerate(end.path[:-1]) if point in stages), default=0)
    rows = rows_along(end.path[at:])
    return {id(row.after): row for row in rows}, {id(row.before): row for row in rows}


def told(row: Row, own: Sequence[Any], beside: dict[int, Row]) -> str:
    """Why two traces differ here. `beside`: the rows of the stages before, by the pieces on both sides."""
    causes = []
    for side, piece in enumerate((row.before, row.after)):
        made = own[side][0].get(id(piece)) if piece is not None else None
        earlier = beside.get(id(made.before)) if made is not None else None
        if made is not None and (earlier is None or earlier.status == "same"):
            causes.append(made.cause)
        if earlier is not None and earlier.status != "same":
            causes.append(earlier.cause)
        elif earlier is not None:
            other = (earlier.after, earlier.before)[side]
            causes.append(own[1 - side][1][id(other)].cause)
    return "; ".join(dict.fromkeys(filter(None, causes)))
