"""Results whose strides FakeTensor tells otherwise than eager makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

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
}
"""The (first) result is row-major; FakeTensor keeps the operand's strides."""


def laid_out_as_eager(op: OpOverload, args: Any, result: Any) -> Any:
    """FakeTensor's result of a call, in the strides of eager's."""
    if (op not in LIKE_A_SUM and op not in CONTIGUOUS) or result is NotImplemented:
        return result
    first, *others = result if isinstance(result, tuple | list) else [result]
    if op in LIKE_A_SUM:
        first = torch.empty_like(aten.add.Tensor(*args[:2]), dtype=first.dtype)
    elif op not in BATCH_NORMS or not channels_last(first):
        first = torch.empty_like(first, memory_format=torch.contiguous_format)
    return (first, *others) if others else first


def channels_last(x: torch.Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])
