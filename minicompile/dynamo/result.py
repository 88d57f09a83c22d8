"""The result of capture: the graph, its inputs and guards, and how Python's results are rebuilt.

    Capture   := graph, inputs: [GraphInput], guards: [Guard], bytecode: [InstructionRecord], result recipe
    GraphInput := Source of a tensor (or symbolic int) that becomes a placeholder
    Guard     := sources, kind, expected, reason, user line: must hold for the capture to be reused
    Break     := reason, user line, hint: why a frame (or part of it) ran in eager
    Miss      := a call that no version answered: the guard that failed in each, and what was made of it
    Passage   := a source line, the instructions executed for it, the graph nodes they made

The real compiler: torch/_dynamo/source.py, torch/_guards.py, output_graph.py.
"""

from __future__ import annotations

import enum
import functools
import itertools
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from minicompile.errors import refusal_text
from minicompile.ops.display import Several, Shown, listed
from minicompile.ops.dtypes import value_text
from minicompile.ops.events import Compilation, Watch
from minicompile.ops.graph import Graph, call_text
from minicompile.ops.origin import SourceLine
from minicompile.options import Options
from minicompile.shapes.expr import python_text

SOURCE_KINDS: dict[str, tuple[str, str]] = {
    # the base is a function
    "default": ("{base}.<default {key}>", "{base}.__defaults__[{key}]"),
    "keyword_default": ("{base}.<default {key}>", "{base}.__kwdefaults__[{key!r}]"),
    "closure": ("{base}.<cell {key}>", "closure_cell({base}, {key!r})"),
    # the base is an object with a `__dict__`; the tables are nn.Module's
    "attribute": ("{base}.{key}", "{namespace}[{key!r}]"),
    "namespace": ("{base}.__dict__", "{namespace}"),
    "parameter": ("{base}.{key}", "member({namespace}, '_parameters', {key!r})"),
    "buffer": ("{base}.{key}", "member({namespace}, '_buffers', {key!r})"),
    "submodule": ("{base}.{key}", "member({namespace}, '_modules', {key!r})"),
    # the base is a cell, a module's globals, a container, a class, an object of a C type, a ContextVar,
    # a weak reference, a tensor, a C function that reads a setting of torch
    "contents": ("{base}", "{base}.cell_contents"),
    "global": ("{base}.{key}", "{base}[{key!r}]"),
    "item": ("{base}[{key}]", "{base}[{key!r}]"),
    "class_attribute": ("{base}.{key}", "lookup({base}, {key!r})"),
    "slot": ("{base}.{key}", "{base}.{key}"),
    "context": ("{base}.get()", "{base}.get()"),
    "referent": ("{base}()", "{base}()"),
    "size": ("{base}.size({key})", "{base}.size({key})"),
    "setting": ("{base}{key}", "{base}(*{key!r})"),
    # no base: an argument; an object that the cache entry holds (a module's globals, a class)
    "local": ("{key}", "L_{key}"),
    "held": ("{key}", "{key}"),
    # no base: a number as text; what Python makes of numbers, see `computed`
    "literal": ("{key}", "{key}"),
    "computed": ("", ""),
}
"""Each kind of source: how it reads, and the Python that fetches it (`guards.SourceCode`)."""


@dataclass(frozen=True)
class Source(Shown):
    """Where a value lives at run time, as a path from the frame: `self.blocks[0].weight`.

    `base` is what it is reached from, `key` the name, number or dict key there.
    """

    kind: str
    key: Any = None
    base: Source | None = None

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.key, self.base))

    def __hash__(self) -> int:
        return self._hash

    @property
    def root(self) -> Source:
        """Where the path starts."""
        return self if self.base is None else self.base.root

    @property
    def name(self) -> str:
        """Readable path, valid Python for the plain kinds."""
        base = self.base.name if self.base is not None else ""
        kind = self.kind
        if kind == "computed":
            form, _, parts = self.key
            return str(form.format(*(part.name for part in parts)))
        if kind == "global" and base in ("", "globals"):
            kind = "local"
        elif kind == "submodule" and str(self.key).isdecimal():
            kind = "item"
        key = describe(self.key) if self.kind == "item" else self.key
        return SOURCE_KINDS[kind][0].format(base=base, key=key)

    def __str__(self) -> str:
        return self.name


def computed(form: str, parts: Iterable[Source], function: Any = None) -> Source:
    """What Python makes of numbers: a form like `({0} + {1})`, or a call of the function that it names."""
    return Source("computed", (form, function, tuple(parts)))


