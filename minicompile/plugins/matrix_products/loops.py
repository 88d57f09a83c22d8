"""Matrix products as loops that a template computes: with mode="max-autotune", for a GPU,
or `library=False`.

The rules stand in the registry `template`, beside those of ordinary loops: where a rule refuses, or the mode
is another, a library multiplies.
The real compiler: tuned_mm, tuned_addmm, tuned_bmm in torch/_inductor/kernel/{mm,bmm}.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from minicompile.errors import Unsupported
from minicompile.lowering.context import LoweringContext, template
from minicompile.lowering.ir import Template
from minicompile.lowering.rules.common import aten
from minicompile.lowering.value import TensorValue
from minicompile.lowering.views import broadcast_index
from minicompile.ops.dtypes import TENSOR_CORES
from minicompile.ops.handler import Index, Ops, V

LIBRARY = "library matrix product"
LEAST = 16
"""Rows, columns and terms of the smallest tiles that tensor cores multiply."""


def refusal(ctx: LoweringContext, a: TensorValue, b: TensorValue) -> str | None:
    """Why a library multiplies; None where a template can, and should."""
    language, device = ctx.options.device_codegen, a.device
    if device.type != "cuda" and language not in ("triton", "reference"):
        return LIBRARY
    sizes, choice = (*a.size, *b.size), ctx.options.library
    if choice and not all(isinstance(size, int) for size in sizes):
        return f"{LIBRARY}: sizes vary, and it chooses its kernel anew in each call"
    small = choice and min((*a.size[-2:], *b.size[-2:])) < LEAST  # type: ignore[type-var]
    if small or 0 in sizes:
        return f"{LIBRARY}: a tile of a template has {LEAST} rows, columns and terms"
    if a.dtype not in TENSOR_CORES or b.dtype is not a.dtype:
        return f"{LIBRARY}: of {a.dtype}"
    return None


def once(ctx: LoweringContext, value: TensorValue, op: torch._ops.OpOverload) -> TensorValue:
    """The value; a copy where its layout repeats elements."""
    repeats = value.layout is not None and 0 in value.layout.stride
    return ctx.settled(ctx.copy_of(value), f"read by {op}") if repeats else value


def multiply(
    op: torch._ops.OpOverload,
    ctx: LoweringContext,
    a: TensorValue,
    b: TensorValue,
    addend: TensorValue | None = None,
) -> TensorValue:
    """The product of two matrices, or of two equal rows of matrices, and what is added to it.

    Raises Unsupported where a library multiplies.
    """
    if (why := refusal(ctx, a, b)) is not None:
        raise Unsupported(why)
    a, b = (ctx.settled(value, f"read by {op}") for value in (a, b))
    if not ctx.options.library:
        a, b = (once(ctx, value, op) for value in (a, b))
    if any(value.layout is None or 0 in value.layout.stride for value in (a, b)):
        raise Unsupported(f"{LIBRARY}: a factor is broadcast")
    size, given = (*a.size[:-1], b.size[-1]), [a, b]
    if addend is not None:
        given.insert(0, ctx.settled(addend, f"read by {op}"))

    def term(ops: Ops, index: Sequence[Index], reduced: Sequence[Index]) -> V:
        *batch, row, column = index
        left, right = a.load(ops, [*batch, row, *reduced]), b.load(ops, [*batch, *reduced, column])
        return ops.mul(ops.to_dtype(left, torch.float32), ops.to_dtype(right, torch.float32))

    def finish(ops: Ops, total: V, index: Sequence[Index]) -> V:
        if addend is None:
            return total
        return ops.add(total, given[0].load(ops, broadcast_index(index, addend.size, size)))

    views = tuple(ctx.realize(value, "") for value in given)

    def loops(fn: V, last: V) -> Template:
        return Template(size, a.size[-1:], "sum", fn, op, views, last)

    return ctx.reduced(loops, a.dtype, a.device, term, "matrix product", finish)


def add(
    op: torch._ops.OpOverload,
    ctx: LoweringContext,
    addend: TensorValue,
    a: TensorValue,
    b: TensorValue,
    beta: float = 1,
    alpha: float = 1,
) -> TensorValue:
    if (beta, alpha) != (1, 1) or addend.dtype is not a.dtype:
        raise Unsupported(f"{LIBRARY}, which scales before it adds")
    return multiply(op, ctx, a, b, addend)


for _op in (aten.mm.default, aten.bmm.default):
    template(_op)(partial(multiply, _op))
for _op in (aten.addmm.default, aten.baddbmm.default):
    template(_op)(partial(add, _op))
