"""Memory layouts of values at compile time: are they dense, and how is one value given another's strides."""

from __future__ import annotations

from typing import Any

import torch

from minicompile import compat
from minicompile.errors import VerifyError
from minicompile.ops.strides import dense_strides
from minicompile.shapes.expr import strides_agree, to_size
from minicompile.shapes.symnode import hint, size_expr


def geometry(value: torch.Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
    """Sizes, strides and offset in elements, as ints or sympy expressions."""
    sizes, strides = tuple(map(size_expr, value.shape)), tuple(map(size_expr, value.stride()))
    return sizes, strides, size_expr(value.storage_offset())


def frozen(value: Any) -> Any:
    """A hashable form of an argument: sizes as expressions, and 1, 1.0 and True told apart, also 0.0 and
    -0.0."""
    if isinstance(value, list | tuple):
        return tuple(map(frozen, value))
    if isinstance(value, dict):
        return tuple((key, frozen(value[key])) for key in sorted(value))
    if isinstance(value, float):
        return (float, value.hex())
    return (type(value), size_expr(value))


def stride_order(value: torch.Tensor) -> list[int]:
    """Dimensions from the outermost in memory to the innermost; ties keep their order."""
    strides = [hint(stride) for stride in value.stride()]
    sizes = [hint(size) for size in value.shape]
    return sorted(range(value.dim()), key=lambda dim: (-strides[dim], -sizes[dim]))


def inverse_order(order: list[int]) -> list[int]:
    """The permutation that undoes another."""
    return sorted(range(len(order)), key=order.__getitem__)


def steps(value: torch.Tensor) -> list[tuple[int, int]]:
    """(size, stride) of dimensions longer than 1, from the innermost in memory; none for no elements."""
    pairs = ((hint(value.shape[i]), hint(value.stride(i))) for i in stride_order(value)[::-1])
    found = [pair for pair in pairs if pair[0] != 1]
    return [] if any(size == 0 for size, _ in found) else found


def is_dense(value: torch.Tensor) -> bool:
    """Does each element have its own place, with no gaps?"""
    expected = 1
    for size, stride in steps(value):
        if stride != expected:
            return False
        expected *= size
    return True


def extent(value: torch.Tensor) -> Any:
    """How many elements of its storage a tensor needs, from the storage's start."""
    reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
    return value.storage_offset() + 1 + reach


def overlaps(value: torch.Tensor) -> bool:
    """May two elements lie in the same place, as in an expanded dimension?"""
    reach = 0
    for size, stride in steps(value):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def same_strides(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal strides wherever they matter."""
    sizes, *strides = (list(map(to_size, n)) for n in (one.shape, one.stride(), other.stride()))
    return 0 in sizes or strides_agree(sizes, *strides)


def with_layout(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`value`'s contents in `like`'s strides; a copy only where they differ.

    If `like` has gaps in memory, the result is dense with dimensions in `like`'s order.
    """
    if same_strides(value, like):
        return value
    return dense_in_order(value, stride_order(like))


def dense_in_order(value: torch.Tensor, order: list[int]) -> torch.Tensor:
    """`value` without gaps in memory, dimensions from the outermost to the innermost as `order` says."""
    if order == sorted(order):
        return value.contiguous()
    return value.permute(order).contiguous().permute(inverse_order(order))


def empty_like_layout(mode: Any, value: torch.Tensor) -> torch.Tensor:
    """A new fake with `value`'s sizes, strides, dtype and device, and nothing else of it."""
    return compat.new_fake(
        mode, value.shape, value.stride(), value.dtype, value.device, offset=value.storage_offset()
    )


def empty_dense(mode: Any, value: torch.Tensor) -> torch.Tensor:
    """The same without gaps in memory: what `dense_in_order` makes of such a tensor."""
    strides = dense_strides(value.shape, stride_order(value))
    return compat.new_fake(mode, value.shape, strides, value.dtype, value.device)


def same_sizes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal shapes; symbolic sizes are compared as expressions, which adds no guard."""
    return tuple(map(size_expr, one.shape)) == tuple(map(size_expr, other.shape))


def same_value(one: Any, other: Any) -> bool:
    """Tensors of the same type, shape and layout?"""
    return (
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and (one.dtype, one.device) == (other.dtype, other.device)
        and same_sizes(one, other)
        and same_strides(one, other)
    )


def conform(op: object, result: Any, expected: Any) -> Any:
    """Give a rule's results the dtype and strides of the operator's. Raises VerifyError for another shape."""
    if isinstance(expected, tuple | list):
        return tuple(
            conform(op, part, wanted) for part, wanted in zip(result, expected, strict=True)
        )
    if not isinstance(expected, torch.Tensor) or result is None:
        return result
    # what isn't equal as expressions becomes a guard
    if result.dim() != expected.dim() or any(a != b for a, b in zip(result.shape, expected.shape)):
        raise VerifyError(
            f"the decomposition of {op} gives shape {list(result.shape)}, not {list(expected.shape)}"
        )
    if result.dtype != expected.dtype:
        result = result.to(expected.dtype)
    return with_layout(result, expected)
