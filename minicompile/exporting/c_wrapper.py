"""The wrapper of a package: readable C that lays out memory, calls kernels and operators, and gives results.

    int mc_check(const mc_tensor* in, int64_t* size)     the inputs are as the graph expects; finds the sizes
    int64_t mc_plan(const int64_t* size, int64_t* at)    where buffers lie in the one block of a call's memory
    int mc_call(state, in, out, written, size, arena, at)

Operators are those of c/operators.c; model.h has all names that the text expects.
The real compiler: torch/_inductor/codegen/cpp_wrapper_cpu.py.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch

from minicompile.codegen.cpp_ops import STORAGE, CIndex, literal
from minicompile.codegen.plan import KernelSource
from minicompile.codegen.wrapper import solved
from minicompile.errors import Unsupported
from minicompile.exporting.exported import Exported
from minicompile.lowering.ir import ExternKernel, InputBuffer, Layout, View, same_size
from minicompile.ops.origin import source_lines
from minicompile.runtime.cpp import complaint
from minicompile.scheduling.memory import may_raise
from minicompile.scheduling.nodes import FusedSchedulerNode, Schedule, ScheduledNode
from minicompile.shapes.expr import Size, is_float

DTYPES = {
    torch.bool: "MC_BOOL", torch.uint8: "MC_UINT8", torch.int8: "MC_INT8", torch.int16: "MC_INT16",
    torch.int32: "MC_INT32", torch.int64: "MC_INT64", torch.float16: "MC_FLOAT16",
    torch.bfloat16: "MC_BFLOAT16", torch.float32: "MC_FLOAT32", torch.float64: "MC_FLOAT64",
}  # fmt: skip
"""In the order of `enum mc_dtype`."""
MOST_DIMENSIONS = 16


def c_string(text: str) -> str:
    """A text as a C literal."""
    return json.dumps("".join(c if c.isprintable() else " " for c in text), ensure_ascii=False)


def c_dtype(layout: Layout) -> str:
    """Raises Unsupported for what a package's tensors can't be."""
    if layout.dtype not in DTYPES or len(layout.size) > MOST_DIMENSIONS:
        raise Unsupported(f"a package has no tensors like {layout}")
    return DTYPES[layout.dtype]


class CWriter:
    """Writes the wrapper: `text` is `model.c` without its weights."""

    def __init__(
        self,
        schedule: Schedule,
        kernels: Mapping[int, Sequence[KernelSource]],
        exported: Exported,
        conditions: Mapping[str, sympy.Basic],
    ) -> None:
        """`conditions` on sizes, by what the user reads."""
        self.schedule, self.kernels = schedule, kernels
        self.signature, self.conditions = exported.signature, conditions
        env, graph = exported.shape_env, schedule.graph
        self.simplified = env.simplified if env is not None else lambda size: size
        self.layouts = {name: buffer.layout for name, buffer in graph.buffers.items()}
        self.variables: dict[str, str] = {}
        self.symbols: list[sympy.Symbol] = []
        self.pieces: list[Size] = []
        """Bytes of the pieces of a call's memory."""
        self.lines: list[str] = []
        self.index = CIndex({})
        self.users: list[str] = []
        """The paths of the user's inputs, in order."""
        self.places: list[str] = []
        """Where the graph's inputs and then its constants are."""
        for spec in self.signature.inputs:
            user, state = len(self.users), len(self.places) - len(self.users)
            self.places.append(f"in[{user}].data" if spec.kind == "input" else f"state[{state}]")
            self.users += [spec.target] * (spec.kind == "input")
        state = len(self.places) - len(self.users)
        self.places += [f"state[{state + i}]" for i in range(len(graph.constants))]
        check, plan = self._check(), self._plan()
        self._call()
        sizes = [f"{s} = size[{i}]" for i, s in enumerate(self.symbols)]
        known = [f"    const int64_t {', '.join(sizes)};"] if sizes else []
        self.text = "\n".join([
            f"// {graph.name}: what runs the kernels, in order.", "",
            '#include "kernels.c"', '#include "model.h"', "",
            "int mc_check(const mc_tensor* in, int64_t* size) {", *check, "    return 0;", "}", "",
            "int64_t mc_plan(const int64_t* size, int64_t* at) {", *known, *plan, "    return end;", "}", "",
            "int mc_call(char* const* state, const mc_tensor* in, mc_tensor* out,",
            "    mc_written* written, const int64_t* size, char* arena, const int64_t* at) {",
            *known, *self.lines, "    return 0;", "}", "",
        ])  # fmt: skip

    # -- inputs and sizes

    def _check(self) -> list[str]:
        """Dtypes, then the sizes that give symbols their values, then all others, then conditions."""
        first: list[str] = []
        later: list[tuple[str, int, Size]] = []
        inputs = list(zip(self.signature.inputs, self.schedule.graph.inputs, strict=True))
        users = [value for spec, value in inputs if spec.kind == "input"]
        for number, (name, buffer) in enumerate(zip(self.users, users, strict=True)):
            assert isinstance(buffer, InputBuffer)
            what, layout = f"&in[{number}], {c_string(name)}", buffer.layout
            expect = f"mc_expect({what}, {c_dtype(layout)}, {len(layout.size)})"
            first += [f"    // {c_string(name)}: {layout}", f"    if ({expect}) return 1;"]
            for axis, size in enumerate(layout.size):
                unknown = set() if isinstance(size, int) else size.free_symbols - {*self.symbols}
                place = f"in[{number}].shape[{axis}]"
                for symbol in unknown if len(unknown) == 1 else ():
                    if value := solved(size, symbol, place, "/"):
                        first.append(f"    const int64_t {symbol} = {value};")
                        first.append(f"    size[{len(self.symbols)}] = {symbol};")
                        self.symbols.append(symbol)
                if unknown != {size}:
                    later.append((what, axis, size))
        checks = [
            f"    if (mc_expect_size({w}, {a}, {self.length(s)})) return 1;" for w, a, s in later
        ]
        for text, condition in self.conditions.items():
            condition = condition.xreplace(
                {s: self.simplified(s) for s in condition.free_symbols - {*self.symbols}}
            )
            if condition == sympy.true:
                continue
            if not condition.is_Relational:
                raise Unsupported(f"the condition {text} has no C text")
            left, right = map(self.length, condition.args)
            told = c_string(f"{text} does not hold".replace("%", "%%"))
            checks.append(f"    if (!({left} {condition.rel_op} {right})) return mc_fail({told});")
        return first + checks

    def length(self, size: Size) -> str:
        if not isinstance(size, int):
            unknown = size.free_symbols.difference(self.symbols)
            if unknown or is_float(size):
                raise Unsupported(f"no input of the package tells what {unknown or size} is")
        return self.index(size)

    def lengths(self, sizes: Iterable[Size]) -> str:
        return f"(int64_t[]){{{', '.join(map(self.length, sizes)) or '0'}}}"

    # -- memory

    def _plan(self) -> list[str]:
        """Pieces of memory, each for blocks of one size that live one after the other."""
        self.home, until, end = dict[str, int](), list[int](), len(self.schedule.nodes)
        for block in sorted(self.schedule.memory.blocks, key=lambda b: b.born):
            size = self._bytes(self.layouts[block.buffers[0]])
            idle = (i for i, n in enumerate(self.pieces) if n == size and until[i] < block.born)
            piece = next(idle, len(self.pieces))
            if piece == len(self.pieces):
                self.pieces.append(size)
                until.append(0)
            until[piece] = end if block.home == "output" else block.dies
            self.home.update(dict.fromkeys(block.buffers, piece))
        for kernel in itertools.chain(*self.kernels.values()):
            for name, layout in kernel.plan.workspace.items():
                if name not in self.home:
                    self.layouts[name], self.home[name] = layout, len(self.pieces)
                    self.pieces.append(self._bytes(layout))
        lines = ["    int64_t end = 0;"]
        for i, size in enumerate(self.pieces):
            lines.append(f"    at[{i}] = end, end += ({self.length(size)} + 63) / 64 * 64;")
        return lines

    @staticmethod
    def _bytes(layout: Layout) -> Size:
        return layout.storage_size * layout.dtype.itemsize

    # -- steps

    def _call(self) -> None:
        graph = self.schedule.graph
        needed = {d.buffer for node in self.schedule.nodes for d in node.reads} | {*graph.returned}
        for buffer, place in zip(graph.given, self.places, strict=True):
            if buffer.name in needed:
                self._declare(buffer.name, place)
        shown: object = ()
        for step, node in enumerate(self.schedule.nodes):
            lines = source_lines(node.origins)
            if lines != shown and lines:
                self.lines += ["", *(f"    // {line}".rstrip("\\ ") for line in lines)]
                shown = lines
            try:
                self._step(step, node)
            except Unsupported as refused:
                where = refused.where or next(iter(lines), None)
                raise Unsupported(refused.reason, where, refused.hint) from None
        for number, output in enumerate(graph.outputs):
            self._result(number, output)

    def _step(self, step: int, node: ScheduledNode) -> None:
        memory = self.schedule.memory
        old = {a.buffer: a.reuses for a in memory.allocate[step]}
        for written in node.writes:
            name = written.buffer
            if name in memory.internal:
                continue
            source = old.get(name) or memory.aliases.get(name)
            place = f"(arena + at[{self.home[name]}])" if source is None else self.variables[source]
            self._declare(name, place)
        if step not in self.kernels:
            assert not isinstance(node, FusedSchedulerNode)
            self._operator(node.kernel)
        elif 0 not in getattr(node, "ranges", {}).values():
            for kernel in self.kernels[step]:
                for name in kernel.plan.workspace:
                    if name not in self.variables:
                        self._declare(name, f"(arena + at[{self.home[name]}])")
                self._launch(kernel, node)

    def _declare(self, buffer: str, place: str) -> None:
        """A C variable for a buffer. Its name ends in _, as no name of C or of the package does."""
        c_dtype(self.layouts[buffer])
        self.variables[buffer] = name = f"{buffer}_"
        kind = f"{STORAGE[self.layouts[buffer].dtype]}*"
        self.lines.append(f"    {kind} {name} = ({kind}){place};")

    def _launch(self, kernel: KernelSource, node: ScheduledNode) -> None:
        plan = kernel.plan
        passed = [self.variables[a.buffer] for a in plan.arguments]
        passed += [self.length(symbol) for symbol in plan.sizes]
        call = f"{kernel.name}({', '.join(passed)})"
        if not isinstance(node, FusedSchedulerNode) or not may_raise(node):
            self.lines.append(f"    {call};")
            return
        told = c_string(complaint(plan).replace("%", "%%"))
        self.lines.append(f"    if ({call}) return mc_fail({told});")

    def _result(self, number: int, output: Any) -> None:
        if not isinstance(output, View):
            raise Unsupported(f"result {number} of a package must be a tensor, not {output}")
        layout, spec = output.layout, self.signature.outputs[number]
        written = number - len(self.signature.outputs) + len(self.signature.mutated)
        to = f"written[{written}].value" if spec.kind == "mutation" else f"out[{number}]"
        where = f"{self.place(output)}, {c_dtype(layout)}, {layout.dtype.itemsize}"
        shape = f"{self.lengths(layout.size)}, {self.lengths(layout.stride)}"
        self.lines.append(
            f"    if (mc_give(&{to}, {where}, {len(layout.size)}, {shape})) return 1;"
        )
        if spec.kind == "mutation":
            targets = [given.target for given in self.signature.inputs]
            place = self.places[targets.index(spec.target)]
            self.lines.append(f"    written[{written}].target = {place};")

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
        self.lines.append(f"    if ({rule(self, out, *kernel.args, **kernel.kwargs)}) return 1;")

    def steps(self, view: View) -> list[Size]:
        """Strides; 0 where there is one element, which is broadcast."""
        layout = view.layout
        return [0 if n == 1 else s for n, s in zip(layout.size, layout.stride, strict=True)]

    def matrix(self, view: View) -> str:
        """A batch of matrices as C; matrices, vectors and scalars are broadcast."""
        steps = [0] * (3 - len(view.layout.size)) + self.steps(view)
        return f"&(mc_matrix){{{', '.join([self.place(view), *map(self.length, steps)])}}}"

    def heads(self, view: View, steps: Sequence[Size]) -> str:
        """A tensor of four dimensions as C."""
        return f"&(mc_heads){{{self.place(view)}, {{{', '.join(map(self.length, steps))}}}}}"

    def images(self, view: View) -> str:
        """Images as C; a row of pixels is an image of height 1."""
        layout = view.layout
        missing = 4 - len(layout.size)
        sizes = [*layout.size[:2], *[1] * missing, *layout.size[2:]]
        steps = [*layout.stride[:2], *[0] * missing, *layout.stride[2:]]
        parts = ["{" + ", ".join(map(self.length, group)) + "}" for group in (sizes, steps)]
        return f"&(mc_images){{{', '.join([self.place(view), *parts])}}}"


