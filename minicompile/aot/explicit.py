"""Pointwise operators made explicit: equal shapes (by `expand`) and equal dtypes (by `convert_element_type`).

Python numbers stay numbers. This is what "prims" means beyond the choice of operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from minicompile import compat
from minicompile.aot.layout import same_sizes, size_expr
from minicompile.aot.tracer import Tracer

aten = torch.ops.aten
prims = torch.ops.prims

COMPARISONS = {aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge}
"""Compared in the operands' common dtype; the result is bool."""

LOGICAL = {aten.logical_and, aten.logical_or, aten.logical_xor, aten.logical_not}
"""Each operand is taken as a truth value."""

PREDICATES = {aten.isnan, aten.isinf, aten.signbit}
"""One operand of any dtype; the result is bool."""


def is_pointwise(op: OpOverload) -> bool:
    return torch.Tag.pointwise in op.tags


class PrimsTracer(Tracer):
    """Records pointwise operators with explicit broadcasting and promotion."""

    def record(self, func: Any, args: Any, kwargs: Any, value: Any) -> Any:
        if isinstance(func, OpOverload) and is_pointwise(func) and isinstance(value, torch.Tensor):
            dtypes = operand_dtypes(func, args, value)
            args = tuple(
                self.operand(arg, dtype, value) if isinstance(arg, torch.Tensor) else arg
                for arg, dtype in zip(args, dtypes)
            )
        return super().record(func, args, kwargs, value)

    def operand(
        self, operand: torch.Tensor, dtype: torch.dtype | None, result: torch.Tensor
    ) -> torch.Tensor:
        """The operand in the computation's dtype, device and the result's shape; nodes only where
        it differs.
        """
        if (
            dtype is not None
            and operand.dtype != dtype
            and not (operand.is_complex() or dtype.is_complex)
        ):
            converted = self.fake_like(operand, dtype, operand.device)
            operand = super().record(
                prims.convert_element_type.default, (operand, dtype), {}, converted
            )
        if operand.device != result.device and operand.dim() == 0:
            moved = self.fake_like(operand, operand.dtype, result.device)
            operand = super().record(
                aten._to_copy.default, (operand,), {"device": result.device}, moved
            )
        if not same_sizes(operand, result):
            size = list(result.shape)
            operand = super().record(
                aten.expand.default, (operand, size), {}, self.expanded(operand, size)
            )
        return operand

    def fake_like(
        self, like: torch.Tensor, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return compat.new_fake(self.mode, like.shape, like.stride(), dtype, device)

    def expanded(self, like: torch.Tensor, size: list[Any]) -> torch.Tensor:
        added = len(size) - like.dim()
        strides = [0] * added + [
            0 if size_expr(old) == 1 and size_expr(new) != 1 else stride
            for old, new, stride in zip(like.shape, size[added:], like.stride())
        ]
        return compat.new_fake(
            self.mode, size, strides, like.dtype, like.device, like.storage_offset()
        )


def operand_dtypes(op: OpOverload, args: Any, result: torch.Tensor) -> list[torch.dtype | None]:
    """The dtype that each positional argument is computed in; None leaves it."""
    packet = op.overloadpacket
    if packet in COMPARISONS:
        common = torch.result_type(*args[:2])
        return [common] * len(args)
    if packet in LOGICAL:
        return [torch.bool] * len(args)
    if packet in PREDICATES or packet is prims.convert_element_type:
        return [None] * len(args)
    if packet is aten.where:
        return [torch.bool, result.dtype, result.dtype]
    return [result.dtype] * len(args)
