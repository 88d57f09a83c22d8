"""Kernels that read along another loop than they write work in squares, and are right at every edge."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import minicompile as mc
from minicompile.extension import without

TRITON = {"device_codegen": "triton"}


def added(x: Tensor, y: Tensor) -> Tensor:
    return x.t() + y * 2


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str
)
def test_loads_are_turned_in_squares(dtype: torch.dtype, dynamic: bool) -> None:
    fn = mc.compile(added, dynamic=dynamic, fullgraph=True)
    for rows, columns in ((64, 64), (100, 67), (16, 200), (129, 16)):
        x, y = torch.randn(rows, columns) * 9, torch.randn(columns, rows) * 9
        x, y = x.abs().to(dtype), y.abs().to(dtype)
        torch.testing.assert_close(fn(x, y), added(x, y))
        [kernel] = mc.trace(fn, x, y).kernels
        assert f"mc_transpose_{dtype.itemsize}(" in kernel.text


def test_gpu_tiles_are_squares() -> None:
    x, y = torch.randn(100, 67), torch.randn(67, 100)
    fn = mc.compile(added, fullgraph=True, options=TRITON)
    [plan] = mc.trace(fn, x, y).plans
    assert [*plan.axes] == ["y", "x"] and plan.tiles == {"y": 32, "x": 32}
    torch.testing.assert_close(fn(x, y), added(x, y))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x[:8].t() + y[:, :8],
        lambda x, y: y.index_add(0, torch.arange(67), x.t() + y),
    ],
    ids=["short", "scatter"],
)
def test_what_gains_nothing_has_no_squares(function) -> None:
    x, y = torch.randn(100, 67), torch.randn(67, 100)
    assert not any("mc_transpose" in kernel.text for kernel in mc.trace(function, x, y).kernels)
    torch.testing.assert_close(mc.compile(function)(x, y), function(x, y))


def test_rows_are_read_one_after_the_other_without_the_rule() -> None:
    x, y = torch.randn(100, 67), torch.randn(67, 100)
    with without("plan:cpp:squares"):
        assert "mc_transpose" not in mc.trace(added, x, y).kernels[0].text
        torch.testing.assert_close(mc.compile(added)(x, y), added(x, y))
