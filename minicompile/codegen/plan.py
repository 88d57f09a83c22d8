"""`KernelPlan`, all decisions about one kernel, and `KernelSource`, its text.

    KernelPlan   := one FusedSchedulerNode merged into one typed LoopBody, cut into phases,
                    with loops and tiles; or cut into launches, [KernelPlan] that run in its place
    Phase        := "row" (once per x) or "loop" (for every r): the values computed there, in order
    KernelSource := name, language, [CodeLine], plan
    CodeLine     := text, origins
    WrapperSource:= Python source that allocates, calls kernels and extern operators, and frees

The body of a plan is legal: computation dtypes, integer widths, NaN rules and rounding are explicit, so the
printers only print. The real compiler: torch/_inductor/codegen/{common,simd,triton,cpp,wrapper}.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import sympy
import torch

from minicompile.errors import Unsupported
from minicompile.lowering.ir import Layout, View
from minicompile.ops.display import Registered, Shown, count_text
from minicompile.ops.dtypes import short
from minicompile.ops.origin import NO_ORIGINS, Origins, union
from minicompile.ops.registry import Registry
from minicompile.options import Options
from minicompile.scheduling.body import LoopBody, Value, ranges_text
from minicompile.scheduling.cost import Cost
from minicompile.scheduling.nodes import ExternKernelSchedulerNode, FusedSchedulerNode, Schedule
from minicompile.shapes.expr import (
    FloorDiv,
    ModularIndexing,
    Size,
    is_float,
    product,
    size_hint,
)

Language = str
"""A key of the registries `code_generator` and `kernel_loader`: "cpp", "triton"."""

REFERENCE = "reference"
"""The language in which an interpreter, if it is there, runs a kernel's loops (debug/reference.py)."""


INT32_END = 2**31

OUTER_ITERATIONS = 8
"""Outer loops of C kernels with fewer iterations leave threads idle."""

INDEX_ERROR = 1
"""What a C kernel returns where a loaded index is out of range; runtime/cpp.py raises it."""


@dataclass(frozen=True)
class KernelArgument:
    """A tensor parameter of a kernel: the parameter's name, its buffer and what the kernel does to it."""

    name: str
    buffer: str
    dtype: torch.dtype
    role: Literal["in", "out", "inout"]


@dataclass(frozen=True)
class Phase:
    """Values computed together: at row level, or in one loop over the reduction variables."""

    level: Literal["row", "loop"]
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Alternative:
    """A plan that was considered, and why it was not taken."""

    description: str
    reason: str


@dataclass(frozen=True)
class Step:
    """A decision about a kernel: the name by which it can be forbidden, the plan's fields it set, and why."""

    name: str
    results: Mapping[str, Any]
    why: str

    def __str__(self) -> str:
        texts = (f"{name} {result_text(value)}" for name, value in self.results.items())
        return f"{self.name}: {', '.join(texts)} ({self.why})"


def result_text(value: Any) -> str:
    """A field of a plan in a few words: large objects by their names or number."""
    match value:
        case torch.dtype():
            return short(value)
        case Mapping() if not any(isinstance(v, Value) for v in value):
            return ", ".join(f"{k}: {result_text(v)}" for k, v in value.items()) or "none"
        case tuple() | frozenset() if all(isinstance(v, KernelPlan) for v in value) and value:
            return ", ".join(f"{p.name} {ranges_text(p.body.all_ranges)}" for p in value)
        case tuple() | frozenset() | Mapping():
            return count_text(len(value), "value")
    return str(value)


@dataclass(frozen=True)
class Tiling:
    """The axes of tiles, with the loops that each flattens, and parallel loops that none does."""

    axes: dict[str, dict[sympy.Symbol, Size]]
    batch: dict[sympy.Symbol, Size]


@dataclass(frozen=True)
class Rival:
    """Launches, and calls of a library, that do what one kernel does; `workspace` is memory between them."""

    name: str
    steps: tuple[KernelPlan | LibraryCall, ...]
    workspace: Mapping[str, Layout]


@dataclass(frozen=True)
class LibraryCall:
    """A call of a library's operator: of views of buffers, into a buffer."""

    op: torch._ops.OpOverload
    operands: tuple[View, ...]
    result: str
    layout: Layout


