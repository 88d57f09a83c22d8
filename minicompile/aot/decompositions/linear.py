"""Matrix products: `mm` and `bmm` stay as library calls, what is added to them becomes pointwise.

A bias added after `mm` costs nothing once it is fused into the kernel that follows (an activation, a residual
connection), where `addmm` would write its result first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minicompile.aot.decompositions.pointwise import Number, scaled
from minicompile.aot.decompositions.registry import HALF_TYPES, Rule, decompose, formulas

aten = torch.ops.aten


def added_to(product: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    """beta * bias + alpha * product(a, b); a bias that isn't read (beta 0) may hold NaN.

    Half types keep the library call: it adds before rounding. So does alpha 0, for which it reads no factor.
    """

    def rule(bias: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
        if a.dtype in HALF_TYPES or alpha == 0:
            return NotImplemented
        if not (a.is_floating_point() or a.is_complex()):
            alpha, beta = int(alpha), int(beta)
        result = scaled(product(a, b), alpha)
        return result if beta == 0 else result + scaled(bias, beta)

    return rule


def outer(a: Tensor, b: Tensor) -> Tensor:
    return a.unsqueeze(1) * b


formulas(
    {
        aten.addr.default: added_to(outer),
        aten.addmm.default: added_to(torch.mm),
        aten.baddbmm.default: added_to(torch.bmm),
        aten.addmv.default: added_to(torch.mv),
    },
    to="prims",
    wide=False,
)


formulas({aten.mv.default: lambda a, b: torch.mm(a, b.unsqueeze(1)).squeeze(1)}, wide=False)


@decompose(aten.dot.default, to="core")
def dot(a: Tensor, b: Tensor) -> Tensor:
    if a.is_complex() or a.dtype in HALF_TYPES:
        return NotImplemented
    return (a * b).sum()