def describe(value: Any) -> str:
    """A value in a guard's text: constants as written, functions and classes by name, others by type.

    Runs no code of the value's class.
    """
    cls: Any = type(value)
    name = f"<{cls.__qualname__}>"
    if issubclass(cls, type | types.FunctionType | types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}".removeprefix("builtins.")
    if cls is types.ModuleType:
        return str(value.__name__)
    if issubclass(cls, torch.Tensor):
        return value_text(value) + (", requires grad" if value.requires_grad else "")
    if cls is tuple or cls is list:
        text = ", ".join(map(describe, value)) + "," * (cls is tuple and len(value) == 1)
        text = f"({text})" if cls is tuple else f"[{text}]"
    elif issubclass(cls, enum.Enum):
        text = f"{cls.__qualname__}.{value._name_}"
    else:
        written = id(cls) in WRITTEN or cls.__module__ == "torch"
        text = str(value) if cls is Description else repr(value) if written else name
    return text if len(text) <= LONGEST else name


LONGEST = 120
WRITTEN = frozenset(map(id, (int, float, complex, bool, str, bytes, type(None), range, slice)))
"""Classes, by id, whose `repr` runs no user code. Looking up a class itself would ask its metaclass."""


class GuardKind(NamedTuple):
    """How a kind of guard is written: {0}, {1}, {all} its sources, {e} what it expects."""

    text: str
    """For a reader; where there is neither a `condition` nor a rule in guards.py, it is the check too."""
    condition: str = ""
    """As Python."""
    found: str = "{0}"
    """What to show of the value that was found: words, or Python if it is about {0}."""


GUARD_KINDS = {
    "type": GuardKind("type({0}) is {e}", found="type({0})"),
    "identity": GuardKind("{0} is {e}"),
    "equals": GuardKind("{0} == {e}"),
    "absent": GuardKind("{e} not in {0}", "not dict.__contains__({0}, {e})", "it there"),
    "length": GuardKind("len({0}) == {e}", found="base_length({0})"),
    "keys": GuardKind("list({0}) == {e}", "same_items(items_of({0}), {e})", "items_of({0})"),
    "class": GuardKind(
        "attributes of {0} are defined as before",
        "same_class({0}, {e})",
        "other attributes or bases",
    ),
    "code": GuardKind("{0}.__code__ is {e}", found="{0}.__code__"),
    "globals": GuardKind("{0} has the same globals", "{0}.__globals__ is {e}", "other globals"),
    "defaults": GuardKind("{0} has {e} defaults", "len({0}.__defaults__ or ()) == {e}"),
    "hooks": GuardKind("{0} has no hooks", "hook_free({0})", "hooks"),
    # of several sources
    "same": GuardKind("{0} is {1}", found="another object"),
    "same_size": GuardKind("{0} == {1}"),
    "distinct": GuardKind(
        "different objects: {all}", "all_different({all})", "one object under two names"
    ),
    "memory": GuardKind(
        "what is changed of {all} shares no memory",
        "memory_facts({e}[0], {all}) == {e}[1]",
        "memory that is shared, or views made in another way",
    ),
    "shape": GuardKind("{e}"),
    "number": GuardKind("{e}"),
    "strides": GuardKind("{0}.stride() == {e}"),
    # of all inputs at once, in C++ where torch has it
    "tensor": GuardKind("{0} is {e}", "True"),
    "different": GuardKind(
        "different tensors: {all}", "all_different({all})", "one tensor under two names"
    ),
    "global_state": GuardKind("global state is as it was", "True"),
}
WHOLE = ("tensor", "global_state", "different")
"""Kinds that are checked for all inputs at once."""
SHAPE_KINDS = ("shape", "number", "same_size", "strides")
"""Guards on symbolic sizes."""


@dataclass(frozen=True, eq=False)
class Guard(Shown):
    """A fact about one or several sources that the captured graph relies on."""

    sources: tuple[Source, ...]
    kind: str
    expected: Any
    reason: str
    user_line: SourceLine | None = None

    @property
    def expression(self) -> str:
        """The check as one readable line."""
        form = GUARD_KINDS.get(self.kind, GuardKind("{all}: " + self.kind + " {e}")).text
        return self.written(form, [source.name for source in self.sources], describe)

    def written(self, form: str, names: Sequence[str], value: Callable[[Any], str]) -> str:
        """A form of the kind, filled in; `value` is how to write what is expected."""
        expected = ""
        if self.kind in ("shape", "strides"):
            expected = python_text(self.expected, names[self.kind == "strides" :])
        elif self.kind == "number":
            expected = self.expected.format(*names)
        elif "{e}" in form:
            expected = value(self.expected)
        return form.format(*names, e=expected, all=", ".join(names))

    def __str__(self) -> str:
        at = f" ({self.user_line})" if self.user_line else ""
        return f"{self.expression}  # {self.reason}{at}"


