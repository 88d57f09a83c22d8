"""A cache small enough to count: which lines of memory a kernel's loops fetch, in the order of its loops."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from minicompile.codegen.plan import KernelPlan
from minicompile.plugins.transposed_tiles.choose import transposed
from minicompile.shapes.expr import coefficient_of

LINE = 16
"""Floats of a cache line: 64 bytes."""


def lines_fetched(plan: KernelPlan, lines: int = 512) -> int:
    """Cache lines that a pointwise kernel over two loops fetches, with its plan's squares or without.

    512 lines are 32 KiB, a usual first-level cache. Raises ValueError for other kernels.
    """
    touch = lru_cache(maxsize=lines)(lambda buffer, line: None)  # the lines used last stay
    for buffer, element in touched(plan):
        touch(buffer, element // LINE)
    return touch.cache_info().misses


def touched(plan: KernelPlan) -> Iterator[tuple[str, int]]:
    """Buffer and element of each access, in the order of the generated loops."""
    (across, height), (inner, width) = ((v, int(n)) for v, n in plan.ranges.items())
    steps = [
        (
            v,
            v.buffer,
            int(coefficient_of(v.index, across) or 0),
            int(coefficient_of(v.index, inner) or 0),
        )
        for v in (*plan.body.loads, *plan.body.stores)
    ]
    tall, wide = plan.tiles.get(str(across), height), plan.tiles.get(str(inner), width)
    for i0 in range(0, height, tall):
        for j0 in range(0, width, wide):
            rows, row = range(i0, min(i0 + tall, height)), range(j0, min(j0 + wide, width))
            turned = [s for s in steps if plan.tiles and transposed(s[0], inner, across)]
            for _, buffer, down, right in turned:  # into a square of scratch
                for j in row:
                    for i in rows:
                        yield buffer, down * i + right * j
                        yield f"{buffer} turned", wide * (i - i0) + j - j0
            for i in rows:
                for j in row:
                    for step in steps:
                        _, buffer, down, right = step
                        if step in turned:
                            yield f"{buffer} turned", wide * (i - i0) + j - j0
                        else:
                            yield buffer, down * i + right * j
