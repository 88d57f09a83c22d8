"""Results that get no gradient take no part in the backward, as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import minicompile as mc
from tests.dynamo.helpers import explained
from tests.torch_versions import needs

BACKENDS = ["aot_eager", "inductor"]


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


def three(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x @ h
    return y.relu().sqrt(), torch.cat([y, x.t()]) * 2, (h.sum(1) * x).exp()


def gradients(
    fn: Callable[..., Any], backend: str | None, used: tuple[int, ...], dynamic: bool
) -> list[torch.Tensor | None]:
    mc.reset()
    call = mc.compile(fn, backend=backend, dynamic=dynamic or None) if backend else fn
    x, h = leaf(4, 4), leaf(4, 4)
    results = call(x, h)
    torch.autograd.backward([results[i] for i in used], [results[i].detach() for i in used])
    return [x.grad, h.grad]


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), (1, 2)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_some_results(backend: str, used: tuple[int, ...], dynamic: bool) -> None:
    expected = gradients(three, None, used, dynamic)
    torch.testing.assert_close(gradients(three, backend, used, dynamic), expected, equal_nan=True)


def steps(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.sqrt().floor(), x * 2, (x * h).ceil() + x


def steps_behind(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * h.exp()
    return y.sqrt().round().sum(), y.exp(), torch.sign(y.sqrt()) * y


def slopes_that_read_no_tangent(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = (x * h).exp()
    return torch.copysign(x.detach(), y), y.mean(), torch.copysign(h, x.sin().sum())


@pytest.mark.long
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fn", [steps, steps_behind, slopes_that_read_no_tangent])
def test_a_slope_of_zero_is_not_asked_for_either(
    fn: Callable[..., Any], backend: str, dynamic: bool | None, used: tuple[int, ...]
) -> None:
    found = []
    for call in (fn, mc.compile(fn, backend=backend, dynamic=dynamic)):
        x, h = torch.tensor([0.0, 0.5, 2]).requires_grad_(), torch.ones(3, requires_grad=True)
        results = call(x, h)
        torch.autograd.backward([results[i].sum() for i in used])
        found.append((x.grad, h.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_is_always_zero_is_there(backend: str) -> None:
    call = mc.compile(lambda x: ((x * x).sign(), x * x * 2, x.exp()), backend=backend)
    x = torch.ones(3, requires_grad=True)
    call(x)[0].sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0, 0, 0]


class Ones(torch.autograd.Function):
    """Its backward doesn't look at the gradient that it gets."""

    @staticmethod
    def forward(_: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(_: Any, tangent: Any) -> Any:
        return torch.ones(3)


def test_a_gradient_that_reads_no_other_is_left_to_eager_beside_others() -> None:
    alone, beside = lambda x: Ones.apply(x), lambda x: (Ones.apply(x), x * 2)
    for fn, reason in ((beside, "is not computed"), (alone, "")):
        compiled, x = mc.compile(fn), torch.zeros(3, requires_grad=True)
        results = compiled(x)
        (results[1] if reason else results).sum().backward()
        assert x.grad is not None and x.grad.tolist() == ([2] * 3 if reason else [1] * 3)
        breaks = explained(compiled).breaks
        assert reason in breaks[0].reason if reason else not breaks


def test_a_history_that_only_some_results_come_from_is_left_to_eager() -> None:
    """Autograd would go on into it, with no gradient, when the others are differentiated."""
    compiled = mc.compile(lambda x, y: (x + 1, x * y))
    x, w = leaf(3), leaf(3)
    first, second = compiled(x.sin(), w.exp())
    first.sum().backward(retain_graph=True)
    assert w.grad is None and "with a history" in explained(compiled).breaks[0].reason
    second.sum().backward()
    assert w.grad is not None
    mc.reset()
    compiled(leaf(3), leaf(3))
    assert not explained(compiled).breaks


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_result_is_not_kept_that_the_program_writes_to_unseen(backend: str) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        middle = x * 3
        result = w * (middle + 1)
        middle.data.add_(1)
        return result

    w = torch.ones(4, requires_grad=True)
    mc.compile(fn, backend=backend)(torch.ones(4), w).sum().backward()
    assert w.grad is not None and w.grad.tolist() == [4, 4, 4, 4]


def test_a_loss_beside_its_logits_needs_no_graph_of_its_own() -> None:
    """Zeros stand for the logits' own gradient, also where a residual adds it to an input's gradient."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = x @ w + x
        return logits, logits.view(-1).exp().mean()

    aot = mc.trace(fn, leaf(3, 4), leaf(4, 4)).aot
    assert aot is not None
    assert aot.metadata.sufficient == (1,)
    other = mc.trace(three, leaf(4, 4), leaf(4, 4)).aot
    assert other is not None
    assert other.metadata.sufficient == ()
    for used in ((0,), (1,), (0, 1)):
        expected = gradients(fn, None, used, False)
        torch.testing.assert_close(gradients(fn, "inductor", used, False), expected)


@needs("a saved tensor is had without the others")
def test_an_output_that_is_saved_is_had_without_the_other_saved_tensors() -> None:
    gradients = []
    for call in (fn := lambda x, w: (x.exp(), w.sin()), mc.compile(fn)):
        x, w = leaf(3), leaf(3)
        first, _ = call(x, w)
        with torch.no_grad():
            w.add_(1)
        first.sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)
