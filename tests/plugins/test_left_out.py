"""Without a plug-in its programs give eager's values, strides and gradients: by extern calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import minicompile as mc
from tests.comparing import assert_as_eager

X, LAST = torch.randn(2, 3, 9, 8), torch.channels_last


PROGRAMS: dict[str, tuple[str, Callable[..., Any], torch.Tensor, str]] = {
    "max_pool": (
        "image_windows", lambda x: F.max_pool2d(x * 2, 3, 2, 1).exp(), X, "max_pool2d_with_indices.default",
    ),
    "avg_pool": ("image_windows", lambda x: F.avg_pool2d(x * 2, 3, 2, 1).exp(), X, "avg_pool2d"),
    "logit": ("special_functions", lambda x: torch.logit(x.sigmoid(), 1e-3) * x, X, "logit"),
}  # fmt: skip


def externs(fn: Callable[..., Any], x: torch.Tensor) -> str:
    graphs = mc.trace(fn, x).graphs.values()
    return " ".join(str(extern.op) for graph in graphs for extern in graph.loops.externs)


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_operators_of_a_plugin_left_out_are_extern_calls(name: str, dynamic: bool) -> None:
    plugin, fn, x, operator = PROGRAMS[name]
    x = x.clone().requires_grad_()
    chosen = [p for p in mc.Options().plugins if p != plugin]
    without = mc.compile(fn, fullgraph=True, dynamic=dynamic, options={"plugins": chosen})
    assert_as_eager(without, fn, x)
    assert operator in externs(without, x)
    if not dynamic:
        assert operator not in externs(mc.compile(fn, dynamic=False), x)
