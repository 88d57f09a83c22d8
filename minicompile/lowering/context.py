"""The registry of lowering rules, and `LoweringContext`, what a rule works with.

    @lowering(aten.softplus.default)
    def softplus(ctx: LoweringContext, x: TensorValue) -> TensorValue:
        return elementwise(ctx, lambda ops, v: ops.log1p(ops.exp(v)), x)

A rule gets the context, which makes elementwise values, reductions and scatters, and the node's arguments:
tensors as `TensorValue`, sizes as `int | sympy.Expr`. It returns a TensorValue or a tuple of them, or raises
`Unsupported`, and then the operator is called as it is. Operators that the AOT room decomposes never get
here. The real compiler: register_lowering in torch/_inductor/lowering.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from minicompile.errors import Unsupported, VerifyError
from minicompile.lowering.ir import (
    Buffer,
    ComputedBuffer,
    ConstantBuffer,
    Layout,
    Loops,
    Operation,
    Pointwise,
    Reduction,
    Scan,
    Scatter,
    View,
    loop_index,
    same_size,
)
from minicompile.lowering.value import Probe, Storage, TensorValue, scoped
from minicompile.lowering.views import ViewMap
from minicompile.ops.dtypes import LOOP_DTYPES
from minicompile.ops.graph import origins_of
from minicompile.ops.handler import Index, InnerFn, Ops, ReductionFn, StoreMode, V
from minicompile.ops.origin import NO_ORIGINS, Origins
from minicompile.ops.registry import Registry
from minicompile.ops.table import POSITIONS, ReductionKind, ScanKind
from minicompile.options import Options
from minicompile.shapes.expr import ZERO, Size, same, strides_agree, to_size

OutputIndex = Callable[[Ops, Sequence[Index]], Sequence[Index]]
Rule = Callable[..., Any]
"""`rule(ctx, *args, **kwargs) -> TensorValue | tuple`."""

lowering: Registry[Rule] = Registry("lowering", "ATen overload -> rule that gives loops")

extern_reasons: Registry[str] = Registry(
    "extern", "ATen overload or packet -> why a library runs it rather than loops"
)

template: Registry[Rule] = Registry(
    "template", 'ATen overload -> rule that gives a template\'s loops, with mode="max-autotune"'
)


class LoweringContext:
    """The node being lowered, and the operations made so far."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.operations: list[Operation] = []
        self.constants: list[ConstantBuffer] = []
        self.input_offsets: dict[str, Size] = {}
        """Where in its storage each input begins, in elements."""
        self.names: set[str] = set()
        self.env: Any = None
        """The `ShapeEnv` of symbolic sizes, if there are any."""
        self.node: fx.Node | None = None
        self.origins: Origins = NO_ORIGINS
        self.layouts: list[Layout | None] = []
        """How the node's results lie in eager."""

    def simplified(self, size: Size) -> Size:
        """A size by what guards say of its symbols."""
        known = isinstance(size, int) or self.env is None
        return size if known else to_size(self.env.simplified(size))

    def enter(self, node: fx.Node) -> None:
        """Everything made from here on belongs to `node`."""
        self.node, self.origins = node, origins_of(node)
        self.layouts = tensor_layouts(node.meta.get("val"))

    @property
    def result(self) -> Layout:
        """How the node's result (it has one) lies in eager."""
        (layout,) = self.layouts
        assert layout is not None
        return layout

    @property
    def result_size(self) -> tuple[Size, ...]:
        return self.result.size

    def new_layout(self, size: Sequence[Size], dtype: torch.dtype, device: torch.device) -> Layout:
        """The layout of a new tensor: as eager's result of this size if that is dense, else contiguous."""
        for layout in self.layouts:
            if layout is not None and same_size(layout.size, size) and is_dense(layout):
                return Layout(device, dtype, tuple(size), layout.stride)
        return Layout.contiguous(device, dtype, size)

    def new_name(self) -> str:
        number = len(self.operations)
        while f"buf{number}" in self.names:
            number += 1
        name = f"buf{number}"
        self.names.add(name)
        return name

    def dry_run(self, fn: Callable[..., V], *indices: Sequence[Index]) -> Probe:
        """What a formula reads and costs. Raises Unsupported where its dtypes don't fit."""
        probe = Probe()
        try:
            probe.dtype = fn(probe, *indices)
        except TypeError as error:
            raise Unsupported(str(error)) from error
        return probe

    # -- values

    def in_memory(self, buffer: Buffer, origins: Origins = NO_ORIGINS) -> TensorValue:
        """A buffer that is full by now; `origins` are those of the views in its layout."""
        storage = Storage(buffer.layout, NO_ORIGINS, buffer, len(self.operations) - 1)
        return TensorValue(storage, origins=origins)

    def constant(self, tensor: torch.Tensor, name: str) -> TensorValue:
        """A tensor known when compiling. Single numbers become part of the formulas that read them."""
        if tensor.dim() == 0 and type(tensor) is torch.Tensor and tensor.dtype in LOOP_DTYPES:
            number, dtype = tensor.item(), tensor.dtype
            return self.pointwise((), tensor.device, lambda ops, _: ops.constant(number, dtype))
        buffer = ConstantBuffer(name, layout_of(tensor), self.origins, tensor)
        self.constants.append(buffer)
        return self.in_memory(buffer)

    def pointwise(self, size: Sequence[Size], device: torch.device, fn: InnerFn) -> TensorValue:
        """A value computed element by element: `fn(ops, index)` with one index per dimension.

        Raises Unsupported where the formula's dtypes don't fit.
        """
        cost = self.dry_run(fn, loop_index(len(size)))
        layout = self.new_layout(size, cost.dtype, device)
        return TensorValue(Storage(layout, self.origins, fn=fn, cost=cost))

    def copy_of(self, value: TensorValue) -> TensorValue:
        """A new tensor with the same elements."""
        return self.pointwise(value.size, value.device, value.load)

    def view(self, value: TensorValue, view: ViewMap) -> TensorValue:
        """The value through an index map, without a copy."""
        return value.through(view, self.origins)

    # -- memory

    def settle(self, storage: Storage, why: str) -> Buffer:
        """Give a storage memory, if it has none."""
        if storage.buffer is None:
            layout, storage.position = storage.layout, len(self.operations)
            assert storage.fn is not None
            body = scoped(storage.fn, storage.position, storage.origins)
            loops = Pointwise(layout.size, body)
            storage.buffer = self._emit(layout, loops, storage.cost, storage.origins, why)
        return storage.buffer

    def settled(self, value: TensorValue, why: str) -> TensorValue:
        """The value, which has memory and strides there from now on. A view without strides is copied."""
        self.settle(value.storage, why)
        return value if value.layout is not None else self.settled(self.copy_of(value), why)

    def realize(self, value: TensorValue, why: str) -> View:
        """The value in memory."""
        value = self.settled(value, why)
        assert value.storage.buffer is not None and value.layout is not None
        return View(value.storage.buffer.name, value.layout)

    def realize_as(self, value: TensorValue, layout: Layout, why: str) -> View | None:
        """The value in memory with exactly this size and these strides (the offset is free); None where a
        new tensor that loops fill can't have them."""
        if not same_size(list(map(self.simplified, value.size)), layout.size):
            raise VerifyError(f"size {value.size} where eager has {layout.size}")
        storage = value.storage
        if value.view is None and storage.buffer is None and is_dense(layout):
            storage.layout = replace(storage.layout, stride=layout.stride)
        buffer = self.settle(storage, why)
        have = value.layout
        if have is not None and strides_agree(have.size, have.stride, layout.stride):
            chosen = Layout(have.device, have.dtype, layout.size, layout.stride, have.offset)
            return View(buffer.name, chosen)
        if value.dtype not in LOOP_DTYPES or not is_dense(layout):
            return None
        copy = self.copy_of(value)
        copy.storage.layout = replace(copy.storage.layout, stride=layout.stride)
        return View(self.settle(copy.storage, why).name, layout)

    def _emit(
        self, layout: Layout, loops: Loops, cost: Probe, origins: Origins, why: str
    ) -> Buffer:
        reads, inlined = cost.reached()
        target = [loops.target] if isinstance(loops, Scatter) else []
        names = frozenset([*reads, *target])
        every = inlined | origins
        buffer = ComputedBuffer(self.new_name(), layout, every, loops, why, names, origins)
        self.operations.append(buffer)
        return buffer

    def body(self, fn: Callable[..., V]) -> Callable[..., V]:
        """A loop body of the operation that is made next, as other rooms get it."""
        return scoped(fn, len(self.operations), self.origins)

    def _filled(self, layout: Layout, loops: Loops, cost: Probe, why: str) -> TensorValue:
        """A new buffer that these loops fill."""
        return self.in_memory(self._emit(layout, loops, cost, self.origins, why))

    # -- reductions, scans and scatters

    def reduction(
        self,
        kind: ReductionKind,
        size: Sequence[Size],
        reduction_ranges: Sequence[Size],
        dtype: torch.dtype,
        device: torch.device,
        fn: ReductionFn,
    ) -> TensorValue:
        """Reduce `fn(ops, index, reduction_index)` to a tensor of `size` and `dtype`.

        One element gives itself; otherwise the result is in memory.
        """
        if 0 in reduction_ranges:
            raise Unsupported("a reduction of no elements")
        if kind in POSITIONS and not reduction_ranges:
            raise Unsupported(f"{kind} of a tensor without dimensions")
        if all(extent == 1 for extent in reduction_ranges) and kind not in POSITIONS:
            first = [ZERO] * len(reduction_ranges)
            return self.pointwise(
                size, device, lambda ops, i: ops.to_dtype(fn(ops, i, first), dtype)
            )
        loops = partial(Reduction, tuple(size), tuple(reduction_ranges), kind)
        return self.reduced(loops, dtype, device, fn, "reduction")

    def reduced(
        self,
        made: Callable[..., Reduction],
        dtype: torch.dtype,
        device: torch.device,
        fn: ReductionFn,
        why: str,
        finish: Callable[[Ops, V, Sequence[Index]], V] | None = None,
    ) -> TensorValue:
        """A new buffer: the reduction that is made of what other rooms get for `fn`, and for `finish`."""
        functions = [fn] if finish is None else [fn, finish]
        loops = made(*map(self.body, functions))
        ranges = loop_index(len(loops.ranges)), loop_index(len(loops.reduction_ranges), "r")

        def whole(ops: Ops, index: Sequence[Index], reduced: Sequence[Index]) -> V:
            value = fn(ops, index, reduced)
            return value if finish is None else finish(ops, ops.to_dtype(value, dtype), index)

        cost = self.dry_run(whole, *ranges)
        return self._filled(self.new_layout(loops.ranges, dtype, device), loops, cost, why)

    def scan(
        self,
        kind: ScanKind,
        size: Sequence[Size],
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
        fn: InnerFn,
    ) -> TensorValue:
        """Combine `fn(ops, index)` along dimension `dim`, in order and in the dtype of `fn`."""
        if not size or size[dim] in (0, 1):
            raise Unsupported("a scan of at most one element")
        cost = self.dry_run(fn, loop_index(len(size)))
        loops = Scan(tuple(size), dim, kind, self.body(fn))
        return self._filled(self.new_layout(size, dtype, device), loops, cost, "scan")

    def scatter(
        self,
        base: TensorValue,
        ranges: Sequence[Size],
        output_index: OutputIndex,
        fn: InnerFn,
        mode: StoreMode,
    ) -> TensorValue:
        """`base` with elements written or added: loops over `ranges` into a fresh copy of it."""
        if mode == "atomic_add" and base.dtype not in ADDABLE:
            raise Unsupported(f"accumulating {base.dtype}: an addition would round or isn't atomic")
        copy = self.copy_of(base)
        target = self.settle(copy.storage, "fresh copy that a scatter writes into")

        def both(ops: Ops, index: Sequence[Index]) -> V:
            output_index(ops, index)
            return fn(ops, index)

        cost = self.dry_run(both, loop_index(len(ranges)))
        where, element = self.body(output_index), self.body(fn)
        loops = Scatter(tuple(ranges), target.name, where, element, mode)
        return self._filled(target.layout, loops, cost, "scatter")


ADDABLE = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})
"""What can be added atomically and exactly."""


def layout_of(tensor: torch.Tensor) -> Layout:
    """A (fake) tensor's layout, from its first element."""
    size, stride = tuple(map(to_size, tensor.shape)), tuple(map(to_size, tensor.stride()))
    return Layout(tensor.device, tensor.dtype, size, stride)


def tensor_layouts(val: Any) -> list[Layout | None]:
    """The layouts of a node's results, None where a result is no tensor."""
    if isinstance(val, torch.Tensor):
        return [layout_of(val)]
    if isinstance(val, tuple | list):
        return [layout_of(v) if isinstance(v, torch.Tensor) else None for v in val]
    return []


def is_dense(layout: Layout) -> bool:
    """Whether there are as many elements as places from the first to the last.

    Then each place is used once: eager makes no new tensor whose elements share some and leave out others.
    """
    return same(layout.storage_size, layout.numel)
