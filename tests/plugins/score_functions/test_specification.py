"""flex_attention in a compiled function: one graph, and eager's values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

import minicompile as mc
from minicompile.api import dispatcher_of

N = 20
INDEX = torch.arange(N)
Mod = Callable[..., Tensor]
SCORES: dict[str, Mod] = {
    "alibi": lambda s, b, h, i, j: s + (j - i) * torch.exp2(-(h + 1.0)),
    "relative bias": lambda s, b, h, i, j, bias: s + bias[h, (i - j).clamp(-9, 9) + 9],
    "capped": lambda s, b, h, i, j: 5 * torch.tanh(s / 5),
    "masked in the score": lambda s, b, h, i, j: torch.where(i - j > 4, s, -torch.inf),
    "by batch": lambda s, b, h, i, j: s * (b + 1) + j // 3,
}
MASKS: dict[str, Mod] = {
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i >= j) & (i - j < 5),
    "prefix": lambda b, h, i, j: (j < 6) | (i >= j),
    "documents": lambda b, h, i, j: (INDEX // 7)[i] == (INDEX // 7)[j],
    "by head": lambda b, h, i, j: (i + h) % 3 != j % 3,
    "empty rows": lambda b, h, i, j: i - j > 4,
}


def made(heads: int = 4, keys: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = [(2, n, N, 8) for n in (heads, keys, keys)]
    return [torch.randn(s).to(dtype).requires_grad_() for s in [*sizes, (heads, 19)]]


def check(
    monkeypatch: pytest.MonkeyPatch, fn: Callable[..., Any], given: list[Any], **options: Any
) -> Any:
    """Compare with eager, which on a CPU would refuse tensors that require a gradient."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    compiled = mc.compile(fn, fullgraph=True, **options)
    tensors = [x for x in given if isinstance(x, Tensor)]
    results = []
    for f in (compiled, fn):
        found = f(*given)
        found = found if isinstance(found, tuple) else (found,)
        total = sum(x.float().masked_fill(x == -torch.inf, 0).cos().sum() for x in found)
        results.append((found, torch.autograd.grad(total, tensors, allow_unused=True)))
    near = {"rtol": 2e-2, "atol": 2e-2} if tensors[0].dtype.itemsize == 2 else {}
    torch.testing.assert_close(*results, **near)
    assert [x.stride() for x in results[0][0]] == [x.stride() for x in results[1][0]]
    return compiled


def program(score: str = "", mask: str = "", **more: Any) -> Callable[..., Any]:
    block = flex.create_block_mask(MASKS[mask], None, None, N, N, device="cpu") if mask else None

    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        own = SCORES.get(score)
        mod = (lambda *a: own(*a, bias)) if score == "relative bias" else own
        return flex.flex_attention(q, k, v, mod, block, enable_gqa=True, **more)

    return fn


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "name", [*SCORES, *MASKS, "plain", "return_lse", "bfloat16", "float16", "both"]
)
def test_values_and_gradients_are_eagers(
    name: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = getattr(torch, name, None)
    score, mask = name if name in SCORES else "", name if name in MASKS else ""
    if not score and not mask and name != "plain":
        score, mask = "relative bias", "causal"
    fn = program(score, mask, **{"return_lse": True, "scale": 0.3} if name == "return_lse" else {})
    given = made(dtype=dtype if isinstance(dtype, torch.dtype) else torch.float32)
    check(monkeypatch, fn, given, dynamic=dynamic)


def test_another_block_mask_is_another_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, block: Any) -> Tensor:
        return flex.flex_attention(q, k, v, block_mask=block)

    compiled, given = mc.compile(fn, fullgraph=True), [x.detach() for x in made(2)[:3]]

    def within(length: int) -> Mod:
        return lambda b, h, i, j: (i - j).abs() < length

    for mod in (within(3), within(4), MASKS["causal"], within(3)):
        block = flex.create_block_mask(mod, None, None, N, N, device="cpu")
        torch.testing.assert_close(compiled(*given, block), fn(*given, block))


def measured(score: Tensor) -> int:
    return len(score.shape) + 1


@pytest.mark.parametrize(
    "score",
    [
        lambda s, b, h, i, j: s - s.max(),
        lambda s, b, h, i, j: s + INDEX,
        lambda s, b, h, i, j: s / measured(s),
    ],
)
def test_scores_that_need_others_end_the_graph(score: Mod) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex.flex_attention(q, k, v, score)

    with pytest.raises(mc.errors.MinicompileError, match=r"elementwise|shape"):
        mc.compile(fn, fullgraph=True)(*(x.detach() for x in made(2)[:3]))


def test_without_the_plugin_the_graph_ends_with_a_reason() -> None:
    compiled = mc.compile(program(), options={"plugins": []})
    given = [x.detach() for x in made()]
    torch.testing.assert_close(compiled(*given), program()(*given))
    (why,) = dispatcher_of(compiled).explanation().breaks
    assert "flex_attention" in why.reason