def product(writer: CWriter, out: View, *views: View, beta: float = 1, alpha: float = 1) -> str:
    """mm, bmm, addmm and baddbmm."""
    *added, a, b = views
    sizes = [1, *out.layout.size, a.layout.size[-1]][-4:]
    matrices = [writer.matrix(view) for view in (out, a, b, *added)] + ["NULL"] * (not added)
    if out.layout.size[-1] != 1 and out.layout.stride[-1] != 1:
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
    views = [writer.heads(view, view.layout.stride) for view in (out, q, k, v)]
    views.append("NULL" if attn_mask is None else writer.heads(attn_mask, writer.steps(attn_mask)))
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
    rows = out.layout.is_contiguous() or out.layout.stride[1] == 1
    if not rows or (bias is not None and not bias.layout.is_contiguous()):
        raise Unsupported(f"a package has no convolution that gives {out.layout}")
    images = [writer.images(view) for view in (out, x, weight)]
    steps = [
        [fill] * (2 - rank) + [*given] for given, fill in ((stride, 1), (padding, 0), (dilation, 1))
    ]
    window = ", ".join("{" + ", ".join(map(str, step)) + "}" for step in steps)
    added = writer.place(bias) if bias is not None else "NULL"
    return f"mc_convolution({', '.join(images)}, {added}, &(mc_window){{{window}, {groups}}})"


OPERATORS: dict[str, Callable[..., str]] = {
    "mm": product, "addmm": product, "bmm": product, "baddbmm": product,
    "convolution": convolution, "_scaled_dot_product_flash_attention_for_cpu": attention,
}  # fmt: skip
"""Operators that a package has, by name: what writes their call."""
