"""The comparison of symbolic sizes with fixed ones: each compilation is measured, misses are told."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench import dynamic

pytestmark = pytest.mark.long


def test_three_compilations_of_each_program_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic, "SECONDS", 0.0)
    for function in dynamic.programs(6).values():
        assert len(dynamic.measure(function, 4, 6)) == 3


@pytest.mark.parametrize(("ratio", "code"), [(1.1, 0), (1.2, 1)])
def test_a_slow_kernel_is_the_exit_code(
    ratio: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[Any]
) -> None:
    monkeypatch.setattr(dynamic, "measure", lambda *_: [1e-3, 1e-3, 1e-3 * ratio])
    assert dynamic.run(threads=0) == code
    shown = capsys.readouterr().out
    assert "softmax" in shown
    assert f"{ratio:.2f}" in shown
