"""Images channels-last between convolutions.

- Results, gradients and their strides stay eager's, in training and at other sizes.
- Images move only where that copies less than the convolutions read and write.
- A graph that looks at memory keeps its layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import minicompile as mc
from tests.comparing import assert_as_eager
from tests.corridor.layouts import compare, images, tower


class Mixed(nn.Module):
    """Images that take every road: windows, slices, joins, random numbers, views, back to rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.last = (
            nn.ConvTranspose2d(16, 8, 2, 2),
            nn.Conv2d(8, 4, 3, groups=4, padding=1),
        )
        self.mix = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.relu(self.first(x))
        y = F.dropout(self.second(self.second(self.second(y))), 0.5, self.training)
        z = F.max_pool2d(F.pad(self.second(y), (0, 1, 0, 1)), 3, 2)
        one, two = z.chunk(2, 1)
        z = torch.cat([two, F.avg_pool2d(y, 2), one], 1)
        z = self.up(z) + self.mix(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        rows = z.flatten(2)
        out = F.interpolate(self.last(z * rows.mean(2)[:, :, None, None]), scale_factor=2.0)
        return out, y.view(-1), z.permute(2, 3, 0, 1), z[:, 1], rows.cumsum(1)


def layout_record(trace: mc.Trace) -> Any:
    (found,) = [record for record in trace.aot.passes if record.name == "prims.channels_last"]
    return found


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("made", [tower, Mixed])
def test_channels_last_inside_of_a_graph_changes_no_result(
    made: Callable[[], nn.Module], mode: str, dynamic: bool | None
) -> None:
    torch.manual_seed(0)
    model, many = made().train(mode == "training"), images("rows", (4, 16), (5, 20))
    with torch.set_grad_enabled(mode == "training"):
        assert layout_record(mc.trace(model, *many[0])).changed
        for (x,) in many:
            x.requires_grad_(mode == "training")
        compare(model, lambda x: model(x), many if dynamic else many[:1], dynamic)


@pytest.mark.long
@pytest.mark.parametrize("channels", [4, 16])
def test_a_weights_gradient_that_the_library_misreads_is_taken_of_rows(channels: int) -> None:
    """Of few channels side by side, without AVX-512: its numbers were whatever lay in memory."""
    first = [nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Conv2d(24, channels, 3), nn.ReLU()]
    model = nn.Sequential(*first, nn.Conv2d(channels, 24, 1, 2))
    args = images("rows", (4, 18))[0]
    moved = [str(rewrite) for rewrite in layout_record(mc.trace(model, *args)).rewrites]
    assert sum("convolution_backward" in text for text in moved) == (2 if channels == 4 else 3)
    call = mc.compile(model)
    for _ in range(5):
        assert_as_eager(call, model, *args, module=model, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("made", [tower, Mixed])
def test_channels_last_on_a_gpu_changes_no_result(made: Callable[[], nn.Module]) -> None:
    """In float64, as convolutions in float32 are rounded to TF32; without dropout's random numbers."""
    torch.manual_seed(0)
    model = made().to("cuda", torch.float64).train(made is tower)
    with torch.set_grad_enabled(made is tower):
        (x,) = images("rows", (4, 16))[0]
        x = x.to("cuda", torch.float64).requires_grad_(made is tower)
        assert layout_record(mc.trace(model, x)).changed
        compare(model, lambda x: model(x), [(x,)])


def test_saved_images_lie_as_the_backward_wants_them() -> None:
    """Copied are the first image and the last, and gradients of weights, which eager has in rows."""
    model, ((x,),) = tower(), images("rows", (4, 16))
    trace = mc.trace(model, x)
    backward = trace.aot.backward
    saved = [
        n.meta["val"] for n in backward.nodes if n.op == "placeholder" and "tangent" not in n.name
    ]
    large = [v for v in saved if isinstance(v, torch.Tensor) and v.dim() == 4 and v.shape[2] > 3]
    assert large and all(v.stride(1) == 1 for v in large)
    copies = [n for n in trace.aot.joint.nodes if n.target is torch.ops.aten.clone.default]
    sizes = {n.meta["val"].numel() for n in copies if n.meta["val"].dim() == 4}
    weights = [w.numel() for w in model.parameters() if w.dim() == 4 and w.shape[2] > 1]
    assert sizes == {x.numel(), *weights, 4 * 24 * 4 * 4}


def test_images_stay_in_rows_where_copies_would_cost_more() -> None:
    layer, ((x,),) = nn.Conv2d(3, 4, 3, padding=1), images("rows", (2, 8))
    record = layout_record(mc.trace(layer, x.requires_grad_()))
    assert not record.changed and "would be copied, convolutions read and write" in str(record)
    compare(layer, lambda x: layer(x), [(x,)])


def test_several_backward_calls_and_hooks_see_the_saved_images() -> None:
    model, ((x,),) = tower().eval(), images("rows", (4, 16))
    call, moved = mc.compile(model), list[torch.Tensor]()

    def pack(value: torch.Tensor) -> torch.Tensor:
        moved.append(value)
        return value.clone(memory_format=torch.contiguous_format)

    want = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        total = call(x).square().sum()
    assert any(v.dim() == 4 and not v.is_contiguous() for v in moved)
    for _ in range(2):
        have = torch.autograd.grad(total, list(model.parameters()), retain_graph=True)
        for a, b in zip(have, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_images_written_to_in_place_keep_their_layout() -> None:
    torch.manual_seed(0)
    layer, other = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = other(layer(x).relu()).relu()
        x.add_(other(y))
        return layer(y).mean((2, 3))

    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            one, two = (images("rows", (4, 16))[0][0] for _ in range(2))
            want, have = fn(one), mc.compile(fn)(two)
        torch.testing.assert_close(have, want, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-3)
        assert two.stride() == one.stride()


def test_a_graph_that_looks_at_memory_keeps_its_layouts() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, 3, padding=1)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return layer(x).relu().as_strided((2, 16), (256, 3)) * 2

    with torch.no_grad():
        compare(layer, fn, images("rows", (4, 16)))