@dataclass(frozen=True)
class GuardFailure(Shown):
    """Why a cached capture could not be reused: the guard, and what was found instead."""

    guard: Guard
    found: Any
    """A constant or a class as it is, anything else as a `Description`."""
    version: int = 1
    """Which capture of the function, the oldest is 1."""
    recompile: int = 1
    """Which of the function's recompiles; all failures of one have the same number."""

    @property
    def expected(self) -> Any:
        """The old value."""
        return self.guard.expected

    @property
    def source(self) -> str:
        """What was looked at, as an expression of the user's program."""
        return ", ".join(source.name for source in self.guard.sources)

    @property
    def user_line(self) -> SourceLine | None:
        """The line of the user's program that made it matter."""
        return self.guard.user_line

    def __str__(self) -> str:
        text = f"{self.guard.expression} failed: found {describe(self.found)}"
        return text + (f"\n  needed at {self.user_line}" if self.user_line else "")


class Description(str):
    """What a value looked like, where keeping the value would keep it alive."""

    __slots__ = ()


@dataclass(frozen=True)
class GraphBreak(Shown):
    """Why Python ran something itself. `kind` is "frame" when the whole frame ran in eager.

    `id` is one of `dynamo/reasons.py`.
    """

    reason: str
    user_line: SourceLine | None
    hint: str = ""
    kind: str = "frame"
    id: str = ""

    explanation: str = ""
    """What this kind of break means, for somebody who has not met it before."""

    def __str__(self) -> str:
        what = refusal_text(self.reason, self.user_line, self.hint, self.id)
        return f"{self.kind} ran in eager: {what}"


@dataclass(frozen=True)
class Miss:
    """A call that no version answered, and what was made of it."""

    answered: dict[int, int]
    """How many calls before it each version had answered, by its number; 0: how many ran in eager."""
    failures: tuple[GuardFailure, ...] = ()
    """The guard that failed, of each version."""
    made: int = 0
    """The number of the version made for it; 0: the call ran in eager."""
    symbolic: tuple[str, ...] = ()
    """The sizes and numbers that are symbolic for the first time."""
    why: GraphBreak | None = None
    """Why no version was made."""
    seconds: float = 0.0

    @property
    def call(self) -> int:
        """Which call it was; the first is 1."""
        return sum(self.answered.values()) + 1

    def __str__(self) -> str:
        tried = "no version fits" if self.failures else "there is no version"
        made = f"made version {self.made}" if self.made else f"in eager: {self.why}"
        symbolic = f", symbolic: {', '.join(self.symbolic)}" if self.symbolic else ""
        return f"call {self.call}: {tried}; {made}{symbolic}"


def failure_lines(failures: Iterable[GuardFailure]) -> list[str]:
    """Lines that say which guard of each version failed."""
    return [f"  version {f.version}: " + str(f).replace("\n", "\n  ") for f in failures]


@dataclass(frozen=True)
class GraphInput:
    """A placeholder of the captured graph: where its value comes from, and its fake at compile time."""

    name: str
    source: Source
    fake: Any
    real: weakref.ref[torch.Tensor] | None = field(default=None, repr=False)
    """The tensor that it was in the call that was captured."""

    def __str__(self) -> str:
        return f"{self.name}: {value_text(self.fake)} = {self.source}"


@dataclass(frozen=True, slots=True)
class InstructionRecord:
    """One instruction the interpreter executed, in order: what a learner sees beside the graph."""

    offset: int
    opname: str
    argument: str
    line: SourceLine | None
    depth: int
    """Call depth: 0 in the captured frame, more inside inlined calls."""
    stack_after: int
    nodes: tuple[str, ...]
    """Names of the graph nodes it created."""

    def __str__(self) -> str:
        return f"{self.opname} {self.argument}".rstrip()


LONG_FLOW = 300
"""Flows with more instructions than this show only those that made nodes."""


