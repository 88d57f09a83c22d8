"""Convolutional models, images in two layouts, and results compared with eager's by value and strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import minicompile as mc
from tests.aot.peak_memory import Residual

FORMATS = {"rows": torch.contiguous_format, "channels_last": torch.channels_last}


def tower() -> nn.Module:
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
    return nn.Sequential(stem, nn.MaxPool2d(2), Residual(16, 24, 2))


def images(layout: str, *sizes: tuple[int, int]) -> list[tuple[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(n, 3, side, side, generator=generator) for n, side in sizes]
    return [(x.to(memory_format=FORMATS[layout]),) for x in made]


def results(call: Callable[..., Any], model: nn.Module, args: Sequence[Any]) -> list[torch.Tensor]:
    """Outputs, and all gradients if they are wanted; the model's state is left alone."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(0)
    out = call(*args)
    outputs = list(out) if isinstance(out, tuple) else [out]
    if outputs[0].requires_grad:
        total = sum(o.square().sum() for o in outputs)
        leaves = [*model.parameters(), *(x for x in args if x.requires_grad)]
        outputs += torch.autograd.grad(total, leaves)
    model.load_state_dict(state)
    return outputs


def compare(
    model: nn.Module,
    fn: Callable[..., Any],
    many: Sequence[Any],
    dynamic: bool | None = None,
    **options: Any,
) -> None:
    call = mc.compile(fn, fullgraph=True, dynamic=dynamic, options={"verify": True, **options})
    for args in many:
        want, have = results(fn, model, args), results(call, model, args)
        for a, b in zip(have, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
            assert a.stride() == b.stride(), (a.shape, a.stride(), b.stride())
