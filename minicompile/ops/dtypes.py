"""The rules of dtypes, for all rooms: names and kinds, in which dtype what is computed, and what it gives.

promote            operands of several dtypes      by eager's rules: torch itself is asked
computation_dtype  formulas                        half types in float32, rounded when stored
sum_dtype          sums and products of elements   ints and bools in int64
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from minicompile.shapes.expr import contiguous_strides, strides_agree, to_size
from minicompile.shapes.symnode import SYMBOLIC

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


HALF_TYPES = frozenset({torch.float16, torch.bfloat16})
"""Half types round after each operator, which one operator in place of several doesn't."""
TENSOR_CORES = HALF_TYPES | {torch.float32}
"""What they multiply, so that templates can."""


def short(dtype: torch.dtype) -> str:
    """`f32` for torch.float32."""
    return SHORT.get(dtype, str(dtype).removeprefix("torch."))


def is_int(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool


def promote(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The common dtype of tensors that have dimensions."""
    return functools.reduce(torch.promote_types, dtypes)


def computation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for half types, otherwise the dtype itself."""
    return torch.float32 if dtype in HALF_TYPES else dtype


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums and products of such elements are, running ones too, unless another dtype is asked for."""
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64


def tensor_text(value: torch.Tensor) -> str:
    """`f32[64, 128]`, with strides when they aren't contiguous: `f32[64, 128; 1, 64]`."""
    size = ", ".join(str(s) for s in value.shape)
    text = f"{short(value.dtype)}[{size}]"
    if value.layout is torch.strided and not is_row_major(value):
        text = text[:-1] + f"; {', '.join(str(s) for s in value.stride())}]"
    return text


def is_row_major(value: torch.Tensor) -> bool:
    """Whether a tensor is contiguous; with symbolic sizes, for all of them, which adds no guard."""
    if not any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride())):
        return value.is_contiguous()
    sizes, strides = (list(map(to_size, numbers)) for numbers in (value.shape, value.stride()))
    return strides_agree(sizes, strides, contiguous_strides(sizes))


def value_text(value: object) -> str:
    """The type annotation of a graph value: tensors by dtype and shape, lists element by element."""
    if isinstance(value, torch.Tensor):
        return tensor_text(value)
    if isinstance(value, tuple | list):
        return "(" + ", ".join(value_text(v) for v in value) + ")"
    if isinstance(value, SYMBOLIC):
        return f"Sym({value})"
    return type(value).__name__
