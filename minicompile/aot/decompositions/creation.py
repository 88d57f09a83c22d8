"""Tensors made from nothing: everything becomes `full`, `iota` or a cast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minicompile.aot.decompositions.registry import Dtype, Rule, decompose, formulas

aten = torch.ops.aten
prims = torch.ops.prims


def filled(size: Any, value: Any, dtype: Dtype, device: Any) -> Tensor:
    """`full` with everything spelled out."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return aten.full.default(size, value, dtype=dtype, device=torch.device(device or "cpu"))


def filled_with(value: Any) -> Rule:
    """Rule of zeros(size), ones(size), ...; further arguments are strides."""
    return lambda size, *_, dtype=None, device=None, **__: filled(size, value, dtype, device)


def filled_like(value: Any) -> Rule:
    """Rule of zeros_like(x), x.new_ones(size), ...: size (unless given), dtype and device of x."""
    return lambda x, size=None, *_, dtype=None, device=None, **__: filled(
        x.shape if size is None else size, value, dtype or x.dtype, device or x.device
    )


# `empty` too: what it holds is nobody's business, and zeros are the same in every run.
formulas(
    {
        aten.empty_like.default: filled_like(0),
        aten.new_empty.default: filled_like(0),
        aten.new_empty_strided.default: filled_like(0),
        aten.empty.memory_format: filled_with(0),
        aten.empty_strided.default: filled_with(0),
        aten.empty_permuted.default: filled_with(0),
        aten.full_like.default: lambda x, value, **kw: filled_like(value)(x, **kw),
        aten.scalar_tensor.default: lambda value, **kw: filled_with(value)([], **kw),
        aten.lift_fresh_copy.default: lambda x: x.clone(),
        aten.copy.default: lambda x, source, non_blocking=False: (
            source.to(dtype=x.dtype, device=x.device).expand(x.shape).clone()
        ),
    },
    wide=False,
)


@decompose(aten.full.default, to="core")
def full(
    size: Any, value: Any, *, dtype: Dtype = None, device: Any = None, **others: Any
) -> Tensor:
    """With dtype and device spelled out, and nothing else."""
    if not others and dtype is not None and device is not None:
        return NotImplemented
    if dtype is None:
        kinds = {bool: torch.bool, int: torch.int64, torch.SymInt: torch.int64}
        kinds |= dict.fromkeys((float, torch.SymFloat), torch.get_default_dtype())
        dtype = kinds.get(type(value))
    return NotImplemented if dtype is None else filled(size, value, dtype, device)


@decompose(aten.arange.start_step, to="prims")
def arange_start_step(
    start: Any, end: Any, step: Any = 1, *, dtype: Dtype = None, device: Any = None, **_: Any
) -> Tensor:
    """Integers by iota, perhaps converted; between floats, eager's operator rounds in its own way."""
    dtype = dtype or torch.int64
    if any(isinstance(v, float) for v in (start, end, step)):
        return NotImplemented
    length = (end - start + step - (1 if step > 0 else -1)) // step
    exact = torch.int64 if dtype.is_floating_point else dtype
    options = {"dtype": exact, "device": torch.device(device or "cpu"), "requires_grad": False}
    return prims.iota.default(length, start=start, step=step, **options).to(dtype)


@decompose(aten._to_copy.default, to="core")
def to_copy(x: Any, *, dtype: Dtype = None, device: Any = None, **options: Any) -> Tensor:
    """A cast; a transfer to another device stays as it is."""
    if not isinstance(x, torch.Tensor):  # a number that vmap takes for a tensor of no dimensions
        return aten.full.default([], x, dtype=dtype, device=device)
    moved = device is not None and torch.device(device).type != x.device.type
    if moved or x.is_complex() or (dtype is not None and dtype.is_complex):
        return NotImplemented
    if dtype is not None and dtype != x.dtype:
        return prims.convert_element_type.default(x, dtype)
    return x.clone()
