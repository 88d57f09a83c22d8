"""Loop graphs written by hand, and kernels that run in torch: what the scheduler's tests run on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import sympy
import torch

from minicompile.codegen.generate import by_position, generate_kernels, make_plans
from minicompile.codegen.plan import KernelPlan, KernelSource
from minicompile.codegen.wrapper import generate_wrapper
from minicompile.debug.reference import ReferenceOps, elements_of, run_reference
from minicompile.errors import VerifyError
from minicompile.lowering.ir import (
    Buffer,
    ComputedBuffer,
    ExternKernel,
    ExternOutput,
    InputBuffer,
    Layout,
    LoopGraph,
    Loops,
    Operation,
    Pointwise,
    Reduction,
    Scan,
    Scatter,
    View,
)
from minicompile.ops.handler import Index, StoreMode
from minicompile.options import Options
from minicompile.runtime.load import load_wrapper
from minicompile.scheduling.body import LoopBody, Value
from minicompile.scheduling.nodes import Schedule
from minicompile.scheduling.schedule import schedule
from minicompile.shapes.expr import FloorDiv, Size, same
from minicompile.shapes.symnode import evaluate

CPU = torch.device("cpu")
F64 = torch.float64
I64 = torch.int64


@dataclass(frozen=True)
class T:
    """A strided view of a buffer."""

    buffer: Buffer
    layout: Layout

    @property
    def size(self) -> tuple[Size, ...]:
        return self.layout.size

    def viewed(self, size: Sequence[Size], stride: Sequence[Size], offset: Size = 0) -> T:
        return T(
            self.buffer,
            replace(
                self.layout,
                size=tuple(size),
                stride=tuple(stride),
                offset=self.layout.offset + offset,
            ),
        )

    def permute(self, *order: int) -> T:
        return self.viewed([self.size[i] for i in order], [self.layout.stride[i] for i in order])

    def t(self) -> T:
        return self.permute(1, 0)

    def reshape(self, *size: Size) -> T:
        """Of a contiguous tensor."""
        assert self.layout.is_contiguous()
        return self.viewed(size, Layout.contiguous(CPU, F64, size).stride)

    def load(self, ops: Any, index: Sequence[Any]) -> Any:
        """Broadcasting: leading dimensions may be missing, extents may be 1."""
        own = index[len(index) - len(self.size) :]
        where = [0 if n == 1 else i for i, n in zip(own, self.size, strict=True)]
        return ops.load(self.buffer.name, self.layout.index(where))


def broadcast(sizes: Sequence[Sequence[Size]]) -> tuple[Size, ...]:
    rank = max(map(len, sizes))
    out: list[Size] = []
    for axis in range(rank):
        extents = [s[len(s) - rank + axis] for s in sizes if len(s) - rank + axis >= 0]
        big = [e for e in extents if e != 1]
        assert not big or all(same(big[0], e) for e in big)
        out.append(big[0] if big else 1)
    return tuple(out)


class GraphBuilder:
    def __init__(self, hints: Mapping[sympy.Symbol, int] | None = None) -> None:
        self.hints = dict(hints or {})
        self.inputs: list[InputBuffer | Size] = []
        self.operations: list[Operation] = []

    def input(
        self, size: Sequence[Size], dtype: torch.dtype = F64, stride: Sequence[Size] | None = None
    ) -> T:
        layout = Layout.contiguous(CPU, dtype, size)
        if stride is not None:
            layout = replace(layout, stride=tuple(stride))
        buffer = InputBuffer(f"in{len(self.inputs)}", layout)
        self.inputs.append(buffer)
        return T(buffer, layout)

    def compute(self, loops: Loops, size: Sequence[Size], dtype: torch.dtype = F64) -> T:
        layout = Layout.contiguous(CPU, dtype, size)
        buffer = ComputedBuffer(f"buf{len(self.operations)}", layout, loops=loops)
        self.operations.append(buffer)
        return T(buffer, layout)

    def pointwise(self, fn: Callable[..., Any], *operands: T) -> T:
        size = broadcast([o.size for o in operands])

        def inner(ops: Any, index: Sequence[Any]) -> Any:
            return fn(ops, *[o.load(ops, index) for o in operands])

        return self.compute(Pointwise(size, inner), size)

    def relu(self, x: T) -> T:
        return self.pointwise(lambda ops, u: ops.maximum(u, ops.constant(0, F64)), x)

    def double(self, x: T) -> T:
        return self.pointwise(lambda ops, u: ops.add(u, u), x)

    def add(self, x: T, y: T) -> T:
        return self.pointwise(lambda ops, u, v: ops.add(u, v), x, y)

    def mul(self, x: T, y: T) -> T:
        return self.pointwise(lambda ops, u, v: ops.mul(u, v), x, y)

    def softmax(self, x: T) -> T:
        last = (len(x.size) - 1,)
        high = self.reduce(x, last, "max", keepdim=True)
        e = self.pointwise(lambda ops, u, m: ops.exp(ops.sub(u, m)), x, high)
        total = self.reduce(e, last, "sum", keepdim=True)
        return self.pointwise(lambda ops, u, t: ops.truediv(u, t), e, total)

    def mm(self, x: T, y: T) -> T:
        """A library's product: the end of a kernel."""
        return self.extern(torch.ops.aten.mm.default, (x, y), (x.size[0], y.size[1]))

    def reduce(
        self, x: T, dims: Sequence[int], kind: Any, keepdim: bool = False, dtype: torch.dtype = F64
    ) -> T:
        kept = [d for d in range(len(x.size)) if d not in dims]
        keep_index = range(len(x.size)) if keepdim else kept
        size = tuple(1 if d in dims else x.size[d] for d in keep_index)

        def inner(ops: Any, index: Sequence[Any], rindex: Sequence[Any]) -> Any:
            full: list[Any] = [None] * len(x.size)
            for d, i in zip(keep_index, index, strict=True):
                full[d] = i
            for d, i in zip(dims, rindex, strict=True):
                full[d] = i
            return x.load(ops, full)

        ranges = tuple(x.size[d] for d in dims)
        return self.compute(Reduction(size, ranges, kind, inner), size, dtype)

    def scan(self, x: T, dim: int, kind: Any, dtype: torch.dtype = F64) -> T:
        return self.compute(Scan(x.size, dim, kind, x.load), x.size, dtype)

    def gather(self, table: T, rows: T) -> T:
        """table[rows], rows one-dimensional."""
        size = (*rows.size, *table.size[1:])

        def inner(ops: Any, index: Sequence[Any]) -> Any:
            row = ops.indirect_indexing(rows.load(ops, index[:1]), table.size[0])
            return table.load(ops, [row, *index[1:]])

        return self.compute(Pointwise(size, inner), size)

    def scatter_add(self, target: T, rows: T, source: T) -> T:
        """target[rows] += source."""

        def where(ops: Any, index: Sequence[Any]) -> Any:
            row = ops.indirect_indexing(rows.load(ops, index[:1]), target.size[0])
            return [row, *index[1:]]

        loops = Scatter(source.size, target.buffer.name, where, source.load, "atomic_add")
        return self.compute(loops, target.size)

    def fill(self, value: float, size: Sequence[Size]) -> T:
        return self.compute(Pointwise(tuple(size), lambda ops, _: ops.constant(value, F64)), size)

    def flip(self, x: T, axis: int) -> T:
        def inner(ops: Any, index: Sequence[Any]) -> Any:
            where = [x.size[d] - 1 - i if d == axis else i for d, i in enumerate(index)]
            return x.load(ops, where)

        return self.compute(Pointwise(x.size, inner), x.size)

    def keep_first(self, x: T, axis: int) -> T:
        """x where the index along an axis is 0, else 7: a masked load at the same index."""

        def inner(ops: Any, index: Sequence[Any]) -> Any:
            place = ops.index_expr(sympy.sympify(index[axis]), I64)
            first = ops.eq(place, ops.constant(0, I64))
            return ops.masked(first, lambda o: x.load(o, index), 7.0)

        return self.compute(Pointwise(x.size, inner), x.size)

    def repeat_rows(self, x: T, times: Size) -> T:
        """x (n, m) as (n*times, m): row i is x[i // times]: an index with a division."""
        size = (x.size[0] * times, x.size[1])

        def inner(ops: Any, index: Sequence[Any]) -> Any:
            return x.load(ops, [FloorDiv(index[0], sympy.sympify(times)), index[1]])

        return self.compute(Pointwise(size, inner), size)

    def extern(
        self, op: Any, args: Sequence[Any], size: Sequence[Size], dtype: torch.dtype = F64
    ) -> T:
        name = f"ext{len(self.operations)}"
        layout = Layout.contiguous(CPU, dtype, size)
        output = ExternOutput(f"buf{len(self.operations)}", layout)
        views = tuple(View(a.buffer.name, a.layout) if isinstance(a, T) else a for a in args)
        self.operations.append(ExternKernel(name, op, views, {}, (output,), "library"))
        return T(output, layout)

    def finish(self, *outputs: T | Size | None) -> LoopGraph:
        found = [View(o.buffer.name, o.layout) if isinstance(o, T) else o for o in outputs]
        graph = LoopGraph("graph", self.inputs, [], self.operations, found, self.hints)
        graph.verify()
        return graph


