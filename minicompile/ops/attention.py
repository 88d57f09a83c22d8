"""Attention whose scores a function changes: softmax(score(q @ k^T)) @ v, and its gradients, as operators.

    out, lse = attention(q, k, v, [bias], "def score(x0, x1):\\n    ...")

`score` is Python source over torch's operators, elementwise: it takes the products of queries and keys in
float32, [batch, heads, queries, keys], then the tensors in the list. So a graph holds all that it needs, and
prints it. For the backward `slope` is written alike: it takes a gradient more, of what `score` gives, and
gives that of the products. Here both operators are what they mean, all scores at once; kernels that never
hold them are made of a template (codegen/attention.py).

`lse` is the logarithm, to base 2, of a row's sum of 2^(score * log2(e)): the backward computes weights by it.
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
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor[] others, str score) -> (Tensor, Tensor)"
)
_library.define(
    "attention_backward(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor lse, Tensor delta, "
    "Tensor[] others, str score, str slope) -> (Tensor, Tensor, Tensor)"
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


def weights_of(
    q: Tensor, k: Tensor, others: Sequence[Tensor], score: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Products, their scores to base 2, and `lse`."""
    products = q.float() @ k.float().mT
    scores = function_of(score)(products, *others) * LOG2E
    lse = torch.logsumexp(scores / LOG2E, -1) * LOG2E
    return products, scores, lse


@torch.library.impl(_library, "attention", "CompositeExplicitAutograd")
def _attention(
    q: Tensor, k: Tensor, v: Tensor, others: Sequence[Tensor], score: str
) -> tuple[Tensor, Tensor]:
    _, scores, lse = weights_of(q, k, others, score)
    weights = torch.exp2(scores - lse.unsqueeze(-1))
    return (weights @ v.float()).to(q.dtype), lse


@torch.library.impl(_library, "attention_backward", "CompositeExplicitAutograd")
def _attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor,
    others: Sequence[Tensor], score: str, slope: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    products, scores, _ = weights_of(q, k, others, score)
    weights = torch.exp2(scores - lse.unsqueeze(-1))
    down = weights * (gradient.float() @ v.float().mT - delta.unsqueeze(-1))
    down = function_of(slope)(products, *others, down)
    by = (down @ k.float(), down.mT @ q.float(), weights.mT @ gradient.float())
    return tuple(g.to(q.dtype) for g in by)  # type: ignore[return-value]


@torch.library.impl(_library, "attention", "Meta")
def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, others: Sequence[Tensor], score: str
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)


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
        out, lse = ATTENTION(q, k, v, list(others), score)
        ctx.save_for_backward(q, k, v, out, lse, *others)
        ctx.texts = score, slope
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, k, v, out, lse, *others = ctx.saved_tensors
        delta = (gradient.float() * out.float()).sum(-1)
        by = ATTENTION_BACKWARD(gradient, q, k, v, lse, delta, others, *ctx.texts)
        return *by, *[None] * (2 + len(others))
