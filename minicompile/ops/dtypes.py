"""Dtype names, kinds and the computation dtype.

`promote` follows eager's rules by asking torch itself; the rest is bookkeeping that every IR shares.
Half types are computed in float32 (as eager's kernels do) and rounded when stored.
"""

from __future__ import annotations

from typing import Any

import torch

SHORT: dict[torch.dtype, str] = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
    torch.complex64: "c64",
    torch.complex128: "c128",
}

LOOP_DTYPES = frozenset(dtype for dtype in SHORT if not dtype.is_complex)
"""What loop bodies can hold; anything else stays with extern operators."""


def short(dtype: torch.dtype) -> str:
    """`f32` for torch.float32."""
    return SHORT.get(dtype, str(dtype).removeprefix("torch."))


def is_int(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool


def computation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for half types, otherwise the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def in_rows(value: torch.Tensor) -> bool:
    """Does it lie row by row without gaps? (`is_contiguous()` adds a guard where sizes are symbolic.)"""
    sizes, strides = (
        [x.node.expr if isinstance(x, torch.SymInt) else x for x in numbers]
        for numbers in (value.shape, value.stride())
    )
    step: Any = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != step and 0 not in sizes:
            return False
        step = step * size
    return True


def tensor_text(value: torch.Tensor) -> str:
    """`f32[64, 128]`, with strides when they aren't contiguous: `f32[64, 128; 1, 64]`."""
    size = ", ".join(str(s) for s in value.shape)
    text = f"{short(value.dtype)}[{size}]"
    if value.layout is torch.strided and not in_rows(value):
        text = text[:-1] + f"; {', '.join(str(s) for s in value.stride())}]"
    return text


def value_text(value: object) -> str:
    """The type annotation of a graph value: tensors by dtype and shape, lists element by element."""
    if isinstance(value, torch.Tensor):
        return tensor_text(value)
    if isinstance(value, tuple | list):
        return "(" + ", ".join(value_text(v) for v in value) + ")"
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return f"Sym({value})"
    return type(value).__name__
