"""Corrects strides and dtypes of results where FakeTensor's differ from eager's, or refuses the call.

Strides of dimensions of size 0 or 1 lead to no element; they are as FakeTensor tells them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from minicompile.errors import Unsupported
from minicompile.ops.overloads import aten_ops
from minicompile.shapes.expr import contiguous_strides, to_size

aten = torch.ops.aten


def dense_strides(size: Sequence[Any], order: Iterable[int] | None = None) -> list[Any]:
    """Strides without gaps; `order`: the dimensions from the outermost in memory to the innermost."""
    strides: list[Any] = [1] * len(size)
    step: Any = 1
    for dim in reversed([*(range(len(size)) if order is None else order)]):
        strides[dim], step = step, step * size[dim]
    return strides


def like_a_sum(args: Any, result: torch.Tensor) -> torch.Tensor:
    """Laid out as the sum of the operands is; FakeTensor looks at the second operand first."""
    return torch.empty_like(aten.add.Tensor(*args[:2]), dtype=result.dtype)


def row_major(args: Any, result: torch.Tensor) -> torch.Tensor:
    """Row-major; FakeTensor keeps the operand's strides."""
    return torch.empty_like(result, memory_format=torch.contiguous_format)


def normalized(args: Any, result: torch.Tensor) -> torch.Tensor:
    """Row-major or channels last; FakeTensor keeps any strides."""
    return result if channels_last(result) else row_major(args, result)


LAYOUTS = {
    like_a_sum: "copysign.Tensor xlogy.Tensor special_xlog1py.default floor_divide.default div.Tensor_mode",
    row_major: "pow.Scalar log_sigmoid_forward.default rrelu_with_noise_functional.default"
    " normal.Tensor_Tensor normal.float_Tensor poisson.default",
    normalized: "_native_batch_norm_legit.no_stats _native_batch_norm_legit_functional.default"
    " _native_batch_norm_legit_no_training.default",
}
"""How eager lays the (first) result out -> the operators of which FakeTensor tells otherwise."""
LAYOUT_OF = {op: layout for layout, names in LAYOUTS.items() for op in aten_ops(names)}

UPDATING = aten_ops(
    "_native_batch_norm_legit_functional.default _batch_norm_with_update_functional.default"
)
"""The new statistics have the dtype of the old ones; in FakeTensor they are float32."""
SHUFFLES = aten_ops(
    "channel_shuffle.default native_channel_shuffle.default roll.default max_unpool2d.default"
)
EMBEDDING_BAGS = aten_ops("_embedding_bag.default _embedding_bag_forward_only.default")


def refuse_wrong_fakes(op: OpOverload, args: Any) -> None:
    """Raise Unsupported for calls whose results FakeTensor gives other strides or sizes than eager does."""
    turned = op in SHUFFLES and args[0].dim() > 3 and not args[0].is_contiguous()
    if turned or (op in EMBEDDING_BAGS and args[0].dtype is torch.bfloat16):
        raise Unsupported(f"{op} of such a tensor has no exact fake", id="unusual-arguments")


def laid_out_as_eager(op: OpOverload, args: Any, result: Any) -> Any:
    """FakeTensor's result of a call, in eager's strides and dtypes."""
    if op in LAYOUT_OF:
        several = isinstance(result, tuple | list)
        first = LAYOUT_OF[op](args, result[0] if several else result)
        result = (first, *result[1:]) if several else first
    if op in UPDATING:
        news = zip(result[-2:], args[3:5], strict=True)
        result = (*result[:-2], *(new.to(old.dtype) for new, old in news))
    return result


UPSAMPLED_GRADIENTS = aten_ops(
    "upsample_linear1d_backward.default upsample_bilinear2d_backward.default"
    " upsample_trilinear3d_backward.default upsample_bicubic2d_backward.default"
    " upsample_nearest1d_backward.default upsample_nearest3d_backward.default"
)
"""For these FakeTensor runs C++ that can't read symbolic sizes."""
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


IMAGE_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last(x: torch.Tensor) -> bool:
    return x.dim() in IMAGE_FORMATS and x.is_contiguous(memory_format=IMAGE_FORMATS[x.dim()])


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
    rest = math.prod(extent for place, extent in enumerate(shape) if place not in inferred)
    if len(inferred) > 1 or rest == 0:
        return op, args
    if inferred and tensor.numel() % rest == 0:
        shape[inferred[0]] = tensor.numel() // rest
    elif inferred or tensor.numel() != rest:
        return op, args
    return aten.as_strided.default, (tensor, shape, dense_strides(shape), tensor.storage_offset())
