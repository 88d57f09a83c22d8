"""Attention is recognised however it is written, and what only looks like it is left alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import minicompile as mc
from minicompile.aot.passes.attention_products import equation_axes
from minicompile.aot.passes.flash_attention import flash_attention
from minicompile.ops.registry import scoped
from minicompile.passes.manager import graph_pass
from tests.codegen.test_attention import TEMPLATE, compiled, errors, kernel_texts, made, reason
from tests.torch_versions import needs

Form = Callable[[Tensor, Tensor, Tensor], Tensor]
BATCH, HEADS, TOKENS, HEAD = 2, 3, 40, 16
SCALE = HEAD**-0.5


def merged(*given: Tensor) -> list[Tensor]:
    return [x.reshape(BATCH * HEADS, *x.shape[2:]) for x in given]


def future(s: Tensor) -> Tensor:
    i, j = (torch.arange(n, device=s.device) for n in s.shape[-2:])
    return j[None, :] > i[:, None]


def causal(s: Tensor) -> Tensor:
    return s.masked_fill(future(s), -torch.inf)


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.einsum("bhid,bhjd->bhij", q, k) * SCALE
    return torch.einsum("bhij, bhjd -> bhid", causal(s).softmax(-1), v)


def einsum_heads_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    s = torch.einsum("blhd,bmhd->bhlm", q, k) * SCALE
    return torch.einsum("bhlm,bmhd->blhd", causal(s).softmax(-1), v).transpose(1, 2)


def einsum_the_other_way_round(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.einsum("hbjd,bhid->bhij", k.transpose(0, 1), q) * SCALE
    return torch.einsum("bhjd,bhij->dbhi", v, causal(s).softmax(-1)).permute(1, 2, 3, 0)


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    s *= SCALE
    s.masked_fill_(future(s), -torch.inf)
    return F.softmax(s, dim=3) @ v


def bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = merged(q, k, v)
    s = causal(torch.bmm(q, k.mT) * SCALE)
    return torch.bmm(F.softmax(s, 2), v).view(BATCH, HEADS, TOKENS, HEAD)


def three_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = merged(q, k, v)
    return (causal(q @ k.mT * SCALE).softmax(-1) @ v).view(BATCH, HEADS, TOKENS, HEAD)


def regrouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As BLOOM does."""
    keys = torch.arange(TOKENS)
    ramp = keys * torch.linspace(0.1, 0.2, HEADS)[:, None]
    ramp = ramp[:, None, :].to(q.dtype).repeat(BATCH, 1, 1)
    a, b, c = merged(q, k, v)
    s = ramp.baddbmm(a, b.mT, beta=0.5, alpha=SCALE).view(BATCH, HEADS, TOKENS, TOKENS)
    s += torch.where(future(s), -1e9, 0.0)
    weights = F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype).view(-1, TOKENS, TOKENS)
    return torch.bmm(weights, c).view(BATCH, HEADS, TOKENS, HEAD)


