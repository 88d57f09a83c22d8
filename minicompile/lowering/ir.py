"""The loop IR: buffers defined by loops over an index.

    LoopGraph(name, inputs, constants, operations, outputs)
    Operation := ComputedBuffer(name, layout, loops)
               | ExternKernel(name, op, args, kwargs, outputs, reason)
    Loops     := Pointwise(ranges, inner_fn)
               | Reduction(ranges, reduction_ranges, kind, inner_fn)
               | Template(ranges, reduction_ranges, kind, inner_fn, op, operands, finish)
               | Scan(ranges, dim, kind, inner_fn)
               | Scatter(ranges, target, output_index, inner_fn, mode)
    Input     := InputBuffer(name, layout) | Size
    Constant  := ConstantBuffer(name, layout, value)
    Output    := View(buffer, layout) | Size | float | bool | None
    Layout(device, dtype, size, stride, offset)
    inner_fn(ops, index) -> value            index: one expression per range
    Size      := int | sympy.Expr

Operations stand in an order in which they can run. A buffer is written by exactly one operation, except that
a Scatter updates the memory of its `target`, which nothing else may read afterwards.
The real compiler: torch/_inductor/ir.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import sympy
import torch

from minicompile import compat
from minicompile.ops.display import Registered, Shown, listed
from minicompile.ops.dtypes import short
from minicompile.ops.handler import Index, InnerFn, Ops, ReductionFn, StoreMode
from minicompile.ops.origin import NO_ORIGINS, Origins, source_lines
from minicompile.ops.overloads import aten_ops
from minicompile.ops.table import ReductionKind, ScanKind
from minicompile.shapes.expr import (
    Expr,
    Ranges,
    Size,
    contiguous_strides,
    index_text,
    linear_index,
    loop_symbol,
    product,
    same,
    simplify_index,
    strides_agree,
)


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in memory; sizes, strides and offset in elements."""

    device: torch.device
    dtype: torch.dtype
    size: tuple[Size, ...]
    stride: tuple[Size, ...]
    offset: Size = 0

    @staticmethod
    def contiguous(device: torch.device, dtype: torch.dtype, size: Sequence[Size]) -> Layout:
        return Layout(device, dtype, tuple(size), contiguous_strides(size))

    @property
    def numel(self) -> Size:
        return product(self.size)

    @property
    def storage_size(self) -> Size:
        """Elements that must exist from the first to the last, offset included; 0 if there are none."""
        if any(extent == 0 for extent in self.size):
            return 0
        last = linear_index([extent - 1 for extent in self.size], self.stride, self.offset)
        return int(last) + 1 if last.is_Integer else last + 1

    def has_strides(self, stride: Sequence[Size]) -> bool:
        """Whether it has these strides wherever they matter."""
        return strides_agree(self.size, self.stride, stride)

    def is_contiguous(self) -> bool:
        """Row-major without gaps."""
        return self.has_strides(contiguous_strides(self.size))

    def index(self, index: Sequence[Expr]) -> Expr:
        """Linear position of an element."""
        return linear_index(index, self.stride, self.offset)

    def __str__(self) -> str:
        parts = [", ".join(map(str, self.size))]
        if not self.is_contiguous() or self.offset != 0:
            parts.append(", ".join(map(str, self.stride)))
        if self.offset != 0:
            parts.append(f"+{self.offset}")
        return f"{short(self.dtype)}[{'; '.join(parts)}]"


def same_size(a: Sequence[Size], b: Sequence[Size]) -> bool:
    return len(a) == len(b) and all(map(same, a, b))


@dataclass(eq=False)
class Buffer(Shown):
    """Named memory: an input, a constant, or what one operation writes."""

    name: str
    layout: Layout
    origins: Origins = NO_ORIGINS

    def __str__(self) -> str:
        return f"{self.name}: {self.layout}"


@dataclass(eq=False)
class InputBuffer(Buffer):
    """A tensor argument of the graph."""


