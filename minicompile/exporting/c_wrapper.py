"""The wrapper of a package: readable C that lays out memory, calls kernels and operators, and gives results.

    int mc_check(const mc_tensor* in, int64_t* size)     the inputs are as the graph expects; finds the sizes
    int64_t mc_plan(const int64_t* size, int64_t* at)    where buffers lie in the one block of a call's memory
    int mc_call(state, in, out, written, size, arena, at)

Operators are those of c/operators.c; model.h has all names that the text expects.
The real compiler: torch/_inductor/codegen/cpp_wrapper_cpu.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from minicompile.codegen.cpp_ops import STORAGE, CIndex, literal
from minicompile.codegen.plan import INDEX_ERROR, ZERO_DIVISION, KernelSource
from minicompile.codegen.wrapper import solved
from minicompile.errors import Unsupported
from minicompile.lowering.ir import ExternKernel, InputBuffer, Layout, View, same_size
from minicompile.ops.origin import source_lines
from minicompile.runtime.cpp import complaint
from minicompile.scheduling.memory import DIVISIONS, may_raise
from minicompile.scheduling.nodes import FusedSchedulerNode, Schedule, ScheduledNode
from minicompile.shapes.expr import Size, is_float, size_hint

DTYPES = {
    torch.bool: "MC_BOOL", torch.uint8: "MC_UINT8", torch.int8: "MC_INT8", torch.int16: "MC_INT16",
    torch.int32: "MC_INT32", torch.int64: "MC_INT64", torch.float16: "MC_FLOAT16",
    torch.bfloat16: "MC_BFLOAT16", torch.float32: "MC_FLOAT32", torch.float64: "MC_FLOAT64",
}  # fmt: skip
"""In the order of `enum mc_dtype`."""
MOST_DIMENSIONS = 16
MOST_LINES = 4
"""Of the user's, above a call."""

RESERVED = frozenset(
    """
    alignas alignof asm auto bool break case char const constexpr continue default do double else enum extern
    false float for goto if inline int long nullptr register restrict return short signed sizeof static struct
    switch thread_local true typedef typeof union unsigned void volatile while linux unix
    state in out written size arena at code
    """.split()  # noqa: SIM905
)


def c_string(text: str) -> str:
    """A text as a C literal."""
    return json.dumps("".join(c if c.isprintable() else " " for c in text), ensure_ascii=False)


def c_dtype(layout: Layout) -> str:
    """Raises Unsupported for what a package's tensors can't be."""
    if layout.dtype not in DTYPES or len(layout.size) > MOST_DIMENSIONS:
        raise Unsupported(f"a package has no tensors like {layout}")
    return DTYPES[layout.dtype]


@dataclass(frozen=True)
class Condition:
    """What must hold of sizes, as sympy, and as the user reads it."""

    holds: sympy.Basic
    text: str


@dataclass
class ModelSource:
    """`model.c` without its kernels, and the numbers that the runtime must know."""

    text: str
    sizes: int
    pieces: int


