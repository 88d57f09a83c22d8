"""Indices taken apart into strides, and put together again over other loops."""

from __future__ import annotations

import sympy

from minicompile.shapes.expr import FloorDiv, loop_symbol, size_symbol
from minicompile.shapes.strided import StridedIndex, divide, footprint

P0, P1, A, B, I0 = map(loop_symbol, ("p0", "p1", "a", "b", "i0"))
S0 = size_symbol("s0")
FOUR = sympy.Integer(4)


def test_what_is_not_linear_stays_whole() -> None:
    ranges = {P0: 4, P1: 8}
    for index in (P0**2, FloorDiv(P0, FOUR), I0 * P0):
        found = StridedIndex.of(index + P1, ranges)
        assert found.rest == index and found.strides == {P1: 1}
        assert found.blocks(P0) and not found.blocks(P1)


def test_footprints_are_equal_for_equal_elements_only() -> None:
    whole = footprint(StridedIndex.of(P0, {P0: 64}), {P0: 64}, {})
    square = {P0: 8, P1: 8}
    assert footprint(StridedIndex.of(8 * P0 + P1, square), square, {}) == whole
    assert footprint(StridedIndex.of(P0 + 8 * P1, square), square, {}) == whole
    assert footprint(StridedIndex.of(8 * P0 + P1 + 1, square), square, {}) != whole
    assert footprint(StridedIndex.of(16 * P0 + P1, square), square, {}) != whole


def test_division_is_exact_or_refused() -> None:
    assert divide(12, 4) == 3 and divide(12, 5) is None and divide(0, 4) is None
    assert divide(S0 * 64, 64) == S0 and divide(64 * S0, S0) == 64
    assert divide(S0 + 1, 2) is None and divide(12, 0) is None
