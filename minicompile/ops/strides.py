"""Corrects results of FakeTensor that differ from eager's in size or dtype, or cost many guards.

Strides are as FakeTensor tells them: the results of library calls are copied where they lie otherwise.

What torch is given are numbers or SymInts; strides of expressions are shapes/expr.py's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from minicompile.shapes.expr import contiguous_strides, to_size

aten = torch.ops.aten


def dense_strides(size: Sequence[Any], order: Iterable[int] | None = None) -> list[Any]:
    """Strides without gaps; `order`: the dimensions from the outermost in memory to the innermost."""
    strides: list[Any] = [1] * len(size)
    step: Any = 1
    for dim in reversed([*(range(len(size)) if order is None else order)]):
        strides[dim], step = step, step * size[dim]
    return strides


UPDATING = {
    aten._native_batch_norm_legit_functional.default,
    aten._batch_norm_with_update_functional.default,
}
"""The new statistics have the dtype of the old ones; in FakeTensor they are float32."""

EMBEDDING_BAGS = {aten._embedding_bag.default, aten._embedding_bag_forward_only.default}


def corrected(op: OpOverload, args: Any, result: Any) -> Any:
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


CONVOLUTIONS = {aten.convolution.default: (0,), aten.convolution_backward.default: (0, 1)}
"""The arguments that have a batch; so has the first result."""
IMAGES = 16
"""From so many on, or with several threads, torch gives windows of 1x1 to oneDNN. Layouts are the same."""


def has_open_batch(op: OpOverload, args: Any) -> bool:
    """Whether a convolution on the CPU is of a symbolic number of images."""
    batched = [args[place] for place in CONVOLUTIONS.get(op, ())]
    return any(x.device.type == "cpu" and isinstance(x.shape[0], torch.SymInt) for x in batched)


def convolved(op: OpOverload, args: Any, run: Callable[[Any], Any]) -> Any:
    """The result of a convolution of any number of images, without a guard on that; `run` is FakeTensor's."""

    def with_batch(x: torch.Tensor, size: Any) -> torch.Tensor:
        return x.new_empty_strided((size, *x.shape[1:]), x.stride())

    places = CONVOLUTIONS[op]
    of_images = [with_batch(x, IMAGES) if i in places else x for i, x in enumerate(args)]
    batch, result = args[0].shape[0], run(tuple(of_images))
    first, *others = result if isinstance(result, tuple | list) else [result]
    first = None if first is None else with_batch(first, batch)
    return (first, *others) if others else first


def as_row_major_view(op: OpOverload, args: Any) -> tuple[OpOverload, Any]:
    """`view` of a row-major tensor with symbolic sizes as `as_strided`, with one guard.

    FakeTensor goes through the dimensions one by one, and asks of each quotient whether it is 1.
    """
    if op is not aten.view.default or not any(isinstance(n, torch.SymInt) for n in args[0].shape):
        return op, args
    tensor, shape = args[0], list(args[1])
    if tuple(map(to_size, tensor.stride())) != contiguous_strides(list(map(to_size, tensor.shape))):
        return op, args
    inferred = [place for place, extent in enumerate(shape) if type(extent) is int and extent == -1]
    known = math.prod(extent for place, extent in enumerate(shape) if place not in inferred)
    if len(inferred) > 1 or known == 0:
        return op, args
    if inferred and tensor.numel() % known == 0:
        shape[inferred[0]] = tensor.numel() // known
    elif inferred or tensor.numel() != known:
        return op, args
    return aten.as_strided.default, (tensor, shape, dense_strides(shape), tensor.storage_offset())
