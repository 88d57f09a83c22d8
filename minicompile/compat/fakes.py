"""Fake tensors: tensors with shapes and strides but no data, laid out as eager's results are."""

from __future__ import annotations

import contextlib
import logging
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from minicompile.compat.dispatch import no_dispatch_modes
from minicompile.compat.private import lookup, relies_on, take
from minicompile.errors import Unsupported
from minicompile.ops.eager_checks import check_arguments
from minicompile.ops.strides import (
    UPSAMPLED_GRADIENTS,
    as_row_major_view,
    convolved,
    has_open_batch,
    laid_out_as_eager,
    upsampled_gradient,
)
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


MOST_CACHED = 8192
"""Results of fakes that torch may keep, some 20 MiB; by itself it keeps all."""


class EagerLayouts(FakeTensorMode):
    """Fake tensors with the strides that eager's results have."""

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
        check_arguments(func, args, kwargs, no_dispatch_modes)
        if not self.static_shapes:
            if func is torch.ops.aten.slice.Tensor and SLICES_NEED_ENV:
                return slice_of(*args, **(kwargs or {}))
            if func in UPSAMPLED_GRADIENTS:
                return upsampled_gradient(func, args[0], args[2])
            if has_open_batch(func, args):
                run = super().__torch_dispatch__
                return convolved(func, args, lambda args: run(func, types, args, kwargs))
            func, args = as_row_major_view(func, args)
        if func is torch.ops.aten._unique.default:  # torch 2.11 fakes it with a size of 1
            raise DynamicOutputShape(func)
        if func is torch.ops.aten.addmm.dtype:  # torch 2.11 takes the dtype for a factor
            return torch.empty_like(args[0])
        result = super().__torch_dispatch__(func, types, args, kwargs)
        return laid_out_as_eager(func, args, result)


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
