"""`register_vjp`: an operator's gradient as a rule, in place of the formula that torch has for it.

    @mc.register_vjp(torch.ops.aten.silu.default)
    def straight_through(grad, result, x):
        return grad

grad      what comes back for the operator's result; for several results a tuple, None for those of integers
result    what the operator gave (a tuple, if several), and then its arguments as they were at the call:
          keyword-only ones by name, defaults left out
returns   one gradient for each parameter of the operator that takes tensors, in the schema's order: of that
          tensor's shape and dtype, None where none is due, a list for a list of tensors

It holds wherever a compiled graph trains, also inside composite operators (`nn.SiLU`) and for `silu_`, which
becomes a copy of the result; eager code keeps torch's formula. There are no built-in rules: what the
backward reads is the partitioner's choice, whichever formula it comes from, so torch's lose nothing.

The real compiler: torch/csrc/autograd/FunctionsManual.cpp, derivatives.yaml.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload

from minicompile import compat
from minicompile.aot.layout import same_sizes
from minicompile.errors import VerifyError
from minicompile.ops.dtypes import value_text
from minicompile.ops.origin import SourceLine
from minicompile.ops.registry import Registry

Vjp = Callable[..., Any]

vjp: Registry[Vjp] = Registry("vjp", "operator -> its gradient, in compiled training")


def register_vjp(*ops: OpOverload) -> Callable[[Vjp], Vjp]:
    """Decorator: the function computes the gradients of `ops`. Raises TypeError for what has no gradient."""
    for op in ops:
        if not isinstance(op, OpOverload):
            raise TypeError(f"{op} is no operator overload, as torch.ops.aten.silu.default is one")
        if op._schema.is_mutable or any(r.alias_info is not None for r in op._schema.returns):
            raise TypeError(f"{op} writes or returns a view: only a new result can have a vjp")
    return vjp(*ops)


@contextlib.contextmanager
def own_gradients() -> Iterator[None]:
    """Inside, under the python dispatcher, the registered rules stand in for torch's formulas."""
    kernels: dict[OpOverload, Callable[..., Any]] = {}
    for op, rule in vjp.items():
        kernels[op] = functools.partial(call, op, rule)
        packet = getattr(getattr(torch.ops, op.namespace), f"{op.overloadpacket.__name__}_", None)
        found = getattr(packet, op._overloadname, None)
        if found is not None and found not in vjp:
            kernels[found] = functools.partial(in_place, op)
    with compat.autograd_kernels(kernels):
        yield


def in_place(op: OpOverload, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`x.silu_()` by way of `silu`."""
    return x.copy_(op(x, *args, **kwargs))


def call(op: OpOverload, rule: Vjp, *args: Any, **kwargs: Any) -> Any:
    """The operator, as a node of autograd's graph whose backward is the rule."""
    tensors = compat.tree_leaves(tensor_arguments(op, args, kwargs))
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        *results, spec = Ruled.apply(op, rule, args, kwargs, *tensors)
        return compat.tree_unflatten(results, spec)
    with compat.below_autograd():
        return op(*args, **kwargs)


def tensor_arguments(op: OpOverload, args: Any, kwargs: Any) -> list[Any]:
    """By the parameters that take tensors, or lists of them; None for what was left out."""
    return [
        args[i] if i < len(args) else kwargs.get(parameter.name)
        for i, parameter in enumerate(op._schema.arguments)
        if "Tensor" in str(parameter.type)
    ]


class Ruled(torch.autograd.Function):
    """Keeps copies, since memory may be written to before the backward; functional graphs drop them again."""

    @staticmethod
    def forward(ctx: Any, op: OpOverload, rule: Vjp, args: Any, kwargs: Any, *tensors: Any) -> Any:
        with compat.below_autograd():
            result = op(*args, **kwargs)
            leaves, spec = compat.tree_flatten((result, args, kwargs))
            leaves = [x.clone() if isinstance(x, torch.Tensor) else x for x in leaves]
        ctx.rule, ctx.op, ctx.kept = rule, op, compat.tree_unflatten(leaves, spec)
        results, ctx.spec = compat.tree_flatten(result)
        return *results, ctx.spec

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        result, args, kwargs = ctx.kept
        due = [g if differentiable(x) else None for g, x in zip(grads, compat.tree_leaves(result))]
        inputs = tensor_arguments(ctx.op, args, kwargs)
        try:
            found = ctx.rule(compat.tree_unflatten(due, ctx.spec), result, *args, **kwargs)
            if len(inputs) == 1 and not isinstance(found, tuple):
                found = (found,)
            pairs = [pair for x, g in zip(inputs, found, strict=True) for pair in paired(x, g)]
            for x, g in pairs:
                if g is not None and (g.dtype != x.dtype or not same_sizes(g, x)):
                    raise TypeError(f"the gradient of a {value_text(x)} is {value_text(g)}")
        except Exception as error:
            where = f"the vjp of {ctx.op} at {place_of(ctx.rule)}"
            raise VerifyError(f"{where}: {type(error).__name__}: {error}") from error
        return None, None, None, None, *(g for _, g in pairs)


def differentiable(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def paired(x: Any, gradient: Any) -> list[tuple[Any, Any]]:
    """(tensor, gradient), or one pair for each tensor of a list."""
    if not isinstance(x, list | tuple):
        return [(x, gradient)]
    return list(zip(x, [None] * len(x) if gradient is None else gradient, strict=True))


def place_of(rule: Vjp) -> str:
    """Where a rule is written."""
    code = getattr(inspect.unwrap(rule), "__code__", None)
    return SourceLine(code.co_filename, code.co_firstlineno, "").place if code else repr(rule)
