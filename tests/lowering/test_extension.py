"""Rules plugged in from outside through the registry."""

from __future__ import annotations

import pytest
import torch

from minicompile.errors import Unsupported
from minicompile.lowering.lower import lowering
from minicompile.lowering.rules.common import elementwise
from minicompile.ops.registry import scoped, without
from tests.lowering.conftest import check, lowered

aten = torch.ops.aten
X = torch.randn(5)


def test_a_rule_taken_away_leaves_an_operator_call() -> None:
    with without("lowering:aten.relu"):
        graph = check(aten.relu, X, externs=1)
    assert graph.externs[0].reason == "no lowering for aten.relu.default"
    check(aten.relu, X, externs=0)


@pytest.mark.parametrize("rule", ["arange.start_step", "full.default"])
def test_sequences_and_constants_are_eagers_without_their_decompositions(rule: str) -> None:
    def fn(x):
        filled = torch.full((5,), 2) * torch.full((5,), 0.5, dtype=torch.float16, pin_memory=False)
        return torch.arange(5) * 1_000_000_000_000, torch.arange(5.0), filled, torch.arange(5) + x

    with without(f"decomposition:aten.{rule}"):
        check(fn, X, externs=None)


def test_an_own_rule_replaces_the_built_in_one() -> None:
    with scoped():

        @lowering(aten.relu.default)
        def relu(ctx, x):
            return elementwise(ctx, lambda ops, v, zero: ops.where(ops.gt(v, zero), v, zero), x, 0)

        graph = check(aten.relu, X)
        assert "where" in str(graph)
    assert "where" not in str(lowered(aten.relu, X))


def test_an_operator_that_was_a_call_gets_loops() -> None:
    def fn(x):
        return aten.logit(x.sigmoid(), None)

    with scoped(), without("decomposition:aten.logit"):
        assert len(lowered(fn, X).externs) == 1

        @lowering(aten.logit.default)
        def logit(ctx, x, eps=None):
            if eps is not None:
                raise Unsupported("logit that clamps")

            def formula(ops, v):
                one = ops.constant(1.0, x.dtype)
                return ops.log(ops.truediv(v, ops.sub(one, v)))

            return elementwise(ctx, formula, x)

        check(fn, X, externs=0)
        graph = check(lambda x: aten.logit(x.sigmoid(), 0.1), X, externs=1)
        assert graph.externs[0].reason == "logit that clamps"


def test_an_operator_whose_rule_mixes_dtypes_is_called_with_the_reason() -> None:
    with scoped():

        @lowering(aten.relu.default)
        def relu(ctx, x):
            return elementwise(ctx, lambda ops, v: ops.add(v, ops.constant(1, torch.int64)), x)

        graph = check(aten.relu, X, externs=1)
    assert graph.externs[0].reason.startswith("ops.add needs operands of one dtype")


def test_a_rule_that_returns_its_argument_does_not_alias_it() -> None:
    with scoped():

        @lowering(aten.relu.default)
        def relu(ctx, x):
            return x

        (buffer,) = lowered(aten.relu, X).operations
    assert buffer.why == "graph output"
