"""Attention whose scores a function changes: softmax(score(q @ k^T)) @ v, and its gradients, as operators.

    out, peak, logs = attention(q, k, v, [bias], "def score(x0, x1):\\n    ...")

`score` is Python source over torch's operators, elementwise: it takes the products of queries and keys in
float32, [batch, heads, queries, keys], then the tensors in the list. So a graph holds all that it needs, and
prints it. For the backward `slope` is written alike: it takes a gradient more, of what `score` gives, and
gives that of the products. Here both operators are what they mean, all scores at once; kernels that never
hold them are made of a template (codegen/attention.py).

The backward computes weights as e^(score - peak) / 2^logs: `peak` is the largest score of a row, `logs` the
logarithm, to base 2, of what these powers sum to. One number for both would lose the second where the first
is large, as in a row of which a finite number masks all; where scores are small, kernels keep one, and 0.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

LOG2E = math.log2(math.e)

_library = torch.library.Library("minicompile", "FRAGMENT")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor[] others, str score) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "attention_backward(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor peak, Tensor logs, "
    "Tensor delta, Tensor[] others, str score, str slope) -> (Tensor, Tensor, Tensor)"
)
ATTENTION = torch.ops.minicompile.attention.default
ATTENTION_BACKWARD = torch.ops.minicompile.attention_backward.default
"""`delta`: for each query, its result times the result's gradient, summed."""


@functools.lru_cache(256)
def function_of(source: str) -> Callable[..., Any]:
    """The function that a text defines."""
    scope: dict[str, Any] = {"torch": torch, "operator": operator}
    scope |= {"aten": torch.ops.aten, "prims": torch.ops.prims}
    exec(source, scope)
    found: Callable[..., Any] = scope["score"]
    return found


def scores_of(q: Tensor, k: Tensor, others: Sequence[Tensor], score: str) -> tuple[Tensor, Tensor]:
    """Products, and their scores."""
    products = q.float() @ k.float().mT
    return products, function_of(score)(products, *others)


@torch.library.impl(_library, "attention", "CompositeExplicitAutograd")
def _attention(
    q: Tensor, k: Tensor, v: Tensor, others: Sequence[Tensor], score: str
) -> tuple[Tensor, Tensor, Tensor]:
    _, scores = scores_of(q, k, others, score)
    peak = scores.amax(-1)
    powers = torch.exp(scores - peak.unsqueeze(-1))
    total = powers.sum(-1)
    out = (powers @ v.float()) / total.unsqueeze(-1)
    return out.to(q.dtype), peak, torch.log2(total)


@torch.library.impl(_library, "attention_backward", "CompositeExplicitAutograd")
def _attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, peak: Tensor, logs: Tensor, delta: Tensor,
    others: Sequence[Tensor], score: str, slope: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    products, scores = scores_of(q, k, others, score)
    weights = torch.exp2((scores - peak.unsqueeze(-1)) * LOG2E - logs.unsqueeze(-1))
    down = weights * (gradient.float() @ v.float().mT - delta.unsqueeze(-1))
    down = function_of(slope)(products, *others, down)
    by = (down @ k.float(), down.mT @ q.float(), weights.mT @ gradient.float())
    return tuple(g.to(q.dtype) for g in by)  # type: ignore[return-value]


@torch.library.impl(_library, "attention", "Meta")
def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, others: Sequence[Tensor], score: str
) -> tuple[Tensor, Tensor, Tensor]:
    row = partial(q.new_empty, q.shape[:-1], dtype=torch.float32)
    return q.new_empty(q.shape), row(), row()


@torch.library.impl(_library, "attention_backward", "Meta")
def _attention_backward_fake(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class FlashAttention(torch.autograd.Function):
    """The operators as one function that autograd knows; tensors that scores read get no gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, score: str, slope: str, *others: Tensor
    ) -> Tensor:
        out, peak, logs = ATTENTION(q, k, v, list(others), score)
        ctx.save_for_backward(q, k, v, out, peak, logs, *others)
        ctx.texts = score, slope
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, k, v, out, peak, logs, *others = ctx.saved_tensors
        delta = (gradient.float() * out.float()).sum(-1)
        by = ATTENTION_BACKWARD(gradient, q, k, v, peak, logs, delta, others, *ctx.texts)
        return *by, *[None] * (2 + len(others))
