"""Results lie as eager's do, whatever the layout of inputs and weights and of what is in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import minicompile as mc
from minicompile import compat
from tests.corridor.layouts import FORMATS, compare, images, tower


@pytest.mark.long
@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("layout", FORMATS)
def test_a_convolutional_model_keeps_eagers_strides(layout: str, weights: str) -> None:
    model = tower().to(memory_format=FORMATS[weights])  # type: ignore[call-overload]
    compare(model, lambda x: model(x), images(layout, (2, 8)))
    model.eval()
    with torch.no_grad():
        compare(model, lambda x: model(x), images(layout, (2, 8), (3, 12)), dynamic=True)


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("layout", FORMATS)
def test_permuted_results_keep_eagers_strides(layout: str, dynamic: bool | None) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2 + 1
        last = y.permute(0, 2, 3, 1).relu()
        first = (y + 1).permute(2, 0, 1, 3)
        return last, first, y.transpose(1, 3).contiguous().sin(), y.contiguous() + x

    compare(nn.Module(), fn, images(layout, (2, 8), (3, 12)), dynamic)


@pytest.mark.parametrize("dynamic", [True, False])
def test_strides_of_a_view_of_size_1_are_the_inputs(dynamic: bool) -> None:
    """As they were given: a view of the same shape may choose others."""

    def made_without_history(x: torch.Tensor) -> Any:
        with torch.no_grad():
            y = x.transpose(0, 1)
        return y.transpose(0, 1), y

    x = torch.randn(8, 1, 5).transpose(0, -1)
    for fn, given in ((lambda x: x * 2, x), (made_without_history, (x * 1).requires_grad_() * 1)):
        want, have = fn(given), mc.compile(fn, dynamic=dynamic)(given)
        for one, other in zip(*map(compat.tree_leaves, (want, have)), strict=True):
            assert one.stride() == other.stride()
