"""The registry of lowering rules. Built-in rules and a user's own enter through the same decorator.

    @lowering(aten.softplus.default)
    def softplus(ctx: LoweringContext, x: TensorValue) -> TensorValue:
        return elementwise(ctx, lambda ops, v: ops.log1p(ops.exp(v)), x)

A rule gets the context and the node's arguments: tensors as `TensorValue`, sizes as `int | sympy.Expr`. It
returns a TensorValue or a tuple of them, or raises `Unsupported`, and then the operator is called as it is.
Operators that the AOT room decomposes never get here. The real compiler: register_lowering in
torch/_inductor/lowering.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minicompile.ops.registry import Registry

Rule = Callable[..., Any]
"""`rule(ctx, *args, **kwargs) -> TensorValue | tuple`."""

lowering: Registry[Rule] = Registry("lowering", "ATen overload -> rule that gives loops")

extern_reasons: Registry[str] = Registry(
    "extern", "ATen overload or packet -> why a library runs it rather than loops"
)
