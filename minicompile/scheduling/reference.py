"""Loop bodies run in plain torch: what a kernel means, without generating any code.

`run_graph` runs a LoopGraph buffer by buffer; `run_schedule` runs a schedule the way its kernels will: the
bodies of a fused node over their common loops, values handed over where a buffer is written and read in
the same kernel, memory allocated, freed and reused as planned. Fusion is right if both agree with eager.
Every value is a tensor over all loops at once, one dimension per loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

from minicompile.errors import VerifyError
from minicompile.lowering.ir import (
    ConstantBuffer,
    ExternKernel,
    InputBuffer,
    Layout,
    LoopGraph,
    Scatter,
    View,
)
from minicompile.ops.handler import Index
from minicompile.ops.table import POINTWISE
from minicompile.scheduling.body import LoopBody, Value, record
from minicompile.scheduling.nodes import ExternKernelSchedulerNode, FusedSchedulerNode, Schedule
from minicompile.shapes.expr import FloorDiv, ModularIndexing, Size, same

Memory = dict[str, torch.Tensor]
"""Each buffer as a flat tensor: element i is position i of its layout."""
Numbers = Mapping[sympy.Symbol, int]
GARBAGE = 77
"""What fresh memory holds here, so that reading what nobody wrote shows."""


def run_graph(graph: LoopGraph, inputs: Sequence[Any]) -> list[Any]:
    """Every buffer by its own loops, in the graph's order. `inputs` as for the compiled graph."""
    memory, sizes = _bind(graph, inputs)
    dtypes = {name: b.layout.dtype for name, b in graph.buffers.items()}
    for operation in graph.operations:
        if isinstance(operation, ExternKernel):
            _run_extern(operation, memory, sizes)
            continue
        if isinstance(operation.loops, Scatter):
            memory[operation.name] = memory[operation.loops.target]
        else:
            memory[operation.name] = _fresh(operation.layout, sizes)
        BodyRunner(memory, sizes).run(record(operation, dtypes), elementwise=True)
    return _outputs(graph, memory, sizes)


def run_schedule(schedule: Schedule, inputs: Sequence[Any]) -> list[Any]:
    """Kernel by kernel as scheduled, with the memory plan obeyed."""
    graph, plan = schedule.graph, schedule.memory
    buffers = graph.buffers
    memory, sizes = _bind(graph, inputs)
    for step, node in enumerate(schedule.nodes):
        for allocation in plan.allocate[step]:
            if allocation.reuses is not None:
                memory[allocation.buffer] = memory.pop(allocation.reuses)
            else:
                layout = buffers[allocation.buffer].layout
                memory[allocation.buffer] = _fresh(layout, sizes)
        if isinstance(node, ExternKernelSchedulerNode):
            _run_extern(node.kernel, memory, sizes)
        else:
            for name in {d.buffer for d in node.writes} & plan.aliases.keys():
                memory[name] = memory[plan.aliases[name]]
            run_kernel(node, memory, sizes, plan.internal)
        waiting = {a.reuses for later in plan.allocate[step + 1 :] for a in later}
        for name in plan.free[step]:
            if name not in waiting:
                memory.pop(name, None)
    return _outputs(graph, memory, sizes)


def run_kernel(
    node: FusedSchedulerNode, memory: Memory, sizes: Numbers, internal: frozenset[str]
) -> None:
    """All bodies of a fused node, values handed from one to the next."""
    runner = BodyRunner(memory, sizes, node.ranges, node.reduction_ranges, internal)
    for body, level in zip(node.bodies, node.levels, strict=True):
        runner.run(body, level == "elem")


