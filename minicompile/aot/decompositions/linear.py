"""Matrix products: `mm` and `bmm` stay as library calls, what is added to them becomes pointwise.

A bias added after `mm` costs nothing once it is fused into the kernel that follows (an activation, a residual
connection), where `addmm` would write its result first.
"""

from __future__ import annotations

import torch

from minicompile.aot.decompositions.registry import decompose

aten = torch.ops.aten
Tensor = torch.Tensor
Number = int | float


def _added(bias: Tensor, product: Tensor, beta: Number, alpha: Number) -> Tensor:
    """beta * bias + alpha * product; a bias that isn't read (beta 0) may hold NaN."""
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product
    return product + (bias if beta == 1 else bias * beta)


@decompose(aten.addmm.default, to="prims")
def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    """Half types keep the library call: it adds before rounding."""
    if a.dtype in (torch.float16, torch.bfloat16):
        return NotImplemented
    return _added(bias, torch.mm(a, b), beta, alpha)


@decompose(aten.baddbmm.default, to="prims")
def baddbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    if a.dtype in (torch.float16, torch.bfloat16):
        return NotImplemented
    return _added(bias, torch.bmm(a, b), beta, alpha)


@decompose(aten.addmv.default, to="core")
def addmv(bias: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    if a.dtype in (torch.float16, torch.bfloat16):
        return NotImplemented
    return _added(bias, aten.mm.default(a, b.unsqueeze(1)).squeeze(1), beta, alpha)


@decompose(aten.mv.default, to="core")
def mv(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b.unsqueeze(1)).squeeze(1)


@decompose(aten.dot.default, to="core")
def dot(a: Tensor, b: Tensor) -> Tensor:
    if a.is_complex() or a.dtype in (torch.float16, torch.bfloat16):
        return NotImplemented
    return (a * b).sum()


@decompose(aten.addr.default, to="core")
def addr(bias: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    if not a.is_floating_point() or a.dtype in (torch.float16, torch.bfloat16):
        return NotImplemented
    return _added(bias, a.unsqueeze(1) * b, beta, alpha)
