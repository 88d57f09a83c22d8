"""The registry of lowering rules. Built-in rules and a user's own enter through the same decorator.

    @lowering(aten.silu.default)
    def silu(ctx: LoweringContext, x: TensorValue) -> TensorValue:
        return elementwise(ctx, lambda ops, v: ops.mul(v, ops.sigmoid(v)), x)

A rule gets the context and the node's arguments: tensors as `TensorValue`, sizes as `int | sympy.Expr`. It
returns a TensorValue, a Size, or a tuple of them, or raises `Unsupported`, and then the operator is called as
it is. The real compiler: register_lowering in torch/_inductor/lowering.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from minicompile.ops.registry import Registry

Rule = Callable[..., Any]
"""`rule(ctx, *args, **kwargs) -> TensorValue | Size | tuple`."""

F = TypeVar("F", bound=Rule)


class Lowerings(Registry[Rule]):
    """Keys are overloads (`aten.silu.default`) and functions on sizes (`operator.mul`)."""

    def __call__(self, *keys: Any) -> Callable[[F], F]:
        def add(rule: F) -> F:
            super(Lowerings, self).__call__(*keys)(rule)
            return rule

        return add


lowering = Lowerings("lowering", "ATen overload -> rule that gives loops")
register_lowering = lowering

extern_reasons: Registry[str] = Registry(
    "extern", "ATen overload or packet -> why a library runs it rather than loops"
)
