"""Entropy terms, logit, sinc and other rare functions, written with operators that kernels have.

The real compiler: torch/_refs/special/__init__.py, torch/_decomp/decompositions.py.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, where

from minicompile.aot.decompositions.registry import Rule, formulas, wide

aten = torch.ops.aten
INF, NAN, PI = math.inf, math.nan, math.pi


def real(rule: Rule) -> Rule:
    """The rule, computed in float32 on half types and in the default dtype on integers and bools."""

    @functools.wraps(rule)
    def run(*args: Any) -> Any:
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if any(x.is_complex() for x in tensors):
            return NotImplemented
        exact = not any(x.is_floating_point() for x in tensors)
        dtype = torch.get_default_dtype()
        return rule(
            *(x.to(dtype) if exact and isinstance(x, torch.Tensor) else wide(x) for x in args)
        )

    return run


def entropy(x: Tensor) -> Tensor:
    found = where(x > 0, -x * torch.log(x), where(x == 0, 0.0, -INF))
    return where(torch.isnan(x), x, found)


def logit(x: Tensor, eps: float | None = None) -> Tensor:
    x = x if eps is None else x.clamp(eps, 1 - eps)
    return torch.log(x / (1 - x))


def logit_backward(grad: Tensor, x: Tensor, eps: float | None = None) -> Tensor:
    low = 0.0 if eps is None else eps
    steep = where((x == 0) | (x == 1), grad * INF, grad / (x * (1 - x)))
    return where((x < low) | (x > 1 - low), NAN if eps is None else 0.0, steep)


RULES: dict[str, Rule] = {
    "special_entr": entropy,
    "angle": lambda x: where(torch.isnan(x), x, (x < 0).to(x.dtype) * PI),
    "sinc": lambda x: where(x == 0, 1.0, torch.sin(PI * x) / (PI * x)),
    "logit": logit,
    "logit_backward": logit_backward,
}
formulas({getattr(aten, name).default: real(rule) for name, rule in RULES.items()}, wide=False)
formulas(
    {
        aten.celu.default: lambda x, alpha=1.0: (  # eager refuses 0
            aten.elu.default(x, alpha, 1.0, 1 / alpha) if alpha else NotImplemented
        ),
        aten.logaddexp.default: lambda x, y: where(
            (x == y) & (x.abs() == INF),
            x,
            torch.maximum(x, y) + torch.log1p(torch.exp(-(x - y).abs())),
        ),
    }
)
formulas(
    {
        aten.fmax.default: lambda x, y: where((x >= y) | torch.isnan(y), x, y),
        aten.fmin.default: lambda x, y: where((x <= y) | torch.isnan(y), x, y),
        aten.ldexp.Tensor: lambda x, y: x * torch.pow(2.0, y),
        aten.deg2rad.default: lambda x: x * (PI / 180),
        aten.rad2deg.default: lambda x: x * (180 / PI),
    },
    wide=False,
)
