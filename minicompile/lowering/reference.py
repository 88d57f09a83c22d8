"""A reference interpreter: runs any LoopGraph in plain torch, all iterations of a loop at once.

A handler of `ops` whose values are tensors over the loop's whole index space, slow and clear. It is the
oracle for every later room, and an example of how little a handler needs. Checks what a code generator may
assume: dtypes, strides, indices within range.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch

from minicompile.errors import VerifyError
from minicompile.lowering.ir import (
    Buffer,
    ComputedBuffer,
    ExternKernel,
    InputBuffer,
    Layout,
    LoopGraph,
    Reduction,
    Scatter,
    View,
    loop_index,
)
from minicompile.ops.handler import Index, Ops, StoreMode
from minicompile.ops.table import POINTWISE, ReductionKind, result_dtype
from minicompile.shapes.expr import FloorDiv, ModularIndexing, Size, loop_symbol

Values = dict[sympy.Symbol, Any]
"""What each symbol stands for: an int, or an int64 tensor over the index space."""


def run_reference(graph: LoopGraph, inputs: Sequence[Any]) -> list[Any]:
    """Run a graph on real inputs (tensors and ints, in placeholder order).

    Raises VerifyError where a loop or an operator breaks its layout, IndexError for an index out of range.
    """
    return _Run(graph, inputs).outputs()


class _Run:
    def __init__(self, graph: LoopGraph, inputs: Sequence[Any]) -> None:
        self.graph = graph
        self.sizes: Values = {}
        self.memory: dict[str, torch.Tensor] = {}
        """Each buffer's elements from its first to its last, one-dimensional."""
        self.dtypes: dict[str, torch.dtype] = {}
        for declared, given in zip(graph.inputs, inputs, strict=True):
            if isinstance(declared, InputBuffer):
                self.bind(declared.layout.size, given.shape)
                self.bind(declared.layout.stride, given.stride())
            else:
                self.bind([declared], [given])
        for declared, given in zip(graph.inputs, inputs, strict=True):
            if isinstance(declared, InputBuffer):
                self.adopt(declared, given)
        for constant in graph.constants:
            assert constant.value is not None
            self.adopt(constant, constant.value)
        for operation in graph.operations:
            if isinstance(operation, ExternKernel):
                self.call(operation)
            else:
                self.loop(operation)

    def outputs(self) -> list[Any]:
        return [self.argument(output) for output in self.graph.outputs]

    # -- sizes and memory

    def bind(self, declared: Sequence[Size], given: Sequence[int]) -> None:
        for size, value in zip(declared, given, strict=True):
            if isinstance(size, sympy.Symbol):
                self.sizes.setdefault(size, int(value))

    def size(self, size: Size) -> int:
        return int(evaluate(sympy.sympify(size), self.sizes))

    def shape(self, sizes: Sequence[Size]) -> list[int]:
        return [self.size(s) for s in sizes]

    def adopt(self, buffer: Buffer, tensor: torch.Tensor) -> None:
        """Let a buffer be a tensor's memory, which must lie as the buffer says."""
        layout = buffer.layout
        size, stride = self.shape(layout.size), self.shape(layout.stride)
        matches = all(
            n == 1 or a == b for n, a, b in zip(size, stride, tensor.stride(), strict=True)
        )
        if list(tensor.shape) != size or not (matches or 0 in size) or tensor.dtype != layout.dtype:
            raise VerifyError(
                f"{buffer} holds {tensor.dtype}{list(tensor.shape)} with strides {tensor.stride()}"
            )
        count = self.size(layout.storage_size)
        self.memory[buffer.name] = tensor.detach().as_strided(
            (count,), (1,), tensor.storage_offset()
        )
        self.dtypes[buffer.name] = layout.dtype

    def view(self, buffer: str, layout: Layout) -> torch.Tensor:
        memory = self.memory[buffer]
        size = self.shape(layout.size)
        if 0 in size:
            return memory.new_empty(0).as_strided(size, self.shape(layout.stride))
        offset = memory.storage_offset() + self.size(layout.offset)
        return memory.as_strided(size, self.shape(layout.stride), offset)

    def argument(self, value: Any) -> Any:
        if isinstance(value, View):
            return self.view(value.buffer, value.layout)
        if isinstance(value, sympy.Expr):
            return self.size(value)
        if isinstance(value, tuple | list):
            return [self.argument(item) for item in value]
        if isinstance(value, dict):
            return {key: self.argument(item) for key, item in value.items()}
        return value

    # -- operations

    def call(self, kernel: ExternKernel) -> None:
        args = [self.argument(a) for a in kernel.args]
        found = kernel.op(*args, **self.argument(kernel.kwargs))
        for output in kernel.outputs:
            if output is not None:
                self.adopt(output, found if output.index is None else found[output.index])

    def loop(self, buffer: ComputedBuffer) -> None:
        loops, layout = buffer.loops, buffer.layout
        if isinstance(loops, Scatter):
            self.scatter(buffer, loops)
            return
        result = torch.empty(
            self.size(layout.storage_size), dtype=layout.dtype, device=layout.device
        )
        self.memory[buffer.name], self.dtypes[buffer.name] = result, layout.dtype
        size = self.shape(loops.ranges)
        if isinstance(loops, Reduction):
            reduced = self.shape(loops.reduction_ranges)
            ops, (index, rindex) = self.space(layout.device, loops.ranges, loops.reduction_ranges)
            value = ops.whole(loops.inner_fn(ops, index, rindex))
            if value.dtype is not loops.source_dtype:
                raise VerifyError(f"{buffer.name}: reduces {value.dtype}, not {loops.source_dtype}")
            flat = value.reshape([*size, _count(reduced)])
            value = ops.reduction(loops.kind, layout.dtype, flat).to(layout.dtype)
        else:
            ops, (index,) = self.space(layout.device, loops.ranges)
            value = ops.whole(loops.inner_fn(ops, index))
            if value.dtype is not layout.dtype:
                raise VerifyError(
                    f"{buffer.name}: its body gives {value.dtype}, not {layout.dtype}"
                )
        self.view(buffer.name, layout).copy_(value)

    def scatter(self, buffer: ComputedBuffer, loops: Scatter) -> None:
        """Takes over the target's memory."""
        self.memory[buffer.name] = self.memory[loops.target]
        self.dtypes[buffer.name] = buffer.layout.dtype
        ops, (index,) = self.space(buffer.layout.device, loops.ranges)
        position = buffer.layout.index(loops.output_index(ops, index))
        ops.store(buffer.name, position, loops.inner_fn(ops, index), loops.mode)

    def space(
        self, device: torch.device, *ranges: Sequence[Size]
    ) -> tuple[ReferenceOps, list[list[sympy.Symbol]]]:
        """A handler for the loops, and their variables."""
        extents = [n for group in ranges for n in self.shape(group)]
        values: Values = dict(self.sizes)
        indices, at = [], 0
        for prefix, group in zip("pr", ranges, strict=False):
            variables = loop_index(len(group), prefix)
            for variable in variables:
                shape = [1] * len(extents)
                shape[at] = extents[at]
                values[variable] = torch.arange(extents[at], device=device).reshape(shape)
                at += 1
            indices.append(variables)
        return ReferenceOps(self.memory, values, extents, device), indices


