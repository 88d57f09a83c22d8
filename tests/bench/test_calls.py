"""The comparison of calls: the instant backend computes once, misses are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import minicompile as mc
from tests.bench import calls
from tests.bench.calls import Figure, Instant

pytestmark = pytest.mark.long


def test_the_instant_backend_runs_the_graph_once() -> None:
    instant = Instant()
    run = mc.compile(lambda a: a * 2, backend=instant)
    first = run(torch.ones(2))
    assert run(torch.zeros(2)) is first is instant.outputs[0]


@pytest.mark.parametrize(("ours", "code"), [(1e-6, 0), (2e-6, 1)])
def test_a_missed_target_is_the_exit_code(
    ours: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[Any]
) -> None:
    monkeypatch.setattr(calls, "figures", lambda: [Figure("a call", ours, 8e-6, 1 / 8)])
    assert calls.run(threads=0) == code
    assert "1/8.0" in capsys.readouterr().out or code
