"""Dtype names, kinds and the computation dtype.

`promote` follows eager's rules by asking torch itself; the rest is bookkeeping that every IR shares.
Half types are computed in float32 (as eager's kernels do) and rounded when stored.
"""

from __future__ import annotations

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


def tensor_text(value: torch.Tensor) -> str:
    """`f32[64, 128]`, with strides when they aren't contiguous: `f32[64, 128; 1, 64]`."""
    size = ", ".join(str(s) for s in value.shape)
    text = f"{short(value.dtype)}[{size}]"
    if value.layout is torch.strided and not value.is_contiguous():
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
