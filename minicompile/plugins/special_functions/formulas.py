"""Entropy terms, logit and sinc, written with operators that kernels have.

The real compiler: torch/_refs/special/__init__.py, torch/_decomp/decompositions.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, where

from minicompile.aot.decompositions.registry import Rule, formulas, real

aten = torch.ops.aten
INF, NAN, PI = math.inf, math.nan, math.pi


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
    "sinc": lambda x: where(x == 0, 1.0, torch.sin(PI * x) / (PI * x)),
    "logit": logit,
    "logit_backward": logit_backward,
}
formulas({getattr(aten, name).default: real(rule) for name, rule in RULES.items()}, wide=False)
