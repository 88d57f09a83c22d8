"""Compound pointwise operators, and operators whose options (alpha, rounding) become operators of
their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, where

from minicompile.aot.decompositions.registry import (
    Rule,
    decompose,
    formulas,
    wide,
)
from minicompile.ops.dtypes import HALF_TYPES

aten = torch.ops.aten
Number = int | float | bool
INF = math.inf


def scaled(x: Any, factor: Number) -> Any:
    """x * factor; x itself if that is 1."""
    return x if factor == 1 else x * factor


def constant(value: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a tensor without dimensions; tensors stay."""
    if isinstance(value, Tensor):
        return value
    return torch.full([], value, dtype=dtype, device=device)


POWERS: dict[float, Callable[[Tensor], Tensor]] = {
    2: lambda x: x * x,
    3: lambda x: x * x * x,
    0.5: torch.sqrt,
    -0.5: torch.rsqrt,
    -1: torch.reciprocal,
    -2: lambda x: torch.reciprocal(x * x),
}


@decompose(aten.pow.Tensor_Scalar, to="prims")
def power(x: Tensor, exponent: Number) -> Tensor:
    """Small powers as products and roots, which eager's kernels do too: they look at the number."""
    exponent = float(exponent) if isinstance(exponent, torch.SymFloat) else exponent
    if type(exponent) not in (int, float) or exponent not in POWERS or x.is_complex():
        return NotImplemented
    if abs(exponent) == 0.5 and x.dtype is torch.float16 and x.device.type == "cpu":
        # eager calls C's pow, for which minus infinity has a root
        x = where(x == -INF, INF, x + 0.0)
    if not x.is_floating_point():
        if isinstance(exponent, float):
            x = x.to(torch.get_default_dtype())
        elif exponent < 0:
            return NotImplemented
    single = abs(exponent) == 0.5 or exponent == -1
    return POWERS[exponent](x if single else wide(x))  # one operation's digits aren't cut


formulas(
    {
        aten.add.Scalar: lambda x, y, alpha=1: aten.add.Tensor(x, y, alpha=alpha),
        aten.sub.Scalar: lambda x, y, alpha=1: aten.sub.Tensor(x, y, alpha=alpha),
        aten.mul.Scalar: lambda x, y: aten.mul.Tensor(x, y),
        aten.div.Scalar: lambda x, y: aten.div.Tensor(x, y),
    },
    wide=False,
)


# What is added to matrix products costs nothing once it is fused into the kernel that follows (an activation,
# a residual connection), where `addmm` would write its result first. `mm` and `bmm` stay library calls.


def added_to(product: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    """beta * bias + alpha * product(a, b); a bias that isn't read (beta 0) may hold NaN.

    Half types keep the library call: it adds before rounding. So does alpha 0, for which it reads no factor,
    and what is added to a whole matrix, which may become the result in place.
    """

    def rule(bias: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
        if a.dtype in HALF_TYPES or alpha == 0:
            return NotImplemented
        if not (a.is_floating_point() or a.is_complex()):
            alpha, beta = int(alpha), int(beta)
        whole = product is torch.mm and bias.dim() == 2 and beta != 0
        if whole and bias.shape == (a.shape[0], b.shape[1]):
            return NotImplemented
        result = scaled(product(a, b), alpha)
        return result if beta == 0 else result + scaled(bias, beta)

    return rule


formulas({aten.frac.default: lambda x: x - torch.trunc(x)})
"""Torch's rule gives zeros another sign."""


formulas(
    {
        aten.addmm.default: added_to(torch.mm),
        aten.baddbmm.default: added_to(torch.bmm),
    },
    to="prims",
    wide=False,
)


formulas({aten.mv.default: lambda a, b: torch.mm(a, b.unsqueeze(1)).squeeze(1)}, wide=False)
