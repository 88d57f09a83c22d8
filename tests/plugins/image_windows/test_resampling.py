"""Upsampling equals eager, forward and backward; nothing is scattered."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import minicompile as mc
from tests.comparing import assert_as_eager


def resize(mode: str, size: tuple[int, ...], **options):
    return lambda x: F.interpolate(x, size=size, mode=mode, **options)


def rescale(mode: str, scale: float, **options):
    return lambda x: F.interpolate(x, scale_factor=scale, mode=mode, **options)


IMAGES = {
    "nearest": resize("nearest", (14, 5)),
    "nearest, scale": rescale("nearest", 1.7),
    "nearest, twice": rescale("nearest", 2.0),
    "nearest, smaller": resize("nearest", (3, 2)),
    "linear": resize("bilinear", (13, 6)),
    "linear, same": resize("bilinear", (7, 9)),
    "linear, same by scale": rescale("bilinear", 1.1),
    "linear, corners": resize("bilinear", (13, 1), align_corners=True),
    "linear, scale": rescale("bilinear", 2.3),
    "linear, much larger": rescale("bilinear", 9.0),
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
def test_kernels_equal_eager(name: str, language: str) -> None:
    fn, x = IMAGES[name], torch.randn(2, 2, 7, 9)
    compiled = mc.compile(weighted(fn), options={"device_codegen": language})
    weights = torch.randn_like(fn(x))
    for given in (x, values(x), x.contiguous(memory_format=torch.channels_last)):
        for factor in (weights, values(weights)):
            args = given.clone().requires_grad_(), factor
            assert_as_eager(compiled, weighted(fn), *args, rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in IMAGES if "scale" not in n])
def test_gradients_of_half_types_are_rounded_as_in_eager(name: str) -> None:
    fn, x = weighted(IMAGES[name]), torch.randn(2, 3, 7, 9).bfloat16().requires_grad_()
    exact = {} if "linear" in name else {"rtol": 0, "atol": 0}  # sums of weighted terms: float32
    assert_as_eager(mc.compile(fn), fn, x, torch.randn_like(IMAGES[name](x)), **exact)


def test_integers_are_moved_exactly() -> None:
    byte = torch.randint(256, (2, 3, 5, 4)).to(torch.uint8)
    assert torch.equal(mc.compile(IMAGES["nearest"])(byte), IMAGES["nearest"](byte))


@pytest.mark.long
@pytest.mark.parametrize("name", ["nearest", "linear"])
def test_unknown_sizes_fall_back(name: str) -> None:
    fn, x = IMAGES[name], torch.randn(2, 2, 7, 9, requires_grad=True)
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
    fn = rescale(mode, factor)
    compiled = mc.compile(fn, dynamic=True, fullgraph=True)
    for extent in (4, 11):
        x = values(torch.randn(2, 3, *range(extent, extent + dims)))
        for given in (x, x.transpose(1, -1).contiguous().transpose(1, -1)):
            assert_as_eager(compiled, fn, given.requires_grad_())


def test_a_gradient_is_one_kernel() -> None:
    for name in ("nearest, twice", "linear"):
        x = torch.randn(2, 2, 7, 9, requires_grad=True)
        graphs = mc.trace(IMAGES[name], x).graphs
        assert len(graphs["forward"].kernels) == len(graphs["backward"].kernels) == 1, name
