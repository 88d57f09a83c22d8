"""Activation functions and their derivatives. Half types are computed in float32, as eager's kernels do."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, erf, exp, sigmoid, tanh, where

from minicompile.aot.decompositions.registry import decompose, formulas

aten = torch.ops.aten

SQRT_HALF = math.sqrt(0.5)
SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715
ONE_SIXTH = 0.1666666716337204
"""In float32: what eager's kernel multiplies with, whatever the type."""
INVERSE_SQRT_2PI = 1 / math.sqrt(2 * math.pi)


@decompose(aten.gelu.default, to="prims", wide=True)
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        inner = SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x)
        return 0.5 * x * (1 + tanh(inner))
    return 0.5 * x * (1 + erf(x * SQRT_HALF))


@decompose(aten.gelu_backward.default, to="core", wide=True)
def gelu_backward(grad: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        inner = tanh(SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x))
        slope = SQRT_2_OVER_PI * (1 + 3 * GELU_CUBIC * x * x)
        return grad * (0.5 * (1 + inner) + 0.5 * x * (1 - inner * inner) * slope)
    cdf = 0.5 * (1 + erf(x * SQRT_HALF))
    pdf = exp(-0.5 * x * x) * INVERSE_SQRT_2PI
    return grad * (cdf + x * pdf)


formulas(
    {
        aten.silu.default: lambda x: x * sigmoid(x),
        aten.hardsigmoid_backward.default: lambda grad, x: where(
            x.abs() < 3, grad * ONE_SIXTH, 0.0
        ),
        aten.log_sigmoid_backward.default: lambda grad, x, scratch: grad * sigmoid(-x),
    }
)


@decompose(aten.native_dropout.default, to="prims")
def native_dropout(x: Tensor, p: float, train: bool | None) -> Any:
    """As eager does it on the CPU, and only there. The product can be computed again from the mask."""
    mask = torch.full_like(x, False, dtype=torch.bool)
    layout = x.is_contiguous() or p == 1
    if train is False or x.device.type != "cpu" or not layout or not 0 <= p <= 1:
        return NotImplemented
    if p < 1:  # else F.dropout draws nothing
        mask = torch.bernoulli(mask, 1 - p)
    return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask
