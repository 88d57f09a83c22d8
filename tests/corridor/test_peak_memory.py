"""The memory that compiled models have live at once is never more than eager's."""

from __future__ import annotations

import pytest

from tests.aot.peak_memory import KINDS, ROUNDING, measure


@pytest.mark.long
@pytest.mark.parametrize("where", KINDS)
@pytest.mark.parametrize("model", ["MLP", "GPT-2", "ResNet"])
def test_peak_memory_is_at_most_eagers(model: str, where: str) -> None:
    peaks = measure(model, where, ["eager", "inductor"], "cpu", 1)
    assert peaks["inductor"] <= peaks["eager"] + ROUNDING
