"""Activation functions and their derivatives. Half types are computed in float32, as eager's kernels do."""

from __future__ import annotations

import math

import torch

from minicompile.aot.decompositions.registry import decompose, wide

aten = torch.ops.aten
Tensor = torch.Tensor

SQRT_HALF = math.sqrt(0.5)
SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715
INVERSE_SQRT_2PI = 1 / math.sqrt(2 * math.pi)


@decompose(aten.gelu.default, to="prims")
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    x = wide(x)
    if approximate == "tanh":
        inner = SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x)
        return 0.5 * x * (1 + torch.tanh(inner))
    return 0.5 * x * (1 + torch.erf(x * SQRT_HALF))


@decompose(aten.gelu_backward.default, to="core")
def gelu_backward(grad: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    grad, x = wide(grad), wide(x)
    if approximate == "tanh":
        inner = torch.tanh(SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x))
        slope = SQRT_2_OVER_PI * (1 + 3 * GELU_CUBIC * x * x)
        return grad * (0.5 * (1 + inner) + 0.5 * x * (1 - inner * inner) * slope)
    cdf = 0.5 * (1 + torch.erf(x * SQRT_HALF))
    pdf = torch.exp(-0.5 * x * x) * INVERSE_SQRT_2PI
    return grad * (cdf + x * pdf)


@decompose(aten.silu.default, to="core")
def silu(x: Tensor) -> Tensor:
    x = wide(x)
    return x * torch.sigmoid(x)


@decompose(aten.silu_backward.default, to="core")
def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    grad, x = wide(grad), wide(x)
    sigmoid = torch.sigmoid(x)
    return grad * sigmoid * (1 + x * (1 - sigmoid))


@decompose(aten.mish.default, to="core")
def mish(x: Tensor) -> Tensor:
    x = wide(x)
    return x * torch.tanh(softplus(x))


@decompose(aten.mish_backward.default, to="core")
def mish_backward(grad: Tensor, x: Tensor) -> Tensor:
    grad, x = wide(grad), wide(x)
    sigmoid, inner = torch.sigmoid(x), torch.tanh(softplus(x))
    return grad * (inner + x * sigmoid * (1 - inner * inner))


@decompose(aten.sigmoid_backward.default, to="core")
def sigmoid_backward(grad: Tensor, y: Tensor) -> Tensor:
    grad, y = wide(grad), wide(y)
    return grad * (1 - y) * y


@decompose(aten.tanh_backward.default, to="core")
def tanh_backward(grad: Tensor, y: Tensor) -> Tensor:
    grad, y = wide(grad), wide(y)
    return grad * (1 - y * y)


@decompose(aten.threshold.default, to="core")
def threshold(x: Tensor, limit: float, value: float) -> Tensor:
    return torch.where(x <= limit, value, x)


@decompose(aten.threshold_backward.default, to="core")
def threshold_backward(grad: Tensor, x: Tensor, limit: float) -> Tensor:
    return torch.where(x <= limit, 0.0, grad)


@decompose(aten.hardtanh.default, to="core")
def hardtanh(x: Tensor, low: float = -1.0, high: float = 1.0) -> Tensor:
    return torch.clamp(x, low, high)


@decompose(aten.hardtanh_backward.default, to="core")
def hardtanh_backward(grad: Tensor, x: Tensor, low: float, high: float) -> Tensor:
    return torch.where((x <= low) | (x >= high), 0.0, grad)


@decompose(aten.hardsigmoid.default, to="core")
def hardsigmoid(x: Tensor) -> Tensor:
    return torch.clamp(wide(x) + 3, 0, 6) / 6


@decompose(aten.hardsigmoid_backward.default, to="core")
def hardsigmoid_backward(grad: Tensor, x: Tensor) -> Tensor:
    return torch.where((x > -3.0) & (x < 3.0), wide(grad) / 6, 0.0)


@decompose(aten.hardswish.default, to="core")
def hardswish(x: Tensor) -> Tensor:
    x = wide(x)
    return x * torch.clamp(x + 3, 0, 6) / 6


@decompose(aten.hardswish_backward.default, to="core")
def hardswish_backward(grad: Tensor, x: Tensor) -> Tensor:
    grad, x = wide(grad), wide(x)
    return torch.where(x <= -3, 0.0, torch.where(x < 3, grad * (x / 3 + 0.5), grad))


@decompose(aten.leaky_relu.default, to="core")
def leaky_relu(x: Tensor, slope: float = 0.01) -> Tensor:
    x = wide(x)
    return torch.where(x > 0, x, x * slope)