@dataclass(eq=False)
class ConstantBuffer(Buffer):
    """A tensor known when compiling."""

    value: torch.Tensor | None = None


@dataclass(frozen=True)
class Pointwise:
    """Each element computed on its own."""

    ranges: tuple[Size, ...]
    inner_fn: InnerFn


@dataclass(frozen=True)
class Reduction:
    """Each element of `ranges` reduces `reduction_ranges`."""

    ranges: tuple[Size, ...]
    reduction_ranges: tuple[Size, ...]
    kind: ReductionKind
    inner_fn: ReductionFn


@dataclass(frozen=True)
class Template(Reduction):
    """A matrix product, as the sum that it is: ranges [batch..., M, N], reduction_ranges [K].

    A kernel computes it on tensor cores, a tile at a time, together with what follows; or `op`, of a library,
    all at once. The real compiler: TemplateBuffer in torch/_inductor/ir.py.
    """

    op: torch._ops.OpOverload
    operands: tuple[View, ...]
    """What the library gets: the factors, and before them what is added to their product."""
    finish: Callable[[Ops, Any, Sequence[Index]], Any] = lambda ops, total, index: total
    """The element at an index, from the sum."""


@dataclass(frozen=True)
class Scan:
    """Each element of `ranges` combines all up to its own place along `dim`, in order.

    It does so in the dtype of `inner_fn`, which is one that loops compute in; the result is converted.
    """

    ranges: tuple[Size, ...]
    dim: int
    kind: ScanKind
    inner_fn: InnerFn


@dataclass(frozen=True)
class Scatter:
    """For each index of `ranges`, write the value to `output_index(ops, index)` of the buffer `target`.

    `output_index` gives one expression per dimension of the target. The target's memory becomes the result's.
    """

    ranges: tuple[Size, ...]
    target: str
    output_index: Callable[[Ops, Sequence[Index]], Sequence[Index]]
    inner_fn: InnerFn
    mode: StoreMode


Loops = Pointwise | Reduction | Scan | Scatter


@dataclass(eq=False)
class ComputedBuffer(Buffer):
    """A buffer that a loop nest fills."""

    loops: Loops = field(default=None)  # type: ignore[assignment]
    why: str = ""
    """Why the value was realized: written to memory instead of inlined into its users."""
    reads: frozenset[str] = frozenset()
    """The buffers that it loads from, and the target that it updates."""
    made_by: Origins = NO_ORIGINS
    """The operations whose result it is; `origins` has those that its loops inline, too."""

    def __post_init__(self) -> None:
        self.made_by = self.made_by or self.origins

    def __str__(self) -> str:
        why = f"  # {self.why}" if self.why else ""
        return f"{self.name}: {self.layout} = {loops_text(self.loops)}{why}"


@dataclass(eq=False)
class ExternOutput(Buffer):
    """One output of an extern operator."""

    index: int | None = None
    """Position in the operator's tuple, None when it returns one tensor."""


@dataclass(frozen=True)
class View:
    """A buffer, or part of it, seen with another layout. Nothing is copied."""

    buffer: str
    layout: Layout

    def __str__(self) -> str:
        return f"{self.buffer}[{self.layout}]"


@dataclass(eq=False)
class ExternKernel(Shown):
    """An operator that a library runs.

    Tensors in `args`/`kwargs` (any nesting) are `View`s; sizes may be expressions.
    """

    name: str
    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[ExternOutput | None, ...]
    reason: str
    """Why no loops: "library matrix product", "no lowering for aten.sort", ..."""
    origins: Origins = NO_ORIGINS

    @property
    def has_effect(self) -> bool:
        """Whether eager would behave differently without it, even if nobody reads its results."""
        seeded = torch.Tag.nondeterministic_seeded in self.op.tags
        return not self.outputs or seeded

    def views(self) -> list[View]:
        """The tensors it reads, in order."""
        given = compat.tree_leaves((self.args, self.kwargs))
        return [value for value in given if isinstance(value, View)]

    @property
    def reads(self) -> tuple[str, ...]:
        """The buffers that those look at, each once."""
        return tuple(dict.fromkeys(view.buffer for view in self.views()))

    def __str__(self) -> str:
        arguments = [_extern_argument(a) for a in self.args]
        arguments += [f"{key}={_extern_argument(value)}" for key, value in self.kwargs.items()]
        outputs = ", ".join(str(o) if o is not None else "None" for o in self.outputs)
        return f"{outputs} = extern {self.op}({', '.join(arguments)})  # {self.reason}"


