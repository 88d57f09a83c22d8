"""Strides without gaps, and results of FakeTensor that differ from eager's in size or dtype.

Other strides are as FakeTensor tells them: the results of library calls are copied where they lie otherwise.
What torch is given are numbers or SymInts; strides of expressions are shapes/expr.py's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

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