@dataclass(eq=False)
class KernelPlan(Shown):
    """How one fused node becomes a kernel."""

    name: str
    language: Language
    device: torch.device
    node: FusedSchedulerNode
    body: LoopBody
    """All bodies merged: stores forwarded to loads, internal buffers gone, dtypes explicit."""
    phases: tuple[Phase, ...]
    arguments: tuple[KernelArgument, ...]
    sizes: tuple[sympy.Symbol, ...]
    """Numbers passed after the tensors: sizes as int64, then floats as float64."""
    reduction: str
    """"none", "persistent" or "looped"; or a name that a step gave: a template prints the kernel (registry
    `kernel_template`), or launches run in its place."""
    loop: frozenset[Value] = frozenset()
    """Values that differ for each r; all others are computed once per x."""
    stashed: frozenset[Value] = frozenset()
    """Loop values kept in a scratch row between phases; others are computed again."""
    riders: Mapping[Value, Value] = field(default_factory=dict)
    """Reductions that need no loop of their own, and those in whose loop they ride."""
    tiles: dict[str, int] = field(default_factory=dict)
    """How large pieces of loops are computed together, by the names that the language has for them."""
    assumes: dict[sympy.Basic, str] = field(default_factory=dict)
    """What must hold of the sizes, which the graph is guarded by, and why."""
    in_place: Mapping[str, str] = field(default_factory=dict)
    """Buffers written in the memory of others, element by element when these have been read."""
    barriers: frozenset[Value | Phase] = frozenset()
    """Accesses of memory, and loops, before which the threads of a GPU's program wait for each other."""
    rivals: tuple[Rival, ...] = ()
    """Other ways to compute the same, of which the fastest is to be taken (registry `rival_rule`)."""
    launches: tuple[KernelPlan, ...] = ()
    """Kernels that run in place of this one, in order."""
    workspace: Mapping[str, Layout] = field(default_factory=dict)
    """Memory by which they hand over what they found."""
    cost: Cost = field(default_factory=lambda: Cost(0, 0, 0))
    hints: dict[sympy.Symbol, int] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    """The decisions, in the order in which they were made."""
    alternatives: tuple[Alternative, ...] = ()

    @property
    def origins(self) -> Origins:
        return self.body.origins

    @property
    def ranges(self) -> dict[sympy.Symbol, Size]:
        return self.body.ranges

    @property
    def reduction_ranges(self) -> dict[sympy.Symbol, Size]:
        return self.body.reduction_ranges

    @property
    def checked(self) -> list[Value]:
        """Loaded indices that the kernel looks at before it uses them."""
        return [v for v in self.body.values if v.check]

    @property
    def rows(self) -> int:
        """How many x there are, at the hints."""
        return count(self.ranges.values(), self.hints)

    @property
    def integers(self) -> list[sympy.Symbol]:
        """Those of `sizes` that are no floats: the first ones."""
        return [symbol for symbol in self.sizes if not is_float(symbol)]

    @property
    def row_length(self) -> int:
        """How many r each of them has, at the hints."""
        return count(self.reduction_ranges.values(), self.hints)

    @property
    def position(self) -> sympy.Expr:
        """The linear position in the reduction's ranges."""
        place: sympy.Expr = sympy.Integer(0)
        for var, size in self.reduction_ranges.items():
            place = place * size + (var if size != 1 else 0)
        return sympy.expand(place)

    def reject(self, description: str, reason: str) -> None:
        """Note down a plan that was considered, and why it was not taken."""
        self.alternatives += (Alternative(description, reason),)

    def take(self, name: str, step: PlanStep, options: Options) -> None:
        """Let a step decide, and note down what it has set."""
        before = dict(vars(self))
        why = step(self, options) or (step.__doc__ or "").partition("\n")[0]
        results = {
            k: v for k, v in vars(self).items() if v is not before.get(k, v) and k not in NOTES
        }
        if results:
            self.steps += (Step(name, results, why),)

    def __str__(self) -> str:
        sizes = ", ".join(f"{s} ({self.hints.get(s, '?')} when compiling)" for s in self.sizes)
        facts = {
            "loops": ranges_text(self.ranges),
            "reduction": ranges_text(self.reduction_ranges) * bool(self.reduction_ranges),
            "sizes": sizes,
            "in place": ", ".join(f"{new} of {old}" for new, old in self.in_place.items()),
            "phases": ", ".join(f"{p.level} ({len(p.values)} values)" for p in self.phases),
            "cost": str(self.cost),
        }
        lines = [f"plan {self.name}: {self.language} for {self.device}"]
        lines += [f"  {name} {fact}" for name, fact in facts.items() if fact]
        lines += [f"  {step}" for step in self.steps]
        lines += [f"  rival {rival.name}" for rival in self.rivals]
        lines += [f"  {a.role} {a.name}: {short(a.dtype)} = {a.buffer}" for a in self.arguments]
        lines += [f"  not {a.description}: {a.reason}" for a in self.alternatives]
        return "\n".join(lines)


