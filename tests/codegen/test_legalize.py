"""Legal bodies: what eager does without saying stands in the body."""

from __future__ import annotations

from typing import Any

import torch

from minicompile.codegen.legalize import LEGALIZE, legalize
from minicompile.codegen.merge import merge
from minicompile.codegen.rewrite import SIMPLIFY
from minicompile.debug.verify import verify_body
from minicompile.ops.registry import scoped, without
from minicompile.scheduling.body import LoopBody
from minicompile.shapes.expr import size_symbol
from tests.codegen.fusing import Program

F32, BF16, I64, I32, BOOL = torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool


def legal(p: Program) -> LoopBody:
    body = legalize(merge(p.fused(), (), p.dtypes)[0], p.dtypes).body
    verify_body(body)
    return body


def applied(name: str, dtype: torch.dtype, count: int = 1) -> Program:
    p = Program()
    inputs = [p.input(buffer, (8,), dtype) for buffer in "xy"[:count]]

    def fn(ops: Any, i: Any) -> Any:
        return ops.pointwise(name, *(ops.load(buffer, i[0]) for buffer in inputs))

    p.pointwise("out", (8,), fn, dtype)
    return p


def ops_of(body: LoopBody) -> list[str]:
    return [v.op for v in body.values if v.op != "constant"]


def test_index_values_are_int32_only_where_they_fit() -> None:
    def width(size: Any, factor: int) -> torch.dtype:
        p = Program()
        p.pointwise("out", (size,), lambda ops, i: ops.index_expr(i[0] * factor, I64), I64)
        return next(v.dtype for v in legal(p).values if v.op == "index_expr")

    assert width(100, 1) is I32
    assert width(11, 1_000_000_000) is I64
    assert width(size_symbol("s0"), 1) is I64


# The table ---------------------------------------------------------------------------------------


def test_each_rule_has_a_condition_a_result_and_a_reason() -> None:
    lines = str(LEGALIZE).splitlines()
    assert len(lines) == 2 + len(SIMPLIFY) + len(LEGALIZE)
    for rule in [*SIMPLIFY.values(), *LEGALIZE.values()]:
        assert rule.result.__doc__ and rule.why
        assert rule.when is None or rule.when.__doc__


def test_a_rule_can_be_added_and_taken_away_by_name() -> None:
    with without("legalize:extremum"):
        assert "maximum" in ops_of(legal(applied("maximum", F32, 2)))
    with scoped():

        @LEGALIZE.rule("exp", of="float", why="base 2 is quicker")
        def by_exp2(ops: Any, value: Any) -> Any:
            "exp2(x * log2(e))"
            scale = ops.constant(1.4426950408889634, value.dtype)
            return ops.exp2(ops.mul(value.inputs[0], scale))

        assert ops_of(legal(applied("exp", F32))) == ["load", "mul", "exp2", "store"]
    assert ops_of(legal(applied("exp", F32))) == ["load", "exp", "store"]
