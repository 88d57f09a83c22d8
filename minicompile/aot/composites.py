"""What torch's kernels of composite operators leave out: dropout between recurrent layers, checks.

    torch.gru(x, ..., num_layers=2, dropout=0.5, train=True)    is traced as
    y, first = torch.gru(x, ..., num_layers=1, dropout=0.0)
    y, second = torch.gru(torch.dropout(y, 0.5, True), ..., num_layers=1, dropout=0.0)

The real compiler: torch/_decomp/decompositions.py; in its `_rnn_helper` the condition for dropout never holds
(torch 2.11 to 2.15).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from minicompile import compat
from minicompile.ops.nodes import aten_ops

aten = torch.ops.aten
Hidden = torch.Tensor | Sequence[torch.Tensor]
"""States of all layers and directions, in dimension 0: one tensor, or those of an LSTM and its cells."""


def padded(
    network: Callable[..., Any], input: torch.Tensor, hx: Hidden, params: Sequence[torch.Tensor],
    has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The network on sequences of one length."""

    def layers(x: torch.Tensor, hx: Any, params: Any, count: int = 1) -> tuple[torch.Tensor, ...]:
        y, *states = network(x, hx, params, has_biases, count, 0.0, train, bidirectional, False)
        # torch 2.11's kernel of LSTMs keeps a dimension of 1 in their states
        return (y, *(state.squeeze(1) if state.dim() > 3 else state for state in states))

    x = input.transpose(0, 1) if batch_first else input
    rate = dropout if train else 0.0
    y, *states = stacked(layers, x, hx, params, num_layers, rate, bidirectional)
    return (y.transpose(0, 1) if batch_first else y, *states)


def packed(
    network: Callable[..., Any], data: torch.Tensor, batch_sizes: torch.Tensor, hx: Hidden,
    params: Sequence[torch.Tensor], has_biases: bool, num_layers: int, dropout: float, train: bool,
    bidirectional: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The network on sequences of several lengths; `batch_sizes`: how many have a first, second ... step."""

    def layers(x: torch.Tensor, hx: Any, params: Any, count: int = 1) -> tuple[torch.Tensor, ...]:
        return network(x, batch_sizes, hx, params, has_biases, count, 0.0, train, bidirectional)

    return stacked(layers, data, hx, params, num_layers, dropout if train else 0.0, bidirectional)


def stacked(
    layers: Callable[..., tuple[torch.Tensor, ...]], x: torch.Tensor, hx: Hidden,
    params: Sequence[torch.Tensor], count: int, dropout: float, bidirectional: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """(output, states...) of `count` layers: all at once if there is no dropout between them."""
    if dropout == 0 or count < 2:
        return layers(x, hx, params, count)
    directions, size = 1 + bidirectional, len(params) // count
    states = []
    for i in range(count):
        rows = slice(i * directions, (i + 1) * directions)
        before = hx[rows] if isinstance(hx, torch.Tensor) else [state[rows] for state in hx]
        x, *after = layers(x, before, params[i * size : (i + 1) * size])
        states.append(after)
        if i < count - 1:
            x = torch.dropout(x, dropout, True)
    return (x, *(torch.cat(layer) for layer in zip(*states)))


def one_hot(kernel: Callable[..., Any], classes: torch.Tensor, count: int = -1) -> torch.Tensor:
    """Eager refuses classes outside of 0 to `count` - 1; torch 2.11's kernel for fake tensors does not."""
    if count == -1:
        count = int(classes.max().item()) + 1
    torch._check(count > 0, lambda: "one_hot: there must be a class")
    for holds, rule in (
        (classes >= 0, "non-negative"),
        (classes < count, "smaller than num_classes"),
    ):
        aten._assert_async.msg(holds.all(), f"Class values must be {rule}.")
    return (classes.unsqueeze(-1) == torch.arange(count, device=classes.device)).long()


RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(aten_ops("gru.input lstm.input rnn_tanh.input rnn_relu.input"), padded),
    **dict.fromkeys(aten_ops("gru.data lstm.data rnn_tanh.data rnn_relu.data"), packed),
    aten.one_hot.default: one_hot,
}


def composites_as_in_eager() -> contextlib.AbstractContextManager[None]:
    """A context in which, under the python dispatcher, the rules above replace torch's kernels."""
    return compat.composite_kernels(RULES)