NOTES = frozenset({"alternatives", "steps"})
"""Fields of a plan that say how it came about."""


@dataclass(eq=False)
class CppPlan(KernelPlan):
    """A plan for C++: the common part, vectors and threads.

    `tiles` has "x", columns per tile; "r" and "chunks", the part of a long row that a thread takes and the
    most parts there are; or two loop variables, the sides of squares in which transposed loads are turned.
    """

    vector_axis: Literal["x", "r", "none"] = "none"
    """Innermost, vectorised loop of a C++ kernel."""
    vector_width: int = 1
    parallel: bool = False
    parallel_above: int = 0
    """With symbolic sizes: threads share the work from this many iterations on; 0: always."""
    double_sums: frozenset[Value] = frozenset()
    """Sums of float32 that are accumulated as doubles: their rounding errors would pile up."""

    @property
    def shares_inner(self) -> bool:
        """Do threads share the innermost loop over x, since those around it have few iterations?"""
        outer = [size for size in self.ranges.values() if size != 1][:-1]
        return self.parallel and count(outer, self.hints) < OUTER_ITERATIONS


@dataclass(eq=False)
class TritonPlan(KernelPlan):
    """A plan for Triton: the common part, tiles, warps and the width of indices.

    `tiles` has "y", "x" and "r", elements per program, and "stages", tiles on their way at once.
    """

    side_by_side: bool = False
    """Threads have so few registers that two programs fit into a multiprocessor's: one loads while
    the other computes."""
    num_warps: int = 4
    index_dtype: torch.dtype = torch.int64
    index_reach: tuple[Size, ...] = ()
    """A launch has int32 indices if these are below 2**31, else int64."""
    parts: int = 1
    """About how many programs share a row, if a rule says so."""
    tiling: Tiling | None = None
    """How tiles lie that aren't tiles of rows."""
    forms: Mapping[Value, str] = field(default_factory=dict)
    """Values that are computed more quickly than their operation says, and how: a key of `QUICK`."""
    choices: tuple[Mapping[str, int], ...] = ()
    """Tiles that are worth measuring, `tiles` first."""

    @property
    def axes(self) -> dict[str, dict[sympy.Symbol, Size]]:
        """The axes of the tiles, and the loops that each flattens."""
        if self.tiling is not None:
            return self.tiling.axes
        rows = {"r": self.reduction_ranges} if self.reduction_ranges else {}
        return {"x": self.ranges, **rows}

    @property
    def batch(self) -> dict[sympy.Symbol, Size]:
        """Parallel loops that no axis flattens: each iteration has programs of its own."""
        return self.tiling.batch if self.tiling is not None else {}

    @property
    def length(self) -> Size:
        """How far the tiles of a reduction go."""
        return product(self.reduction_ranges.values())

    @property
    def varying(self) -> bool:
        """That isn't known before the launch."""
        return not isinstance(self.length, int)


PLANS: Mapping[Language, type[KernelPlan]] = {"triton": TritonPlan}
"""The plans of a language. A new language has C++'s."""


PlanStep = Callable[[Any, Options], str | None]
"""`step(plan, options)` edits a plan and says why; if it says nothing, its docstring tells."""


class PlanRules(Registry[PlanStep]):
    """Rules in the order in which they decide: that of their registration, unless one goes `before` another.

    A rule for a `whole` kernel isn't asked about its launches. One that is `needed` can't be refused: without
    its decision there is no kernel."""

    def __init__(self, name: str, doc: str) -> None:
        super().__init__(name, doc)
        self.whole, self.needed = set[str](), set[str]()

    def __call__(
        self, *keys: str, before: str = "", whole: bool = False, needed: bool = False
    ) -> Callable[[PlanStep], PlanStep]:
        if before:
            self.load()
        register = super().__call__(*keys)
        new = [key for key in keys if key not in self.records]
        self.whole.update(keys if whole else ())
        self.needed.update(keys if needed else ())

        def add(rule: PlanStep) -> PlanStep:
            register(rule)
            order = list(self.records)
            for key in order[order.index(before) :] if before in order and new else ():
                if key not in new:
                    self.records[key] = self.records.pop(key)
            return rule

        return add