class ReferenceOps(Ops):
    """Values are tensors that broadcast over the index space; symbols stand for ints or such tensors."""

    def __init__(
        self,
        memory: Mapping[str, torch.Tensor],
        values: Values,
        extents: Sequence[int],
        device: torch.device,
        mask: torch.Tensor | None = None,
    ) -> None:
        self.memory, self.values, self.extents, self.device = memory, values, extents, device
        self.mask = mask
        """Where the body being evaluated counts; elsewhere its loads are made harmless."""

    def whole(self, value: torch.Tensor) -> torch.Tensor:
        return value.expand(list(self.extents))

    def position(self, index: Index) -> torch.Tensor:
        found = evaluate(sympy.sympify(index), self.values)
        return torch.as_tensor(found, device=self.device)

    def load(self, buffer: str, index: Index) -> torch.Tensor:
        memory, at = self.memory[buffer], self.position(index)
        if self.mask is not None:
            at = torch.where(self.mask, at, 0)
            if memory.numel() == 0 and not bool(self.mask.any()):
                return memory.new_zeros(()).expand(at.shape)
        if memory.numel() == 0:
            return memory.new_zeros(()).expand(at.shape) if 0 in self.extents else memory[at]
        if at.numel() and 0 not in self.extents:
            low, high = int(at.min()), int(at.max())
            if low < 0 or high >= memory.numel():
                raise VerifyError(f"load {buffer}[{index}] leaves its memory: {low} to {high}")
            return memory[at]
        return memory.new_zeros(()).expand(at.shape)

    def store(
        self, buffer: str, index: Index, value: torch.Tensor, mode: StoreMode = "store"
    ) -> torch.Tensor:
        at, value = self.whole(self.position(index)), self.whole(value)
        self.memory[buffer].index_put_((at,), value, accumulate=mode == "atomic_add")
        return value

    def constant(self, value: float | int | bool, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(value, dtype=dtype, device=self.device)

    def index_expr(self, expr: Index, dtype: torch.dtype) -> torch.Tensor:
        return self.position(expr).to(dtype)

    def to_dtype(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return value.to(dtype)

    def bitcast(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return value.contiguous().view(dtype)

    def masked(
        self,
        mask: torch.Tensor,
        body: Callable[[Ops], torch.Tensor],
        other: float | int | bool,
    ) -> torch.Tensor:
        inside = mask if self.mask is None else torch.logical_and(mask, self.mask)
        ops = ReferenceOps(self.memory, self.values, self.extents, self.device, inside)
        value = body(ops)
        return torch.where(mask, value, torch.tensor(other, dtype=value.dtype, device=self.device))

    def indirect_indexing(
        self,
        value: torch.Tensor,
        size: sympy.Expr | int,
        check: bool = True,
        wrap_negative: bool = True,
    ) -> Index:
        extent = int(evaluate(sympy.sympify(size), self.values))
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
        """Reduce the last dimension."""
        if kind == "max":
            return value.amax(-1)
        if kind == "min":
            return value.amin(-1)
        if kind in ("sum", "prod"):
            found: torch.Tensor = getattr(torch, kind)(value, -1, dtype=value.dtype)
            return found
        reduced: torch.Tensor = getattr(torch, kind)(value, -1)
        return reduced

    def pointwise(self, name: str, *values: torch.Tensor) -> torch.Tensor:
        dtype = result_dtype(name, tuple(v.dtype for v in values))
        found: torch.Tensor = POINTWISE[name].reference(*values)
        if found.dtype is not dtype:
            raise VerifyError(f"ops.{name} gave {found.dtype}, the table says {dtype}")
        return found


def evaluate(expr: sympy.Expr, values: Mapping[sympy.Symbol, Any]) -> Any:
    """An index expression on ints and int64 tensors."""
    if isinstance(expr, sympy.Integer):
        return int(expr)
    if isinstance(expr, sympy.Symbol):
        return values[expr]
    if isinstance(expr, FloorDiv):
        base, divisor = (evaluate(a, values) for a in expr.args)
        return base // divisor
    if isinstance(expr, ModularIndexing):
        base, divisor, modulus = (evaluate(a, values) for a in expr.args)
        return (base // divisor) % modulus
    parts = [evaluate(a, values) for a in expr.args]
    if isinstance(expr, sympy.Add):
        return sum(parts[1:], parts[0])
    if isinstance(expr, sympy.Mul):
        return _count(parts)
    if isinstance(expr, sympy.Pow):
        return parts[0] ** parts[1]
    if isinstance(expr, sympy.Max):
        return max(parts)
    if isinstance(expr, sympy.Min):
        return min(parts)
    raise VerifyError(f"no value for index expression {expr}")


def _count(factors: Sequence[Any]) -> Any:
    out: Any = 1
    for factor in factors:
        out = out * factor
    return out
