"""Fake tensors: tensors with shapes and strides but no data, laid out as eager's results are."""

from __future__ import annotations

import contextlib
import logging
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from minicompile.compat.dispatch import Unwrapped
from minicompile.compat.graphs import tree_leaves
from minicompile.compat.memory import storage_id
from minicompile.compat.private import lookup, relies_on, take
from minicompile.errors import Unsupported
from minicompile.ops.strides import (
    UPSAMPLED_GRADIENTS,
    as_row_major_view,
    convolved,
    has_open_batch,
    laid_out_as_eager,
    refuse_wrong_fakes,
)
from minicompile.ops.writes import written_arguments
from minicompile.shapes.symnode import size_expr
from minicompile.versions import release

FAKE = "torch._subclasses.fake_tensor"
if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
else:
    FakeTensor = take(f"{FAKE}.FakeTensor", "capture")
    FakeTensorMode = take(f"{FAKE}.FakeTensorMode", "capture")
FakeTensorConverter = take(f"{FAKE}.FakeTensorConverter", "capture")
without_dispatch = take("torch._C._DisableTorchDispatch", "capture")
relies_on(f"{FAKE}.FakeTensorMode.dispatch", "capture")
relies_on(f"{FAKE}.FakeTensorMode.is_our_fake", "capture")
relies_on("torch.Tensor._has_symbolic_sizes_strides", "capture")
relies_on("torch.ops.aten._unique", "capture")

FAKE_LIMITS: tuple[type[BaseException], ...] = tuple(
    kind
    for name in ("DataDependentOutput", "DynamicOutputShape", "UnsupportedFakeTensor", "UnsupportedOperator")
    if (kind := take(f"{FAKE}.{name}Exception", "capture", otherwise=None)) is not None
)  # fmt: skip
"""What a fake tensor raises where eager would have looked at the data, or has no fake kernel."""

DynamicOutputShape = take(f"{FAKE}.DynamicOutputShapeException", "capture", otherwise=Unsupported)


NOT_COMPUTED = object()
"""Stands for the results of a call that a mode doesn't remember."""


