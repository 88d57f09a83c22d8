"""Shared by all tests: repeatable, and GPU tests skipped with the reason where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from minicompile.ops.events import Event, observer
from tests.codegen.races import shared_writes

SLOW_SECONDS = 20


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # torch.compile that raised leaves its frame evaluator in the process, and then ours is not used
    items.sort(key=lambda item: "test_torch_side" in item.nodeid)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU: torch.cuda.is_available() is False")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List tests of over 20 s that don't say why by the mark `slow`. A list, no failure: machines differ."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.getreports(kind)]
    slow = [r for r in reports if r.duration > SLOW_SECONDS and "slow" not in r.keywords]
    for report in sorted(slow, key=lambda report: -report.duration):
        terminalreporter.line(f"{report.duration:.0f} s without a reason: {report.nodeid}")


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Every test starts from the same random state."""
    torch.manual_seed(0)
    yield


@pytest.fixture(autouse=True)
def races() -> Iterator[list[str]]:
    """Watch the kernels of every test, by an observer of that name: no C++ thread writes where others do.

    Compilations that are watched are not read from the GPU graph cache either, so a test that changes the
    compiler does not get what another one compiled. The tests of that cache define an empty `races`.
    """
    races = list[str]()

    def look(event: Event) -> None:
        if event.kind == "kernels":
            races.extend(line for kernel in event.subject for line in shared_writes(kernel.text))

    with observer.scoped():
        observer("races")(look)
        yield races
    assert not races
