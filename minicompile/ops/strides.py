"""Strides of what torch is given: numbers or SymInts. (Those of expressions are shapes/expr.py's.)"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def dense_strides(size: Sequence[Any], order: Iterable[int] | None = None) -> list[Any]:
    """Strides without gaps; `order`: the dimensions from the outermost in memory to the innermost."""
    strides: list[Any] = [1] * len(size)
    step: Any = 1
    for dim in reversed([*(range(len(size)) if order is None else order)]):
        strides[dim], step = step, step * size[dim]
    return strides
