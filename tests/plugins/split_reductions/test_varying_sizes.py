"""Shared rows of sizes that vary: right at every size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import minicompile as mc
from minicompile.codegen import triton_rules
from minicompile.codegen.plan import KernelPlan
from minicompile.debug.gpu_assembly import cross_compile
from minicompile.plugins.split_reductions import choose
from minicompile.plugins.split_reductions.split import ALIGNED
from tests.codegen.test_varying_sizes import compiled, gradients


@pytest.mark.long
def test_parts_of_varying_rows_begin_where_wide_loads_can() -> None:
    trace = mc.trace(compiled(lambda x: (x * x).sum()), torch.empty(1024, 4096))
    sweep, _ = trace.kernels
    (length,) = sweep.plan.reduction_ranges.values()
    assert length.args[0] == ALIGNED
    assert "ld.global.v4" in cross_compile(sweep).levels["ptx"]


@pytest.fixture
def early(monkeypatch) -> Iterator[None]:
    """Rows are split at sizes for tests."""
    monkeypatch.setattr(choose, "LEAST_ROW", 8)
    monkeypatch.setattr(choose, "LEAST_COLUMN", 4)
    monkeypatch.setattr(choose, "COLUMNS", 4)
    monkeypatch.setattr(triton_rules, "longest_persistent", lambda plan, gpu: 40)
    monkeypatch.setattr(choose, "seconds", lambda plan, gpu, parts, programs: -parts)
    yield


def batch_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, w, b, True))


def roles(plans: list[KernelPlan]) -> list[str]:
    return [launch.name.split("_")[-2] for plan in plans for launch in plan.launches]


@pytest.mark.long
def test_split_rows_are_right_at_every_size(early) -> None:
    fn = compiled(batch_norm)
    first = torch.randn(8, 3, 9, 9), torch.randn(3), torch.randn(3)
    assert "sweep" in roles(mc.trace(fn, *first).plans)
    for size in ((8, 3, 9, 9), (9, 17, 8, 8), (2, 2, 2, 2), (33, 3, 16, 16), (3, 40, 5, 5)):
        torch.manual_seed(0)
        x, w, b = torch.randn(size) * 3 + 50, torch.randn(size[1]), torch.randn(size[1])
        found, expected = (gradients(f, x, w, b) for f in (fn, batch_norm))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
