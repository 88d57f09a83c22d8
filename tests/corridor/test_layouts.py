"""Results lie as eager's do, whatever the layout of inputs and weights and of what is in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import minicompile as mc
from tests.aot.peak_memory import Residual

FORMATS = {"rows": torch.contiguous_format, "channels_last": torch.channels_last}


def tower() -> nn.Module:
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    return nn.Sequential(stem, nn.MaxPool2d(2), Residual(4, 8, 2))


def images(layout: str, *sizes: tuple[int, int]) -> list[tuple[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(n, 3, side, side, generator=generator) for n, side in sizes]
    return [(x.to(memory_format=FORMATS[layout]),) for x in made]


def results(call: Callable[..., Any], model: nn.Module, args: Sequence[Any]) -> list[torch.Tensor]:
    """Outputs, and the gradients of the parameters if they are wanted; the model's state is left alone."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    out = call(*args)
    outputs = list(out) if isinstance(out, tuple) else [out]
    if outputs[0].requires_grad:
        total = sum(o.square().sum() for o in outputs)
        outputs += torch.autograd.grad(total, list(model.parameters()))
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


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("layout", FORMATS)
def test_a_convolutional_model_keeps_eagers_strides(layout: str, weights: str) -> None:
    model = tower().to(memory_format=FORMATS[weights])  # type: ignore[call-overload]
    compare(model, lambda x: model(x), images(layout, (2, 8)))
    model.eval()
    with torch.no_grad():
        compare(model, lambda x: model(x), images(layout, (2, 8), (3, 12)), dynamic=True)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("layout", FORMATS)
def test_permuted_results_keep_eagers_strides(layout: str, dynamic: bool | None) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2 + 1
        last = y.permute(0, 2, 3, 1).relu()
        first = (y + 1).permute(2, 0, 1, 3)
        return last, first, y.transpose(1, 3).contiguous().sin(), y.contiguous() + x

    compare(nn.Module(), fn, images(layout, (2, 8), (3, 12)), dynamic)


@pytest.mark.parametrize("mode", ["training", "inference", "dynamic"])
def test_channels_last_inside_of_a_graph_changes_no_result(mode: str) -> None:
    model = tower()
    many, dynamic = images("rows", (2, 8), (3, 12)), True if mode == "dynamic" else None
    if mode == "training":
        compare(model, lambda x: model(x), many[:1], layout_optimization=True)
        return
    model.eval()
    with torch.no_grad():
        compare(model, lambda x: model(x).relu(), many, dynamic, layout_optimization=True)


def test_channels_last_is_told_where_it_is_chosen() -> None:
    model, ((x,),) = tower().eval(), images("rows", (2, 8))
    off = mc.compile(model, options={"layout_optimization": False})
    with torch.no_grad():
        loops = mc.trace(model, x).graphs["forward"].loops
        plain = mc.trace(off, x).graphs["forward"].loops
    training = mc.trace(model, x).graphs["forward"].loops
    for graph in (plain, training):
        assert [e.reason for e in graph.externs] == ["library convolution"] * 4
    chosen = "library convolution, channels last"
    assert [e.reason for e in loops.externs] == [chosen] * 4
    assert "read by aten.convolution.default, channels last" in str(loops)
    for extern in loops.externs:
        (result,) = extern.outputs
        assert result is not None and result.layout.stride[1] == 1


def test_a_graph_that_looks_at_memory_keeps_its_layouts() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, 3, padding=1)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return layer(x).relu().as_strided((2, 16), (256, 3)) * 2

    with torch.no_grad():
        compare(layer, fn, images("rows", (2, 8)), layout_optimization=True)
