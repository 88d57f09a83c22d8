"""Shape rules for the commonest operators: what FakeTensor would answer, without asking it.

A FakeTensor call costs a hundred microseconds and more (milliseconds with symbolic sizes), and most
calls are pointwise or reductions on contiguous tensors of one dtype, where the answer is plain. Anything
else gives None, and the operator is run on fakes. The real compiler: `fast_binary_impl` in
torch/_subclasses/fake_impls.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from minicompile import compat
from minicompile.aot.layout import size_expr
from minicompile.aot.views import aten_ops

aten = torch.ops.aten

SAME_DTYPE = aten_ops(
    "add.Tensor sub.Tensor mul.Tensor div.Tensor maximum.default minimum.default relu.default "
    "neg.default abs.default exp.default log.default log1p.default sqrt.default rsqrt.default "
    "reciprocal.default tanh.default sigmoid.default erf.default sin.default cos.default"
)
"""Pointwise operators that keep a common floating-point dtype."""

COMPARISONS = aten_ops("eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor") | aten_ops(
    "eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar"
)


def infer(mode: Any, op: OpOverload, args: Any, kwargs: Any) -> torch.Tensor | None:
    """The fake result of a call, or None if the rules here don't cover it."""
    if kwargs:
        return None
    if op in SAME_DTYPE or op in COMPARISONS:
        return pointwise(mode, op, args)
    rule = RULES.get(op)
    return None if rule is None else rule(mode, *args)


def plain(value: Any) -> bool:
    """A contiguous fake tensor."""
    return isinstance(value, compat.fake_tensor_type()) and contiguous(value)


def contiguous(value: torch.Tensor) -> bool:
    """Row-major strides, compared as expressions: asks nothing of the sizes."""
    expected: Any = 1
    for size, stride in zip(map(size_expr, reversed(value.shape)), reversed(value.stride())):
        if size == 0:
            return False
        if size != 1:
            if size_expr(stride) != expected:
                return False
            expected = expected * size
    return True


def new(mode: Any, size: list[Any], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """A contiguous fake."""
    strides: list[Any] = [1] * len(size)
    for dim in range(len(size) - 2, -1, -1):
        inner = size[dim + 1]
        strides[dim] = strides[dim + 1] * (1 if size_expr(inner) == 0 else inner)
    return compat.new_fake(mode, size, strides, dtype, like.device)


def broadcast(values: list[torch.Tensor]) -> list[Any] | None:
    """The common shape, if sizes are equal or 1 beyond doubt."""
    rank = max(value.dim() for value in values)
    result: list[Any] = [1] * rank
    for value in values:
        for dim, size in enumerate(value.shape, start=rank - value.dim()):
            ours, theirs = size_expr(result[dim]), size_expr(size)
            if ours == 1:
                result[dim] = size
            elif theirs not in (1, ours):
                return None
    return result


def pointwise(mode: Any, op: OpOverload, args: Any) -> torch.Tensor | None:
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    numbers = [arg for arg in args if not isinstance(arg, torch.Tensor)]
    if not tensors or not all(map(plain, tensors)):
        return None
    first = tensors[0]
    if any((t.dtype, t.device) != (first.dtype, first.device) for t in tensors):
        return None
    if not first.is_floating_point() or any(type(number) not in (int, float) for number in numbers):
        return None
    size = broadcast(tensors)
    dtype = torch.bool if op in COMPARISONS else first.dtype
    return None if size is None else new(mode, size, dtype, first)


def reduction(
    mode: Any, x: torch.Tensor, dims: Any = None, keepdim: bool = False
) -> torch.Tensor | None:
    """Sums and extrema of floating-point tensors."""
    if not plain(x) or not x.is_floating_point() or not isinstance(dims, list | tuple) or not dims:
        return None
    gone = {dim % x.dim() for dim in dims} if x.dim() else set()
    size = [1 if d in gone else n for d, n in enumerate(x.shape) if keepdim or d not in gone]
    return new(mode, size, x.dtype, x)


def matrix_product(mode: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    """mm and bmm give contiguous results whatever the layout of their operands."""
    if a.dtype != b.dtype or size_expr(a.shape[-1]) != size_expr(b.shape[-2]):
        return None
    return new(mode, [*a.shape[:-1], b.shape[-1]], a.dtype, a)


RULES: dict[OpOverload, Callable[..., torch.Tensor | None]] = {
    aten.sum.dim_IntList: reduction,
    aten.amax.default: reduction,
    aten.amin.default: reduction,
    aten.mm.default: matrix_product,
    aten.bmm.default: matrix_product,
    torch.ops.prims.convert_element_type.default: lambda mode, x, dtype: (
        new(mode, list(x.shape), dtype, x) if plain(x) else None
    ),
}
