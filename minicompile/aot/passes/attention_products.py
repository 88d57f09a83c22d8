"""The two products of written-out attention, however they are written, and what of their operands is what.

    q @ k.transpose(-2, -1)                        of four dimensions, of three or two
    torch.bmm(q, kt), torch.baddbmm(mask, q, kt)
    torch.einsum("bihd,bjhd->bhij", q, k)

Axes have letters. Between the products batch and heads may be one dimension, or become one.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket

from minicompile.aot.passes.patterns import TORCH
from minicompile.ops.graph import target_name

MATMUL = {2: ("id", "dj", "ij"), 3: ("nid", "ndj", "nij"), 4: ("bhid", "bhdj", "bhij")}
"""Axes of both operands and the result, by dimensions."""
REGROUPS = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"}
PYTHON = {"truediv": "div", "and_": "bitwise_and", "or_": "bitwise_or", "invert": "bitwise_not"}
"""Operators of Python that ATen calls otherwise."""


def name_of(node: fx.Node) -> str:
    """`softmax` for torch.softmax, F.softmax and the method; "" for what is no call, or not of torch."""
    target = node.target
    if not node.op.startswith("call"):
        return ""
    if isinstance(target, OpOverload | OpOverloadPacket):
        ours = str(target).startswith("aten.")
    else:
        ours = str(getattr(target, "__module__", "torch")).partition(".")[0] in (*TORCH, "builtins")
    name = target_name(target).rpartition(".")[2]
    return PYTHON.get(name, name) if ours else ""


def value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def regroups(node: fx.Node) -> bool:
    """Does a call merge or split batch and heads, and nothing else?"""
    if name_of(node) not in REGROUPS or not isinstance(node.args[0], fx.Node):
        return False
    before, after = value(node.args[0]), value(node)
    if not all(isinstance(x, Tensor) for x in (before, after)):
        return False
    return same_rows(before, after.shape) and before.dtype is after.dtype


def same_rows(x: Tensor, size: Sequence[Any]) -> bool:
    """Is a tensor's size the other, but for how batch and heads are grouped? Sizes that vary aren't asked
    what they come to."""
    both = tuple(x.shape), tuple(size)
    if not all(len(s) in MATMUL and all(isinstance(n, int) for n in s) for s in both):
        return both[0] == both[1] and len(both[0]) in MATMUL
    return both[0][-2:] == both[1][-2:] and x.numel() == math.prod(both[1])


@dataclass(frozen=True)
class Product:
    """A batch of matrix products. `axes`: the letters of both operands and of the result."""

    node: fx.Node
    left: fx.Node
    right: fx.Node
    axes: tuple[str, str, str]

    @property
    def summed(self) -> str:
        """The axis that both operands have and the result has not."""
        left, right, out = self.axes
        return next(x for x in left if x in right and x not in out)

    def swapped(self) -> Product:
        left, right, out = self.axes
        return Product(self.node, self.right, self.left, (right, left, out))

    def scores(self, products: fx.Node, copied: Any) -> fx.Node:
        """A call of baddbmm, where the products are there already."""
        if name_of(self.node) != "baddbmm":
            return products
        graph, given = products.graph, self.node.kwargs
        alpha, beta = given.get("alpha", 1), given.get("beta", 1)
        made = graph.call_function(operator.mul, (products, alpha)) if alpha != 1 else products
        if beta == 0:  # what is in memory there doesn't count
            return made
        added = copied(self.node.args[0])
        added = graph.call_function(operator.mul, (added, beta)) if beta != 1 else added
        return graph.call_function(operator.add, (made, added))


def product_of(node: fx.Node) -> Product | None:
    """The product that a call is, of tensors with up to two dimensions for batch and heads."""
    name, args = name_of(node), list[Any](node.args)
    axes: tuple[str, str, str] | None
    if name == "einsum" and args and isinstance(args[0], str) and not node.kwargs:
        operands = list(args[1]) if isinstance(args[1], list | tuple) else args[1:]
        axes = equation_axes(args[0])
    elif name in ("matmul", "bmm", "mm") and not node.kwargs:
        operands, axes = args, MATMUL.get(dims(node))
    elif name == "baddbmm" and set(node.kwargs) <= {"alpha", "beta"} and args:
        known = all(isinstance(x, int | float) for x in node.kwargs.values())
        ignored = node.kwargs.get("beta", 1) == 0  # the gradient of what is added is 0 then
        known &= dims(args[0]) > 0 and not (ignored and value(args[0]).requires_grad)
        operands, axes = args[1:], MATMUL[3] if known else None
    else:
        return None
    if axes is None or [dims(x) for x in operands] != [len(x) for x in axes[:2]]:
        return None
    return Product(node, operands[0], operands[1], axes)


def dims(node: Any) -> int:
    found = value(node)
    return found.dim() if isinstance(found, Tensor) else 0


def equation_axes(equation: str) -> tuple[str, str, str] | None:
    """The letters of an einsum that is a batch of matrix products."""
    found = re.fullmatch(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]+)", equation.replace(" ", ""))
    if found is None:
        return None
    left, right, out = found.groups()
    once = all(len(set(x)) == len(x) in MATMUL for x in (left, right, out))
    both = set(left) & set(right)
    alone = [set(x) - both for x in (left, right)]
    fits = len(both - set(out)) == 1 and alone[0] | alone[1] | both & set(out) == set(out)
    return (left, right, out) if once and fits and len(alone[0]) == len(alone[1]) == 1 else None


@dataclass(frozen=True)
class Sides:
    """How operands become queries, keys and values, [batch, heads, tokens, elements], and what comes of them
    the result: orders of dimensions, and how batch and heads are grouped."""

    pairs: tuple[int, int]
    """Batch and heads."""
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    out: tuple[int, ...]
    outer: tuple[int, ...]
    """Batch and heads as weights have them."""
    inner: tuple[int, ...]
    """As products have them."""

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        moved = (ordered(x, way) for x, way in ((q, self.q), (k, self.k), (v, self.v)))
        return [grouped(x, self.pairs) for x in moved]

    def result(self, out: Tensor) -> Tensor:
        return ordered(grouped(out, self.outer), self.out)


def ordered(x: Tensor, way: tuple[int, ...]) -> Tensor:
    plain = tuple(range(x.dim()))
    if way == plain:
        return x
    return x.mT if way == (*plain[:-2], plain[-1], plain[-2]) else x.permute(way)


def grouped(x: Tensor, outer: tuple[int, ...]) -> Tensor:
    return x if tuple(x.shape[:-2]) == outer else x.reshape(*outer, *x.shape[-2:])


def queries_and_keys(found: Product) -> Product | None:
    """The product with queries to the left, if it has a row of scores for each."""
    _, right, out = found.axes
    found = found if out[-1] in right else found.swapped()
    left, right, out = found.axes
    rows = out[-2] in left and out[-2] not in right
    return found if rows and out[-1] in right and out[-1] not in left else None


def is_weighted(found: Product) -> bool:
    """Does a product sum over the last axis of what is to its left, for each row?"""
    left, right, _ = found.axes
    return left[-1] == found.summed and left[-2] not in right


def sides(first: Product, second: Product, batches: Sequence[tuple[int, ...]]) -> Sides:
    """`batches`: how batch and heads are grouped where scores lie; the first of two dimensions counts."""
    queries, keys, out = first.axes
    pair, row, column = out[:-2], out[-2], out[-1]
    weights, values, result = second.axes
    around = weights[:-2]
    element = next(x for x in values if x not in weights)
    made = around + weights[-2] + element
    inner = tuple(value(first.node).shape[:-2])
    after = tuple(value(second.left).shape[:-2])
    pairs = next((b for b in (*batches, inner, after) if len(b) == 2), (1, math.prod(inner)))

    def way(axes: str, wanted: str) -> tuple[int, ...]:
        return tuple(axes.index(x) for x in wanted)

    return Sides(
        pairs,  # type: ignore[arg-type]
        way(queries, pair + row + first.summed),
        way(keys, pair + column + first.summed),
        way(values, around + weights[-1] + element),
        way(made, result),
        after,
        inner,
    )
