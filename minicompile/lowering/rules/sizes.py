"""Arithmetic on sizes, and access to tuples: nodes that compute no tensor."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy

from minicompile.errors import Unsupported
from minicompile.lowering.context import LoweringContext
from minicompile.lowering.registry import lowering
from minicompile.lowering.rules.common import aten
from minicompile.lowering.value import TensorValue
from minicompile.shapes.expr import Size, floor_div, modulo, product, to_size


@lowering(operator.getitem)
def getitem(ctx: LoweringContext, items: Any, index: Any) -> Any:
    return items[index]


@lowering(aten.sym_size.int)
def sym_size(ctx: LoweringContext, x: TensorValue, dim: int) -> Size:
    return x.size[dim]


@lowering(aten.sym_numel.default)
def sym_numel(ctx: LoweringContext, x: TensorValue) -> Size:
    return product(x.size)


def arithmetic(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A rule that computes with ints and expressions."""

    def rule(ctx: LoweringContext, *numbers: Any) -> Any:
        if not all(isinstance(n, int | sympy.Expr) for n in numbers):
            if all(isinstance(n, int | float) for n in numbers):
                return fn(*numbers)
            raise Unsupported("arithmetic on a number known only at run time that is no size")
        return to_size(fn(*numbers))

    return rule


for _fn in (operator.add, operator.sub, operator.mul, operator.neg, operator.pos):
    lowering(_fn)(arithmetic(_fn))
lowering(operator.floordiv)(arithmetic(floor_div))
lowering(operator.mod)(arithmetic(modulo))