@decompose(aten.leaky_relu_backward.default, to="core")
def leaky_relu_backward(grad: Tensor, x: Tensor, slope: float, x_is_result: bool) -> Tensor:
    grad = wide(grad)
    return torch.where(x > 0, grad, grad * slope)


@decompose(aten._prelu_kernel.default, to="core")
def prelu(x: Tensor, weight: Tensor) -> Tensor:
    return torch.where(x > 0, x, wide(weight) * wide(x))


@decompose(aten._prelu_kernel_backward.default, to="core")
def prelu_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    grad, x, weight = wide(grad), wide(x), wide(weight)
    return torch.where(x > 0, grad, weight * grad), torch.where(x > 0, 0.0, x * grad)


@decompose(aten.elu.default, to="core")
def elu(x: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    x = wide(x)
    return torch.where(x > 0, x * scale, torch.expm1(x * input_scale) * (alpha * scale))


@decompose(aten.elu_backward.default, to="core")
def elu_backward(
    grad: Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, x_or_y: Tensor
) -> Tensor:
    grad, value = wide(grad), wide(x_or_y)
    if is_result:
        falling = grad * input_scale * (value + alpha * scale)
    else:
        falling = grad * (input_scale * alpha * scale) * torch.exp(value * input_scale)
    return torch.where(value <= 0, falling, grad * scale)


@decompose(aten.softplus.default, to="core")
def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    x = wide(x)
    scaled = x * beta
    return torch.where(scaled > threshold, x, torch.log1p(torch.exp(scaled)) / beta)


@decompose(aten.softplus_backward.default, to="core")
def softplus_backward(grad: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    grad, scaled = wide(grad), wide(x) * beta
    power = torch.exp(scaled)
    return torch.where(scaled > threshold, grad, grad * power / (power + 1))


@decompose(aten.log_sigmoid_forward.default, to="core")
def log_sigmoid_forward(x: Tensor) -> tuple[Tensor, Tensor]:
    """The second result is eager's CPU scratch space, empty on CUDA; our backward has no use for it."""
    if x.device.type != "cpu":
        return torch.clamp(wide(x), max=0) - torch.log1p(
            torch.exp(-torch.abs(wide(x)))
        ), x.new_zeros([0])
    x = wide(x)
    scratch = torch.exp(-torch.abs(x))
    return torch.clamp(x, max=0) - torch.log1p(scratch), scratch


@decompose(aten.log_sigmoid_backward.default, to="core")
def log_sigmoid_backward(grad: Tensor, x: Tensor, scratch: Tensor) -> Tensor:
    grad, x = wide(grad), wide(x)
    power = torch.exp(-torch.abs(x))
    ratio = power / (1 + power)
    return grad * torch.where(x < 0, 1 - ratio, ratio)


@decompose(aten.glu.default, to="core")
def glu(x: Tensor, dim: int = -1) -> Tensor:
    value, gate = wide(x).chunk(2, dim)
    return value * torch.sigmoid(gate)


@decompose(aten.glu_backward.default, to="core")
def glu_backward(grad: Tensor, x: Tensor, dim: int) -> Tensor:
    value, gate = wide(x).chunk(2, dim)
    sigmoid, grad = torch.sigmoid(gate), wide(grad)
    return torch.cat([grad * sigmoid, grad * value * sigmoid * (1 - sigmoid)], dim)


@decompose(aten.hardshrink.default, to="core")
def hardshrink(x: Tensor, limit: float = 0.5) -> Tensor:
    return torch.where((x >= -limit) & (x <= limit), 0.0, x)


@decompose(aten.softshrink.default, to="core")
def softshrink(x: Tensor, limit: float = 0.5) -> Tensor:
    wider = wide(x)
    shrunk = torch.where(
        wider > limit, wider - limit, torch.where(wider < -limit, wider + limit, 0.0)
    )
    return torch.where(torch.isnan(wider), wider, shrunk)


@decompose(aten.hardshrink_backward.default, aten.softshrink_backward.default, to="core")
def shrink_backward(grad: Tensor, x: Tensor, limit: float) -> Tensor:
    return torch.where((x >= -limit) & (x <= limit), 0.0, grad)


@decompose(aten.native_dropout.default, to="prims")
def native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Without effect when p is 0 or outside training; otherwise the random operator stays."""
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    return NotImplemented


@decompose(aten.native_dropout_backward.default, to="core")
def native_dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    return wide(grad) * mask * scale