@dataclass
class CWriter:
    """Writes the wrapper. `state`: how many of the graph's inputs are the package's own; `written`: for each
    output that becomes the contents of an input, that input's number; `conditions` on the sizes."""

    schedule: Schedule
    kernels: Mapping[int, Sequence[KernelSource]]
    state: int
    names: Sequence[str]
    """Of the user's inputs, for messages."""
    written: Mapping[int, int]
    conditions: Sequence[Condition]
    simplified: Callable[[sympy.Basic], sympy.Basic] = lambda expr: expr
    """A size symbol in terms of others."""
    lines: list[str] = field(default_factory=list)

    def write(self) -> ModelSource:
        graph = self.schedule.graph
        self.layouts = {name: buffer.layout for name, buffer in graph.buffers.items()}
        self.variables: dict[str, str] = {}
        self.symbols: list[sympy.Symbol] = []
        self.index = CIndex({})
        self.shown: object = ()
        check, plan = self._check(), self._plan()
        call = self._call()
        sizes = [f"{s} = size[{i}]" for i, s in enumerate(self.symbols)]
        known = [f"    const int64_t {', '.join(sizes)};"] if sizes else []
        at = "const int64_t* size, int64_t* at"
        given = (
            "char* const* state, const mc_tensor* in, mc_tensor* out,\n"
            "    mc_written* written, const int64_t* size, char* arena, const int64_t* at"
        )
        text = [
            f"// {graph.name}: what runs the kernels, in order.", "",
            '#include "kernels.c"', '#include "model.h"', "",
            "int mc_check(const mc_tensor* in, int64_t* size) {", *check, "    return 0;", "}", "",
            f"int64_t mc_plan({at}) {{", *known, *plan, "}", "",
            f"int mc_call({given}) {{", *known, *call, "    return 0;", "}", "",
        ]  # fmt: skip
        return ModelSource("\n".join(text), len(self.symbols), len(self.pieces))

    # -- inputs and sizes

    def _check(self) -> list[str]:
        """Dtypes, then the sizes that give symbols their values, then all others, then conditions."""
        first: list[str] = []
        later: list[tuple[str, int, Size]] = []
        for number, (name, buffer) in enumerate(zip(self.names, self._user_inputs(), strict=True)):
            what, layout = f"&in[{number}], {c_string(name)}", buffer.layout
            rank = len(layout.size)
            first += [
                f"    // {name}: {layout}".rstrip("\\"),
                f"    if (mc_expect({what}, {c_dtype(layout)}, {rank})) return 1;",
            ]
            for axis, size in enumerate(layout.size):
                unknown = set() if isinstance(size, int) else size.free_symbols - {*self.symbols}
                if len(unknown) == 1:
                    (symbol,) = unknown
                    if value := solved(size, symbol, f"in[{number}].shape[{axis}]", "/"):
                        place = f"size[{len(self.symbols)}]"
                        first.append(f"    const int64_t {symbol} = {place} = {value};")
                        self.symbols.append(symbol)
                if unknown != {size}:
                    later.append((what, axis, size))
        checks = [
            f"    if (mc_expect_size({w}, {a}, {self.length(s)})) return 1;" for w, a, s in later
        ]
        for condition in self.conditions:
            unknown = condition.holds.free_symbols - {*self.symbols}
            told = condition.holds.xreplace({s: self.simplified(s) for s in unknown})
            if told == sympy.true:
                continue
            shown = sorted(told.free_symbols, key=str)
            values = ", ".join(f"{s} = %ld" for s in shown)
            form = c_string(f"{condition.text.replace('%', '%%')} does not hold: {values}")
            numbers = "".join(f", (long){s}" for s in shown)
            checks.append(f"    if (!({self._condition(told)})) return mc_fail({form}{numbers});")
        return first + checks

    def _user_inputs(self) -> list[InputBuffer]:
        found: list[InputBuffer] = []
        for value in self.schedule.graph.inputs:
            if not isinstance(value, InputBuffer):
                raise Unsupported("a package takes tensors: a number that varies can't be an input")
            if not value.layout.is_contiguous():
                raise Unsupported(f"{value.name} must be contiguous: {value.layout}")
            found.append(value)
        return found[self.state :]

    def _condition(self, condition: sympy.Basic) -> str:
        if isinstance(condition, sympy.And | sympy.Or):
            sign = " && " if isinstance(condition, sympy.And) else " || "
            return sign.join(f"({self._condition(part)})" for part in condition.args)
        if isinstance(condition, sympy.Not):
            return f"!({self._condition(condition.args[0])})"
        if isinstance(condition, sympy.core.relational.Relational):
            left, right = map(self.length, condition.args)
            return f"{left} {condition.rel_op} {right}"
        raise Unsupported(f"the condition {condition} has no C text")

    def length(self, size: Size) -> str:
        if not isinstance(size, int):
            unknown = size.free_symbols.difference(self.symbols)
            if unknown or is_float(size):
                raise Unsupported(f"no input of the package tells what {unknown or size} is")
        return self.index(size)

    def lengths(self, sizes: Iterable[Size]) -> str:
        texts = [self.length(size) for size in sizes]
        return f"(int64_t[]){{{', '.join(texts or ['0'])}}}"

    # -- memory

    def _plan(self) -> list[str]:
        """Pieces of memory, each for blocks of buffers that live one after the other, of about one size."""
        hints, self.home = self.schedule.graph.size_hints, dict[str, int]()
        self.pieces: list[list[Size]] = []
        until: list[int] = []
        largest: list[int] = []
        for block in sorted(self.schedule.memory.blocks, key=lambda b: (b.born, -b.bytes)):
            free = [i for i, last in enumerate(until) if last < block.born]
            best = min(free, key=lambda i: abs(largest[i] - block.bytes), default=len(until))
            if best == len(until):
                self.pieces.append([])
                until.append(0)
                largest.append(0)
            last = len(self.schedule.nodes) if block.home == "output" else block.dies
            until[best], largest[best] = last, max(largest[best], block.bytes)
            self.pieces[best].append(self._bytes(self.layouts[block.buffers[0]]))
            self.home.update(dict.fromkeys(block.buffers, best))
        for step in sorted(self.kernels):
            for kernel in self.kernels[step]:
                for name, layout in kernel.plan.workspace.items():
                    if name not in self.home:
                        self.layouts[name], self.home[name] = layout, len(self.pieces)
                        self.pieces.append([self._bytes(layout)])
        if not self.pieces:
            return ["    return 0;"]
        lines = ["    const int64_t bytes[] = {"]
        for sizes in self.pieces:
            one = sympy.Max(*sizes) if len(sizes) > 1 else sizes[0]
            hint = size_hint(one, hints)
            lines.append(f"        {self.length(int(one) if one == hint else one)},")
        return [
            *lines, "    };", "    int64_t end = 0;",
            f"    for (int i = 0; i < {len(self.pieces)}; i++) {{",
            "        at[i] = end;", "        end += (bytes[i] + 63) / 64 * 64;", "    }",
            "    return end;",
        ]  # fmt: skip

    @staticmethod
    def _bytes(layout: Layout) -> Size:
        return layout.storage_size * layout.dtype.itemsize

    # -- steps

    def _call(self) -> list[str]:
        graph = self.schedule.graph
        needed = {d.buffer for node in self.schedule.nodes for d in node.reads} | {*graph.returned}
        places = [f"state[{i}]" for i in range(self.state)]
        places += [f"in[{i}].data" for i in range(len(self.names))]
        places += [f"state[{self.state + i}]" for i in range(len(graph.constants))]
        for buffer, place in zip(graph.given, places, strict=True):
            if buffer.name in needed:
                self._declare(buffer.name, f"(%s){place}")
        for step, node in enumerate(self.schedule.nodes):
            lines = source_lines(node.origins)
            if lines != self.shown and lines:
                self.lines += ["", *(f"    // {line}".rstrip("\\ ") for line in lines[:MOST_LINES])]
                if len(lines) > MOST_LINES:
                    self.lines.append(f"    // and {len(lines) - MOST_LINES} more lines")
                self.shown = lines
            try:
                self._step(step, node)
            except Unsupported as refused:
                where = refused.where or next(iter(lines), None)
                raise Unsupported(refused.reason, where, refused.hint) from None
        self.lines.append("")
        for number, output in enumerate(graph.outputs):
            self._result(number, output)
        return self.lines

    def _step(self, step: int, node: ScheduledNode) -> None:
        memory = self.schedule.memory
        old = {a.buffer: a.reuses for a in memory.allocate[step]}
        for written in node.writes:
            name = written.buffer
            if name in memory.internal:
                continue
            source = old.get(name) or memory.aliases.get(name)
            place = f"arena + at[{self.home[name]}]" if source is None else ""
            self._declare(name, f"(%s)({place})" if place else self.variables[source or ""])
        if step not in self.kernels:
            assert not isinstance(node, FusedSchedulerNode)
            self._operator(node.kernel)
        elif 0 not in getattr(node, "ranges", {}).values():
            self._kernels(step, node)

    def _declare(self, buffer: str, value: str) -> None:
        name = re.sub(r"\W", "_", buffer)
        name = f"_{name}" if name[0].isdigit() else name
        taken = RESERVED | {*self.variables.values()} | {*map(str, self.symbols)}
        while name in taken or name.startswith("mc_"):
            name += "_"
        self.variables[buffer] = name
        layout = self.layouts[buffer]
        if layout.dtype not in DTYPES:
            raise Unsupported(f"a package has no tensors like {layout}")
        kind = f"{STORAGE[layout.dtype]}*"
        self.lines.append(f"    {kind} {name} = {value.replace('%s', kind)};")

    def _kernels(self, step: int, node: ScheduledNode) -> None:
        for kernel in self.kernels[step]:
            for name in kernel.plan.workspace:
                if name not in self.variables:
                    self._declare(name, f"(%s)(arena + at[{self.home[name]}])")
            self._launch(kernel, node)

    def _launch(self, kernel: KernelSource, node: ScheduledNode) -> None:
        plan = kernel.plan
        given = [self.variables[a.buffer] for a in plan.arguments]
        given += [self.length(symbol) for symbol in plan.sizes]
        call = f"{kernel.name}({', '.join(given)})"
        if not isinstance(node, FusedSchedulerNode) or not may_raise(node):
            self.lines.append(f"    {call};")
            return
        divided = any(v.op in DIVISIONS for v in plan.body.values)
        self.lines += ["    {", f"        int64_t code = {call};"]
        for bit, happens in ((INDEX_ERROR, plan.checked), (ZERO_DIVISION, divided)):
            if happens:
                told = c_string(complaint(plan, bit).replace("%", "%%"))
                self.lines += [
                    f"        if (code & {bit})",
                    f"            return mc_fail({told});",
                ]
        self.lines.append("    }")

    def _result(self, number: int, output: Any) -> None:
        if not isinstance(output, View):
            raise Unsupported(f"result {number} of a package must be a tensor, not {output}")
        layout, rank = output.layout, len(output.layout.size)
        given = [*self.schedule.graph.inputs][self.written.get(number, 0)]
        written = sorted(self.written)
        plain = number - sum(1 for w in written if w < number)
        to = (
            f"&written[{written.index(number)}].value"
            if number in self.written
            else f"&out[{plain}]"
        )
        where = f"{self.place(output)}, {c_dtype(layout)}, {layout.dtype.itemsize}, {rank}"
        shape = f"{self.lengths(layout.size)}, {self.lengths(layout.stride)}"
        self.lines.append(f"    if (mc_give({to}, {where}, {shape})) return 1;")
        if number in self.written:
            source = self.written[number]
            own = f"state[{source}]" if source < self.state else f"in[{source - self.state}].data"
            assert isinstance(given, InputBuffer)
            self.lines.append(f"    written[{written.index(number)}].target = {own};")

    # -- operators

    def place(self, view: View) -> str:
        own, offset = self.variables[view.buffer], view.layout.offset
        if self.layouts[view.buffer].dtype != view.layout.dtype:
            raise Unsupported(f"{view.buffer} can't be seen as {view.layout.dtype}")
        return own if offset == 0 else f"{own} + {self.index.within(offset, 1)}"

    def _operator(self, kernel: ExternKernel) -> None:
        name = str(kernel.op).removeprefix("aten.").removesuffix(".default")
        rule = OPERATORS.get(name)
        kept = [output for output in kernel.outputs if output is not None]
        if rule is None or len(kept) != 1:
            hint = "write it with other operators, or run the model with mc.compile"
            raise Unsupported(f"a package has no {kernel.op}", hint=hint)
        out = View(kept[0].name, kept[0].layout)
        if any(view.layout.dtype is not torch.float32 for view in (*kernel.views(), out)):
            raise Unsupported(f"a package has {kernel.op} in float32 only", hint="use float32")
        text = f"    if ({rule(self, out, *kernel.args, **kernel.kwargs)}) return 1;"
        self.lines.append(
            text if len(text) < 100 else text.replace(", &(mc_", ",\n            &(mc_")
        )

    def matrix(self, view: View, batched: bool = False) -> str:
        """A (batch of) matrices as C; vectors and scalars are broadcast."""
        layout = view.layout
        rank = 3 if batched else 2
        steps: list[Size] = [0] * (rank - len(layout.size))
        steps += [0 if n == 1 else s for n, s in zip(layout.size, layout.stride, strict=True)]
        texts = [self.length(step) for step in ([0] * (3 - rank) + steps)]
        return f"&(mc_matrix){{{', '.join([self.place(view), *texts])}}}"

    def strided(self, kind: str, view: View, size: bool, axes: int = 4) -> str:
        """A view as a struct of data, sizes if asked for, and strides."""
        missing = axes - len(view.layout.size)
        stride, sizes = list(view.layout.stride), list(view.layout.size)
        at = 2 if kind == "mc_images" else 0  # a row of pixels is an image of height 1
        stride[at:at], sizes[at:at] = [0] * missing, [1] * missing
        groups = [sizes, stride] if size else [stride]
        parts = ["{" + ", ".join(map(self.length, group)) + "}" for group in groups]
        return f"&({kind}){{{', '.join([self.place(view), *parts])}}}"


