"""Operator levels (full ATen, core ATen, prims): which operators each allows, and the lowering to it.

    full   functional ATen operators, whatever autograd used
    core   those that torch tags as core, and others that the library computes as a whole
    prims  pointwise operators with operands of one shape and dtype, reductions, views, and the library's

No operator is left that a rule of its level would replace, unless the rule declined (a half type, an odd
window). A user's own operator is called as it is, like the library's.

`lower_to` brings a graph down: an operator's rule, if it has one, is traced on the node's fakes; other nodes
are copied. Each result keeps the dtype and strides of the operator it replaces, so everything after it
may be copied unchanged. At "prims", moreover, operands of pointwise operators get equal shapes (by `expand`)
and dtypes (by `convert_element_type`); Python numbers stay numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import fx
from torch._ops import OpOverload

from minicompile import compat
from minicompile.aot.decompositions.registry import Decomposition, decomposition, rule_for
from minicompile.aot.layout import conform, same_sizes
from minicompile.aot.tracer import Tracer
from minicompile.errors import VerifyError
from minicompile.ops.display import count_text
from minicompile.ops.gates import allowed, gate
from minicompile.ops.graph import Graph, statement
from minicompile.ops.nodes import aten_ops, is_pointwise, is_size, results_of
from minicompile.ops.origin import Origins, source_lines, union
from minicompile.passes.replacements import Replacement
from minicompile.shapes.symnode import size_expr

aten = torch.ops.aten
prims = torch.ops.prims

Level = Literal["full", "core", "prims"]


@dataclass
class LevelGraph(Graph):
    """A graph at an operator level, and how it came there."""

    level: Level = "full"
    applied: dict[OpOverload, list[Origins]] = field(default_factory=dict)
    """The operators that rules replaced -> the origins of each call."""
    declined: dict[OpOverload, list[Origins]] = field(default_factory=dict)
    """Those whose rules left a call as it was."""
    refused: set[OpOverload] = field(default_factory=set)
    """Those whose rules a gate refused: eager takes any operands."""

    @property
    def calls(self) -> list[tuple[fx.Node, OpOverload]]:
        """The operations on tensors; sizes are computed beside them."""
        named = ((node, node.target) for node in self.nodes if not is_size(node))
        return [(node, op) for node, op in named if isinstance(op, OpOverload)]

    @property
    def summary(self) -> str:
        """How many operations there are, of how many operators."""
        operators = len({op for _, op in self.calls})
        return f"{self.op_count} operations of {count_text(operators, 'kind')}"

    @property
    def steps(self) -> list[tuple[str, int, str]]:
        """(operator, calls replaced, user lines) of each rule that led here, the busiest first."""
        rows = []
        for op, calls in self.applied.items():
            places = dict.fromkeys(line.place for line in source_lines(union(calls)))
            rows.append((str(op), len(calls), ", ".join(places)))
        return sorted(rows, key=lambda row: (-row[1], row[0]))

    def __str__(self) -> str:
        lines = [f"# level {self.level}: {self.summary}"]
        lines += [f"#   {n} x {op} by its rule, from {at}" for op, n, at in self.steps]
        return "\n".join([*lines, super().__str__()])


def is_uneven(node: fx.Node) -> bool:
    """Has a pointwise call an operand of another shape than its result, or operands of several dtypes?"""
    values = [x.meta["val"] for x in node.args if isinstance(x, fx.Node)]
    operands = [value for value in values if isinstance(value, torch.Tensor)]
    dtypes = {x.dtype for x in operands[node.target is aten.where.self :]}
    result = next(iter(compat.tree_leaves(node.meta["val"])))
    return any(not same_sizes(x, result) for x in operands) or (
        len(dtypes) > 1 and not any(dtype.is_complex for dtype in dtypes)
    )


def verify(graph: LevelGraph, rules: Mapping[Any, Decomposition] = decomposition) -> None:
    """Raises VerifyError that names an operator which its graph's level can't hold."""
    for node, op in graph.calls:
        wrong = ""
        if op._schema.is_mutable or compat.is_composite(op):
            wrong = "writes to an argument, or only calls other operators"
        elif rule_for(op, graph.level, rules) is not None and op not in {
            *graph.declined,
            *graph.refused,
        }:
            wrong = "has a rule, which was not applied"
        elif op in graph.refused:
            continue
        elif graph.level == "prims" and is_pointwise(op) and is_uneven(node):
            wrong = "has operands of several shapes or dtypes"
        if wrong:
            raise VerifyError(f"level {graph.level}: {op} ({node.name}) {wrong}")


# The way down


def lower_to(
    level: Level, graph: Graph, mode: Any, rules: Mapping[Any, Decomposition] = decomposition
) -> LevelGraph:
    """Return a new graph with the operators of `level` ("core" or "prims"); `rules` are decompositions."""
    gm = graph.gm
    kind = PrimsTracer if level == "prims" else Tracer
    tracer, values = kind(mode), dict[fx.Node, Any]()
    made: dict[fx.Node, str] = {}
    """What became of each node, for gates."""

    def rule(op: Any) -> Any:
        found = op if isinstance(op, Replacement) else rule_for(op, level, rules)
        before, after = partial(statement, node), partial(made.__getitem__, node)
        where = partial(union, [tracer.origins])
        if found in (None, op) or allowed("decomposition", op, before, after, where):
            return found
        tracer.refused.add(op)
        return None

    tracer.rules = rule

    def lowered(node: fx.Node) -> Any:
        op: Any = node.target
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        result = tracer.by_rule(op, args, kwargs)
        if result is not NotImplemented:
            return conform(op, result, node.meta["val"])
        return tracer.copy(node, gm, values.__getitem__)

    with tracer.rewriting():
        for node in gm.graph.nodes:
            if node.op != "output":
                tracer.follow(node)
                start = len(tracer.graph.nodes)
                values[node] = lowered(node)
                if gate:
                    made[node] = "\n".join(map(statement, [*tracer.graph.nodes][start:]))
        results = fx.map_arg(results_of(gm.graph), values.__getitem__)
        lowered_gm = tracer.finish(results, graph.name)
    made_by = f"decomposition to {'Core ATen' if level == 'core' else level}"
    calls = tracer.applied, tracer.declined, tracer.refused
    return LevelGraph(lowered_gm, graph.name, made_by, level, *calls)


COMPARISONS = aten_ops("eq ne lt le gt ge")
"""Compared in the operands' common dtype; the result is bool."""

LOGICAL = aten_ops("logical_and logical_or logical_xor logical_not")
"""Each operand is taken as a truth value."""

ANY_DTYPE = {aten.isnan, aten.isinf, aten.signbit, prims.convert_element_type}
"""One operand, whose dtype has nothing to do with the result's."""


class PrimsTracer(Tracer):
    """Records pointwise operators with explicit broadcasting and promotion."""

    def record(self, func: Any, args: Any, kwargs: Any, value: Any) -> Any:
        even = isinstance(func, OpOverload) and is_pointwise(func) and func not in self.refused
        if even and isinstance(value, torch.Tensor):
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
