"""A reference interpreter: runs loops in plain torch, all iterations at once, and whole LoopGraphs with them.

`ReferenceOps` is a handler of `ops` whose values are tensors over the loops' whole index space, slow and
clear: the oracle for every later room, and an example of how little a handler needs. It checks what a code
generator may assume: dtypes, strides, indices within range. `run_reference(graph, inputs)` runs a graph with
it, or with a handler of yours, which may print or count what happens:

    class Counting(ReferenceOps):
        flops = 0

        def pointwise(self, name, *values):
            result = super().pointwise(name, *values)
            Counting.flops += POINTWISE[name].flops * result.numel()
            return result

    run_reference(trace.loops, [x, y], Counting)
    print(Counting.flops)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from minicompile.codegen.generate import code_generator
from minicompile.codegen.plan import REFERENCE, CodeLine, KernelModule, KernelPlan, KernelSource
from minicompile.compat import tree_map
from minicompile.errors import VerifyError
from minicompile.lowering.ir import (
    Buffer,
    ComputedBuffer,
    ExternKernel,
    InputBuffer,
    LoopGraph,
    Scatter,
    Template,
    View,
    loop_ranges,
    loops_text,
    run_loops,
)
from minicompile.ops.handler import Index, Ops, StoreMode
from minicompile.ops.table import EAGER, POSITIONS, ReductionKind, ScanKind, result_dtype
from minicompile.options import Options
from minicompile.runtime.load import Kernels, kernel_loader
from minicompile.shapes.expr import Ranges, Size, is_float, loop_symbol
from minicompile.shapes.symnode import evaluate

Values = dict[sympy.Symbol, Any]
"""What each symbol stands for: an int, or an int64 tensor over the index space."""


def run_reference(
    graph: LoopGraph, inputs: Sequence[Any], handler: type[ReferenceOps] | None = None
) -> list[Any]:
    """Run a graph on real inputs (tensors and ints, in placeholder order).

    Raises VerifyError where a loop or an operator breaks its layout, IndexError for an index out of range.
    """
    run = _Run(handler or ReferenceOps)
    pairs = list(zip(graph.inputs, inputs, strict=True))
    for declared, given in pairs:
        if isinstance(declared, InputBuffer):
            run.bind(
                (*declared.layout.size, *declared.layout.stride), (*given.shape, *given.stride())
            )
        else:
            run.bind([declared], [given])
    pairs += [(constant, constant.value) for constant in graph.constants]
    for declared, given in pairs:
        if isinstance(declared, Buffer):
            run.adopt(declared, given)
    for operation in graph.operations:
        if isinstance(operation, ExternKernel):
            run.call(operation)
        else:
            run.loop(operation)
    return [run.argument(output) for output in graph.outputs]


class _Run:
    def __init__(self, handler: type[ReferenceOps]) -> None:
        self.handler = handler
        self.sizes: Values = {}
        self.memory: dict[str, torch.Tensor] = {}
        """Each buffer's elements from its first to its last, one-dimensional."""

    # -- sizes and memory

    def bind(self, declared: Sequence[Size], given: Sequence[int]) -> None:
        for size, value in zip(declared, given, strict=True):
            if isinstance(size, sympy.Symbol):
                self.sizes.setdefault(size, value)

    def shape(self, sizes: Sequence[Size]) -> list[int]:
        return [int(evaluate(size, self.sizes)) for size in sizes]

    def adopt(self, buffer: Buffer, tensor: torch.Tensor) -> None:
        """Let a buffer be a tensor's memory, which must lie as the buffer says."""
        layout = buffer.layout
        size, stride = self.shape(layout.size), self.shape(layout.stride)
        steps = zip(size, stride, tensor.stride(), strict=True)
        matches = 0 in size or all(n == 1 or a == b for n, a, b in steps)
        if list(tensor.shape) != size or not matches or tensor.dtype != layout.dtype:
            raise VerifyError(
                f"{buffer} holds {tensor.dtype}{list(tensor.shape)} with strides {tensor.stride()}"
            )
        count = self.shape([layout.storage_size])
        self.memory[buffer.name] = tensor.detach().as_strided(count, (1,), tensor.storage_offset())

    def argument(self, value: Any) -> Any:
        if isinstance(value, View):
            memory, layout = self.memory[value.buffer], value.layout
            offset = memory.storage_offset() + self.shape([layout.offset])[0]
            return memory.as_strided(self.shape(layout.size), self.shape(layout.stride), offset)
        return self.shape([value])[0] if isinstance(value, sympy.Expr) else value

    # -- operations

    def call(self, kernel: ExternKernel) -> None:
        args, kwargs = tree_map(self.argument, (kernel.args, kernel.kwargs))
        result = kernel.op(*args, **kwargs)
        for output in filter(None, kernel.outputs):
            self.adopt(output, result if output.index is None else result[output.index])

    def loop(self, buffer: ComputedBuffer) -> None:
        layout, loops = buffer.layout, buffer.loops
        if isinstance(loops, Template):
            self.adopt(buffer, loops.op(*map(self.argument, loops.operands)))
            return
        if isinstance(loops, Scatter):  # takes over the target's memory
            memory = self.memory[loops.target]
        else:
            count = self.shape([layout.storage_size])
            memory = torch.empty(count, dtype=layout.dtype, device=layout.device)
        self.memory[buffer.name] = memory
        ranges = loop_ranges(loops)
        run_loops(buffer, self.handler.over(*ranges, self.memory, self.sizes, layout.device))


