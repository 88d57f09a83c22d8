"""`trace.fusion_steps()`: every question in order."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile.ops.display import to_html
from minicompile.pipeline_result import Trace


def scores(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.relu(x) * 2, -1).sum(0)


def small(**options: Any) -> Trace:
    return mc.trace(mc.compile(scores, options=options), torch.randn(64, 128))


@pytest.mark.parametrize("inline", ["auto", "never"])
def test_every_decision_is_a_step(inline: str) -> None:
    trace = small(inline=inline)
    assert list(trace.fusion_steps()) == trace.schedule.decisions


def slides_of(page: str) -> list[str]:
    return re.findall(r"<details(?: open)?><summary>(\d+: [^<]*)<", page)


def test_as_slides_each_question_has_one() -> None:
    run = small(inline="never").fusion_steps()
    page = to_html(run)
    assert len(slides_of(page)) == len(run) == 7
    assert page == to_html(small(inline="never").fusion_steps()), "not deterministic"


def test_a_run_without_questions() -> None:
    run = small(fusion=False).fusion_steps()
    assert "0 questions" in str(run) and "0 questions" in to_html(run)
    with pytest.raises(AttributeError, match="has no backward graph; it has forward"):
        small().fusion_steps("backward")
