"""Attention whose scores a function changes: softmax(score(q @ k^T)) @ v, and its gradients, as operators.

    out, peak, logs = attention(q, k, v, [bias], "def score(x0, x1):\n    ...")

`score` is Python source over torch's operators, elementwise: it takes the products of queries and keys in
float32, [batch, heads, queries, keys], then the tensors in the list. So a graph holds all that it needs, and
prints it. The functions below hold all scores at once; the kernels of kernels.py never do.

The backward computes weights as e^(score - peak) / 2^logs: `peak` is the largest score of a row, `logs` the
logarithm, to base 2, of what these powers sum to. One number for both would lose the second where the first
is large, as in a row of which a finite number masks all; where scores are small, kernels keep one, and 0.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LOG2E = math.log2(math.e)

_library = torch.library.Library("minicompile", "FRAGMENT")
_ARGUMENTS = "Tensor q, Tensor k, Tensor v, Tensor[] others, str score"
_RESULTS = "(Tensor, Tensor, Tensor)"
_library.define(f"attention({_ARGUMENTS}) -> {_RESULTS}")
_library.define(
    f"attention_backward({_ARGUMENTS}, Tensor gradient, Tensor peak, Tensor logs, Tensor delta) -> {_RESULTS}"
)
ATTENTION = torch.ops.minicompile.attention.default
ATTENTION_BACKWARD = torch.ops.minicompile.attention_backward.default
"""`delta`: for each query, its result times the result's gradient, summed."""


@functools.lru_cache(256)
def function_of(source: str) -> Callable[..., Any]:
    """Return the function that a text defines."""
    scope: dict[str, Any] = {"torch": torch, "operator": operator}
    scope |= {"aten": torch.ops.aten, "prims": torch.ops.prims}
    exec(source, scope)
    score: Callable[..., Any] = scope["score"]
    return score


@torch.library.impl(_library, "attention", "CompositeExplicitAutograd")
def _attention(
    q: Tensor, k: Tensor, v: Tensor, others: Sequence[Tensor], score: str
) -> tuple[Tensor, Tensor, Tensor]:
    scores = function_of(score)(q.float() @ k.float().mT, *others)
    peak = scores.amax(-1)
    powers = torch.exp(scores - peak.unsqueeze(-1))
    total = powers.sum(-1)
    out = (powers @ v.float()) / total.unsqueeze(-1)
    return out.to(q.dtype), peak, torch.log2(total)


@torch.library.impl(_library, "attention_backward", "CompositeExplicitAutograd")
def _attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    others: Sequence[Tensor],
    score: str,
    gradient: Tensor,
    *more: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out, _, _ = _attention(q, k, v, others, score)
        return torch.autograd.grad(out, (q, k, v), gradient)  # type: ignore[return-value]


@torch.library.impl(_library, "attention", "Meta")
def _attention_fake(q: Tensor, *more: Any) -> tuple[Tensor, Tensor, Tensor]:
    peak, logs = (q.new_empty(q.shape[:-1], dtype=torch.float32) for _ in range(2))
    return q.new_empty(q.shape), peak, logs


@torch.library.impl(_library, "attention_backward", "Meta")
def _attention_backward_fake(
    q: Tensor, k: Tensor, v: Tensor, *more: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class FlashAttention(torch.autograd.Function):
    """The operators as one function that autograd knows; tensors that scores read get no gradient."""

    @staticmethod
    def forward(ctx: Any, score: str, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
        out, peak, logs = ATTENTION(q, k, v, list(others), score)
        ctx.save_for_backward(q, k, v, out, peak, logs, *others)
        ctx.score = score
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, k, v, out, peak, logs, *others = ctx.saved_tensors
        delta = (gradient.float() * out.float()).sum(-1)
        by = ATTENTION_BACKWARD(q, k, v, others, ctx.score, gradient, peak, logs, delta)
        return None, *by, *[None] * len(others)