def product(
    writer: CWriter,
    out: View,
    *given: Any,
    batched: bool = False,
    beta: float = 1,
    alpha: float = 1,
) -> str:
    """mm, bmm, addmm and baddbmm."""
    added, a, b = given if len(given) == 3 else (None, *given)
    sizes = [1, *out.layout.size, a.layout.size[-1]][-4:]
    matrices = [writer.matrix(view, batched) for view in (out, a, b)]
    matrices.append(writer.matrix(added, batched) if added is not None else "NULL")
    wide = out.layout.size[-1] != 1 and out.layout.stride[-1] != 1
    if wide:
        raise Unsupported("a package's matrix products give rows without gaps")
    lengths = ", ".join(map(writer.length, sizes))
    factors = ", ".join(literal(float(f), torch.float32) for f in (alpha, beta))
    return f"mc_product({lengths}, {', '.join(matrices)}, {factors})"


def attention(
    writer: CWriter, out: View, q: View, k: View, v: View, dropout: float = 0, causal: bool = False,
    *, attn_mask: View | None = None, scale: float | None = None,
) -> str:  # fmt: skip
    """Scaled dot products, softmax, and the mean of values that follows."""
    if dropout:
        raise Unsupported("a package has no attention with dropout", hint="call eval() first")
    if not same_size(q.layout.size[:2], k.layout.size[:2]) or out.layout.stride[3] != 1:
        raise Unsupported("a package has no attention with fewer heads of keys")
    sizes = [*q.layout.size[:3], k.layout.size[2], q.layout.size[3], v.layout.size[3]]
    views = [writer.strided("mc_heads", view, False) for view in (out, q, k, v)]
    if attn_mask is None:
        views.append("NULL")
    else:
        layout = attn_mask.layout
        steps = tuple(0 if n == 1 else s for n, s in zip(layout.size, layout.stride, strict=True))
        seen = Layout(layout.device, layout.dtype, layout.size, steps, layout.offset)
        views.append(writer.strided("mc_heads", View(attn_mask.buffer, seen), False))
    factor = scale if scale is not None else float(q.layout.size[3]) ** -0.5
    arguments = [writer.lengths(sizes), *views, str(int(causal)), literal(factor, torch.float32)]
    return f"mc_attention({', '.join(arguments)})"


