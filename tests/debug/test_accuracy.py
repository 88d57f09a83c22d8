"""`mc.accuracy`: every stage against float64, on copies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile.debug.accuracy import accuracy_stage
from minicompile.ops.display import to_html

STAGES = ["float64", "eager", "captured", "aot", "compiled"]


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.GELU())


def test_every_stage_is_as_accurate_as_eager() -> None:
    found = mc.accuracy(model(), torch.randn(5, 8))
    assert [row.stage for row in found.stages] == STAGES
    assert found.ok and found["captured"].verdict == "same as eager"
    for row in found.stages[1:]:
        assert row.output_error is not None and 0 < row.output_error < 1e-5
        assert row.gradient_error is not None and 0 < row.gradient_error < 1e-4
        assert row.state_error is not None and row.ratio is not None and row.ratio <= 2
    assert "compiled" in str(found) and "as eager" in to_html(found)


def test_nothing_of_the_users_changes() -> None:
    layers, a = model(), torch.randn(5, 8, requires_grad=True)
    before, values, state = (
        copy.deepcopy(layers.state_dict()),
        a.detach().clone(),
        torch.get_rng_state(),
    )

    def closed_over(b: torch.Tensor, log: list[Any]) -> torch.Tensor:
        log.append(1)
        b.detach().add_(1)
        return layers(b) + torch.rand(16)

    log: list[Any] = []
    mc.accuracy(closed_over, a, log)
    assert log == [] and a.grad is None and torch.equal(a, values)
    assert all(torch.equal(value, before[name]) for name, value in layers.state_dict().items())
    assert all(parameter.grad is None for parameter in layers.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() is torch.float32


class Off(torch.autograd.Function):
    """Right forward, wrong backward."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        return a * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 2.001


def double(a: torch.Tensor) -> torch.Tensor:
    return a * 2


def raises(a: torch.Tensor) -> torch.Tensor:
    raise ValueError("planted")


@pytest.mark.parametrize(
    ("planted", "verdict"),
    [
        (lambda a: double(a) + 1e-3, "wrong"),
        (Off.apply, "wrong"),
        (lambda a: (a.data.add_(0.5), double(a) - 1)[1], "wrong"),
        (lambda a: double(a)[:2], "wrong"),
        (raises, "raised"),
        (lambda a: a.bfloat16().float() * 2, "wrong"),
        (double, "same as eager"),
    ],
)
def test_a_stage_of_ones_own_and_what_it_does_wrong(planted: Any, verdict: str) -> None:
    a = torch.randn(4) * 1.0
    with mc.scoped():
        accuracy_stage("planted")(lambda target: planted)
        found = mc.accuracy(double, a.requires_grad_())
    assert found["planted"].verdict == verdict
    assert found.ok == (verdict == "same as eager")
    assert [row.stage for row in found.stages] == [*STAGES, "planted"]


def test_a_refused_function_is_not_called_compiled() -> None:
    def refused(a: torch.Tensor) -> Any:
        yield a

    assert mc.accuracy(refused, torch.randn(4))["aot"].verdict == "not compiled"


def test_random_numbers_make_eager_the_reference() -> None:
    found = mc.accuracy(torch.nn.Dropout(), torch.ones(64))
    assert "random" in found["float64"].note and found["float64"].verdict == "unusable"
    assert found["captured"].verdict == "same as eager" and found.ok
