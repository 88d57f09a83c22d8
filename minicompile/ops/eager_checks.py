"""What eager refuses and FakeTensor allows: dtypes that a kernel doesn't take, places where values don't fit.

FakeTensor computes shapes and dtypes, so it accepts `1 - mask` or the variance of integers. Whether eager
does depends, for most operators, on the operands' dtypes alone: it is asked once, about one element.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._ops import OpOverload

from minicompile.ops.overloads import aten_ops

aten = torch.ops.aten

ASKED = aten_ops(
    "searchsorted.Tensor searchsorted.Scalar bucketize.Tensor bucketize.Scalar var.correction std.correction"
    " argmax.default argmin.default _softmax.default _log_softmax.default _prelu_kernel.default"
    " index_select.default put_.default dot.default trace.default multi_margin_loss.default"
    " multilabel_margin_loss_forward.default"
)
"""Beside elementwise operators: those that take sizes of 1 as well as any. (Products of matrices are the
library's calls, which refuse when they run.)"""


def check_selected(x: torch.Tensor, dim: int, position: Any) -> None:
    """torch 2.11's symbolic fakes allow positions outside of the dimension."""
    if x.dim() and not -x.shape[dim] <= position < x.shape[dim]:
        raise IndexError(f"select(): index {position} out of range for dimension {dim}")


def check_put(
    x: torch.Tensor, indices: Any, values: torch.Tensor, accumulate: bool = False
) -> None:
    """Fakes take values of any dtype and size. (Those of index_add put integers into bools.)"""
    if x.dtype is not values.dtype and not (x.dtype is torch.bool and accumulate):
        raise RuntimeError(f"index_put puts {values.dtype} into {x.dtype}")
    masks = (torch.bool, torch.uint8)
    if not any(index is not None and index.dtype in masks for index in indices):
        values.expand(aten.index.Tensor(x, indices).shape)


def check_added(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> None:
    """Fakes broadcast."""
    rest = [list(t.shape) for t in (x, source)]
    _, rows = [sizes.pop(dim) if sizes else 1 for sizes in rest]
    if x.dim() != source.dim() or rest[0] != rest[1] or rows != index.numel():
        raise RuntimeError(f"index_add adds {list(source.shape)} to {list(x.shape)}")


CHECKS: dict[OpOverload, Callable[..., None]] = {
    aten.select.int: check_selected,
    **dict.fromkeys(aten_ops("index_put.default index_put_.default"), check_put),
    **dict.fromkeys(aten_ops("index_add.default index_add_.default"), check_added),
}


def check_arguments(
    op: OpOverload, args: Any, kwargs: Any, eagerly: Callable[[], AbstractContextManager[Any]]
) -> None:
    """Raise what eager would: positions that aren't there, values of other dtypes or sizes than the places
    that they are put into, dtypes that it can't compute in.

    `eagerly()`: outside of the modes that handle calls now.
    """
    if op in CHECKS:
        CHECKS[op](*args)
    elif torch.Tag.pointwise in op.tags or op in ASKED:
        named = tuple((name, described(value)) for name, value in (kwargs or {}).items())
        with eagerly():
            error = refusal(op, tuple(map(described, args)), named)
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        on_cpu = all(x.device.type == "cpu" for x in tensors)
        if error and (on_cpu or "not implemented" not in str(error)):
            raise type(error)(*error.args)


def described(value: Any) -> Any:
    """What of an argument decides whether eager computes: a tensor's dtype and rank, a number's type."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.dtype, value.dim()
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return (int if isinstance(value, torch.SymInt) else float), 1
    return type(value), tuple(value) if isinstance(value, list) else value


class AtOnce(torch.autograd.Function):
    """A call that looks to torch like a call of a torch function."""

    @staticmethod
    def forward(_: Any, call: Callable[[], Any]) -> Any:
        return call()


def quietly(call: Callable[[], Any]) -> Any:
    """Return what a call gives, and drop its warnings.

    Warnings of C++ come at the end of the torch function that Python called, so a filter around an operator
    inside of another one misses them: here the call is such a function itself.
    """
    with warnings.catch_warnings(action="ignore"):
        return super(torch.autograd.Function, AtOnce).apply(call)  # type: ignore[misc]


@functools.lru_cache(maxsize=4096)
def refusal(op: OpOverload, args: Any, kwargs: Any) -> Exception | None:
    """The exception that eager raises for such arguments, if any."""

    def made(spec: Any) -> Any:
        kind, *rest = spec
        if kind is torch.Tensor:
            return torch.full((1,) * rest[1], op not in ASKED, dtype=rest[0])  # 0 is an index
        if kind in (int, float, bool) and op not in ASKED:
            return kind(1)
        return list(rest[0]) if kind is list else rest[0]

    try:
        quietly(lambda: op(*map(made, args), **{name: made(one) for name, one in kwargs}))
    except Exception as error:
        return error.with_traceback(None)
    return None
