"""Tensors made from nothing: everything becomes `full`, `arange` or a cast."""

from __future__ import annotations

from typing import Any

import torch

from minicompile.aot.decompositions.registry import decompose

aten = torch.ops.aten
prims = torch.ops.prims
Tensor = torch.Tensor


def _full(size: Any, value: Any, dtype: torch.dtype | None, device: Any) -> Tensor:
    device = torch.device("cpu" if device is None else device)
    result: Tensor = aten.full.default(
        size, value, dtype=dtype or torch.get_default_dtype(), device=device
    )
    return result


@decompose(aten.full.default, to="core")
def full(
    size: Any, value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **others: Any
) -> Tensor:
    """With dtype and device spelled out, and nothing else."""
    if not others and dtype is not None and device is not None:
        return NotImplemented
    if dtype is None:
        kinds = {bool: torch.bool, int: torch.int64, float: torch.get_default_dtype()}
        dtype = kinds.get(type(value))
    return NotImplemented if dtype is None else _full(size, value, dtype, device)


@decompose(aten.zeros.default, aten.empty.memory_format, to="core")
def zeros(
    size: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:
    """`empty` too: what it holds is nobody's business, and zeros are the same in every run."""
    return _full(size, 0, dtype, device)


@decompose(aten.ones.default, to="core")
def ones(
    size: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Tensor:
    return _full(size, 1, dtype, device)


@decompose(aten.zeros_like.default, aten.empty_like.default, to="core")
def zeros_like(
    x: Tensor, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> Tensor:
    return _full(x.shape, 0, dtype or x.dtype, device or x.device)


@decompose(aten.ones_like.default, to="core")
def ones_like(
    x: Tensor, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> Tensor:
    return _full(x.shape, 1, dtype or x.dtype, device or x.device)


@decompose(aten.full_like.default, to="core")
def full_like(
    x: Tensor, value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> Tensor:
    return _full(x.shape, value, dtype or x.dtype, device or x.device)


@decompose(aten.new_zeros.default, aten.new_empty.default, to="core")
def new_zeros(
    x: Tensor, size: Any, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> Tensor:
    return _full(size, 0, dtype or x.dtype, device or x.device)


@decompose(aten.new_ones.default, to="core")
def new_ones(
    x: Tensor, size: Any, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> Tensor:
    return _full(size, 1, dtype or x.dtype, device or x.device)


@decompose(aten.new_full.default, to="core")
def new_full(
    x: Tensor,
    size: Any,
    value: Any,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **_: Any,
) -> Tensor:
    return _full(size, value, dtype or x.dtype, device or x.device)


@decompose(aten.empty_strided.default, aten.new_empty_strided.default, to="core")
def empty_strided(
    *args: Any, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> Tensor:
    like = args[0] if isinstance(args[0], Tensor) else None
    size = args[0] if like is None else args[1]
    if like is not None:
        dtype, device = dtype or like.dtype, device or like.device
    return _full(size, 0, dtype, device)


@decompose(aten.scalar_tensor.default, to="core")
def scalar_tensor(
    value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> Tensor:
    return _full([], value, dtype, device)


@decompose(aten.fill.Scalar, aten.fill.Tensor, to="core")
def fill(x: Tensor, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(dtype=x.dtype, device=x.device).expand(x.shape).clone()
    return _full(x.shape, value, x.dtype, x.device)


@decompose(aten.arange.default, to="core")
def arange(end: Any, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    return aten.arange.start_step(0, end, 1, dtype=dtype, device=device)


@decompose(aten.arange.start, to="core")
def arange_start(
    start: Any, end: Any, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> Tensor:
    return aten.arange.start_step(start, end, 1, dtype=dtype, device=device)


@decompose(aten.arange.start_step, to="prims")
def arange_start_step(
    start: Any,
    end: Any,
    step: Any = 1,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **_: Any,
) -> Tensor:
    """Integers by iota; other types stay."""
    if any(isinstance(v, float) for v in (start, end, step)) or (
        dtype is not None and dtype.is_floating_point
    ):
        return NotImplemented
    length = (end - start + step - (1 if step > 0 else -1)) // step
    length = torch.sym_max(length, 0) if isinstance(length, torch.SymInt) else max(length, 0)
    return prims.iota.default(
        length,
        start=start,
        step=step,
        dtype=dtype or torch.int64,
        device=torch.device(device or "cpu"),
        requires_grad=False,
    )


@decompose(aten.eye.default, to="core")
def eye(n: Any, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    return eye_m(n, n, dtype=dtype, device=device)


@decompose(aten.eye.m, to="core")
def eye_m(
    n: Any, m: Any, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> Tensor:
    diagonal = torch.arange(n, device=device).unsqueeze(-1) == torch.arange(m, device=device)
    return diagonal.to(dtype or torch.get_default_dtype())


@decompose(aten._to_copy.default, to="core")
def to_copy(
    x: Tensor, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> Tensor:
    """A cast; a transfer to another device stays as it is."""
    if (
        device is not None
        and torch.device(device) != x.device
        and torch.device(device).type != x.device.type
    ):
        return NotImplemented
    if x.is_complex() or (dtype is not None and dtype.is_complex):
        return NotImplemented
    if dtype is not None and dtype != x.dtype:
        return prims.convert_element_type.default(x, dtype)
    return x.clone()


@decompose(aten.copy.default, to="core")
def copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return source.to(dtype=x.dtype, device=x.device).expand(x.shape).clone()


@decompose(aten.lift_fresh_copy.default, to="core")
def lift_fresh_copy(x: Tensor) -> Tensor:
    return x.clone()
