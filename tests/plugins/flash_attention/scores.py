"""Written-out attention: the scores that tests change, and its error on a GPU by that of the library's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import minicompile as mc
from tests.comparing import in_double

Scores = Callable[..., Tensor]


def positions(s: Tensor) -> tuple[Tensor, Tensor]:
    i, j = (torch.arange(n, device=s.device) for n in s.shape[-2:])
    return i[:, None], j[None, :]


def causal(s: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
    i, j = positions(s)
    return s.masked_fill(j > i, -torch.inf)


def biased(s: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
    return causal(s + bias, bias, slopes)


def alibi(s: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
    i, j = positions(s)
    return causal(s + slopes * (j - i), bias, slopes)


def capped(s: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
    return causal(20 * torch.tanh(s / 20), bias, slopes)


def windowed(s: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
    i, j = positions(s)
    return s.masked_fill((j > i) | (i - j >= 1024), -torch.inf)


CASES: dict[str, Scores] = {f.__name__: f for f in (causal, biased, alibi, capped, windowed)}


def attention(scores: Scores, q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
    s = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    return torch.softmax(scores(s, *more), -1).to(v.dtype) @ v


def gradients(fn: Callable[..., Tensor], given: Sequence[Tensor], down: Tensor) -> list[Tensor]:
    out = fn(*given)
    return [out, *torch.autograd.grad(out, given[:3], down)]


def library(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def largest_errors(found: Sequence[Tensor], right: Sequence[Tensor]) -> list[float]:
    """The largest difference of each, by the largest number."""
    return [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, right)]


def error(name: str, head: int, length: int = 1000) -> float:
    """Of results and gradients against float64, by that of the library's plain causal attention."""
    torch.manual_seed(0)
    new = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    q, k, v = (new(1, 2, length, head).requires_grad_() for _ in "qkv")
    given = [q, k, v, new(2, length, length), torch.randn(2, 1, 1, device="cuda").abs() * 0.01]
    down = torch.randn_like(q)
    options = {"plugins": ["flash_attention"], "device_codegen": "triton"}
    fn = partial(attention, CASES[name])

    def errors(fn: Callable[..., Tensor], reference: str) -> list[float]:
        right = gradients(partial(attention, CASES[reference]), in_double(given), down.double())
        return largest_errors(gradients(fn, given, down), right)

    compiled = mc.compile(fn, fullgraph=True, dynamic=False, options=options)
    return max(a / b for a, b in zip(errors(compiled, name), errors(library, "causal")))
