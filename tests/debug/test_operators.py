"""`mc.operator_accuracy`: the first stage and operator that err more than eager and rounding explain."""

from __future__ import annotations

import pytest
import torch

import minicompile as mc
from minicompile.debug.operator_accuracy import STAGES
from minicompile.lessons.bugs import planted
from minicompile.ops.display import to_html
from tests.debug.test_bisect import INPUT, WITH_NAN, layered
from tests.show.test_views import parsed

LOOPS = {"device_codegen": "reference"}


def test_every_operator_is_accurate_in_every_stage() -> None:
    found = mc.operator_accuracy(layered, INPUT)
    assert found.first is None and len(found.rows) == 12, str(found)
    assert all(list(row.errors) == ["eager", *STAGES] for row in found.rows)
    assert all(0 < row.allowed < 1e-4 for row in found.rows)
    parsed(to_html(found))


@pytest.mark.long
@pytest.mark.parametrize(
    "bug, x, stage, operator, line",
    [
        ("half rotation", INPUT, "decomposed", "torch.nn.functional.silu(x)", "silu(x)"),
        ("same sign", INPUT, "functional", "operator.mul(silu, -1)", "torch.tanh(y * -1)"),
        ("lost nan", WITH_NAN, "loops", "torch.relu(add_1)", "torch.relu(y + x)"),
        ("hot sigmoid", INPUT, "loops", "torch.sigmoid(mul)", "torch.sigmoid"),
    ],
)
def test_the_first_stage_and_operator_are_named(
    bug: str, x: torch.Tensor, stage: str, operator: str, line: str
) -> None:
    def hot(x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x * 900).cos() + 1

    with planted(bug):
        function = mc.compile(hot if bug == "hot sigmoid" else layered, options=LOOPS)
        found = mc.operator_accuracy(function, x)
    assert found.first is not None, str(found)
    name, row = found.first
    assert (name, row.operator) == (stage, operator) and line in row.line, str(found)
    assert row.errors["captured"] <= row.allowed < row.errors[stage]
    assert f": {stage}: {operator} is off by" in str(found)
