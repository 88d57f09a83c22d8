"""Shared by all tests: repeatable, and GPU tests skipped with the reason where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from minicompile.codegen import cpp
from minicompile.codegen.plan import KernelPlan, KernelSource
from tests.codegen.races import shared_writes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # torch.compile that raised leaves its frame evaluator in the process, and then ours is not used
    items.sort(key=lambda item: "test_torch_side" in item.nodeid)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU: torch.cuda.is_available() is False")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Every test starts from the same random state."""
    torch.manual_seed(0)
    yield


@pytest.fixture(autouse=True)
def nothing_kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that changes the compiler must not find a GPU graph that another one compiled."""
    if torch.cuda.is_available() and "test_graph_cache" not in request.node.nodeid:
        monkeypatch.setattr("minicompile.plugins.graph_cache.store.key_of", lambda *given: None)


@pytest.fixture(autouse=True)
def no_races(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever C++ kernel a test generates: no thread writes where others do."""
    print_kernel, found = cpp.print_kernel, list[str]()

    def checked(plan: KernelPlan) -> KernelSource:
        kernel = print_kernel(plan)
        found.extend(shared_writes(kernel.text))
        return kernel

    monkeypatch.setattr(cpp, "print_kernel", checked)
    yield
    assert not found
