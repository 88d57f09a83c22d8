"""What is seen of compiled CUDA code is about CUDA: launches, both compilers."""

from __future__ import annotations

import pytest
import torch

import minicompile as mc
from minicompile.ops.events import observer

pytestmark = pytest.mark.gpu


def scores(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.relu(x @ w) * 2, -1).sum(0)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    x, w = torch.randn(512, 256, generator=made), torch.randn(256, 384, generator=made)
    return x.cuda().requires_grad_(), w.cuda().requires_grad_()


def same(found: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> bool:
    """Values and gradients are eager's."""
    wanted = scores(*inputs)
    weights = torch.linspace(0, 1, len(wanted), device=wanted.device)
    ours, theirs = (torch.autograd.grad(y @ weights, inputs) for y in (found, wanted))
    pairs = [(found, wanted), *zip(ours, theirs)]
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in pairs)


def test_each_launch_has_a_time() -> None:
    compiled, given = mc.compile(scores), inputs()
    assert same(compiled(*given), given)
    found = mc.launches(compiled, *given)
    kinds = [launch.kind for graph in found for launch in graph.launches]
    assert {"kernel", "extern"} <= set(kinds)
    assert same(compiled(*given), given)


def test_both_compilers_agree() -> None:
    found = mc.compare_with_torch(scores, *inputs())
    assert found.conclusion == "both agree with eager", str(found)
    assert found.ours.kernels and found.theirs.kernels, str(found)


def test_a_fresh_cache_compiles_triton_kernels_again() -> None:
    built = []
    with mc.scoped():

        @observer("building")
        def listen(event: object) -> None:
            if getattr(event, "kind", "") == "building":
                built.append(event)

        given = inputs()
        with mc.fresh_cache():
            assert same(mc.compile(scores)(*given), given)
    assert built