PRODUCTS = frozenset(aten_ops("mm.default bmm.default addmm.default addmm.dtype baddbmm.default"))
"""Matrix products: they take `out=`, and their result lies the same way however their operands do."""
LIBRARY_PRODUCTS = PRODUCTS | {compat.onednn_linear()}
"""With oneDNN's, which has no `out=`."""

Operation = ComputedBuffer | ExternKernel
Output: TypeAlias = View | Size | float | bool | None


@dataclass
class LoopGraph(Shown):
    """Everything one ATen graph lowered to."""

    name: str
    inputs: list[InputBuffer | Size]
    """In placeholder order: tensors as buffers, symbolic ints as their symbol (or expression)."""
    constants: list[ConstantBuffer]
    operations: list[Operation]
    outputs: list[Output]
    size_hints: dict[sympy.Symbol, int] = field(default_factory=dict)
    """Each size symbol's value when compiling: for heuristics only."""
    written_back: dict[int, int] = field(default_factory=dict)
    """Outputs that become an input's new contents, by their numbers: a kernel may write them there."""

    verify = Registered()
    """Raise VerifyError where the graph breaks the grammar (debug/verify.py)."""

    def __post_init__(self) -> None:
        listed(self, "inputs", "operations")

    @property
    def buffers(self) -> dict[str, Buffer]:
        """All buffers by name."""
        written = [buffer for operation in self.operations for buffer in written_by(operation)]
        return {buffer.name: buffer for buffer in (*self.given, *written)}

    @property
    def given(self) -> list[Buffer]:
        """Memory that is full before anything runs, and the caller's: inputs and constants."""
        return [b for b in (*self.inputs, *self.constants) if isinstance(b, Buffer)]

    @property
    def returned(self) -> list[str]:
        """The buffers that outputs are, or look at."""
        return [output.buffer for output in self.outputs if isinstance(output, View)]

    @property
    def externs(self) -> list[ExternKernel]:
        return [op for op in self.operations if isinstance(op, ExternKernel)]

    def __str__(self) -> str:
        lines = [f"# {self.name}, by lowering: {len(self.operations)} buffers and extern calls"]
        lines += [f"input {b}" if isinstance(b, Buffer) else f"size {b}" for b in self.inputs]
        lines += [f"constant {b}" for b in self.constants]
        shown: object = None
        for operation in self.operations:
            at = source_lines(operation.origins)
            if at and at != shown:
                lines += [f"# {line}" for line in at]
                shown = at
            lines.append(str(operation))
        lines.append(f"return {', '.join(map(str, self.outputs))}")
        return "\n".join(lines)


def written_by(operation: Operation) -> Sequence[Buffer]:
    """The buffers an operation defines."""
    if isinstance(operation, ExternKernel):
        return [o for o in operation.outputs if o is not None]
    return [operation]


def loop_index(count: int, prefix: str = "p") -> list[sympy.Symbol]:
    """Loop variables p0, p1, ...: outermost first."""
    return [loop_symbol(f"{prefix}{i}") for i in range(count)]


def loop_ranges(loops: Loops) -> tuple[dict[sympy.Symbol, Size], dict[sympy.Symbol, Size]]:
    """The extents of the loops p0, p1, ... and of the reduction's loops r0, r1, ...

    The dimension of a scan is r0.
    """
    reduced = loops.reduction_ranges if isinstance(loops, Reduction) else ()
    p = dict(zip(loop_index(len(loops.ranges)), loops.ranges, strict=True))
    if isinstance(loops, Scan):
        reduced = (p.pop(loop_symbol(f"p{loops.dim}")),)
    return p, dict(zip(loop_index(len(reduced), "r"), reduced, strict=True))


