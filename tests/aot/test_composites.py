"""Recurrent networks and random layers in training: eager's results, gradients and random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import minicompile as mc
from minicompile.api import dispatcher_of
from tests.comparing import assert_as_eager

CELLS = {"gru": nn.GRU, "lstm": nn.LSTM, "rnn": nn.RNN}
OPTIONS: dict[str, dict[str, Any]] = {
    "three layers": {"num_layers": 3, "dropout": 0.3},
    "both directions": {"num_layers": 2, "dropout": 0.5, "bidirectional": True},
    "batch first": {"num_layers": 3, "dropout": 0.5, "batch_first": True},
    "all dropped": {"num_layers": 2, "dropout": 1.0},
    "one layer": {"num_layers": 1},
}


def assert_same_numbers(module: nn.Module, *inputs: Tensor) -> None:
    compiled = mc.compile(module, backend="aot_eager")
    close = 2e-2 if inputs[0].dtype is torch.bfloat16 else 1e-5
    inputs = tuple(x.requires_grad_() for x in inputs)
    assert_as_eager(compiled, module, *inputs, module=module, rtol=close, atol=close)
    assert dispatcher_of(compiled).explanation().graph_count == 1


def packed(lengths: list[int], x: Tensor) -> Any:
    return nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)


@pytest.mark.long
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("cell", CELLS)
def test_dropout_between_layers_is_eagers(cell: str, option: str) -> None:
    module = CELLS[cell](4, 3, **OPTIONS[option])
    assert_same_numbers(module, torch.randn(3, 2, 4, requires_grad=True))


VARIANTS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "evaluated": (lambda: nn.GRU(4, 3, 2, dropout=0.5).eval(), (torch.randn(3, 2, 4),)),
    "relu": (lambda: nn.RNN(4, 3, 2, "relu", dropout=0.5), (torch.randn(3, 2, 4),)),
    "float64": (lambda: nn.LSTM(4, 3, 2, dropout=0.5).double(), (torch.randn(3, 2, 4).double(),)),
    "projection": (
        lambda: nn.LSTM(4, 3, 2, dropout=0.5, proj_size=2).double(),
        (torch.randn(3, 2, 4).double(),),
    ),
    "frozen": (lambda: nn.LSTM(4, 3, 2, dropout=0.5).requires_grad_(False), (torch.randn(3, 2, 4),)),
    "unbatched": (lambda: nn.GRU(4, 3, 2, dropout=0.5), (torch.randn(3, 4),)),
    "given state": (lambda: nn.GRU(4, 3, 2, dropout=0.5), (torch.randn(3, 2, 4), torch.randn(2, 2, 3))),
    "bfloat16": (lambda: nn.GRU(4, 3, 2, dropout=0.5).bfloat16(), (torch.randn(3, 2, 4).bfloat16(),)),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", VARIANTS)
def test_dropout_between_layers_of_every_variant(name: str) -> None:
    build, inputs = VARIANTS[name]
    assert_same_numbers(build(), *inputs)


def test_packed_sequences_have_dropout_between_layers() -> None:
    module = nn.LSTM(4, 3, 2, dropout=0.5, bidirectional=True).double()
    x = torch.randn(4, 3, 4, dtype=torch.float64)

    def run(net: Any) -> Any:
        return lambda x: net(packed([2, 4, 1], x))[0].data

    assert_as_eager(run(mc.compile(module, backend="aot_eager")), run(module), x, module=module)


TURNED = torch.randn(2, 4, 6, 5).transpose(1, 2)
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "bernoulli_ of probabilities": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
    "bernoulli_ of a row of probabilities": lambda x: torch.empty_like(x).bernoulli_(x[:1, :1].sigmoid()),
    "bernoulli": lambda x: torch.bernoulli(x, 0.3),
    "uniform_": lambda x: torch.empty_like(x).uniform_(),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.3),
    "channels last": lambda x: (
        torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last).bernoulli_(0.4)
    ),
    "gaps": lambda x: torch.zeros(8, 40)[:, ::2].bernoulli_(0.4),
    "normal_ into gaps": lambda x: torch.zeros(8, 40)[:, ::2].normal_(),
    "normal": lambda x: torch.normal(x, x.abs()),
    "poisson": lambda x: torch.poisson(x.abs()),
    "dropout": lambda x: F.dropout(x, 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, True),
    "dropout2d": lambda x: F.dropout2d(x, 0.3),
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.3, True).contiguous(),  # eager's functional form gives rows
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.4),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x, 2, 3),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_lie_where_eager_puts_them(name: str, backend: str) -> None:
    assert_as_eager(mc.compile(DRAWS[name], backend=backend), DRAWS[name], TURNED)
