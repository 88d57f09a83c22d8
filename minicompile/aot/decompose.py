"""Bring a functional graph down a level: call the rule of each operator that has one, copy the other nodes.

Rules are traced on the node's fakes, so only what a rule does costs time. Each result keeps the dtype and
strides of the operator it replaces, so everything after it may be copied unchanged. At "prims", moreover,
operands of pointwise operators get equal shapes (by `expand`) and dtypes (by `convert_element_type`); Python
numbers stay numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from minicompile import compat
from minicompile.aot.decompositions import rule_for
from minicompile.aot.layout import conform, same_sizes, size_expr
from minicompile.aot.levels import Level, LevelGraph
from minicompile.aot.tracer import Tracer
from minicompile.aot.views import aten_ops, is_pointwise, results_of
from minicompile.ops.graph import Graph
from minicompile.passes.patterns import Replacement

aten = torch.ops.aten
prims = torch.ops.prims


def lower_to(level: Level, graph: Graph, mode: Any) -> LevelGraph:
    """A new graph with the operators of `level` ("core" or "prims")."""
    gm = graph.gm
    kind = PrimsTracer if level == "prims" else Tracer
    tracer = kind(mode, rules=lambda op: op if isinstance(op, Replacement) else rule_for(op, level))
    values: dict[fx.Node, Any] = {}

    def lowered(node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        result = tracer.by_rule(node.target, args, kwargs)
        if result is not NotImplemented:
            return conform(node.target, result, node.meta["val"])
        return tracer.copy(node, gm, values.__getitem__)

    with torch.no_grad(), tracer.active():
        for node in gm.graph.nodes:
            if node.op != "output":
                tracer.follow(node)
                values[node] = lowered(node)
        results = fx.map_arg(results_of(gm.graph), values.__getitem__)
        lowered_gm = tracer.finish(results, graph.name)
    made_by = f"decomposition to {'Core ATen' if level == 'core' else level}"
    return LevelGraph(lowered_gm, graph.name, made_by, level, tracer.applied, tracer.declined)


COMPARISONS = aten_ops("eq ne lt le gt ge")
"""Compared in the operands' common dtype; the result is bool."""

LOGICAL = aten_ops("logical_and logical_or logical_xor logical_not")
"""Each operand is taken as a truth value."""

ANY_DTYPE = {aten.isnan, aten.isinf, aten.signbit, prims.convert_element_type}
"""One operand, whose dtype has nothing to do with the result's."""


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
        self, x: torch.Tensor, dtype: torch.dtype | None, result: torch.Tensor
    ) -> torch.Tensor:
        """The operand in the computation's dtype, device and the result's shape; nodes only where
        it differs."""
        if dtype is not None and dtype.is_complex:  # real numbers stay such, of the same width
            dtype = x.dtype if x.is_complex() else dtype.to_real()
        if dtype not in (None, x.dtype) and not x.is_complex():
            converted = compat.new_fake(self.mode, x.shape, x.stride(), dtype, x.device)
            x = super().record(prims.convert_element_type.default, (x, dtype), {}, converted)
        if x.device != result.device and x.dim() == 0:
            moved = compat.new_fake(self.mode, (), (), x.dtype, result.device)
            x = super().record(aten._to_copy.default, (x,), {"device": result.device}, moved)
        if not same_sizes(x, result):
            size = list(result.shape)
            x = super().record(aten.expand.default, (x, size), {}, self.expanded(x, size))
        return x

    def expanded(self, x: torch.Tensor, size: list[Any]) -> torch.Tensor:
        added = len(size) - x.dim()
        strides = [0] * added + [
            0 if size_expr(old) == 1 and size_expr(new) != 1 else stride
            for old, new, stride in zip(x.shape, size[added:], x.stride())
        ]
        return compat.new_fake(self.mode, size, strides, x.dtype, x.device, x.storage_offset())


def operand_dtypes(op: OpOverload, args: Any, result: torch.Tensor) -> list[torch.dtype | None]:
    """The dtype that each positional argument is computed in; None leaves it."""
    packet = op.overloadpacket
    if packet is aten.where:
        return [torch.bool, result.dtype, result.dtype]
    dtype: torch.dtype | None = result.dtype
    if packet in COMPARISONS:
        dtype = torch.result_type(*args[:2])
    elif packet in LOGICAL:
        dtype = torch.bool
    elif packet in ANY_DTYPE:
        dtype = None
    return [dtype] * len(args)