@dataclass(frozen=True)
class Passage:
    """Instructions that were executed one after the other for one source line."""

    line: SourceLine | None
    depth: int
    """Call depth: 0 in the captured frame, more inside inlined calls."""
    instructions: tuple[InstructionRecord, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the graph nodes that they made."""
        return tuple(name for record in self.instructions for name in record.nodes)

    def __str__(self) -> str:
        steps = (f"\n    {record}" for record in self.instructions)
        return "  " * self.depth + f"{self.line or '(no line)'}{''.join(steps)}"


@dataclass
class Capture(Shown):
    """One frame, captured once. `graph` outputs a flat tuple of tensors (and symbolic ints)."""

    name: str
    graph: Graph
    inputs: list[GraphInput]
    guards: list[Guard]
    bytecode: Sequence[InstructionRecord] = ()
    result: str = ""
    """How the frame's return value is rebuilt from the graph's outputs, as text."""
    side_effects: tuple[str, ...] = ()
    """What the frame changed outside of itself, replayed after the graph ran."""
    inlined: tuple[str, ...] = ()
    """Qualified names of the functions inlined into the graph."""
    grad_enabled: bool = True
    """Grad mode when the frame was entered (guarded)."""
    shape_env: Any = None
    """The `shapes.env.ShapeEnv` of symbolic sizes, None when all sizes are plain ints."""
    stopped_by: GraphBreak | None = None
    """Why the graph ends before the frame does."""
    continues: bool = False
    """Does the compiled function go on after the frame, or after the graph?"""
    watch: Watch = field(
        default_factory=lambda: Watch(Compilation(0, 0, "", Options())), repr=False
    )
    """Who hears what the rooms make of it."""

    def __post_init__(self) -> None:
        listed(self, "inputs", "guards")

    @property
    def passages(self) -> Several[Passage]:
        """The executed instructions, by source line, without jumps and those that restore a cut frame."""
        plumbing = ("JUMP", "NOP", "RESUME")
        told = (
            record
            for record in self.bytecode
            if record.opname not in plumbing and not record.argument.startswith("__stack")
        )
        same_line = itertools.groupby(told, key=lambda r: (r.line, r.depth))
        return Several(Passage(line, depth, tuple(group)) for (line, depth), group in same_line)

    @property
    def flow(self) -> str:
        """The executed instructions with the graph's nodes beside them, and where the frame was cut. A long
        flow shows only source lines that made nodes."""
        texts = {node.name: call_text(node) for node in self.graph.nodes}
        short = len(self.bytecode) <= LONG_FLOW
        lines: list[str] = []
        for passage in self.passages:
            if not short and not passage.nodes:
                continue
            indent = "  " * passage.depth
            lines.append(f"{indent}{passage.line or '(no line)'}")
            for record in passage.instructions:
                made = "; ".join(f"{name} = {texts.get(name, '')}" for name in record.nodes)
                lines.append(
                    f"{indent}    {record!s:<40}  | {made}" if made else f"{indent}    {record}"
                )
        if self.stopped_by is not None:
            lines.append(f"----- cut here: {self.stopped_by.reason} [{self.stopped_by.id}]")
        return "\n".join(lines)

    @property
    def size_lines(self) -> list[str]:
        """What each symbol stands for and why there is one, or what fixed its value."""
        lines = self.shape_env.lines() if self.shape_env is not None else []
        return ["symbols:", *(f"  {line}" for line in lines)] if lines else []

    @property
    def fakes(self) -> list[Any]:
        """Compile-time values of the graph's inputs, in placeholder order."""
        return [graph_input.fake for graph_input in self.inputs]

    @property
    def subgraphs(self) -> list[Graph]:
        """Graphs that nodes of the graph run: of functions that torch calls later, or under a transform."""
        return [graph for node in self.graph.nodes for graph in getattr(node.target, "graphs", ())]

    def __str__(self) -> str:
        lines = [
            f"capture of {self.name}: {self.graph.op_count} operations, {len(self.inputs)} inputs, "
            f"{len(self.guards)} guards, {len(self.inlined)} calls inlined",
            *("", str(self.graph)),
            *(f"\n{inner}" for inner in self.subgraphs),
            *("", "guards:", *(f"  {guard}" for guard in self.guards), *self.size_lines),
        ]
        if self.side_effects:
            lines += ["", "afterwards:", *(f"  {effect}" for effect in self.side_effects)]
        lines += ["", f"returns {self.result}"]
        return "\n".join(lines)
