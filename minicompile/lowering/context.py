"""`LoweringContext`, what a rule works with: makes lazy values, reductions, scatters, extern calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from minicompile.errors import Unsupported, VerifyError
from minicompile.lowering import realize as heuristics
from minicompile.lowering.ir import (
    ComputedBuffer,
    ConstantBuffer,
    ExternKernel,
    ExternOutput,
    Layout,
    Loops,
    Operation,
    Pointwise,
    Reduction,
    Scatter,
    View,
    loop_index,
)
from minicompile.lowering.value import (
    BufferValue,
    LazyValue,
    Probe,
    Scope,
    TensorValue,
    ViewValue,
)
from minicompile.lowering.views import ViewMap
from minicompile.ops.dtypes import LOOP_DTYPES
from minicompile.ops.graph import origins_of
from minicompile.ops.handler import Index, InnerFn, Ops, ReductionFn, StoreMode, V
from minicompile.ops.origin import NO_ORIGINS, Origins
from minicompile.ops.table import ReductionKind, reduction_identity
from minicompile.options import Options
from minicompile.shapes.expr import ZERO, Size, contiguous_strides, product, same, to_size

OutputIndex = Callable[[Ops, Sequence[Index]], Sequence[Index]]


class LoweringContext:
    """The graph being lowered, the node at hand, and the operations made so far."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.operations: list[Operation] = []
        self.constants: list[ConstantBuffer] = []
        self.reads: dict[str, frozenset[str]] = {}
        """Buffers that each operation reads, by the operation's name."""
        self.input_offsets: dict[str, Size] = {}
        """Where in its storage each input begins, in elements."""
        self.names: set[str] = set()
        self.origins: Origins = NO_ORIGINS
        self.node: fx.Node | None = None
        self._strides: list[tuple[tuple[Size, ...], tuple[Size, ...]]] | None = None

    # -- the node at hand

    def enter(self, node: fx.Node) -> None:
        """Everything made from here on belongs to `node`."""
        self.node, self.origins, self._strides = node, origins_of(node), None

    def eager_strides(self, size: Sequence[Size]) -> tuple[Size, ...]:
        """Strides for a new tensor: eager's for the node's result of this size if dense, else contiguous."""
        if self._strides is None:
            self._strides = []
            for layout in tensor_layouts(self.node.meta.get("val") if self.node else None):
                if layout is not None and is_dense(layout.size, layout.stride):
                    self._strides.append((layout.size, layout.stride))
        for known, stride in self._strides:
            if len(known) == len(size) and all(map(same, known, size)):
                return stride
        return contiguous_strides(size)

    def result_size(self) -> tuple[Size, ...] | None:
        """The size that the node's one result has in eager, if known."""
        val = self.node.meta.get("val") if self.node is not None else None
        return tuple(map(to_size, val.shape)) if isinstance(val, torch.Tensor) else None

    def new_name(self) -> str:
        number = len(self.operations)
        while f"buf{number}" in self.names:
            number += 1
        name = f"buf{number}"
        self.names.add(name)
        return name

    # -- values

    def pointwise(
        self,
        size: Sequence[Size],
        device: torch.device,
        fn: InnerFn,
        dtype: torch.dtype | None = None,
    ) -> LazyValue:
        """A value computed element by element: `fn(ops, index)` with one index per dimension.

        `dtype`, if given, is what the formula must have. Raises VerifyError where dtypes don't fit.
        """
        probe = Probe()
        try:
            found, weight = fn(probe, loop_index(len(size)))
        except TypeError as error:
            raise VerifyError(f"{self._rule()}: {error}") from error
        if dtype is not None and found is not dtype:
            raise VerifyError(f"{self._rule()}: the formula gives {found}, not {dtype}")
        stride = self.eager_strides(size)
        return LazyValue(size, device, fn, found, probe, weight, self.origins, stride)

    def view(self, value: TensorValue, view: ViewMap) -> TensorValue:
        """The value through an index map: strided memory where it can be, without a copy."""
        base = value.memory if isinstance(value, LazyValue) and value.memory else value
        if isinstance(base, ViewValue) and base.base.memory is not None:
            settled = base.strided
            base = settled if settled is not None else base
        if isinstance(base, BufferValue):
            layout = view.over(base.layout)
            if layout is not None:
                return BufferValue(base.buffer, layout, base.origins | self.origins)
            if base.dtype not in LOOP_DTYPES:
                raise Unsupported(f"a view of {base.dtype} that isn't strided")
            base = self.copy_of(base)
        if isinstance(base, ViewValue):
            return ViewValue(base.base, view.after(base.view), base.origins | self.origins)
        assert isinstance(base, LazyValue)
        return ViewValue(base, view, self.origins)

    def copy_of(self, value: TensorValue) -> LazyValue:
        """A new tensor with the same elements."""
        return self.pointwise(value.size, value.device, value.load)

    def constant(self, tensor: torch.Tensor, name: str) -> TensorValue:
        """A tensor known when compiling. Single numbers become part of the formulas that read them."""
        if tensor.dim() == 0 and type(tensor) is torch.Tensor and tensor.dtype in LOOP_DTYPES:
            number, dtype = tensor.item(), tensor.dtype
            return self.pointwise((), tensor.device, lambda ops, _: ops.constant(number, dtype))
        self.names.add(name)
        layout = layout_of(tensor)
        buffer = ConstantBuffer(name, layout, self.origins, tensor)
        self.constants.append(buffer)
        return BufferValue(buffer, layout)

    # -- memory

    def realize(self, value: TensorValue, why: str) -> BufferValue:
        """Give a value memory, if it has none. A view of a value that it would have to copy is copied."""
        if isinstance(value, BufferValue):
            return value
        if isinstance(value, LazyValue):
            if value.memory is None:
                value.memory = self._write(value, value.stride, why)
            return value.memory
        assert isinstance(value, ViewValue)
        self.realize(value.base, why)
        settled = value.strided
        return settled if settled is not None else self.realize(self.copy_of(value), why)

    def realize_as(self, value: TensorValue, layout: Layout, why: str) -> BufferValue:
        """The value in memory with exactly this size and these strides (the offset is free)."""
        found: BufferValue | None = None
        if isinstance(value, BufferValue):
            found = value
        elif isinstance(value, ViewValue):
            self.realize(value.base, why)
            found = value.strided
        elif isinstance(value, LazyValue):
            if value.memory is None and is_dense(layout.size, layout.stride):
                value.stride = layout.stride
            found = self.realize(value, why)
        if found is not None:
            matching = with_strides(found, layout)
            if matching is not None:
                return matching
        return self._write_repeated(value, layout, why)

    def reuse(self, value: TensorValue, times: int = 2) -> None:
        """Say that a rule is going to read a value `times` times; realizes it if that is worth it."""
        base = value.base if isinstance(value, ViewValue) else value
        if isinstance(base, LazyValue) and base.memory is None:
            why = heuristics.worth_keeping(base, times)
            if why is not None:
                self.realize(base, why)

    def _write(self, value: LazyValue, stride: Sequence[Size], why: str) -> BufferValue:
        layout = Layout(value.device, value.dtype, value.size, tuple(stride))
        reads, origins = value.inputs.reached()
        position = len(self.operations)
        body = _body(value.fn, position, value.origins)
        memory = self._emit(
            layout, Pointwise(value.size, body), frozenset(reads), origins | value.origins, why
        )
        value.position = position
        return memory

    def _write_repeated(self, value: TensorValue, layout: Layout, why: str) -> BufferValue:
        """Write the distinct elements of an expanded layout (stride 0) once."""
        repeated = [
            extent != 1 and isinstance(step, int) and step == 0
            for extent, step in zip(layout.size, layout.stride, strict=True)
        ]
        once = tuple(1 if r else s for r, s in zip(repeated, layout.size, strict=True))
        if not is_dense(once, layout.stride):
            raise Unsupported(f"a new tensor with strides {layout.stride} for size {layout.size}")
        if value.dtype not in LOOP_DTYPES:
            raise Unsupported(f"a copy of a {value.dtype} tensor into other strides")
        first = value
        if any(repeated):
            first = self.view(value, ViewMap(once, list))
        memory = self._write(self.copy_of(first), layout.stride, why)
        return BufferValue(memory.buffer, layout)

    def _emit(
        self, layout: Layout, loops: Loops, reads: frozenset[str], origins: Origins, why: str
    ) -> BufferValue:
        if layout.dtype not in LOOP_DTYPES:
            raise Unsupported(f"loops over {layout.dtype}")
        name = self.new_name()
        buffer = ComputedBuffer(name, layout, origins, loops, why)
        self.operations.append(buffer)
        self.reads[name] = reads
        return BufferValue(buffer, layout)

    # -- reductions and scatters

    def reduction(
        self,
        kind: ReductionKind,
        size: Sequence[Size],
        reduction_ranges: Sequence[Size],
        source_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
        fn: ReductionFn,
    ) -> TensorValue:
        """Reduce `fn(ops, index, reduction_index)`, of `source_dtype`, to a tensor of `size` and `dtype`.

        Nothing to reduce gives the identity, one element gives itself; otherwise the result is in memory.
        """
        empty = any(isinstance(r, int) and r == 0 for r in reduction_ranges)
        if empty or all(isinstance(r, int) and r == 1 for r in reduction_ranges):
            return self._trivial_reduction(kind, size, reduction_ranges, dtype, device, fn, empty)
        probe = Probe()
        index, rindex = loop_index(len(size)), loop_index(len(reduction_ranges), "r")
        found, _ = fn(probe, index, rindex)
        if found is not source_dtype:
            raise VerifyError(f"{self._rule()}: reduces {found}, not {source_dtype}")
        layout = Layout(device, dtype, tuple(size), self.eager_strides(size))
        position, origins = len(self.operations), self.origins
        reads, inlined = probe.inputs.reached()

        def body(ops: Ops, i: Sequence[Index], r: Sequence[Index]) -> V:
            return fn(Scope(ops, position, origins), i, r)

        loops = Reduction(tuple(size), tuple(reduction_ranges), kind, source_dtype, body)
        return self._emit(layout, loops, frozenset(reads), inlined | origins, "reduction")

    def _trivial_reduction(
        self,
        kind: ReductionKind,
        size: Sequence[Size],
        reduction_ranges: Sequence[Size],
        dtype: torch.dtype,
        device: torch.device,
        fn: ReductionFn,
        empty: bool,
    ) -> TensorValue:
        if empty and kind in ("max", "min", "argmax", "argmin"):
            raise Unsupported(f"{kind} of no elements")
        if empty or kind in ("argmax", "argmin"):
            number = 0 if kind in ("argmax", "argmin") else reduction_identity(kind, dtype)
            return self.pointwise(size, device, lambda ops, _: ops.constant(number, dtype), dtype)
        zeros = loop_zeros(len(reduction_ranges))
        return self.pointwise(
            size, device, lambda ops, index: ops.to_dtype(fn(ops, index, zeros), dtype), dtype
        )

    def scatter(
        self,
        base: TensorValue,
        ranges: Sequence[Size],
        output_index: OutputIndex,
        fn: InnerFn,
        mode: StoreMode,
    ) -> TensorValue:
        """`base` with elements written or added: loops over `ranges` into a fresh copy of it."""
        copy = self.copy_of(base)
        target = self.realize(copy, "fresh copy that a scatter writes into")
        probe = Probe()
        index = loop_index(len(ranges))
        output_index(probe, index)
        found, _ = fn(probe, index)
        if found is not base.dtype:
            raise VerifyError(f"{self._rule()}: scatters {found} into {base.dtype}")
        position, origins = len(self.operations), self.origins
        reads, inlined = probe.inputs.reached()
        loops = Scatter(
            tuple(ranges),
            target.buffer.name,
            lambda ops, i: output_index(Scope(ops, position, origins), i),
            lambda ops, i: fn(Scope(ops, position, origins), i),
            mode,
        )
        everything = frozenset({*reads, target.buffer.name})
        return self._emit(target.layout, loops, everything, inlined | origins, "scatter")

    # -- libraries

    def extern(
        self,
        op: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        reason: str,
        layouts: Sequence[Layout | None] | None = None,
    ) -> Any:
        """Call an operator as it is. Its results lie as eager's do: `node.meta["val"]`, or `layouts`.

        Gives a value, or a tuple of values and numbers for operators that return several.
        """
        views_made: list[View] = []
        call_args = self._views(tuple(args), op, views_made)
        call_kwargs = self._views(dict(kwargs), op, views_made)
        name = self.new_name()
        val = self.node.meta.get("val") if self.node is not None else None
        single = isinstance(val, torch.Tensor) if layouts is None else len(layouts) == 1
        outputs: list[ExternOutput | None] = []
        for i, layout in enumerate(tensor_layouts(val) if layouts is None else layouts):
            own = name if single else f"{name}_{i}"
            index = None if single else i
            self.names.add(own)
            outputs.append(
                ExternOutput(own, layout, self.origins, name, index) if layout is not None else None
            )
        kernel = ExternKernel(
            name, op, call_args, call_kwargs, tuple(outputs), reason, self.origins
        )
        self.operations.append(kernel)
        self.reads[name] = frozenset(view.buffer for view in views_made)
        results = [BufferValue(o, o.layout) if o is not None else None for o in outputs]
        if single:
            return results[0]
        numbers = val if isinstance(val, tuple | list) else [None] * len(results)
        return tuple(
            plain_number(number) if result is None else result
            for result, number in zip(results, numbers, strict=True)
        )

    def _views(self, nested: Any, op: torch._ops.OpOverload, made: list[View]) -> Any:
        if isinstance(nested, TensorValue):
            value = self.realize(nested, f"read by {op}")
            view = View(value.buffer.name, value.layout)
            made.append(view)
            return view
        if isinstance(nested, tuple | list):
            return type(nested)(self._views(item, op, made) for item in nested)
        if isinstance(nested, dict):
            return {key: self._views(item, op, made) for key, item in nested.items()}
        return nested

    def _rule(self) -> str:
        return f"lowering of {self.node.target}" if self.node is not None else "lowering"