def evaluate_loops(loops: Loops, ops: Ops) -> tuple[Any, Sequence[Index]]:
    """A loop body in some handler: its value, and the index it writes."""
    index, reduction_index = map(list[Index], loop_ranges(loops))
    if isinstance(loops, Reduction):
        return loops.inner_fn(ops, index, reduction_index), index
    if isinstance(loops, Scan):
        index.insert(loops.dim, *reduction_index)
    where = loops.output_index(ops, index) if isinstance(loops, Scatter) else index
    return loops.inner_fn(ops, index), where


def run_loops(buffer: ComputedBuffer, ops: Ops) -> None:
    """All that a buffer's loops do, in some handler: a value, its reduction or scan, and the store."""
    loops, layout = buffer.loops, buffer.layout
    value, where = evaluate_loops(loops, ops)
    if isinstance(loops, Reduction):
        value = ops.reduction(loops.kind, layout.dtype, value)
    if isinstance(loops, Template):
        value = loops.finish(ops, value, where)
    if isinstance(loops, Scan):
        value = ops.to_dtype(ops.scan(loops.kind, value), layout.dtype)
    mode: StoreMode = loops.mode if isinstance(loops, Scatter) else "store"
    ops.store(buffer.name, layout.index(where), value, mode)


def formulas(loops: Loops) -> tuple[str, Sequence[Index]]:
    """`evaluate_loops` as text."""
    p, r = loop_ranges(loops)
    return evaluate_loops(loops, FormulaOps({**p, **r}))


UNWRITTEN = ("output_index", "op", "operands", "finish")
"""Fields of loops that their text leaves out, or has in another place."""


def loops_text(loops: Loops) -> str:
    """`Pointwise([64, 128], relu(load(x, 128*p0 + p1)))`: the loop body as a formula."""
    inner, where = formulas(loops)
    written: dict[str, str] = {"inner_fn": inner}
    if isinstance(loops, Scatter):
        written["target"] = f"{loops.target}[{', '.join(map(str, where))}]"
    for name in ("ranges", "reduction_ranges"):
        written[name] = f"[{', '.join(map(str, getattr(loops, name, ())))}]"
    names = (field.name for field in fields(loops) if field.name not in UNWRITTEN)
    arguments = (written.get(name) or repr(getattr(loops, name)) for name in names)
    return f"{type(loops).__name__}({', '.join(arguments)})"


class FormulaOps(Ops):
    """The handler that prints: every value is its formula as text, indices simplified over `ranges`."""

    def __init__(self, ranges: Ranges | None = None) -> None:
        self.ranges: Ranges = ranges or {}
        self.loaded: list[str] = []
        """The buffers that the formulas read."""

    def load(self, buffer: str, index: Index) -> str:
        self.loaded.append(buffer)
        return f"{buffer}[{index_text(simplify_index(index, self.ranges))}]"

    def constant(self, value: float | int | bool, dtype: torch.dtype) -> str:
        return repr(value)

    def index_expr(self, expr: Index, dtype: torch.dtype) -> str:
        return f"{short(dtype)}({simplify_index(expr, self.ranges)})"

    def to_dtype(self, value: str, dtype: torch.dtype) -> str:
        return f"{short(dtype)}({value})"

    def masked(self, mask: str, body: Callable[[Ops], str], other: float | int | bool) -> str:
        return f"masked({mask}, {body(self)}, {other!r})"

    def indirect_indexing(
        self, value: str, size: Expr | int, check: bool = True, wrap_negative: bool = True
    ) -> Index:
        return sympy.Symbol(f"<{value}>", integer=True, nonnegative=True)

    def pointwise(self, name: str, *values: str) -> str:
        return f"{name}({', '.join(values)})"


def _extern_argument(value: Any) -> str:
    if isinstance(value, View):
        return value.buffer
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_extern_argument, value)) + "]"
    return str(value)
