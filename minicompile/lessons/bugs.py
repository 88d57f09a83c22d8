"""Bugs to look for: each is a plausible rule that is wrong, planted through the registry of its room.

    with planted("ragged"):
        mc.compile(fn)(x)          # wrong, for some x

Reading on spoils lesson 16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from minicompile.custom.vjps import register_vjp
from minicompile.extension import decompose, graph_pass, lowering, plan_rule
from minicompile.lowering.rules.common import elementwise
from minicompile.ops.registry import Registry, scoped

aten = torch.ops.aten

bugs: Registry[Callable[[], object]] = Registry("bug", "name -> function that plants it")


@contextlib.contextmanager
def planted(*names: str) -> Iterator[None]:
    """The compiler with these bugs, inside of the block. Raises KeyError for a name that there is not."""
    with scoped():
        for name in names:
            bugs[name]()
        yield


@bugs("lost nan")
def lost_nan() -> None:
    def formula(ops: Any, v: Any) -> Any:
        zero = ops.constant(0.0, torch.float32)
        return ops.where(ops.gt(v, zero), v, zero)

    lowering(aten.relu.default)(lambda ctx, x: elementwise(ctx, formula, x))


@bugs("hot softmax")
def hot_softmax() -> None:
    @decompose(aten._softmax.default, to="prims")
    def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        found = x.exp()
        return found / found.sum(dim, keepdim=True)


@bugs("hot sigmoid")
def hot_sigmoid() -> None:
    def formula(ops: Any, v: Any) -> Any:
        power = ops.exp(v)
        return ops.truediv(power, ops.add(power, ops.constant(1.0, torch.float32)))

    lowering(aten.sigmoid.default)(lambda ctx, x: elementwise(ctx, formula, x))


@bugs("ragged")
def ragged() -> None:
    @lowering(aten.neg.default)
    def neg(ctx: Any, x: Any) -> Any:
        whole = x.size[-1] // 8 * 8

        def body(ops: Any, index: Any) -> Any:
            v = x.load_as(ops, index, x.dtype)
            inside = ops.lt(
                ops.index_expr(index[-1], torch.int64), ops.constant(whole, torch.int64)
            )
            return ops.where(inside, ops.neg(v), v)

        return ctx.pointwise(x.size, x.device, body)


@bugs("same sign")
def same_sign() -> None:
    @graph_pass("tidy_products", stage="prims", order=35)
    def tidy_products(gm: fx.GraphModule, mode: Any) -> int:
        found = [
            node
            for node in gm.graph.nodes
            if node.target is aten.mul.Tensor and node.args[1] in (1, 1.0, -1, -1.0)
        ]
        for node in found:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
        return len(found)


@bugs("wrong slope")
def wrong_slope() -> None:
    @register_vjp(aten.tanh.default)
    def tanh(grad: Tensor, result: Tensor, x: Tensor) -> Tensor:
        return grad * (1 - result)


@bugs("half rotation")
def half_rotation() -> None:
    @decompose(aten.silu.default, to="core")
    def silu(x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.7 * x)


@bugs("wrong base")
def wrong_base() -> None:
    @plan_rule("any:bases")
    def bases(plan: Any, options: Any) -> None:
        if {"max", "sum"} <= {value.kind for value in plan.body.reductions}:
            for value in plan.body.values:
                if value.op == "exp":
                    value.op = "exp2"


@bugs("no table")
def no_table() -> None:
    @lowering(aten.erf.default)
    def erf(ctx: Any, x: Any) -> Any:
        raise RuntimeError("erf: the table is empty")