def _body(fn: InnerFn, position: int, origins: Origins) -> InnerFn:
    def body(ops: Ops, index: Sequence[Index]) -> V:
        return fn(Scope(ops, position, origins), index)

    return body


def loop_zeros(count: int) -> list[Index]:
    """An index of `count` zeros."""
    return [ZERO] * count


def layout_of(tensor: torch.Tensor) -> Layout:
    """A (fake) tensor's layout, from its first element. Raises Unsupported unless strided."""
    if tensor.layout is not torch.strided:
        raise Unsupported(f"a tensor with layout {tensor.layout}")
    return Layout(
        tensor.device,
        tensor.dtype,
        tuple(map(to_size, tensor.shape)),
        tuple(map(to_size, tensor.stride())),
    )


def tensor_layouts(val: Any) -> list[Layout | None]:
    """The layouts of a node's results, None where a result is no tensor."""
    if isinstance(val, torch.Tensor):
        return [layout_of(val)]
    if isinstance(val, tuple | list):
        return [layout_of(v) if isinstance(v, torch.Tensor) else None for v in val]
    return []


def plain_number(value: Any) -> Any:
    """A number that an operator returns beside tensors, known when compiling; None for nothing."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int | torch.SymInt):
        return to_size(value)
    raise Unsupported(f"an operator that returns {type(value).__name__}")


def is_dense(size: Sequence[Size], stride: Sequence[Size]) -> bool:
    """Every element between the first and the last is used exactly once, in some order of dimensions."""
    if any(isinstance(extent, int) and extent == 0 for extent in size):
        return True
    expected: Size = 1
    left = [(e, s) for e, s in zip(size, stride, strict=True) if not _is_one(e)]
    while left:
        step = next((pair for pair in left if same(pair[1], expected)), None)
        if step is None:
            return False
        left.remove(step)
        expected = product((expected, step[0]))
    return True


def _is_one(extent: Size) -> bool:
    return isinstance(extent, int) and extent == 1


def with_strides(value: BufferValue, layout: Layout) -> BufferValue | None:
    """The same memory with the strides of `layout`, if the two name the same elements."""
    have = value.layout
    if len(have.size) != len(layout.size) or not all(map(same, have.size, layout.size)):
        raise VerifyError(f"size {have.size} where eager has {layout.size}")
    empty = any(isinstance(extent, int) and extent == 0 for extent in have.size)
    if not empty and not all(
        _is_one(extent) or same(a, b)
        for extent, a, b in zip(have.size, have.stride, layout.stride, strict=True)
    ):
        return None
    chosen = Layout(have.device, have.dtype, layout.size, layout.stride, have.offset)
    return BufferValue(value.buffer, chosen, value.origins)
