"""`register_vjp`: an operator's gradient as a rule, in place of torch's formula for it.

    @mc.register_vjp(torch.ops.aten.silu.default)
    def straight_through(grad, result, x):
        return grad

The rule gets the gradient of the operator's result (of several a tuple, None for integers), the result, then
the arguments as they were at the call: keyword-only ones by name, defaults left out. It returns one gradient
for each parameter that takes tensors, in the schema's order: of that tensor's shape and dtype; None where
none is due; a list for a list of tensors. It holds wherever a compiled graph trains: in composite operators
too, and for `silu_`, which becomes a copy of `silu`. Eager code keeps torch's formula. None is built in: the
partitioner chooses what backward reads and what it computes again, so torch's formulas lose nothing.

The real compiler: tools/autograd/derivatives.yaml.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

from minicompile import compat
from minicompile.aot.joint import around_trace
from minicompile.errors import OptionError
from minicompile.ops.dtypes import value_text
from minicompile.ops.gates import allowed
from minicompile.ops.nodes import gives_view
from minicompile.ops.origin import place_of
from minicompile.ops.registry import Registry
from minicompile.ops.writes import arguments

Vjp = Callable[..., Any]

vjp: Registry[Vjp] = Registry("vjp", "operator -> its gradient, in compiled training")


def register_vjp(*ops: OpOverload) -> Callable[[Vjp], Vjp]:
    """Decorator: the function computes the gradients of `ops`. Raises TypeError for what can't have one."""
    for op in ops:
        if not isinstance(op, OpOverload):
            raise TypeError(f"{op} is no operator overload, as torch.ops.aten.silu.default is one")
        if op._schema.is_mutable or gives_view(op):
            raise TypeError(f"{op} writes or returns a view: only a new result can have a vjp")
    return vjp(*ops)


@around_trace("vjp")
def own_gradients() -> contextlib.AbstractContextManager[None]:
    """A context in which, under the python dispatcher, the registered rules replace torch's formulas."""
    kernels: dict[OpOverload, Callable[..., Any]] = {}
    for op, rule in vjp.items():
        formula = partial("{} of {}".format, "torch's formula", op)
        own = partial("the rule at {}".format, place_of(rule))
        if op.namespace == "aten" and not allowed("vjp", op, formula, own):
            continue
        kernels[op] = partial(call, op, rule)
        packet = getattr(getattr(torch.ops, op.namespace), f"{op.overloadpacket.__name__}_", None)
        in_place = getattr(packet, op._overloadname, None)
        if in_place is not None:
            kernels[in_place] = lambda x, *args, op=op, **kwargs: x.copy_(op(x, *args, **kwargs))
    return compat.autograd_kernels(kernels)


def call(op: OpOverload, rule: Vjp, *args: Any, **kwargs: Any) -> Any:
    """The operator, as a node of autograd's graph whose backward is the rule."""
    tensors = compat.tree_leaves(tensor_arguments(op, args, kwargs))
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        apply: Any = Ruled.apply
        *results, spec = apply(op, rule, args, kwargs, *tensors)
        return compat.tree_unflatten(results, spec)
    with compat.below_autograd():
        return op(*args, **kwargs)


def tensor_arguments(op: OpOverload, args: Any, kwargs: Any) -> list[Any]:
    """By the parameters that take tensors, or lists of them; None for what was left out."""
    return arguments(op, args, kwargs, lambda parameter: "Tensor" in str(parameter.type))


class Ruled(torch.autograd.Function):
    """Keeps copies, since memory may be written to before the backward; functional graphs drop them again."""

    @staticmethod
    def forward(ctx: Any, op: OpOverload, rule: Vjp, args: Any, kwargs: Any, *tensors: Any) -> Any:
        with compat.below_autograd():
            result = op(*args, **kwargs)
            leaves, spec = compat.tree_flatten((result, args, kwargs))
            leaves = [x.clone() if isinstance(x, torch.Tensor) else x for x in leaves]
        ctx.op, ctx.rule, ctx.kept = op, rule, compat.tree_unflatten(leaves, spec)
        results, ctx.spec = compat.tree_flatten(result)
        return *results, ctx.spec

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        result, args, kwargs = ctx.kept
        kinds = [getattr(x, "dtype", torch.int64) for x in compat.tree_leaves(result)]
        due = [g if k.is_floating_point or k.is_complex else None for k, g in zip(kinds, grads)]
        grad = compat.tree_unflatten(due, ctx.spec)
        inputs = tensor_arguments(ctx.op, args, kwargs)
        try:
            found = ctx.rule(grad, result, *args, **kwargs)
            if len(inputs) == 1 and not isinstance(found, tuple):
                found = (found,)
            tensors = compat.tree_leaves(inputs)
            gradients: list[Any] = []
            for x, g in zip(inputs, found, strict=True):
                many = isinstance(x, list | tuple)
                gradients += [None] * len(x) if many and g is None else g if many else [g]
            for x, g in zip(tensors, gradients, strict=True):
                if g is not None and (g.dtype != x.dtype or g.shape != x.shape):
                    raise TypeError(f"the gradient of a {value_text(x)} is {value_text(g)}")
        except Exception as error:
            what = f"the vjp of {ctx.op} at {place_of(ctx.rule)}: {type(error).__name__}: {error}"
            raise OptionError(what) from error
        return None, None, None, None, *gradients
