"""Threads: a few rounds of `threads.py`, and that nobody waits for somebody else's code."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch

import minicompile as mc
from tests.dynamo import threads
from tests.dynamo.helpers import equal, lenient

x = torch.randn(3, 4)


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 8])
def test_threads_give_what_eager_gives(count: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # recompile limits are reached
        report = threads.run(count, ["eager"], lambda number: number < 120)
    assert not report.wrong and not report.errors, str(report)
    assert sum(report.calls.values()) > 110 * count and len(report.calls) == len(threads.PROGRAMS)
    assert report.graphs > 10


def test_a_wrong_result_and_an_error_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(backends: list[str], functions: list[Any]) -> list[tuple[Any, Any]]:
        return [(f, mc.compile(threads.with_breaks)) for f in functions if f is threads.scaled]

    monkeypatch.setattr(threads, "compile_all", mistaken)
    assert len(threads.run(2, ["eager"], lambda number: number < 3).wrong) == 6
    monkeypatch.setattr(threads, "equal", None)
    assert len(threads.run(2, ["eager"], lambda number: number < 3).errors) == 2


def test_user_code_waits_for_nobody() -> None:
    """One thread stands in its own code after a graph break until another has compiled."""
    compiled, reached = threading.Event(), threading.Event()
    found: list[Any] = []

    def waits(a: torch.Tensor) -> torch.Tensor:
        b = a * 2
        reached.set()
        assert compiled.wait(60)
        return b + 1

    def work() -> None:
        found.append(lenient(waits)(x))

    thread = threading.Thread(target=work)
    thread.start()
    assert reached.wait(60)
    assert equal(lenient(lambda a: a + 1)(x), x + 1)
    compiled.set()
    thread.join()
    assert equal(found, [x * 2 + 1])
