"""Pooling and resampling in loops.

- Windows of any kind, and images of any other size, equal eager's to the bit or within rounding: values,
  gradients, strides; next to NaN and infinities; at symbolic sizes.
- Large windows, those with gaps, and tables of positions for unknown sizes are left to the library.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import minicompile as mc
from tests.comparing import assert_as_eager

aten = torch.ops.aten

WINDOWS = {
    "max": lambda x: aten.max_pool2d_with_indices(x, [3, 2], [2, 1], [1, 1]),
    "average": lambda x: F.avg_pool2d(x, 3, 2, 1),
}
LEFT = {
    "max, dilated": lambda x: F.max_pool2d(x, 2, 1, 1, 2),
    "max, ceil": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "max, large": lambda x: F.max_pool2d(x, 7, 1, 3),
    "average, only elements": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "average, divisor": lambda x: F.avg_pool2d(x, 2, divisor_override=3),
}


def images(*size: int) -> torch.Tensor:
    """NaN, infinities and zeros of both signs among ordinary numbers."""
    x = torch.randn(*size)
    special = torch.tensor([torch.nan, -torch.inf, torch.inf, -0.0, 0.0, -torch.inf, 1.0, 1.0])
    chosen = torch.randint(0, 3, size) == 0
    return torch.where(chosen, special[torch.randint(0, len(special), size)], x)


def test_the_sign_of_zero_is_that_of_the_first() -> None:
    x = torch.tensor([[[[-0.0, 0.0], [0.0, -0.0]]]])
    fn = lambda x: F.max_pool2d(x, 2)  # noqa: E731
    for given in (x, -x):
        assert torch.equal(mc.compile(fn)(given).signbit(), fn(given).signbit())


EXACT = {"rtol": 0, "atol": 0}


@pytest.mark.long
@pytest.mark.parametrize("name", WINDOWS)
def test_gradients_of_windows_of_half_types_are_rounded_as_in_eager(name: str) -> None:
    fn, x = WINDOWS[name], torch.randn(2, 3, 10, 9).bfloat16().requires_grad_()
    first = lambda x: fn(x)[0] if "max" in name else fn(x)  # noqa: E731
    noise = torch.randn_like(first(x))
    weighted = lambda x: first(x) * noise  # noqa: E731
    assert_as_eager(mc.compile(weighted), weighted, x, **EXACT)


@pytest.mark.long
@pytest.mark.parametrize("language", ["auto", "triton"])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_equal_eager(name: str, language: str) -> None:
    fn, x = WINDOWS[name], images(1, 2, 10, 9)
    compiled = mc.compile(fn, options={"device_codegen": language})
    channels_last = x.contiguous(memory_format=torch.channels_last)
    for given in (x, torch.full_like(x, -torch.inf), channels_last, x.bfloat16()):
        assert_as_eager(compiled, fn, given, **(EXACT if "max" in name else {}))


@pytest.mark.long
@pytest.mark.parametrize("name", WINDOWS)
def test_sizes_may_be_symbols(name: str) -> None:
    fn, x = WINDOWS[name], torch.randn(2, 3, 10, 9, requires_grad=True)
    compiled = mc.compile(fn, dynamic=True)
    assert_as_eager(compiled, fn, x)
    assert not any(graph.loops.externs for graph in mc.trace(compiled, x).graphs.values())


@pytest.mark.parametrize("name", LEFT)
def test_other_windows_are_left_to_the_library(name: str) -> None:
    fn, x = LEFT[name], torch.randn(1, 2, 10, 9, requires_grad=True)
    assert_as_eager(mc.compile(fn), fn, x)
    assert all(graph.loops.externs for graph in mc.trace(fn, x).graphs.values())


# -- resampling


def resize(*size: int):
    return lambda x: F.interpolate(x, size=size)


def rescale(scale: float, mode: str = "nearest"):
    return lambda x: F.interpolate(x, scale_factor=scale, mode=mode)


IMAGES = {
    "nearest": resize(14, 5),
    "nearest, scale": rescale(1.7),
    "nearest, twice": rescale(2.0),
    "nearest, smaller": resize(3, 2),
}


def values(x: torch.Tensor) -> torch.Tensor:
    """With NaN and infinities far from each other."""
    x = x.clone()
    flat = x.as_strided([x.numel()], [1])
    flat[0], flat[-1], flat[x.numel() // 2] = torch.nan, -torch.inf, torch.inf
    return x


def weighted(fn):
    """The function times its last argument, which is then what its gradient gets."""
    return lambda x, weights: fn(x) * weights


@pytest.mark.long
@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("language", ["auto", "triton"])
def test_resampling_equals_eager(name: str, language: str) -> None:
    fn, x = IMAGES[name], torch.randn(2, 2, 7, 9)
    compiled = mc.compile(weighted(fn), options={"device_codegen": language})
    weights = torch.randn_like(fn(x))
    for given in (x, values(x), x.contiguous(memory_format=torch.channels_last)):
        for factor in (weights, values(weights)):
            args = given.clone().requires_grad_(), factor
            assert_as_eager(compiled, weighted(fn), *args)


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in IMAGES if "scale" not in n])
def test_gradients_of_resampled_half_types_are_rounded_as_in_eager(name: str) -> None:
    fn, x = weighted(IMAGES[name]), torch.randn(2, 3, 7, 9).bfloat16().requires_grad_()
    assert_as_eager(mc.compile(fn), fn, x, torch.randn_like(IMAGES[name](x)), **EXACT)


def test_integers_are_moved_exactly() -> None:
    byte = torch.randint(256, (2, 3, 5, 4)).to(torch.uint8)
    assert torch.equal(mc.compile(IMAGES["nearest"])(byte), IMAGES["nearest"](byte))


@pytest.mark.long
def test_resampling_to_unknown_sizes_falls_back() -> None:
    fn, x = IMAGES["nearest"], torch.randn(2, 2, 7, 9, requires_grad=True)
    compiled = mc.compile(fn, dynamic=True, options={"device_codegen": "reference"})
    assert_as_eager(compiled, fn, x)
    graphs = mc.trace(compiled, x).graphs.values()
    assert {extern.reason for graph in graphs for extern in graph.loops.externs} <= {
        "a table of positions for sizes that are only known at run time, or 0"
    }


FACTORS = [("nearest", 1.1, 1), ("bilinear", 1.1, 2), ("trilinear", 1.1, 3), ("bicubic", 1.7, 2)]


@pytest.mark.long
@pytest.mark.parametrize(("mode", "factor", "dims"), FACTORS)
def test_unknown_sizes_times_a_factor_equal_eager(mode: str, factor: float, dims: int) -> None:
    """Also where the size stays the same (eager copies then), next to infinities, and channels last."""
    fn = rescale(factor, mode)
    compiled = mc.compile(fn, dynamic=True, fullgraph=True)
    for extent in (4, 11):
        x = values(torch.randn(2, 3, *range(extent, extent + dims)))
        for given in (x, x.transpose(1, -1).contiguous().transpose(1, -1)):
            assert_as_eager(compiled, fn, given.requires_grad_())


def test_a_gradient_of_resampling_is_one_kernel() -> None:
    x = torch.randn(2, 2, 7, 9, requires_grad=True)
    graphs = mc.trace(IMAGES["nearest, twice"], x).graphs
    assert len(graphs["forward"].kernels) == len(graphs["backward"].kernels) == 1