def split_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What is read of scores has three dimensions; the scores at last have four."""
    a, b = merged(q, k)
    bias = torch.linspace(-1, 1, BATCH * HEADS)[:, None, None] * torch.arange(TOKENS)
    s = causal(torch.bmm(a, b.mT) * SCALE + bias.to(q.dtype))
    return s.unflatten(0, (BATCH, HEADS)).softmax(-1) @ v


FORMS = [
    einsum,
    einsum_heads_last,
    einsum_the_other_way_round,
    in_place,
    bmm,
    three_dimensions,
    regrouped,
    split_after,
]


def is_template(text: str) -> bool:
    return "def triton_attention" in text


def scaled_by_itself(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT * SCALE
    more = s + 1
    more *= s  # autograd keeps a copy of what is written over
    return more.softmax(-1) @ v


@pytest.mark.parametrize("form", FORMS)
def test_every_form_becomes_the_template(form: Form) -> None:
    given = made(TOKENS, TOKENS, HEAD)[:3]
    assert max(errors(compiled(form), form, given)) < 1e-5
    texts = kernel_texts(form, given)
    assert any(map(is_template, texts))
    # the future is left out, whether its mask was written in place or not
    (forward,) = (text for text in texts if "def attend(" in text)
    assert ("end = tl.minimum(first + XBLOCK" in forward) == (form is not regrouped)


def test_a_factor_may_be_another_score() -> None:
    given = made(TOKENS, TOKENS, HEAD)[:3]
    assert max(errors(compiled(scaled_by_itself), scaled_by_itself, given)) < 1e-5
    assert any(map(is_template, kernel_texts(scaled_by_itself, given)))


def test_one_head_needs_no_dimension() -> None:
    given = [x[0, 0].detach().requires_grad_() for x in made(TOKENS, 25, HEAD)[:3]]

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.mm(F.softmax(q @ k.T / math.sqrt(HEAD), dim=1), v)

    assert max(errors(compiled(fn), fn, given)) < 1e-5
    assert any(map(is_template, kernel_texts(fn, given)))


def test_layers_of_several_forms_follow_each_other() -> None:
    given = made(TOKENS, TOKENS, HEAD)[:3]

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for form in FORMS:
            q = q + form(q, k, v)
        return q

    assert max(errors(compiled(fn), fn, given)) < 1e-5
    assert sum("def attend(" in text for text in kernel_texts(fn, given)) == len(FORMS)


@pytest.mark.parametrize("form", [einsum_heads_last, in_place, bmm])
def test_the_library_takes_forms_that_it_knows(form: Form) -> None:
    given, options = made(TOKENS, TOKENS, HEAD)[:3], {"fuse_attention": True}
    with scoped():
        on_cpu = partial(flash_attention, devices={"cpu"}, library=True)
        graph_pass("flash_attention", stage="pre_grad", order=40, option="fuse_attention")(on_cpu)
        trace = mc.trace(mc.compile(form, options=options), *given)
        found = errors(mc.compile(form, options=options), form, given)
    assert "flash_attention_for_cpu" in str(trace.graphs["forward"].loops)
    assert max(found) < 1e-5


def where_whole(s: Tensor) -> Tensor:
    return s * s.long().bool()


def rounded_down(s: Tensor) -> Tensor:
    return torch.div(s, 0.5, rounding_mode="floor")


@pytest.mark.parametrize("change", [where_whole, rounded_down])
def test_the_library_knows_no_whole_numbers(change: Callable[[Tensor], Tensor]) -> None:
    given, options = made(TOKENS, TOKENS, HEAD)[:3], {"fuse_attention": True}

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return change(q @ k.mT).softmax(-1) @ v

    with scoped():
        on_cpu = partial(flash_attention, devices={"cpu"}, library=True)
        graph_pass("flash_attention", stage="pre_grad", order=40, option="fuse_attention")(on_cpu)
        torch.testing.assert_close(mc.compile(fn, options=options)(*given), fn(*given))


def test_without_keys_a_sum_is_zero() -> None:
    given = made(TOKENS, 0, HEAD)[:3]

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        return torch.bmm(torch.bmm(q, k.mT).softmax(-1), v)

    assert reason(fn, *given) == "nothing to look at"
    assert compiled(fn)(*given).equal(torch.zeros(BATCH * HEADS, TOKENS, HEAD))


def test_a_number_may_become_a_tensor() -> None:
    given = made(TOKENS, TOKENS, HEAD)[:3]

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s: Any = 5
        s += q @ k.mT
        s *= SCALE
        return s.softmax(-1) @ v

    assert max(errors(compiled(fn), fn, given)) < 1e-5


def seen_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    once = s + 1
    s *= SCALE
    return (s + once).softmax(-1) @ v


def seen_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    view = s[:, :, :3]
    s *= SCALE
    return s.softmax(-1) @ v + view.sum()


def written_through_a_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    s.view(-1).mul_(SCALE)
    return s.softmax(-1) @ v


def a_part_is_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    s[..., 3:] *= SCALE
    return s.softmax(-1) @ v


def an_argument_is_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    bias = torch.ones_like(s)
    held = bias
    bias += s
    return bias.softmax(-1) @ v + held.mean()


def scores_are_returned(q: Tensor, k: Tensor, v: Tensor) -> Any:
    s = q @ k.mT
    s += 1
    return s.softmax(-1) @ v + s.mean()


@pytest.mark.parametrize(
    "fn",
    [
        seen_before,
        seen_after,
        written_through_a_view,
        a_part_is_written,
        an_argument_is_written,
        scores_are_returned,
    ],
)
def test_what_somebody_else_sees_is_written_for_him(fn: Form) -> None:
    given = made(TOKENS, TOKENS, HEAD)[:3]
    assert max(errors(compiled(fn), fn, given)) < 1e-5
    assert not any(map(is_template, kernel_texts(fn, given)))


def kept_as_a_result(s: Tensor) -> Tensor:
    s = torch.tanh(s)
    s *= 20
    return s


def kept_as_a_factor(s: Tensor) -> Tensor:
    s *= s
    return s


@pytest.mark.parametrize("change", [kept_as_a_result, kept_as_a_factor])
def test_what_autograd_keeps_can_not_be_written_to(change: Callable[[Tensor], Tensor]) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return change(q @ k.mT).softmax(-1) @ v

    for called in (fn, mc.compile(fn, options={"fuse_attention": "template"})):
        given = made(TOKENS, TOKENS, HEAD)[:3]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            called(*given).sum().backward()


@pytest.mark.parametrize("write", [torch.add, torch.sub])
def test_what_is_in_a_callers_memory_is_written_there(write: Callable[..., Tensor]) -> None:
    q, k, v = (x.detach() for x in made(TOKENS, TOKENS, HEAD)[:3])

    def fn(q: Tensor, k: Tensor, v: Tensor, held: Tensor) -> Tensor:
        s = write(q, q, out=held) @ k.mT
        more = write(s, s, out=v.new_empty(0))
        more += s
        return more.softmax(-1) @ v

    def into(q: Tensor, k: Tensor, v: Tensor, held: Tensor) -> Tensor:
        s = write(held, 1, out=held)
        s += q @ k.mT
        return s.softmax(-1) @ v

    for called, size in ((fn, HEAD), (into, TOKENS)):
        ours, theirs = (torch.zeros(2, 3, TOKENS, size) for _ in range(2))
        found = mc.compile(called, dynamic=False, options=TEMPLATE)(q, k, v, ours)
        torch.testing.assert_close(found, called(q, k, v, theirs))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, pytest.param(torch.bfloat16, marks=needs("a row of NaN stays in its row"))],
)
def test_a_mask_is_rounded_as_the_scores_that_it_is_added_to(dtype: torch.dtype) -> None:
    q, k, v = (x.detach() for x in made(TOKENS, TOKENS, HEAD, dtype)[:3])
    mask = torch.zeros(TOKENS, TOKENS)
    mask[3] = torch.finfo(torch.float32).min  # infinite in half types

    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        s = q @ k.mT
        s += mask
        return s.softmax(-1) @ v

    found, right = compiled(fn)(q, k, v, mask), fn(q, k, v, mask)
    assert any(map(is_template, kernel_texts(fn, [q, k, v, mask])))
    assert found.isnan().equal(right.isnan()) and right.isnan().any()


def test_only_scores_are_written_over() -> None:
    q, k, v = (x.detach() for x in made(TOKENS, TOKENS, HEAD)[:3])

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = torch.ones(2, 3, TOKENS, TOKENS, dtype=torch.float16) * 1
        s *= q @ k.mT * 1e4
        return s.softmax(-1, dtype=torch.float32) @ v

    torch.testing.assert_close(compiled(fn)(q, k, v), fn(q, k, v), equal_nan=True)


@torch.library.custom_op("minicompile_tests::bmm", mutates_args=())
def cosines(x: Tensor, y: Tensor) -> Tensor:
    return torch.bmm(x, y).cos()


@cosines.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], y.shape[2])


def test_an_operator_of_another_library_is_not_torchs() -> None:
    q, k, v = merged(*(x.detach() for x in made(TOKENS, TOKENS, HEAD)[:3]))

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.bmm(torch.ops.minicompile_tests.bmm(q, k.mT).softmax(-1), v)

    torch.testing.assert_close(compiled(fn)(q, k, v), fn(q, k, v))


def test_weights_that_are_cut_to_whole_numbers_are_no_attention() -> None:
    given = [x * 9 for x in made(TOKENS, TOKENS, HEAD)[:3]]

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT).softmax(-1) * 2).int().float() @ v

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1).int().float() @ v

    for called in (fn, whole):
        torch.testing.assert_close(compiled(called)(*given), called(*given))


def transposed(s: Tensor) -> Tensor:
    return s + s.transpose(-1, -2)


def of_another_head(s: Tensor) -> Tensor:
    return s + s[:, [1, 2, 0]]


def shaped_as(s: Tensor) -> Tensor:
    return s + torch.ones_like(s)[0, 0].triu(1)


@pytest.mark.parametrize("change", [transposed, of_another_head, shaped_as])
def test_scores_that_read_other_scores_are_left(change: Callable[[Tensor], Tensor]) -> None:
    given = made(TOKENS, TOKENS, HEAD)[:3]

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return change(q @ k.mT).softmax(-1) @ v

    assert max(errors(compiled(fn), fn, given)) < 1e-5
    assert any(map(is_template, kernel_texts(fn, given))) == (change is shaped_as)


def test_what_is_added_to_products_may_want_a_gradient() -> None:
    q, k, v = merged(*made(TOKENS, TOKENS, HEAD)[:3])
    bias = torch.randn(TOKENS, TOKENS, requires_grad=True)

    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, beta: float = 1.0) -> Tensor:
        return torch.bmm(torch.baddbmm(bias[None], q, k.mT, beta=beta).softmax(-1), v)

    assert "gradient" in reason(fn, q, k, v, bias)
    for beta in (1.0, 0.0):
        found = [
            torch.autograd.grad(call(q, k, v, bias, beta).sum(), bias)[0]
            for call in (fn, compiled(fn))
        ]
        torch.testing.assert_close(found[1], found[0])


def test_nothing_is_read_that_counts_nothing() -> None:
    q, k, v = (x.detach() for x in merged(*made(TOKENS, TOKENS, HEAD)[:3]))
    q.requires_grad_()
    old = torch.full((BATCH * HEADS, TOKENS, TOKENS), torch.nan)

    def fn(q: Tensor, k: Tensor, v: Tensor, old: Tensor) -> Tensor:
        return torch.bmm(torch.baddbmm(old, q, k.mT, beta=0, alpha=SCALE).softmax(-1), v)

    torch.testing.assert_close(compiled(fn)(q, k, v, old), fn(q, k, v, old))
    assert any(map(is_template, kernel_texts(fn, [q, k, v, old])))


def rows_of_other_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.einsum("bhid,bhjd->bhji", q, k)  # softmax goes over queries
    return torch.einsum("bhji,bhid->bhjd", s.softmax(-1), v)


def test_queries_and_keys_may_change_sides() -> None:
    given = made(TOKENS, TOKENS, HEAD)[:3]
    fn = rows_of_other_queries
    assert max(errors(compiled(fn), fn, given)) < 1e-5
    assert any(map(is_template, kernel_texts(fn, given)))


def one_for_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhid,bhjd->bhij", q, k[:, :1]).softmax(-1) @ v


def sums_over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhij,bhid->bhjd", (q @ k.mT).softmax(-1), v)


def other_bits(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = (q @ k.mT).view(torch.int32).view(torch.float32)
    return s.softmax(-1) @ v


@pytest.mark.parametrize(
    "fn, why",
    [
        (one_for_all, "queries, keys and values differ in batch or heads"),
        (sums_over_queries, "no softmax of rows times values"),
        (other_bits, "no product of queries and keys"),
    ],
)
def test_what_is_no_attention_is_left(fn: Form, why: str) -> None:
    given = made(TOKENS, TOKENS, HEAD)[:3]
    assert reason(fn, *given) == why
    if fn is not other_bits:
        assert max(errors(compiled(fn), fn, given)) < 1e-5


def test_equations_of_products() -> None:
    assert equation_axes("bhid, bhjd -> bhij") == ("bhid", "bhjd", "bhij")
    for other in (
        "bhid,bhjd",
        "bhid,bhjd->bhi",
        "bhid,bhjd->bhijd",
        "bhii,bhjd->bhij",
        "bhid,bhjd->bihj...",
        "bhid,bhd->bhi",
        "bhid,bhjd,bj->bhij",
        "bhide,bhjde->bhij",
    ):
        assert equation_axes(other) is None, other
    assert equation_axes("id,jd->ij") == ("id", "jd", "ij")