def example_inputs(
    graph: LoopGraph, sizes: Mapping[sympy.Symbol, int] | None = None, seed: int = 0
) -> list[Any]:
    """Random tensors for a graph; integer ones hold small indices, some negative."""
    generator = torch.Generator().manual_seed(seed)
    numbers = {**graph.size_hints, **(sizes or {})}

    def number(size: Size) -> int:
        return size if isinstance(size, int) else int(evaluate(size, numbers))

    found: list[Any] = []
    for buffer in graph.inputs:
        if not isinstance(buffer, InputBuffer):
            found.append(number(buffer))
            continue
        layout = buffer.layout
        size, stride = [*map(number, layout.size)], [*map(number, layout.stride)]
        if layout.dtype.is_floating_point:
            values = torch.randn(size, generator=generator, dtype=layout.dtype)
        else:
            low = -2 if layout.dtype.is_signed else 0
            values = torch.randint(low, 2, size, generator=generator, dtype=layout.dtype)
        found.append(torch.empty_strided(size, stride, dtype=layout.dtype).copy_(values))
    return found


def check(
    graph: LoopGraph,
    result: Schedule | None = None,
    sizes: Mapping[sympy.Symbol, int] | None = None,
) -> None:
    """A schedule gives what the graph's loops give one by one."""
    check_wrapper(compiled(result or schedule(graph, Options(verify=True))), graph, sizes)


