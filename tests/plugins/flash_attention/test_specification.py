"""Written-out attention as one kernel, or as one call of the library.

- It is recognised as it is usually written; what only looks like it is left as it is written.
- On a CPU the library gets scores that are scaled and masked; other scores stay as they are written.
- Values and gradients are eager's; a model with it trains.

`test_kernels.py` has the template of kernels, `test_random.py` random programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import minicompile as mc
from minicompile.lessons.model import GPT, GPTConfig
from tests.plugins.flash_attention.test_kernels import (
    TEMPLATE,
    compiled,
    errors,
    kernel_texts,
    made,
    reason,
)

Form = Callable[..., Any]
TOKENS, HEAD = 40, 16
LIBRARY = {"plugins": ["flash_attention"]}


def future(s: Tensor) -> Tensor:
    i, j = (torch.arange(n, device=s.device) for n in s.shape[-2:])
    return j[None, :] > i[:, None]


def method(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q.matmul(k.transpose(2, 3)).div(4)
    return s.masked_fill(future(s), float("-inf")).softmax(3).matmul(v)


def in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.matmul(q, k.transpose(-2, -1)) * HEAD**-0.5
    s = s + torch.full(s.shape[-2:], -torch.inf).triu(1)
    weights = F.dropout(F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype), 0.0, True)
    return torch.matmul(weights, v)


def several(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    for form in (method, in_float32):
        q = q + form(q, k, v)
    return q


@pytest.mark.long
@pytest.mark.parametrize("form", [method, in_float32, several])
def test_usual_forms_become_the_template(form: Form) -> None:
    given = made(TOKENS, TOKENS, HEAD)[:3]
    assert max(errors(compiled(form), form, given)) < 1e-5
    forward = [text for text in kernel_texts(form, given) if "def attend(" in text]
    assert len(forward) == 1 + (form is several)
    assert all("end = tl.minimum(first + XBLOCK" in text for text in forward)


def seen_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    once = s + 1
    s *= 0.25
    return (s + once).softmax(-1) @ v


def seen_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    view = s[:, :, :3]
    s *= 0.25
    return s.softmax(-1) @ v + view.sum()


def written_through_a_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    s.view(-1).mul_(0.25)
    return s.softmax(-1) @ v


def values_are_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights, v = (q @ k.mT).softmax(-1), v.clone()
    v.add_(1)
    return weights @ v


def scores_are_returned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    return s.softmax(-1) @ v + s.mean()


OTHERS: dict[str, Form] = {
    "seen before a write": seen_before,
    "seen after a write": seen_after,
    "written through a view": written_through_a_view,
    "written in place": lambda q, k, v: (
        (s := q @ k.mT).masked_fill_(future(s), -torch.inf).softmax(-1) @ v
    ),
    "values are written": values_are_written,
    "scores are returned": scores_are_returned,
    "other sums": lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
    "one for all": lambda q, k, v: (q @ k[:, :1].mT).softmax(-1) @ v,
    "two products": lambda q, k, v: (q @ k.mT + k @ q.mT).softmax(-1) @ v,
    "another head": lambda q, k, v: ((s := q @ k.mT) + s[:, [1, 2, 0]]).softmax(-1) @ v,
}


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("options", [TEMPLATE, LIBRARY], ids=["template", "library"])
def test_what_is_something_else_is_left(name: str, options: dict[str, Any]) -> None:
    given = made(TOKENS, TOKENS, HEAD)[:3]
    call = mc.compile(OTHERS[name], dynamic=False, options=options)
    assert max(errors(call, OTHERS[name], given)) < 1e-5
    text = str(mc.trace(call, *given).graphs["forward"].loops)
    assert "minicompile.attention" not in text and "scaled_dot_product" not in text


def test_weights_that_are_cut_to_whole_numbers_are_no_attention() -> None:
    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (9 * (q @ k.mT).softmax(-1)).int().float() @ v

    given = [x * 9 for x in made(TOKENS, TOKENS, HEAD)[:3]]
    torch.testing.assert_close(compiled(form)(*given), form(*given))


@torch.library.custom_op("minicompile_tests::matmul", mutates_args=())
def cosines(x: Tensor, y: Tensor) -> Tensor:
    return torch.matmul(x, y).cos()


@cosines.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], y.shape[-1])


def test_an_operator_of_another_library_is_not_torchs() -> None:
    q, k, v = (x.detach() for x in made(TOKENS, TOKENS, HEAD)[:3])

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.minicompile_tests.matmul(q, k.mT).softmax(-1) @ v

    torch.testing.assert_close(compiled(fn)(q, k, v), fn(q, k, v))


def test_without_keys_a_sum_is_zero() -> None:
    given = made(TOKENS, 0, HEAD)[:3]

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v

    assert reason(fn, *given) == "nothing to look at"
    assert compiled(fn)(*given).equal(torch.zeros(2, 3, TOKENS, HEAD))


# -- the library


Change = Callable[[Tensor, Tensor], Tensor]


def attends(change: Change) -> Form:
    """Attention whose scores are changed, with a mask."""
    return lambda q, k, v, m: change(q @ k.mT, m).softmax(-1) @ v


def masked(s: Tensor, m: Tensor) -> Tensor:
    return (s / 4).masked_fill(~m, -torch.inf)


def window(s: Tensor, m: Tensor) -> Tensor:
    i, j = torch.arange(s.size(2))[:, None], torch.arange(s.size(3))
    return (s - (i - j).abs() / 8).masked_fill((i - j).abs() > 9, -torch.inf)


FOR_THE_LIBRARY: dict[str, Change] = {
    "masked": masked,
    "chosen": lambda s, m: torch.where(m, s, -torch.inf),
    "added": lambda s, m: torch.zeros_like(m, dtype=s.dtype).masked_fill(~m, -torch.inf) + s * 0.5,
    "truth values": lambda s, m: s + m,
    "triangle": lambda s, m: s.div(4).masked_fill(future(s), -torch.inf),
    "window": window,
}
AS_WRITTEN: dict[str, Change] = {
    "capped": lambda s, m: torch.tanh(s),
    "finite": lambda s, m: s.masked_fill(~m, -1e9),
    "by zero": lambda s, m: s * 0.0 + m,
    "squared": lambda s, m: s + s * s / 9,
}


@pytest.mark.long
@pytest.mark.parametrize(
    "name, head",
    [(name, head) for name in FOR_THE_LIBRARY for head in (8, 200)]
    + [(n, HEAD) for n in AS_WRITTEN],
)
def test_on_a_cpu_the_library_has_scaled_and_masked_scores(name: str, head: int) -> None:
    """Other scores stay as they are written."""
    given = [*made(TOKENS, TOKENS, head)[:3], torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(3)]
    form = attends((FOR_THE_LIBRARY | AS_WRITTEN)[name])
    call = mc.compile(form, fullgraph=True, options=LIBRARY)
    assert max(errors(call, form, given)) < 1e-5
    graph = str(mc.trace(call, *given).aot.joint)  # type: ignore[union-attr]
    assert ("scaled_dot_product" in graph) == (name in FOR_THE_LIBRARY)
    assert "minicompile.attention" not in graph


def test_a_mask_in_half_types_stays_as_it_is_written_on_a_cpu() -> None:
    q, k, v = (x.detach() for x in made(TOKENS, TOKENS, HEAD, torch.bfloat16)[:3])
    m = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    trace = mc.trace(mc.compile(attends(masked), options=LIBRARY), q, k, v, m)
    assert "scaled_dot_product" not in str(trace.graphs["forward"].loops)


@pytest.mark.long
def test_the_library_s_mask_gets_no_gradient() -> None:
    q, k, v, bias, _ = made(TOKENS, TOKENS, HEAD)
    bias.requires_grad_()

    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return (q @ k.mT + bias).softmax(-1) @ v

    for call in (compiled(fn), mc.compile(fn, options=LIBRARY)):
        found, right = (torch.autograd.grad(f(q, k, v, bias).sum(), bias)[0] for f in (call, fn))
        torch.testing.assert_close(found, right)


def test_dropout_in_place_beside_attention_is_done() -> None:
    q, k, v = (x.detach() for x in made(TOKENS, TOKENS, HEAD)[:3])

    def written(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        F.dropout(m, 1.0, True, True)
        return (q @ k.mT).softmax(-1) @ v

    held = torch.ones(3)
    mc.compile(written, options=LIBRARY)(q, k, v, held)
    assert not held.any()


@pytest.mark.long
def test_the_lesson_model_trains_as_in_eager() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=50))
    tokens, weights = torch.randint(50, (2, 16)), list(model.parameters())
    losses = [m(tokens, tokens)[1] for m in (mc.compile(model, options=LIBRARY), model)]
    torch.testing.assert_close(*losses)
    ours, right = (torch.autograd.grad(loss, weights) for loss in losses)
    torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)
