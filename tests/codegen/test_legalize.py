"""Legal bodies: what eager does without saying stands in the body."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minicompile.codegen.legalize import LEGALIZE, legalize
from minicompile.codegen.merge import merge
from minicompile.ops.dtypes import HALF_TYPES
from minicompile.ops.registry import scoped, without
from minicompile.scheduling.body import LoopBody, verify
from minicompile.scheduling.rewrite import SIMPLIFY
from minicompile.shapes.expr import size_symbol
from tests.codegen.fusing import Program, softmax

F32, BF16, I64, I32, BOOL = torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool


def legal(p: Program) -> LoopBody:
    body = legalize(merge(p.fused(), (), p.dtypes)[0], p.dtypes).body
    verify(body)
    return body


def unary(name: str, dtype: torch.dtype, result: torch.dtype | None = None) -> LoopBody:
    p = Program()
    p.input("x", (8,), dtype)
    p.pointwise(
        "out", (8,), lambda ops, i: ops.pointwise(name, ops.load("x", i[0])), result or dtype
    )
    return legal(p)


def binary(name: str, dtype: torch.dtype, result: torch.dtype | None = None) -> LoopBody:
    p = Program()
    p.input("x", (8,), dtype)
    p.input("y", (8,), dtype)
    fn = lambda ops, i: ops.pointwise(name, ops.load("x", i[0]), ops.load("y", i[0]))  # noqa: E731
    p.pointwise("out", (8,), fn, result or dtype)
    return legal(p)


def ops_of(body: LoopBody) -> list[str]:
    return [v.op for v in body.values if v.op != "constant"]


def test_half_types_are_loaded_widened_computed_rounded_and_stored() -> None:
    body = unary("exp", BF16)
    assert [(v.op, v.dtype) for v in body.values] == [
        ("load", BF16),
        ("to_dtype", F32),
        ("exp", F32),
        ("to_dtype", BF16),
        ("store", BF16),
    ]


def test_half_values_exist_only_next_to_memory_and_at_roundings() -> None:
    body = legal(softmax(4, 6, BF16))
    arithmetic = [v for v in body.values if v.op not in ("load", "store", "to_dtype")]
    assert not any(v.dtype in HALF_TYPES for v in arithmetic)


def test_an_explicit_conversion_to_a_half_type_rounds() -> None:
    p = Program()
    p.input("x", (8,))
    p.pointwise(
        "out", (8,), lambda ops, i: ops.to_dtype(ops.to_dtype(ops.load("x", i[0]), BF16), F32)
    )
    assert [v.dtype for v in legal(p).values] == [F32, BF16, F32, F32]


def test_a_copy_of_half_values_converts_nothing() -> None:
    p = Program()
    p.input("x", (8,), BF16)
    p.pointwise("out", (8,), lambda ops, i: ops.load("x", i[0]), BF16)
    assert ops_of(legal(p)) == ["load", "store"]


def test_bools_are_bytes_in_memory_and_logic_in_between() -> None:
    body = binary("add", BOOL)
    assert [v.dtype for v in body.loads + body.stores] == [torch.uint8] * 3
    assert "logical_or" in ops_of(body) and "add" not in ops_of(body)


@pytest.mark.parametrize("name", ["floordiv", "remainder"])
@pytest.mark.parametrize("dtype", [I64, F32])
def test_floor_division_is_truncation_and_a_correction(name: str, dtype: torch.dtype) -> None:
    assert name not in ops_of(binary(name, dtype)) and "fmod" in ops_of(binary(name, dtype))


def test_float_extrema_are_comparisons_and_integer_ones_stay() -> None:
    assert "maximum" not in ops_of(binary("maximum", F32))
    assert "isnan" in ops_of(binary("maximum", F32))
    assert "maximum" in ops_of(binary("maximum", I64))


def test_the_extremum_with_a_constant_needs_one_comparison() -> None:
    p = Program()
    p.input("x", (8,))
    p.pointwise(
        "out", (8,), lambda ops, i: ops.maximum(ops.load("x", i[0]), ops.constant(0.0, F32))
    )
    assert ops_of(legal(p)) == ["load", "gt", "where", "store"]


def test_index_values_are_int32_only_where_they_fit() -> None:
    def width(size: Any, factor: int) -> torch.dtype:
        p = Program()
        p.pointwise("out", (size,), lambda ops, i: ops.index_expr(i[0] * factor, I64), I64)
        return next(v.dtype for v in legal(p).values if v.op == "index_expr")

    assert width(100, 1) is I32
    assert width(11, 1_000_000_000) is I64
    assert width(size_symbol("s0"), 1) is I64


def test_reductions_accumulate_in_float32_and_the_sum_is_rounded_once() -> None:
    p = Program()
    p.input("x", (4, 6), BF16)
    fn = lambda ops, i, r: ops.load("x", 6 * i[0] + r[0])  # noqa: E731
    p.reduce("out", (4,), (6,), "sum", fn, BF16)
    body = legal(p)
    (reduction,) = body.reductions
    assert reduction.dtype is F32 and body.stores[0].inputs[0].dtype is BF16


def test_choices_by_constants_are_made() -> None:
    p = Program()
    p.input("x", (8,))

    def fn(ops: Any, i: Any) -> Any:
        x, yes = ops.load("x", i[0]), ops.constant(True, BOOL)
        either = ops.logical_and(yes, ops.gt(x, ops.constant(0.0, F32)))
        return ops.where(ops.logical_not(yes), ops.exp(x), ops.to_dtype(either, F32))

    p.pointwise("out", (8,), fn)
    assert ops_of(legal(p)) == ["load", "gt", "to_dtype", "store"]


# The table ---------------------------------------------------------------------------------------


def test_the_table_prints_a_line_for_each_rule_with_condition_result_and_reason() -> None:
    lines = str(LEGALIZE).splitlines()
    assert len(lines) == 2 + len(SIMPLIFY) + len(LEGALIZE)
    assert (
        "  maximum, minimum of float if an operand is a constant that isn't NaN -> "
        "where(number > x, number, x): then one comparison is enough"
    ) in lines
    for rule in [*SIMPLIFY.values(), *LEGALIZE.values()]:
        assert rule.result.__doc__ and rule.why
        assert rule.when is None or rule.when.__doc__


def test_a_rule_can_be_added_and_taken_away_by_name() -> None:
    with without("legalize:extremum"):
        assert "maximum" in ops_of(binary("maximum", F32))
    with scoped():

        @LEGALIZE.rule("exp", of="float", why="base 2 is quicker")
        def by_exp2(ops: Any, value: Any) -> Any:
            "exp2(x * log2(e))"
            scale = ops.constant(1.4426950408889634, value.dtype)
            return ops.exp2(ops.mul(value.inputs[0], scale))

        assert ops_of(unary("exp", F32)) == ["load", "mul", "exp2", "store"]
    assert ops_of(unary("exp", F32)) == ["load", "exp", "store"]


def test_origins_survive() -> None:
    for value in legal(softmax(4, 6, BF16)).values:
        assert value.origins or value.op == "constant"
