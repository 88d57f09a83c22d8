"""Fake tensors: tensors with shapes and strides but no data."""

from __future__ import annotations

import contextlib
import logging
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from minicompile.compat.private import lookup, relies_on, take
from minicompile.errors import Unsupported
from minicompile.versions import release

FAKE = "torch._subclasses.fake_tensor"
if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
else:
    FakeTensor = take(f"{FAKE}.FakeTensor", "capture")
    FakeTensorMode = take(f"{FAKE}.FakeTensorMode", "capture")
FakeTensorConverter = take(f"{FAKE}.FakeTensorConverter", "capture")
without_dispatch = take("torch._C._DisableTorchDispatch", "capture")
relies_on(f"{FAKE}.FakeTensorMode.__torch_dispatch__", "capture")
relies_on(f"{FAKE}.FakeTensorMode.cache_clear", "capture")
relies_on("torch.Tensor._has_symbolic_sizes_strides", "capture")
relies_on("torch.ops.aten._unique", "capture")

FAKE_LIMITS: tuple[type[BaseException], ...] = tuple(
    kind
    for name in ("DataDependentOutput", "DynamicOutputShape", "UnsupportedFakeTensor", "UnsupportedOperator")
    if (kind := take(f"{FAKE}.{name}Exception", "capture", otherwise=None)) is not None
)  # fmt: skip
"""What a fake tensor raises where eager would have looked at the data, or has no fake kernel."""

DynamicOutputShape = take(f"{FAKE}.DynamicOutputShapeException", "capture", otherwise=Unsupported)


# What is corrected, and what is refused. Strides are as FakeTensor tells them, since results of library calls
# are copied where they lie otherwise; dtypes that a kernel of eager's doesn't take are taken.

aten = torch.ops.aten

UPDATING = {
    aten._native_batch_norm_legit_functional.default,
    aten._batch_norm_with_update_functional.default,
}
"""The new statistics have the dtype of the old ones; in FakeTensor they are float32."""

EMBEDDING_BAGS = {aten._embedding_bag.default, aten._embedding_bag_forward_only.default}


def corrected(op: torch._ops.OpOverload, args: Any, result: Any) -> Any:
    """FakeTensor's result of a call, in eager's dtypes and sizes."""
    if op in UPDATING:
        *others, mean, var = result
        result = (*others, mean.to(args[3].dtype), var.to(args[4].dtype))
    elif op in EMBEDDING_BAGS and args[0].dtype is torch.bfloat16:  # FakeTensor knows of float16
        halves = (x.half() if getattr(x, "dtype", 0) is torch.bfloat16 else x for x in args)
        result = (result[0], *op(*halves)[1:])
    return result


UPSAMPLED_GRADIENTS = {
    getattr(aten, f"{name}_backward").default
    for name in (
        *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"),
        *("upsample_nearest1d", "upsample_nearest3d", "_upsample_nearest_exact1d"),
        *("_upsample_nearest_exact3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa"),
    )
}
"""For these FakeTensor runs C++ that can't read symbolic sizes: arguments are a gradient, a size, the input's
size."""

PUTS = {aten.index_put.default, aten.index_put_.default}


def check_arguments(op: torch._ops.OpOverload, args: Any) -> None:
    """Raise what eager would: for `select` outside of a dimension (torch 2.11's symbolic fakes allow it), and
    for values of another dtype or size than the places that they are put into."""
    if op is aten.select.int and args[0].dim():
        size, position = args[0].shape[args[1]], args[2]
        if not -size <= position < size:
            raise IndexError(f"select(): index {position} out of range for dimension {args[1]}")
    elif op in PUTS:
        tensor, indices, values, *accumulate = args
        # fakes of index_add put integers into bools
        if tensor.dtype is not values.dtype and not (
            tensor.dtype is torch.bool and any(accumulate)
        ):
            raise RuntimeError(f"{op} puts {values.dtype} into {tensor.dtype}")
        if not any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices
        ):
            values.expand(aten.index.Tensor(tensor, indices).shape)


MOST_CACHED = 8192
"""Results of fakes that torch may keep, some 20 MiB; by itself it keeps all."""


class EagerFakes(FakeTensorMode):
    """Fake tensors with the sizes and dtypes that eager's results have."""

    random = False
    """Whether an operator drew random numbers."""
    env: Any = None
    """The `shapes.env.ShapeEnv` of symbolic sizes."""

    def __init__(self, symbolic: bool) -> None:
        super().__init__(allow_non_fake_inputs=True)
        if len(self.cache) > MOST_CACHED:
            self.cache_clear()
        self.static_shapes = not symbolic
        self.cache_enabled = self.cache_enabled and not symbolic
        self.answers: dict[Any, tuple[Any, ...]] = {}
        """(operator, arguments by type and layout) -> the layout of a new tensor that it returns."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.random = self.random or torch.Tag.nondeterministic_seeded in func.tags
        check_arguments(func, args)
        if not self.static_shapes:
            if func is aten.slice.Tensor and SLICES_NEED_ENV:
                return slice_of(*args, **(kwargs or {}))
            if func in UPSAMPLED_GRADIENTS:
                return args[0].new_empty(args[2])
        if func is aten._unique.default:  # torch 2.11 fakes it with a size of 1
            raise DynamicOutputShape(func)
        if func is aten.addmm.dtype:  # torch 2.11 takes the dtype for a factor
            return torch.empty_like(args[0])
        result = super().__torch_dispatch__(func, types, args, kwargs)
        return corrected(func, args, result)


SLICES_NEED_ENV = release(torch.__version__) < (2, 13)
"""Do fakes ask torch's own ShapeEnv for the length of a slice whose ends are symbolic?"""

if SLICES_NEED_ENV and relies_on("torch._meta_registrations.div_rtn", "speed", replaced=True):
    # The sizes that pooling gives: its rounding down asks for the sign of a remainder, `//` does not.
    lookup("torch._meta_registrations").div_rtn = operator.floordiv


def slice_of(
    x: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> torch.Tensor:
    """Return a fake slice. Comparisons of sizes that aren't the same for all sizes become guards."""
    size = x.shape[dim]

    def position(end: Any, otherwise: Any) -> Any:
        if end is None or end is sys.maxsize:
            return otherwise
        end = end + size if end < 0 else end
        return 0 if end < 0 else size if end > size else end

    first, last = position(start, 0), position(end, size)
    length = 0 if last < first else (last - first + step - 1) // step
    sizes, strides = list(x.shape), list(x.stride())
    sizes[dim], strides[dim] = length, strides[dim] * step
    return x.as_strided(sizes, strides, x.storage_offset() + first * x.stride(dim))


def fake_mode(symbolic: bool = False) -> Any:
    """Return a FakeTensorMode. `symbolic`: sizes may be SymInts of our own ShapeEnv; its cache is off."""
    return EagerFakes(symbolic)


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
