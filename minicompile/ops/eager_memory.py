"""What eager would keep in memory: the peak of a graph that runs operator by operator."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx

from minicompile import compat
from minicompile.ops.graph import Graph
from minicompile.shapes.expr import product, size_hint, to_size


def eager_peak(graph: Graph, hints: Mapping[sympy.Symbol, int]) -> int:
    """Most bytes alive at once: each result from its call to its last use, outputs to the end.

    Views cost nothing and keep what they look at alive. Inputs are the caller's and don't count.
    """
    nodes = list(graph.nodes)
    owner: dict[fx.Node, fx.Node] = {}
    last: dict[fx.Node, int] = {}
    for step, node in enumerate(nodes):
        owner[node] = owner[node.all_input_nodes[0]] if _looks(node) else node
        for used in (node, *node.all_input_nodes):
            last[owner[used]] = step
    change = [0] * (len(nodes) + 1)
    for step, node in enumerate(nodes):
        if node.op == "call_function" and owner[node] is node:
            size = _bytes(node.meta.get("val"), hints)
            change[step] += size
            change[last[node] + 1] -= size
    live = peak = 0
    for step in change:
        live += step
        peak = max(peak, live)
    return peak


def _looks(node: fx.Node) -> bool:
    """The node is a part of another one's result, or a view of it."""
    schema = getattr(node.target, "_schema", None)
    views = schema is not None and any(result.alias_info for result in schema.returns)
    return bool(node.all_input_nodes) and (views or node.target is operator.getitem)


def _bytes(val: Any, hints: Mapping[sympy.Symbol, int]) -> int:
    found = 0
    for tensor in compat.tree_leaves(val):
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            elements = size_hint(product(map(to_size, tensor.shape)), hints)
            found += elements * tensor.dtype.itemsize
    return found