def convolution(
    writer: CWriter, out: View, x: View, weight: View, bias: View | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool, output_padding: Any, groups: int,
) -> str:  # fmt: skip
    """One- and two-dimensional convolution."""
    rank = len(x.layout.size) - 2
    if transposed or rank not in (1, 2):
        kind = "transposed" if transposed else f"{rank}-dimensional"
        raise Unsupported(f"a package has no {kind} convolution")
    flat = Layout.contiguous(out.layout.device, out.layout.dtype, out.layout.size)
    rows = out.layout.is_contiguous() or out.layout.stride[1] == 1
    if not rows or (bias is not None and not bias.layout.is_contiguous()):
        raise Unsupported(f"a package has no convolution that gives {out.layout}, only {flat}")
    images = [writer.strided("mc_images", view, True) for view in (out, x, weight)]
    steps = [
        [fill] * (2 - rank) + [*given] for given, fill in ((stride, 1), (padding, 0), (dilation, 1))
    ]
    window = ", ".join("{" + ", ".join(map(str, step)) + "}" for step in steps)
    added = writer.place(bias) if bias is not None else "NULL"
    return f"mc_convolution({', '.join(images)}, {added}, &(mc_window){{{window}, {groups}}})"


def _batched(writer: CWriter, out: View, *given: Any, **factors: float) -> str:
    return product(writer, out, *given, batched=True, **factors)


OPERATORS: dict[str, Callable[..., str]] = {
    "mm": product, "addmm": product, "bmm": _batched, "baddbmm": _batched,
    "convolution": convolution, "_scaled_dot_product_flash_attention_for_cpu": attention,
}  # fmt: skip
"""Operators that a package has, by name: what writes their call."""