def evaluate(index: Index, numbers: Mapping[sympy.Symbol, Any]) -> Any:
    """An index expression on numbers or integer tensors."""
    if index.is_Integer:
        return int(index)
    if isinstance(index, sympy.Symbol):
        return numbers[index]
    args = [evaluate(a, numbers) for a in index.args]
    if isinstance(index, FloorDiv):
        return args[0] // args[1]
    if isinstance(index, ModularIndexing):
        return (args[0] // args[1]) % args[2]
    if isinstance(index, sympy.Pow):
        return args[0] ** args[1]
    total = args[0]
    for a in args[1:]:
        total = total + a if isinstance(index, sympy.Add) else total * a
    return total


class BodyRunner:
    """Runs the bodies of one kernel. Raises VerifyError where a kernel could not do what they ask."""

    def __init__(
        self,
        memory: Memory,
        sizes: Numbers,
        ranges: Mapping[sympy.Symbol, Size] | None = None,
        reduction_ranges: Mapping[sympy.Symbol, Size] | None = None,
        internal: frozenset[str] = frozenset(),
    ) -> None:
        self.memory, self.sizes, self.internal = memory, sizes, internal
        self.ranges, self.reduction_ranges = ranges, reduction_ranges
        self.stored: dict[str, tuple[Index, torch.Tensor]] = {}

    def run(self, body: LoopBody, elementwise: bool) -> None:
        x = self.ranges if self.ranges is not None else body.ranges
        r = self.reduction_ranges if self.reduction_ranges is not None else body.reduction_ranges
        device = next(iter(self.memory.values())).device if self.memory else torch.device("cpu")
        loops = [*x.items(), *r.items()]
        self.x_shape = [self._size(size) for size in x.values()]
        r_shape = [self._size(size) for size in r.values()]
        self.row_shape = self.x_shape + [1] * len(r)
        self.shape = self.x_shape + (r_shape if elementwise else [1] * len(r))
        self.r_shape = r_shape if elementwise else [1] * len(r)
        self.numbers: dict[sympy.Symbol, Any] = dict(self.sizes)
        for axis, (loop, _) in enumerate(loops):
            extent = (self.x_shape + r_shape)[axis]
            where = [1] * len(loops)
            where[axis] = extent
            if elementwise or axis < len(x):
                self.numbers[loop] = torch.arange(extent, device=device).reshape(where)
        self.values: dict[Value, torch.Tensor] = {}
        self.name = body.name
        for value in body.values:
            self.values[value] = self._value(value)

    def _size(self, size: Size) -> int:
        return size if isinstance(size, int) else int(evaluate(size, self.sizes))

    def _index(self, value: Value) -> torch.Tensor:
        assert value.index is not None
        found = evaluate(value.index, self.numbers)
        return torch.as_tensor(found, dtype=torch.int64)

    def _value(self, value: Value) -> torch.Tensor:
        inputs = [self.values[v] for v in value.inputs]
        if value.op == "constant":
            return torch.tensor(value.constant, dtype=value.dtype)
        if value.op == "index_expr":
            return self._index(value).to(value.dtype)
        if value.op == "to_dtype":
            return inputs[0].to(value.dtype)
        if value.op == "bitcast":
            return inputs[0].view(value.dtype)
        if value.op == "load":
            return self._load(value)
        if value.op == "store":
            return self._store(value, inputs[0])
        if value.op == "indirect":
            return self._indirect(value, inputs[0])
        if value.op == "reduction":
            return self._reduce(value, inputs[0])
        return POINTWISE[value.op].reference(*inputs)  # type: ignore[no-any-return]

    def _load(self, value: Value) -> torch.Tensor:
        assert value.index is not None
        mask = self.values[value.mask] if value.mask is not None else None
        if value.buffer in self.stored:
            where, found = self.stored[value.buffer]
            if not same(where, value.index):
                raise VerifyError(f"{self.name} loads {value.buffer}[{value.index}], not [{where}]")
            if any(have > want for have, want in zip(found.shape, self.shape, strict=True)):
                raise VerifyError(f"{self.name} reads a value of every element once per row")
        else:
            flat = self.memory[value.buffer]
            index = self._index(value)
            if mask is not None:
                index = torch.where(mask, index, 0)
            if flat.numel() == 0:
                found = torch.zeros(index.shape, dtype=value.dtype)
            else:
                found = flat[index]
        if mask is None:
            return found
        return torch.where(mask, found, torch.zeros((), dtype=found.dtype))

    def _indirect(self, value: Value, found: torch.Tensor) -> torch.Tensor:
        size = self._size(value.size)
        index = found.to(torch.int64)
        if value.wrap_negative:
            index = torch.where(index < 0, index + size, index)
        if value.mask is not None:
            index = torch.where(self.values[value.mask], index, 0)
        if value.check and bool(((index < 0) | (index >= size)).expand(self.shape).any()):
            raise IndexError(f"index out of range for a dimension of {size}")
        assert value.symbol is not None
        self.numbers[value.symbol] = index
        return index

    def _reduce(self, value: Value, source: torch.Tensor) -> torch.Tensor:
        count = 1
        for extent in self.r_shape:
            count *= extent
        full = source.expand(self.shape).reshape([*self.x_shape, count])
        kind = value.kind
        if kind in ("max", "min"):
            out = full.amax(-1) if kind == "max" else full.amin(-1)
        elif kind == "argmax":
            out = full.to(torch.uint8).argmax(-1) if full.dtype is torch.bool else full.argmax(-1)
        elif kind == "argmin":
            out = full.to(torch.uint8).argmin(-1) if full.dtype is torch.bool else full.argmin(-1)
        elif kind in ("sum", "prod"):
            reduce = torch.sum if kind == "sum" else torch.prod
            out = reduce(full, -1, dtype=value.dtype)
        else:
            out = full.any(-1) if kind == "any" else full.all(-1)
        return out.to(value.dtype).reshape(self.row_shape)

    def _store(self, value: Value, source: torch.Tensor) -> torch.Tensor:
        assert value.index is not None
        index = self._index(value)
        shape = torch.broadcast_shapes(index.shape, source.shape, [1] * len(self.shape))
        if value.kind == "atomic_add":
            shape = torch.Size(self.shape)
        else:
            self.stored[value.buffer] = (value.index, source.expand(shape))
            if value.buffer in self.internal:
                return source
        flat = self.memory[value.buffer]
        data = source.to(flat.dtype).expand(shape).reshape(-1)
        where = index.expand(shape).reshape(-1)
        flat.index_put_((where,), data, accumulate=value.kind == "atomic_add")
        return source


# -- memory, library calls, inputs and outputs


def _bind(graph: LoopGraph, inputs: Sequence[Any]) -> tuple[Memory, dict[sympy.Symbol, int]]:
    memory: Memory = {}
    sizes: dict[sympy.Symbol, int] = {}
    for buffer, given in zip(graph.inputs, inputs, strict=True):
        if not isinstance(buffer, InputBuffer):
            if isinstance(buffer, sympy.Symbol):
                sizes[buffer] = int(given)
            continue
        for size, have in zip(buffer.layout.size, given.shape, strict=True):
            if isinstance(size, sympy.Symbol):
                sizes[size] = have
        memory[buffer.name] = flat(given)
    for constant in graph.constants:
        assert isinstance(constant, ConstantBuffer) and constant.value is not None
        memory[constant.name] = flat(constant.value)
    return memory, sizes


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's memory from its first element to its last, as one dimension."""
    extent = 0
    if tensor.numel():
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((extent,), (1,))


def _fresh(layout: Layout, sizes: Numbers) -> torch.Tensor:
    extent = layout.storage_size
    count = extent if isinstance(extent, int) else int(evaluate(extent, sizes))
    return torch.full((count,), GARBAGE, dtype=layout.dtype, device=layout.device)


def as_view(view: View, memory: Memory, sizes: Numbers) -> torch.Tensor:
    """A view of a buffer as a tensor."""
    layout = view.layout

    def number(size: Size) -> int:
        return size if isinstance(size, int) else int(evaluate(size, sizes))

    base = memory[view.buffer]
    where = base.storage_offset() + number(layout.offset)
    return base.as_strided([*map(number, layout.size)], [*map(number, layout.stride)], where)


def _resolve(value: Any, memory: Memory, sizes: Numbers) -> Any:
    if isinstance(value, View):
        return as_view(value, memory, sizes)
    if isinstance(value, sympy.Expr):
        return int(evaluate(value, sizes))
    if isinstance(value, tuple | list):
        return type(value)(_resolve(v, memory, sizes) for v in value)
    return value


def _run_extern(kernel: ExternKernel, memory: Memory, sizes: Numbers) -> None:
    args = _resolve(kernel.args, memory, sizes)
    kwargs = {key: _resolve(v, memory, sizes) for key, v in kernel.kwargs.items()}
    found = kernel.op(*args, **kwargs)
    for output in kernel.outputs:
        if output is None:
            continue
        result = found if output.index is None else found[output.index]
        kept = _fresh(output.layout, sizes)
        memory[output.name] = kept
        as_view(View(output.name, output.layout), memory, sizes).copy_(result)


def _outputs(graph: LoopGraph, memory: Memory, sizes: Numbers) -> list[Any]:
    return [_resolve(output, memory, sizes) for output in graph.outputs]
