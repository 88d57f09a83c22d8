"""Faults of lowering, fusion, memory planning, kernel plans and code generators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from minicompile.codegen import cpp, cpp_values
from minicompile.codegen.generate import code_generator
from minicompile.codegen.plan import KernelModule, KernelPlan, plan_rule
from minicompile.lessons.bugs import bugs
from minicompile.lowering import views
from minicompile.lowering.lower import lowering
from minicompile.lowering.rules import creation
from minicompile.lowering.rules.common import elementwise
from minicompile.scheduling import in_place
from minicompile.scheduling.fusion import Fuser
from tests.faults.table import CPP, SQUARE, WITH_NAN, X, fault

aten = torch.ops.aten


def wrapped(op: Any, change: Callable[..., Any]) -> None:
    """Register a lowering that gets the right one first."""
    right = lowering[op]
    lowering(op)(lambda ctx, *args, **kwargs: change(right, ctx, *args, **kwargs))


# -- lowering


@fault(
    "lowering", "aten.maximum.default", lambda x, y: torch.maximum(x, y.cos()) * 2, [WITH_NAN, X]
)
def maximum_forgets_nan(patch):
    """NaN comes from the second operand only (#93784)."""

    @lowering(aten.maximum.default)
    def maximum(ctx: Any, x: Any, y: Any) -> Any:
        return elementwise(ctx, lambda ops, a, b: ops.where(ops.gt(a, b), a, b), x, y)


@fault("lowering", "aten.neg.default", lambda x: (-(x.sin())).exp() + 1, [X])
def the_tail_is_masked_out(patch):
    """A wrong mask: the last elements of each row are not computed."""
    bugs["ragged"]()


@fault("lowering", "aten.erf.default", lambda x: torch.erf(x.sin()) * 2, [X])
def a_rule_crashes(patch):
    """An exception inside."""
    bugs["no table"]()


@fault("lowering", "aten.argmin.default", lambda x: torch.argmin(x.sin().t()) + 1, [X])
def argmin_counts_in_memory_order(patch):
    """The position in a transposed matrix is that in its memory (#183894)."""

    def flat(right: Any, ctx: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        if dim is not None or x.dim != 2:
            return right(ctx, x, dim, keepdim)
        return right(ctx, ctx.view(x, views.permute(x.size, [1, 0])), dim, keepdim)

    wrapped(aten.argmin.default, flat)


@fault("lowering", "aten.argmax.default", lambda x: torch.argmax(torch.log1p(x), 1) + 1, [X])
def nan_is_not_the_largest(patch):
    """argmax by comparison passes over NaN (#118266)."""

    def without_nan(right: Any, ctx: Any, x: Any, *args: Any) -> Any:
        def small(ops: Any, v: Any) -> Any:
            return ops.where(ops.isnan(v), ops.constant(-9e9, torch.float32), v)

        return right(ctx, elementwise(ctx, small, x), *args)

    wrapped(aten.argmax.default, without_nan)


@fault("lowering", "aten.constant_pad_nd.default", lambda x: F.pad(x.cos(), [2, 1]) * 3, [X])
def a_border_is_off_by_one(patch):
    """A wrong mask: the element after the last is read too."""
    whole = creation.inside

    def inside(ops: Any, index: Any, size: Any, bounds: Any) -> Any:
        return whole(
            ops, index, size, {dim: (low + 1, high) for dim, (low, high) in bounds.items()}
        )

    patch.setattr(creation, "inside", inside)


@fault("lowering", "aten.permute.default", lambda x: x.sin().t() * 2 + x, [SQUARE])
def strides_of_a_view_are_lost(patch):
    """A view of the same shape reads memory in the old order (#186850)."""

    def straight(right: Any, ctx: Any, x: Any, dims: Any) -> Any:
        same = tuple(x.size[d] for d in dims) == tuple(x.size)
        return x if same else right(ctx, x, dims)

    wrapped(aten.permute.default, straight)


@fault("lowering", "aten.select.int", lambda x: x.sin()[2] * 2 + 1, [X])
def the_offset_of_a_view_is_lost(patch):
    """It begins where its base does (#93562)."""
    wrapped(aten.select.int, lambda right, ctx, x, dim, index: right(ctx, x, dim, 0))


@fault(
    *("lowering", "aten.index_put.default"),
    lambda x, i, y: torch.index_put(x.sin(), [i], y, accumulate=True) * 2,
    [X[:, 0].contiguous(), torch.tensor([1, 1, 3]), torch.tensor([2.0, 3.0, 4.0])],
)
def writes_that_meet_are_lost(patch):
    """A race: of two additions to one element one is kept."""
    wrapped(
        aten.index_put.default,
        lambda right, ctx, x, indices, values, accumulate=False: right(ctx, x, indices, values),
    )


# -- fusion


def interrupted(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    z = torch.sort(y).values
    return z + y


@fault("fusion", "buf0 and", interrupted, [X])
def a_cycle_is_fused(patch):
    """A kernel reads what a library makes of its own result."""
    patch.setattr(Fuser, "_cycle", lambda self, a, b: None)


# -- memory


def turned(x: torch.Tensor) -> torch.Tensor:
    y = x @ x.t()
    return y.exp() + y.t()


@fault("memory", "in place of", turned, [X])
def a_buffer_is_overwritten_while_it_is_read(patch):
    """In place over elements that are read later."""
    patch.setattr(in_place, "refusal", lambda node, old, new: None)


# -- kernel plans


def mistaken(name: str, old: str, new: str) -> None:
    """A rule that takes one operation for another."""

    @plan_rule(name)
    def rule(plan: KernelPlan, options: Any) -> None:
        for value in plan.body.values:
            value.op = new if value.op == old else value.op


@fault("plan rule", "any:bases", lambda x: torch.softmax(x.sin() * 3, -1) * 2, [X], options=CPP)
def another_base(patch):
    """exp becomes exp2."""
    bugs["wrong base"]()


@fault("plan rule", "any:rounding", lambda x: torch.floor(x * 2.3) + x, [X], options=CPP)
def rounding_to_zero(patch):
    """floor becomes trunc."""

    mistaken("any:rounding", "floor", "trunc")


# -- code generators


def misprint(old: str, new: str) -> None:
    """A printer of C++ that writes one word for another."""

    def printed(plans: Any) -> KernelModule:
        module = cpp.kernel_module(plans)
        units = tuple(text.replace(old, new) for text in module.units)
        for kernel in module.kernels:
            kernel.lines = [replace(k, text=k.text.replace(old, new)) for k in kernel.lines]
        return replace(module, text=module.text.replace(old, new), units=units)

    code_generator("cpp")(printed)


@fault("code generator", "", lambda x: torch.sin(x + 1) * 2 + x, [X], options=CPP)
def a_function_is_printed_as_another(patch):
    """sin as cos."""
    misprint("sin", "cos")


@fault("code generator", "", lambda x: torch.cos(x.exp()) * 2 + x, [X], options=CPP)
def a_kernel_is_no_program(patch):
    """The C++ compiler refuses it."""
    misprint("cos(", "cos(;")


@fault("code generator", "", lambda x: (x / 2).prod(1).exp() + 1, [X], options=CPP)
def accumulators_begin_with_zero(patch):
    """The identity of every reduction is 0."""
    patch.setattr(cpp_values, "reduction_identity", lambda kind, dtype: 0)
