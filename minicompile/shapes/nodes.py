"""`SizeNodes`: symbolic sizes as nodes of a graph.

The real compiler: torch/fx/passes/runtime_assert.py, torch/fx/experimental/proxy_tensor.py.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx

from minicompile.errors import Unsupported
from minicompile.shapes.expr import PythonNumber, is_float
from minicompile.shapes.symnode import operation_of

aten = torch.ops.aten


class SizeNodes:
    """Symbolic sizes as graph nodes, made on demand from the inputs whose shapes contain the symbols."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.nodes: dict[sympy.Expr, fx.Node] = {}
        self.sources: dict[sympy.Symbol, tuple[fx.Node, int | None, int, int]] = {}
        """Input (of a tensor, the dimension), rest and step: the size is `step * symbol + rest`."""
        self.env: Any = None
        """The `ShapeEnv` of the symbols."""

    def add_input(self, node: fx.Node, value: Any) -> None:
        if isinstance(value, torch.SymInt):
            self.nodes[value.node.expr] = node
        tensor = isinstance(value, torch.Tensor)
        for dim, size in enumerate(value.shape) if tensor else [(None, value)]:
            if isinstance(size, torch.SymInt):
                self.env = size.node.shape_env
                rest, term = size.node.expr.as_coeff_Add()
                step, symbol = term.as_coeff_Mul()
                if symbol.is_Symbol:
                    self.sources.setdefault(symbol, (node, dim, int(rest), int(step)))

    def argument(self, expr: sympy.Expr, env: Any, meta: Mapping[str, Any]) -> Any:
        """The node that computes an expression, or the number it is."""
        if expr.is_Integer:
            return int(expr)
        if expr.is_number:
            return float(expr)
        if expr in self.nodes:
            return self.nodes[expr]
        if expr.has(PythonNumber) or (is_float(expr) and not (-expr).is_Symbol):
            return self.argument(env.evaluate(expr, "computed with"), env, meta)
        if expr.is_Symbol:
            if expr not in self.sources:
                raise Unsupported(f"{expr} is neither a graph input nor the size of one")
            node, dim, rest, step = self.sources[expr]
            steps = (
                (aten.sym_size.int, dim, None, step * expr + rest),
                (operator.sub, rest, 0, step * expr),
                (operator.floordiv, step, 1, expr),
            )
            for target, number, neutral, value in steps:
                if number != neutral:
                    node = self.graph.call_function(target, (node, number))
                    node.meta.update(meta, val=env.number(value))
        else:
            _, target, parts = operation_of(expr)
            arguments = tuple(self.argument(part, env, meta) for part in parts)
            node = self.graph.call_function(target, arguments)
        node.meta.update(meta, val=env.number(expr))
        self.nodes[expr] = node
        return node
