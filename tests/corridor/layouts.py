"""Convolutional models, images in two layouts, and results compared with eager's by value and strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import minicompile as mc
from tests.aot.peak_memory import Residual
from tests.comparing import assert_as_eager

FORMATS = {"rows": torch.contiguous_format, "channels_last": torch.channels_last}


def tower() -> nn.Module:
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
    return nn.Sequential(stem, nn.MaxPool2d(2), Residual(16, 24, 2))


def images(layout: str, *sizes: tuple[int, int]) -> list[tuple[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(n, 3, side, side, generator=generator) for n, side in sizes]
    return [(x.to(memory_format=FORMATS[layout]),) for x in made]


def compare(
    model: nn.Module,
    fn: Callable[..., Any],
    many: Sequence[Any],
    dynamic: bool | None = None,
    **options: Any,
) -> None:
    """Every call gives eager's results, and gradients that lie as eager's do."""
    call = mc.compile(fn, fullgraph=True, dynamic=dynamic, options={"verify": True, **options})
    for args in many:
        assert_as_eager(call, fn, *args, module=model, gradient_strides=True, rtol=1e-3, atol=1e-3)
