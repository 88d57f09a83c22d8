"""Results lie as eager's do, whatever the layout of inputs and weights and of what is in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import minicompile as mc
from minicompile import compat
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


@pytest.mark.parametrize("channels", [4, 16])
def test_a_weights_gradient_that_the_library_misreads_is_taken_of_rows(channels: int) -> None:
    """Of few channels side by side, without AVX-512: its numbers were whatever lay in memory."""
    first = [nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Conv2d(24, channels, 3), nn.ReLU()]
    model = nn.Sequential(*first, nn.Conv2d(channels, 24, 1, 2))
    args = images("rows", (4, 18))[0]
    moved = [str(rewrite) for rewrite in layout_record(mc.trace(model, *args)).rewrites]
    assert sum("convolution_backward" in text for text in moved) == (2 if channels == 4 else 3)
    want, call = results(model, model, args), mc.compile(model)
    for _ in range(5):
        for a, b in zip(results(call, model, args), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


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


def test_channels_last_is_told_where_it_is_chosen() -> None:
    model, ((x,),) = tower(), images("rows", (4, 16))
    off = mc.compile(model, options={"layout_optimization": False})
    assert not any("channels_last" in record.name for record in mc.trace(off, x).aot.passes)
    trace = mc.trace(model, x)
    assert "aten.convolution_backward" in str(layout_record(trace))
    for name, placed in (("forward", 1), ("backward", 1)):
        for extern in trace.graphs[name].loops.externs:
            image = extern.outputs[0]
            assert image is None or image.layout.stride[placed] == 1, extern


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
    wide = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())
    record = layout_record(mc.trace(lambda x: wide(x).mean((2, 3)), x.detach()))
    assert "no change (scratch for a weight's gradient of 36 KiB)" in str(record)
    nothing = layout_record(mc.trace(lambda x: x.relu(), x))
    assert "no change (no convolution of images" in str(nothing)


def test_eager_runs_graphs_whose_images_were_laid_out() -> None:
    torch.manual_seed(0)
    model, ((x,),) = Mixed(), images("rows", (4, 16))
    call = mc.compile(model, backend="aot_eager")
    for a, b in zip(results(call, model, [x]), results(model, model, [x]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


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


def test_images_that_are_results_and_saved_too() -> None:
    model, ((x,),) = tower().eval(), images("rows", (4, 16))
    compare(model, lambda x: (y := model[0](x), z := model[1](y), model[2](z)), [(x,)])


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


SMALL = {
    "a row of one": lambda x: (x.sum(-1, keepdim=True) - 1)[0][::2],
    "a flipped row": lambda x: x[:2][::2].flip(0),
    "a row of several dtypes": lambda x: x[:1].double() + x.amax((), keepdim=True),
    "every other of one": lambda x: (x * 3).unsqueeze(0)[::2],
    "nothing": lambda x: x[:0].amax(-1, keepdim=True) - 1.5,
    "every other of nothing": lambda x: x[:0].amax(-1, keepdim=True)[::2],
    "a written column": lambda x: (
        (x[0] + x.amax((), keepdim=True)).t().masked_fill_(x[0, 0] > 9, 0)
    ),
}


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [(name, None) for name in SMALL]
    + [(name, True) for name in SMALL if name != "a flipped row"],  # asked of eager's own kernel
)
def test_strides_that_lead_to_no_element_are_eagers(name: str, dynamic: bool | None) -> None:
    fn, x = SMALL[name], torch.arange(16.0).view(4, 4) - 8  # sums are exact
    for given in (x, x.clone().requires_grad_()):
        want, have = fn(given), mc.compile(fn, dynamic=dynamic)(given)
        assert torch.equal(want, have)
        assert (want.stride(), want.storage_offset()) == (have.stride(), have.storage_offset())


FREE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "size 1": lambda b: b.t().contiguous().t() * b.unsqueeze(0),
    "size 0": lambda b: b * b[None, None].diff(dim=0),
    "size 0 inside": lambda b: b[:, None].diff(dim=1) * 2,
    "size 0 of a slice": lambda b: torch.ones_like(b[:, 1:3][:, 2:]),
}


@pytest.mark.parametrize("name", FREE)
def test_strides_that_lead_to_no_element_are_eagers_whatever_the_sizes(name: str) -> None:
    fn = FREE[name]
    call = mc.compile(fn, dynamic=True)
    for rows in (5, 9):
        for b in (torch.randn(rows, 7), torch.randn(7, rows).t()):
            assert call(b).stride() == fn(b).stride()


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


def test_large_sizes_without_elements_have_eagers_strides() -> None:
    x = torch.empty(300, 64, 0)
    for dynamic in (True, False):
        found = mc.compile(lambda x: x.sum((0, 1), keepdim=True), dynamic=dynamic)(x)
        assert found.stride() == x.sum((0, 1), keepdim=True).stride()