plan_rule = PlanRules("plan", "language:step -> step(plan, options) that edits a kernel plan")
plan_rule.modules += ["minicompile.codegen.cpp_rules", "minicompile.codegen.triton_rules"]


@dataclass(frozen=True)
class Surroundings:
    """What a kernel is planned in: its place in the schedule, and how to plan others for that place."""

    schedule: Schedule
    position: int
    options: Options
    make_plan: Callable[[FusedSchedulerNode, Schedule], KernelPlan]


rival_rule: Registry[Callable[[Any, Surroundings], Iterable[Rival]]] = Registry(
    "rival",
    "name -> rule(plan, surroundings) that gives other ways to compute what a kernel computes",
)


@dataclass(eq=False, kw_only=True)
class TemplatePlan(TritonPlan):
    """The plan of a kernel that computes an extern operator: text with holes, tiles that stay as planned,
    and arithmetic that needn't round step by step as eager's."""

    @property
    def origins(self) -> Origins:
        return self.node.origins


template_plan: Registry[Callable[[ExternKernelSchedulerNode, Language, int], TemplatePlan]] = (
    Registry(
        "template_plan",
        "extern operator -> rule(node, language, position): its kernels' plan, or Unsupported",
    )
)


@dataclass(frozen=True)
class CodeLine:
    """A line of generated code and the operations it came from."""

    text: str
    origins: Origins = NO_ORIGINS
    scaffold: bool = False
    """It only holds lines that compute, load or store: the head of a loop, a brace, where a block begins."""

    def __str__(self) -> str:
        return self.text


class Code:
    """Generated code, line by line."""

    name: str
    lines: list[CodeLine]

    @property
    def text(self) -> str:
        return "\n".join(line.text for line in self.lines) + "\n"

    def __str__(self) -> str:
        return self.text


@dataclass(eq=False)
class KernelSource(Code, Shown):
    """A generated kernel. After its prelude, the joined lines compile."""

    name: str
    language: Language
    lines: list[CodeLine]
    plan: Any
    """The KernelPlan of its language."""
    prelude: str = ""
    """Helper functions that the lines call: source text that goes before them."""

    interpreted = Registered()
    """Makes a Triton kernel a function of CPU tensors, in Triton's interpreter."""

    @property
    def origins(self) -> Origins:
        return union(line.origins for line in self.lines)


@dataclass(eq=False)
class KernelModule(Shown):
    """The kernels of one graph in one language, and the text that is compiled."""

    language: Language
    text: str
    kernels: list[KernelSource]
    units: tuple[str, ...] = ()
    """The text in files that can be compiled side by side."""
    cached: int | None = None
    """How many of these files the disk cache had; None where it is not known."""
    tell: Callable[[str, Any], None] = lambda kind, made: None
    """Hears of what is found out about the kernels when they are called."""

    def __str__(self) -> str:
        return self.text


@dataclass(eq=False)
class WrapperSource(Code, Shown):
    """Python that runs a graph: `call(args)` takes a list, which it empties, and returns the outputs."""

    name: str
    lines: list[CodeLine]
    kernels: list[KernelSource]
    owned: bool = False
    """No output is a view, be it of memory made here."""


def count(sizes: Iterable[Size], hints: Mapping[sympy.Symbol, int]) -> int:
    """How many elements, at the hints."""
    return math.prod(size_hint(size, hints) for size in sizes)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n (and at least 1)."""
    return 1 << max(n - 1, 0).bit_length()


def size_text(size: Size) -> str:
    """A size as a Python expression. Raises Unsupported for functions that have no text."""
    if isinstance(size, int):
        return str(size)
    for part in sympy.preorder_traversal(size):
        power = part.is_Pow and part.exp.is_positive
        known = part.is_Symbol or part.is_Integer or part.is_Add or part.is_Mul or power
        if not known and not isinstance(part, FloorDiv | ModularIndexing):
            raise Unsupported(f"the size {size} has no Python text")
    return str(size)