class EagerLayouts(Unwrapped, FakeTensorMode):
    """Fake tensors with the strides that eager's results have.

    A call is computed once. The mode remembers how the results of an operator lie for arguments of the same
    types and layouts, so the passes after capture may run a graph again for the price of a lookup.
    """

    supports_higher_order_operators = True
    random = False
    """Whether an operator drew random numbers."""
    env: Any = None
    """The `shapes.env.ShapeEnv` of symbolic sizes."""

    def __init__(self, symbolic: bool) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.static_shapes, self.cache_enabled = not symbolic, False
        self.written: set[int] = set()
        """Storages that operators wrote to, since somebody emptied the set."""
        if len(NUMERIC_LAYOUTS) > MOST_LAYOUTS:
            NUMERIC_LAYOUTS.clear()
        self.layouts: dict[Any, Any] = {} if symbolic else NUMERIC_LAYOUTS
        """Calls as `key` writes them -> a FakeLayout; a list of them if there are several results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and self.is_our_fake(args[0]):
            return args[0].fake_device
        if not isinstance(func, torch._ops.OpOverload):  # a launch in a user's operator, say
            # torch looks rules up by the mode's own class, which is ours
            if rule := func.python_key_table.get(FakeTensorMode):
                return rule(self, *args, **(kwargs or {}))
            return super().dispatch(func, types, args, kwargs or {})
        self.random = self.random or torch.Tag.nondeterministic_seeded in func.tags
        if func._schema.is_mutable:
            self.note_writes(written_arguments(func, args, kwargs or {}))
            return self.computed(func, types, args, kwargs)
        key = self.key(func, args, kwargs)
        if (result := self.recalled(key, args)) is not NOT_COMPUTED:
            return result
        result = self.computed(func, types, args, kwargs)
        layouts = layouts_of(result, args) if key is not None else None
        # Making a view of symbolic sizes again would compare them, as in `is it contiguous?`
        if layouts is not None and (self.static_shapes or not getattr(layouts, "is_view", False)):
            self.layouts[key] = layouts
        return result

    def note_writes(self, arguments: Any) -> None:
        for tensor in tree_leaves(arguments):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                self.written.add(storage_id(tensor))

    def has_written(self, tensor: torch.Tensor) -> bool:
        """Has an operator written to the tensor's memory?"""
        return bool(self.written) and storage_id(tensor) in self.written

    def key(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what decides how a call's results lie; None if that may be more than its arguments."""
        if func.namespace not in ("aten", "prims") or func in UNKEYED:
            return None
        try:
            given = self.frozen(args), self.frozen(tuple(sorted((kwargs or {}).items())))
            key = func, torch.get_default_dtype(), *given
            hash(key)
        except TypeError:
            return None
        return key

    def frozen(self, value: Any) -> Any:
        """Return a hashable form of an argument, of a fake its type and layout. Raises TypeError."""
        if isinstance(value, torch.Tensor):
            if type(value) is not FakeTensor or value.fake_mode is not self:
                raise TypeError
            if value.constant is not None or value.layout is not torch.strided:
                raise TypeError
            layout: Any = value.shape, value.stride(), value.storage_offset()
            layout = layout if self.static_shapes else self.frozen(layout)
            return value.dtype, value.fake_device, value.is_conj(), value.is_neg(), layout
        if isinstance(value, list | tuple):
            return tuple(map(self.frozen, value))
        if isinstance(value, float):  # 0.0 and -0.0 are equal
            return float, value.hex()
        if isinstance(value, torch.device) and value.type == "cuda" and value.index is None:
            raise TypeError  # the GPU that is current at the call
        return type(value), size_expr(value)

    def recalled(self, key: Any, args: Any) -> Any:
        """Return new fakes for the results of a call that was computed before; else NOT_COMPUTED."""
        found = self.layouts.get(key, NOT_COMPUTED)
        if isinstance(found, FakeLayout):
            return found.fake(self, args)
        if isinstance(found, list):
            return [layout.fake(self, args) for layout in found]
        return found

    def computed(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Return a call's results as torch's fake kernels have them, with eager's layouts."""
        refuse_wrong_fakes(func, args)
        if not self.static_shapes and SLICES_NEED_ENV:
            if func is torch.ops.aten.select.int:
                check_selected(*args)
            if func is torch.ops.aten.slice.Tensor:
                return slice_of(*args, **(kwargs or {}))
        if not self.static_shapes and func in UPSAMPLED_GRADIENTS and args[0].is_contiguous():
            return args[0].new_empty(args[2])
        if not self.static_shapes:
            if has_open_batch(func, args):
                run = super().dispatch
                return convolved(func, args, lambda args: run(func, types, args, kwargs))
            func, args = as_row_major_view(func, args)
        if func is torch.ops.aten._unique.default:  # torch 2.11 fakes it with a size of 1
            raise DynamicOutputShape(func)
        if func is torch.ops.aten.addmm.dtype:  # torch 2.11 takes the dtype for a factor
            return torch.empty_like(args[0])
        return laid_out_as_eager(func, args, super().dispatch(func, types, args, kwargs))


MOST_LAYOUTS = 8192
NUMERIC_LAYOUTS: dict[Any, Any] = {}
"""`EagerLayouts.layouts` of all modes whose sizes are numbers: a later compilation knows them already."""

UNKEYED = {torch.ops.aten.as_strided.default, torch.ops.aten.native_batch_norm.default}
"""Not only the types and layouts of arguments matter: the size of a storage; statistics are written to."""


class FakeLayout(NamedTuple):
    """How a fake result lies: in memory of its own, or in that of the call's first argument."""

    is_view: bool
    dtype: torch.dtype
    device: torch.device
    size: Sequence[Any]
    stride: Sequence[Any]
    offset: Any

    def fake(self, mode: Any, args: Any) -> torch.Tensor:
        """Return a new fake of this layout."""
        if not self.is_view:
            return new_fake(mode, self.size, self.stride, self.dtype, self.device, self.offset)
        with without_dispatch():
            meta = torch.empty((0,), dtype=self.dtype, device="meta")
            meta.set_(args[0].untyped_storage(), self.offset, self.size, self.stride)
        return FakeTensor(mode, meta, self.device)


def layouts_of(result: Any, args: Any) -> Any:
    """Return the layout of a call's result, or a list of them; None if layouts don't say all about it."""
    if isinstance(result, list | tuple):
        layouts = [layouts_of(x, args) for x in result]
        storages = {storage_id(x) for x in result if isinstance(x, torch.Tensor)}
        apart = len(storages) == len(result) and None not in layouts
        return layouts if apart and not any(layout.is_view for layout in layouts) else None
    if type(result) is not FakeTensor or result.layout is not torch.strided:
        return None
    if result.constant is not None or result.is_conj() or result.is_neg():
        return None
    read = [(x, storage_id(x)) for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
    owners = [x for x, storage in read if storage == storage_id(result)]
    if owners and (owners[0] is not args[0] or any(x is result for x in owners)):
        return None
    about = result.dtype, result.fake_device, result.shape, result.stride()
    return FakeLayout(bool(owners), *about, result.storage_offset())


SLICES_NEED_ENV = release(torch.__version__) < (2, 13)
"""Do fakes ask torch's own ShapeEnv for the length of a slice whose ends are symbolic?"""

if SLICES_NEED_ENV and relies_on("torch._meta_registrations.div_rtn", "speed", replaced=True):
    # The sizes that pooling gives: its rounding down asks for the sign of a remainder, `//` does not.
    lookup("torch._meta_registrations").div_rtn = operator.floordiv


def check_selected(x: torch.Tensor, dim: int, position: Any) -> None:
    """Refuse positions outside of a dimension, which torch 2.11's symbolic fakes allow."""
    if x.dim() and not -x.shape[dim] <= position < x.shape[dim]:
        raise IndexError(f"select(): index {position} out of range for dimension {dim}")


def slice_of(
    x: torch.Tensor, dim: int = 0, start: Any = 0, end: Any = sys.maxsize, step: int = 1
) -> torch.Tensor:
    """Return a fake slice. Comparisons of sizes that aren't the same for all sizes become guards."""
    size = x.shape[dim]

    def position(end: Any) -> Any:
        end = end + size if end < 0 else end
        return 0 if end < 0 else size if end > size else end

    first, last = position(start), position(end)
    length = 0 if last < first else (last - first + step - 1) // step
    sizes, strides = list(x.shape), list(x.stride())
    sizes[dim], strides[dim] = length, strides[dim] * step
    return x.as_strided(sizes, strides, x.storage_offset() + first * x.stride(dim))


def fake_mode(symbolic: bool = False) -> Any:
    """Return a FakeTensorMode. `symbolic`: sizes may be SymInts of our own ShapeEnv; its cache is off."""
    return EagerLayouts(symbolic)


def new_fake(
    mode: Any,
    size: Sequence[Any],
    stride: Sequence[Any],
    dtype: torch.dtype,
    device: torch.device,
    offset: Any = 0,
) -> torch.Tensor:
    """Return a fake tensor of a given layout, made without an operator call (ten times cheaper)."""
    with without_dispatch():
        meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        if offset:
            last = sum((n - 1) * step for n, step in zip(size, stride) if n != 0)
            meta = torch.empty((offset + 1 + last,), dtype=dtype, device="meta")
            meta = meta.as_strided(size, stride, offset)
        return FakeTensor(mode, meta, device)


def fakes_again(mode: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that makes a new fake of a tensor, even of one that the mode has met."""
    converter = FakeTensorConverter(copy_data=False)
    return lambda tensor: converter.from_real_tensor(mode, tensor)


@contextlib.contextmanager
def silent_log() -> Iterator[None]:
    """Silence what fake tensors log before they raise."""
    logger = logging.getLogger(FAKE)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """Silence what fake tensors log and warn of: operators do so themselves when they run."""
    with silent_log(), warnings.catch_warnings(action="ignore"):
        yield
