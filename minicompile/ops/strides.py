"""Corrects shapes and strides of results where FakeTensor's differ from eager's, or cost many guards.

Strides of dimensions of size 0 or 1 lead to no element; they are as FakeTensor tells them.

What torch is given are numbers or SymInts; strides of expressions are shapes/expr.py's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from minicompile.shapes.expr import contiguous_strides, to_size
from minicompile.shapes.symnode import hint

aten = torch.ops.aten


def dense_strides(size: Sequence[Any], order: Iterable[int] | None = None) -> list[Any]:
    """Strides without gaps; `order`: the dimensions from the outermost in memory to the innermost."""
    strides: list[Any] = [1] * len(size)
    step: Any = 1
    for dim in reversed([*(range(len(size)) if order is None else order)]):
        strides[dim], step = step, step * size[dim]
    return strides


LIKE_A_SUM = {
    aten.copysign.Tensor,
    aten.xlogy.Tensor,
    aten.special_xlog1py.default,
    aten.floor_divide.default,
    aten.div.Tensor_mode,
}
"""Laid out as the sum of the operands is; FakeTensor looks at the second operand first."""

BATCH_NORMS = {
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
}
CONTIGUOUS = BATCH_NORMS | {
    aten.pow.Scalar,
    aten.log_sigmoid_forward.default,
    aten.rrelu_with_noise_functional.default,
    aten.normal.Tensor_Tensor,
    aten.normal.float_Tensor,
    aten.poisson.default,
}
"""The (first) result is row-major; FakeTensor keeps the operand's strides."""

UPDATING = {
    aten._native_batch_norm_legit_functional.default,
    aten._batch_norm_with_update_functional.default,
}
"""The new statistics have the dtype of the old ones; in FakeTensor they are float32."""

SHUFFLES = {aten.roll.default, aten.channel_shuffle.default, aten.native_channel_shuffle.default}
"""On CPUs they keep channels last; in FakeTensor the result is row-major."""

UNPOOL = aten.max_unpool2d.default
EMBEDDING_BAGS = {aten._embedding_bag.default, aten._embedding_bag_forward_only.default}
CORRECTED = LIKE_A_SUM | CONTIGUOUS | UPDATING | EMBEDDING_BAGS | SHUFFLES | {UNPOOL}


def laid_out_as_eager(op: OpOverload, args: Any, result: Any) -> Any:
    """FakeTensor's result of a call, in eager's strides, dtypes and sizes."""
    if op not in CORRECTED or result is NotImplemented:
        return result
    first, *others = result if isinstance(result, tuple | list) else [result]
    if op in LIKE_A_SUM:
        first = torch.empty_like(aten.add.Tensor(*args[:2]), dtype=first.dtype)
    elif op is UNPOOL:  # as other kernels that go by a tensor's strides
        if args[0].dim() == 4 and args[0].device.type == "cpu":
            first = torch.empty_like(aten.upsample_nearest2d(args[0], args[2]))
    elif op in SHUFFLES:
        whole = op is aten.roll.default and len(args) < 3  # all dimensions as one
        if channels_last(args[0]) and args[0].device.type == "cpu" and not whole:
            first = torch.empty_like(args[0])
    elif op in EMBEDDING_BAGS:
        if (wide := args[0].dtype) is torch.bfloat16:  # as of float16, of which FakeTensor knows
            others = op(*(x.half() if getattr(x, "dtype", 0) is wide else x for x in args))[1:]
    elif op in CONTIGUOUS and not (op in BATCH_NORMS and channels_last(first)):
        first = torch.empty_like(first, memory_format=torch.contiguous_format)
    if op in UPDATING:
        others[-2:] = [new.to(old.dtype) for new, old in zip(others[-2:], args[3:5])]
    return (first, *others) if others else first


def hints(numbers: Iterable[Any]) -> tuple[Any, ...]:
    """Numbers that may be symbolic, by their values while compiling."""
    return tuple(map(hint, numbers))


KEPT_GRADIENTS = {
    aten.upsample_linear1d_backward.default,
    aten.upsample_bilinear2d_backward.default,
    aten.upsample_trilinear3d_backward.default,
}
UPSAMPLED_GRADIENTS = KEPT_GRADIENTS | {
    aten.upsample_nearest1d_backward.default,
    aten.upsample_nearest3d_backward.default,
    aten._upsample_nearest_exact1d_backward.default,
    aten._upsample_nearest_exact3d_backward.default,
    aten.upsample_bicubic2d_backward.default,
    aten._upsample_bicubic2d_aa_backward.default,
}
"""For these FakeTensor runs C++ that can't read symbolic sizes; the first few keep channels last."""


def upsampled_gradient(op: OpOverload, grad: torch.Tensor, size: Any) -> torch.Tensor:
    """What such an operator gives, for an input of that size."""
    found = grad.new_empty(size)
    if op in KEPT_GRADIENTS and channels_last(grad) and not grad.is_contiguous():
        layout = {4: torch.channels_last, 5: torch.channels_last_3d}[grad.dim()]
        found = torch.empty_like(found, memory_format=layout)
    return found


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


def channels_last(x: torch.Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])


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