@dataclass(eq=False)
class ReferenceOps(Ops):
    """Values are tensors that broadcast over the index space; symbols stand for ints or such tensors."""

    memory: Mapping[str, torch.Tensor]
    values: Values
    rows: Sequence[int]
    """The extents of the loops; then those of a reduction or scan."""
    columns: Sequence[int]
    device: torch.device
    mask: torch.Tensor | None = None
    """Where the body being evaluated counts; elsewhere its loads are made harmless."""

    @classmethod
    def over(
        cls,
        ranges: Ranges,
        reduction_ranges: Ranges,
        memory: Mapping[str, torch.Tensor],
        sizes: Values,
        device: torch.device,
        **more: Any,
    ) -> ReferenceOps:
        """A handler in which each loop variable stands for all of its values."""
        rows, columns = (
            [int(evaluate(size, sizes)) for size in group.values()]
            for group in (ranges, reduction_ranges)
        )
        extents, values = [*rows, *columns], dict(sizes)
        for axis, variable in enumerate((*ranges, *reduction_ranges)):
            shape = [-1 if a == axis else 1 for a in range(len(extents))]
            values[variable] = torch.arange(extents[axis], device=device).reshape(shape)
        return cls(memory, values, rows, columns, device, **more)

    @property
    def extents(self) -> list[int]:
        return [*self.rows, *self.columns]

    def flat(self, value: torch.Tensor) -> torch.Tensor:
        """An element for each iteration, the loops of a reduction or scan as one dimension."""
        return value.expand(self.extents).reshape([*self.rows, math.prod(self.columns)])

    def position(self, index: Index) -> torch.Tensor:
        return torch.as_tensor(evaluate(index, self.values), device=self.device)

    def load(self, buffer: str, index: Index) -> torch.Tensor:
        memory, at = self.memory[buffer], self.position(index)
        if self.mask is not None:
            at = torch.where(self.mask, at, 0)
        unread = 0 in self.extents or (self.mask is not None and not bool(self.mask.any()))
        if at.numel() == 0 or unread:
            return memory.new_zeros(()).expand(at.shape)
        low, high = int(at.min()), int(at.max())
        if low < 0 or high >= memory.numel():
            raise VerifyError(f"load {buffer}[{index}] leaves its memory: {low} to {high}")
        return memory[at]

    def store(
        self, buffer: str, index: Index, value: torch.Tensor, mode: StoreMode = "store"
    ) -> torch.Tensor:
        memory, at = self.memory[buffer], self.position(index)
        shape = torch.broadcast_shapes(at.shape, value.shape)
        if mode == "atomic_add":  # for every iteration, be they equal
            shape = torch.Size(self.extents)
        indices, add = (at.expand(shape),), mode == "atomic_add"
        memory.index_put_(indices, value.expand(shape), accumulate=add)
        return value

    def constant(self, value: float | int | bool, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(value, dtype=dtype, device=self.device)

    def index_expr(self, expr: Index, dtype: torch.dtype) -> torch.Tensor:
        if is_float(expr):
            return torch.tensor(evaluate(expr, self.values), dtype=torch.float64).to(dtype)
        return self.position(expr).to(dtype)

    def to_dtype(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return value.to(dtype)

    def masked(
        self, mask: torch.Tensor, body: Callable[[Ops], torch.Tensor], other: float | int | bool
    ) -> torch.Tensor:
        inside = mask if self.mask is None else torch.logical_and(mask, self.mask)
        value = body(replace(self, mask=inside))
        return torch.where(mask, value, self.constant(other, value.dtype))

    def indirect_indexing(
        self, value: torch.Tensor, size: Size, check: bool = True, wrap_negative: bool = True
    ) -> Index:
        extent = int(evaluate(size, self.values))
        at = value.to(torch.int64)
        if wrap_negative:
            at = torch.where(at < 0, at + extent, at)
        wrong = (at < 0) | (at >= extent)
        if self.mask is not None:
            wrong = wrong & self.mask
        if check and 0 not in self.extents and bool(wrong.any()):
            raise IndexError(
                f"index {int(value[wrong.expand_as(value)][0])} is out of range for size {extent}"
            )
        symbol = loop_symbol(f"i{len(self.values)}")
        self.values[symbol] = at
        return symbol

    def reduction(
        self, kind: ReductionKind, dtype: torch.dtype, value: torch.Tensor
    ) -> torch.Tensor:
        if kind in POSITIONS and value.dtype is torch.bool:
            value = value.to(torch.uint8)
        name = {"max": "amax", "min": "amin"}.get(kind, kind)
        options = {"dtype": value.dtype} if kind in ("sum", "prod") else {}
        found: torch.Tensor = getattr(torch, name)(self.flat(value), -1, **options)
        return found.to(dtype).reshape([*self.rows, *[1] * len(self.columns)])

    def scan(self, kind: ScanKind, value: torch.Tensor) -> torch.Tensor:
        scanned: torch.Tensor = getattr(torch, f"cum{kind}")(self.flat(value), -1)
        return scanned.to(value.dtype).reshape(self.extents)

    def pointwise(self, name: str, *values: torch.Tensor) -> torch.Tensor:
        dtype = result_dtype(name, tuple(v.dtype for v in values))
        found: torch.Tensor = EAGER[name](*values)
        if found.dtype is not dtype:
            raise VerifyError(f"ops.{name} gave {found.dtype}, the table says {dtype}")
        return found


# -- the interpreter as a language: options={"device_codegen": "reference"}


@code_generator(REFERENCE)
def reference_module(plans: Sequence[KernelPlan]) -> KernelModule:
    """Write a kernel's formulas as its text: the interpreter runs the loops of the plan's nodes."""
    kernels = []
    for plan in plans:
        loops = [(part.name, part.buffer) for part in plan.node.nodes]
        lines = [CodeLine(f"{name} = {loops_text(b.loops)}", b.origins) for name, b in loops]
        kernels.append(KernelSource(plan.name, REFERENCE, lines, plan))
    return KernelModule(REFERENCE, "\n".join(kernel.text for kernel in kernels), kernels)


@kernel_loader(REFERENCE)
def load_reference(module: KernelModule, options: Options) -> Callable[[], Kernels]:
    return lambda: {k.name: functools.partial(run_kernel, k.plan) for k in module.kernels}


def run_kernel(plan: KernelPlan, *given: Any) -> None:
    """One node after the other, each into memory of its own; what the kernel writes is copied at the end."""
    count, run = len(plan.arguments), _Run(ReferenceOps)
    run.sizes = dict(zip(plan.sizes, given[count:], strict=True))
    outside = {a.buffer: elements_of(tensor) for a, tensor in zip(plan.arguments, given)}
    run.memory.update(outside)
    for new, old in plan.in_place.items():
        run.memory[old] = outside[new]
    for part in plan.node.nodes:
        if isinstance(loops := part.buffer.loops, Scatter):  # its memory is its target's
            run.memory[loops.target] = run.memory[part.name]
        run.loop(part.buffer)
    for name, memory in outside.items():
        if run.memory[name] is not memory:
            memory.copy_(run.memory[name])


def elements_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements from its first to its last, one-dimensional."""
    steps = zip(tensor.shape, tensor.stride())
    count = 1 + sum((size - 1) * step for size, step in steps) if tensor.numel() else 0
    return tensor.as_strided((count,), (1,), tensor.storage_offset())