# -- kernels without code generation


def python_kernels(schedule: Schedule) -> tuple[dict[int, list[KernelSource]], dict[str, Any]]:
    """A kernel for each fused node that runs its bodies in torch, and the names a wrapper needs."""
    plans = make_plans(schedule, Options(device_codegen="reference"))
    for position, plan in plans.items():
        plan.name = f"kernel_{position}"
    kernels = by_position(plans, generate_kernels(plans))
    internal = schedule.memory.internal
    return kernels, {p.name: partial(run_kernel, p, internal) for p in plans.values()}


@dataclass(eq=False)
class KernelOps(ReferenceOps):
    """Hands values from one body to the next, as a kernel does."""

    internal: Collection[str] = ()
    stored: dict[str, tuple[Index, torch.Tensor]] = field(default_factory=dict)
    loaded: dict[tuple[str, Index], torch.Tensor] = field(default_factory=dict)
    """Equal loads are one: what a store overwrites later was read before."""

    def load(self, buffer: str, index: Index) -> torch.Tensor:
        if buffer not in self.stored:
            return super().load(buffer, index)
        where, found = self.stored[buffer]
        if not same(where, index):
            raise VerifyError(f"{buffer}[{where}] is in the kernel, not [{index}]")
        if any(have > want for have, want in zip(found.shape, self.extents, strict=True)):
            raise VerifyError(f"{buffer} is there for every element, wanted once per row")
        return found

    def store(
        self, buffer: str, index: Index, value: torch.Tensor, mode: StoreMode = "store"
    ) -> torch.Tensor:
        if mode == "store":
            ones = [1] * len(self.extents)
            shape = torch.broadcast_shapes(self.position(index).shape, value.shape, ones)
            self.stored[buffer] = (index, value.expand(shape))
        return value if buffer in self.internal else super().store(buffer, index, value, mode)

    def play(self, body: LoopBody) -> None:
        """Do again what a body recorded."""
        done: dict[Value, torch.Tensor] = {}
        for value in body.values:
            mask = done[value.mask] if value.mask is not None else None
            done[value] = replace(self, mask=mask).again(value, [done[v] for v in value.inputs])

    def read(self, value: Value, index: Index) -> torch.Tensor:
        """A load; the same again, whatever has been written since, if it was done before."""
        if value.buffer in self.stored or self.mask is not None or value.indirect:
            return self.load(value.buffer, index)
        place = (value.buffer, index)
        if place not in self.loaded:
            self.loaded[place] = self.load(*place).clone()
        return self.loaded[place]

    def again(self, value: Value, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """One recorded value, on what its inputs have become."""
        index = value.index if value.index is not None else sympy.Integer(0)
        if value.op == "load":
            found = self.read(value, index)
            return (
                found if self.mask is None else torch.where(self.mask, found, found.new_zeros(()))
            )
        if value.op == "store":
            return self.store(value.buffer, index, inputs[0], value.kind)
        if value.op == "constant":
            return self.constant(value.constant, value.dtype)
        if value.op == "index_expr":
            return self.index_expr(index, value.dtype)
        if value.op == "indirect":
            made = self.indirect_indexing(*inputs, value.size, value.check, value.wrap_negative)
            self.values[value.symbol] = self.values[made]
            return self.values[made]
        if value.op == "reduction":
            return self.reduction(value.kind, value.dtype, inputs[0])
        if value.op == "scan":
            return self.scan(value.kind, inputs[0])
        if value.op == "to_dtype":
            return self.to_dtype(inputs[0], value.dtype)
        return self.pointwise(value.op, *inputs)


def run_kernel(plan: KernelPlan, internal: Collection[str], *given: Any) -> None:
    """The bodies of a fused node, one after the other, on one-dimensional memory.

    Raises VerifyError where a kernel could not do what the bodies ask.
    """
    node, memory = plan.node, {a.buffer: elements_of(t) for a, t in zip(plan.arguments, given)}
    memory |= {old: memory[new] for new, old in plan.in_place.items()}
    sizes = dict(zip(plan.sizes, given[len(plan.arguments) :], strict=True))
    handed: dict[str, Any] = {"stored": {}, "loaded": {}}
    for body, level in zip(node.bodies, node.levels, strict=True):
        columns = node.reduction_ranges
        if level != "elem":
            columns = dict.fromkeys(columns, 1)
        ops = KernelOps.over(
            node.ranges, columns, memory, sizes, plan.device, internal=internal, **handed
        )
        ops.play(body)


def dirty_empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """New memory that doesn't happen to be zero."""
    found = torch.empty_strided(size, stride, dtype=dtype)
    return elements_of(found).fill_(77).as_strided(size, stride)


def compiled(schedule: Schedule, options: Options = Options()) -> Callable[[list[Any]], Any]:  # noqa: B008
    kernels, namespace = python_kernels(schedule)
    wrapper = generate_wrapper(schedule, kernels)
    return load_wrapper(wrapper, {**namespace, "empty_strided_cpu": dirty_empty})


def check_wrapper(
    call: Callable[[list[Any]], Any],
    graph: LoopGraph,
    sizes: Mapping[sympy.Symbol, int] | None = None,
    seed: int = 0,
) -> None:
    """The wrapper's call gives what the graph's loops give one by one; inputs are left alone."""
    inputs = example_inputs(graph, sizes, seed)
    kept = [i.clone() if isinstance(i, torch.Tensor) else i for i in inputs]
    want = run_reference(graph, kept)
    args = list(inputs)
    have = call(args)
    assert args == []
    assert len(have) == len(want)
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
        if isinstance(b, torch.Tensor):
            assert a.stride() == b.stride()
    for a, b in zip(inputs, kept, strict=True):
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b), "an input was overwritten"
