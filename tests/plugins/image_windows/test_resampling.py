"""Upsampling equals eager, forward and backward; nothing is scattered."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import minicompile as mc
from tests.lowering.samples import Found, as_sample
from tests.lowering.samples import check as check_sample

aten = torch.ops.aten


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


@pytest.mark.long
@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("language", ["auto", "triton"])
def test_kernels_equal_eager(name: str, language: str) -> None:
    fn, x = IMAGES[name], torch.randn(2, 2, 7, 9)
    compiled = mc.compile(fn, options={"device_codegen": language})
    for given in (x, values(x), x.contiguous(memory_format=torch.channels_last)):
        torch.testing.assert_close(compiled(given), fn(given), equal_nan=True, rtol=1e-5, atol=1e-5)
        leaf = given.clone().requires_grad_()
        grad = torch.randn_like(fn(x)) if given is x else values(torch.randn_like(fn(x)))
        wanted, got = (torch.autograd.grad(f(leaf), leaf, grad)[0] for f in (fn, compiled))
        torch.testing.assert_close(got, wanted, equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in IMAGES if "scale" not in n])
def test_gradients_of_half_types_are_rounded_as_in_eager(name: str) -> None:
    fn, x = IMAGES[name], torch.randn(2, 3, 7, 9).bfloat16().requires_grad_()
    grad = torch.randn_like(fn(x))
    (expected,) = torch.autograd.grad(fn(x), x, grad)
    (found,) = torch.autograd.grad(mc.compile(fn)(x), x, grad)
    if "linear" in name:  # sums of weighted terms: float32, in another order
        torch.testing.assert_close(found, expected)
    else:
        assert torch.equal(found, expected)


def test_integers_are_moved_exactly() -> None:
    byte = torch.randint(256, (2, 3, 5, 4)).to(torch.uint8)
    assert torch.equal(mc.compile(IMAGES["nearest"])(byte), IMAGES["nearest"](byte))


@pytest.mark.long
def test_unknown_sizes_fall_back() -> None:
    found = Found()
    for name in ("nearest", "linear"):
        x = torch.randn(2, 2, 7, 9, requires_grad=True)
        check_sample(as_sample(name, IMAGES[name], x), found, dynamic=True)
    assert found.wrong == []
    assert {reason for _, reason in found.externs} <= {
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
            leaf = given.requires_grad_()
            wanted, got = fn(leaf), compiled(leaf)
            assert wanted.stride() == got.stride()
            torch.testing.assert_close(got, wanted, equal_nan=True)
            grads = [torch.autograd.grad(y.sum(), leaf)[0] for y in (got, wanted)]
            torch.testing.assert_close(*grads)


def test_a_gradient_is_one_kernel() -> None:
    for name in ("nearest, twice", "linear"):
        x = torch.randn(2, 2, 7, 9, requires_grad=True)
        graphs = mc.trace(IMAGES[name], x).graphs
        assert len(graphs["forward"].kernels) == len(graphs["backward"].kernels) == 1, name
