"""Written-out attention with changed scores, through the template of Triton kernels, interpreted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import minicompile as mc
from minicompile.codegen.printing import kernel_template
from minicompile.debug.gpu_assembly import cross_compile
from minicompile.ops.registry import scoped
from minicompile.plugins.flash_attention.kernels import AttentionPrinter
from minicompile.plugins.flash_attention.operators import FlashAttention
from tests.comparing import in_double
from tests.plugins.flash_attention.scores import (
    CASES,
    attention,
    error,
    gradients,
    largest_errors,
    positions,
)

TEMPLATE = {"plugins": ["flash_attention"], "device_codegen": "triton"}
Function = Callable[..., Any]


def made(
    rows: int, columns: int, head: int, dtype: torch.dtype = torch.float32, batch: int = 2
) -> list[Tensor]:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(batch, 3, n, head).to(dtype).requires_grad_() for n in (rows, columns, columns)
    )
    return [q, k, v, torch.randn(3, rows, columns).to(dtype), torch.rand(3, 1, 1)]


def errors(fn: Function, exact: Function, given: Sequence[Tensor]) -> list[float]:
    """Largest differences from float64, by the largest number."""
    torch.manual_seed(1)
    down = torch.randn(given[0].shape).to(given[0].dtype)
    return largest_errors(
        gradients(fn, given, down), gradients(exact, in_double(given), down.double())
    )


def compiled(fn: Function, **options: Any) -> Any:
    return mc.compile(fn, fullgraph=True, dynamic=False, options={**TEMPLATE, **options})


def kernel_texts(fn: Function, given: Sequence[Any]) -> list[str]:
    trace = mc.trace(compiled(fn), *given)
    kernels = [kernel for stages in trace.graphs.values() for kernel in stages.kernels]
    return [kernel.text for kernel in kernels if kernel.name.startswith("triton_attention")]


def assert_close_as_the_library(fn: Function, given: Sequence[Tensor]) -> None:
    """At most twice as far from float64 as the library's attention, forward and backward."""
    library = lambda q, k, v, *more: F.scaled_dot_product_attention(q, k, v)  # noqa: E731
    plain = lambda q, k, v, *more: attention(lambda s, *more: s, q, k, v)  # noqa: E731
    limits = errors(library, plain, given)
    assert len(kernel_texts(fn, given)) == 3
    for ours, limit in zip(errors(compiled(fn), fn, given), limits, strict=True):
        assert ours <= 2 * limit


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_changed_scores_are_as_exact_as_the_library(name: str, dtype: torch.dtype) -> None:
    assert_close_as_the_library(partial(attention, CASES[name]), made(150, 150, 32, dtype))


@pytest.mark.long
@pytest.mark.parametrize("rows, columns, head", [(1, 33, 16), (130, 70, 40), (65, 200, 128)])
def test_any_lengths_and_heads(rows: int, columns: int, head: int) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
        return attention(lambda s: s + bias, q, k, v)

    batch = 2 if rows > 1 else 50  # the largest of few errors is a matter of luck
    assert_close_as_the_library(fn, made(rows, columns, head, batch=batch))


def window(s: Tensor, *more: Tensor) -> Tensor:
    i, j = positions(s)
    return s.masked_fill((j > i) | (i - j >= 40), -torch.inf)


@pytest.mark.long
def test_heads_in_one_projection_are_read_where_they_lie() -> None:
    def fn(x: Tensor) -> Tensor:
        q, k, v = x.view(2, 100, 3, 2, 32).permute(2, 0, 3, 1, 4)
        return attention(window, q, k, v).transpose(1, 2).reshape(2, 100, 64)

    torch.manual_seed(0)
    x = torch.randn(2, 100, 192, requires_grad=True)
    trace = mc.trace(compiled(fn), x)
    first = trace.graphs["forward"].schedule.nodes[0]
    assert {read.buffer for read in first.reads} == {"x"}
    ours, eager = (torch.autograd.grad(f(x).sin().sum(), x)[0] for f in (compiled(fn), fn))
    assert torch.allclose(ours, eager, atol=1e-5)


@pytest.mark.long
def test_tiles_outside_of_a_window_are_left_out() -> None:
    given = made(500, 500, 16)[:3]
    forward, queries, keys = kernel_texts(partial(attention, window), given)
    for text in (forward, queries):
        assert "begin = tl.maximum(first - 39, 0)" in text
        assert "end = tl.minimum(first + XBLOCK, 500)" in text
    assert "end = tl.minimum(first + XBLOCK + 39, 500)" in keys
    assert_close_as_the_library(partial(attention, window), given)


LOWEST = torch.finfo(torch.float32).min
SCORES: dict[str, Callable[..., Tensor]] = {
    "padding and the future, -inf": lambda s, i, j, pad: torch.where(
        (j <= i) & (pad == 0), s, -torch.inf
    ),
    "padding added": lambda s, i, j, pad: (s + pad * LOWEST).masked_fill(j > i, LOWEST),
    "padding before": lambda s, i, j, pad: s.masked_fill(pad > 0, -torch.inf).masked_fill(
        j > i, LOWEST
    ),
    "rows of masks": lambda s, i, j, pad: s.masked_fill(
        (i == 5) | (i == 40) & (j < 30), -torch.inf
    ),
    "a band, large": lambda s, i, j, pad: s.masked_fill((j > i) | (j < i - 7), -1e9),
    "a band that leaves a row": lambda s, i, j, pad: s.masked_fill(j >= i, -torch.inf),
    "a finite mask that becomes infinite": lambda s, i, j, pad: (
        s.masked_fill((i - j > 7) & (i > 50), LOWEST) * 2.0
    ),
    "signs": lambda s, i, j, pad: torch.sign(s) * 20,
    "positions": lambda s, i, j, pad: s * 0 + j / 9,
}
"""Of products, positions and padding: rows may be masked whole, by -inf or by a number, or hardly depend on
the products. Of rows without a number, eager gives NaN."""


@pytest.mark.long
@pytest.mark.parametrize("name", SCORES)
def test_values_and_gradients_are_eagers_where_rows_are_masked(name: str) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        return attention(lambda s: SCORES[name](s, *positions(s), pad), q, k, v)

    pad = torch.zeros(2, 1, 1, 64)
    pad[1, ..., :5] = 1
    given = [*made(64, 64, 16)[:3], pad]
    assert kernel_texts(fn, given)
    down = torch.ones_like(given[0])
    ours, eager = (gradients(f, given, down) for f in (compiled(fn), fn))
    if ours[3].isnan().any():  # of values, whose rows without a number reach others in eager
        ours[3].masked_fill_(eager[3].isnan(), torch.nan)
    for mine, theirs in zip(ours, eager):
        assert torch.allclose(mine, theirs, atol=1e-5, equal_nan=True)


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "triangle": lambda s: s.masked_fill(torch.ones(s.shape[-2:]).tril() == 0, -torch.inf),
    "where": lambda s: torch.where(torch.ones_like(s, dtype=torch.bool).tril(), s, -torch.inf),
    "added": lambda s: s + torch.full(s.shape[-2:], -torch.inf).triu(1),
    "by distance": lambda s: s.masked_fill(
        (positions(s)[0] - positions(s)[1]).clamp(max=0) < 0, -torch.inf
    ),
    "compared": lambda s: s.masked_fill(~(positions(s)[0] >= positions(s)[1]), -torch.inf),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MASKS)
def test_a_causal_mask_is_known_however_it_is_written(name: str) -> None:
    given = made(130, 130, 16)[:3]
    fn = partial(attention, MASKS[name])
    assert "end = tl.minimum(first + XBLOCK, 130)" in kernel_texts(fn, given)[0]
    assert_close_as_the_library(fn, given)


@pytest.mark.long
@pytest.mark.parametrize(
    "dtype, size", [(torch.bfloat16, 30), (torch.bfloat16, 300), (torch.float16, 30)]
)
def test_large_products_leave_one_weight(dtype: torch.dtype, size: float) -> None:
    """Queries and keys of 30 give scores of thousands: no power overflows."""
    q, k, v = (x.detach() for x in made(130, 70, 32, dtype)[:3])
    given = [(x * factor).requires_grad_() for x, factor in ((q, size), (k, size), (v, 1))]
    fn = partial(attention, CASES["causal"])
    limits = errors(fn, fn, [*given, v, v])
    assert all(a <= 2 * b for a, b in zip(errors(compiled(fn), fn, [*given, v, v]), limits))


def filled_in_part(s: Tensor, bias: Tensor) -> Tensor:
    low = bias * 2
    low[:, :3] = -5.0
    return s + low


def filled_through_a_view(s: Tensor, bias: Tensor) -> Tensor:
    low = torch.full((70, 70), -3.0).triu(1)
    low.view(-1)[:100].fill_(2)
    return s + low


def read_before_it_is_filled(s: Tensor, bias: Tensor) -> Tensor:
    line = torch.arange(70.0)[None]
    column, double = line.T, line * 2
    column += 3
    return s + double.cos() + column


def an_input_written_to(s: Tensor, bias: Tensor) -> Tensor:
    low = bias * 2
    bias.add_(1)
    return s + low


def kept_and_cast(s: Tensor, bias: Tensor) -> Tensor:
    ones = torch.ones(70, 70).bool()
    same = ones.bool()
    same.tril_()
    return s.masked_fill(~ones, -torch.inf)


@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    [
        filled_in_part, filled_through_a_view, read_before_it_is_filled,
        an_input_written_to, kept_and_cast,
    ],
)  # fmt: skip
def test_what_is_written_to_is_not_computed_anew(change: Function) -> None:
    """Else kernels would take what it was made as: a mask that is filled in part was lost."""

    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        s = q @ k.transpose(-2, -1)
        return torch.softmax(change(s, bias), -1) @ v

    def prepared(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        low = change(torch.zeros(70, 70), bias)
        return torch.softmax(q @ k.transpose(-2, -1) + low, -1) @ v

    for function in (fn, prepared):
        ours, eager = made(70, 70, 16)[:4], made(70, 70, 16)[:4]
        assert torch.allclose(compiled(function)(*ours), function(*eager), atol=1e-5)
        assert torch.equal(ours[3], eager[3])
    assert len(kernel_texts(prepared, made(70, 70, 16)[:4])) == 3


def test_a_template_from_outside_is_printed_and_run() -> None:
    class Signed(AttentionPrinter):
        def kernel(self) -> None:
            super().kernel()
            self.line("    # from outside")

    given = made(40, 40, 16)
    with scoped():
        kernel_template("attention")(Signed)
        fn = partial(attention, CASES["causal"])
        assert all("# from outside" in text for text in kernel_texts(fn, given))
        assert_close_as_the_library(fn, given)


def test_the_operator_is_its_own_reference() -> None:
    """Where no Triton kernels are made, a library call computes what the operator means."""
    text = "def score(x0, x1):\n    return torch.tanh(x0 * 0.25) + x1"
    ours = lambda q, k, v, bias: FlashAttention.apply(text, q, k, v, bias)  # noqa: E731
    given = made(50, 50, 16)[:4]
    exact = lambda q, k, v, b: torch.softmax(torch.tanh(q @ k.mT / 4) + b, -1) @ v  # noqa: E731
    assert max(errors(ours, exact, given)) < 1e-5


def reason(fn: Function, *given: Tensor) -> str:
    trace = mc.trace(compiled(fn), *given)
    assert trace.aot is not None
    (record,) = (r for r in trace.aot.passes if r.name == "pre_grad.flash_attention_template")
    assert not record.changed
    return record.reason


def test_what_the_template_cannot_is_left_with_a_reason() -> None:
    q, k, v, bias, _ = made(20, 20, 16)
    bias.requires_grad_()
    added = lambda q, k, v, bias: attention(lambda s: s + bias, q, k, v)  # noqa: E731
    assert "gradient" in reason(added, q, k, v, bias)
    assert "float64" in reason(added, *(x.detach().double() for x in (q, k, v, bias)))

    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.softmax(q @ k.mT, -1)
        return weights, weights @ v

    assert "others read" in reason(both, q, k, v)
    dropped = lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.5) @ v  # noqa: E731
    assert reason(dropped, q, k, v) == "no softmax of rows times values"


@pytest.mark.long
@pytest.mark.parametrize(
    "name, head", [("causal", 64), ("causal", 128), ("biased", 64), ("capped", 64)]
)
def test_kernels_fit_their_gpu(name: str, head: int) -> None:
    """The matrix units work, and next to nothing spills."""
    fn, given = partial(attention, CASES[name]), made(256, 256, head, torch.bfloat16)
    trace = mc.trace(compiled(fn), *given)
    kernels = [kernel for stages in trace.graphs.values() for kernel in stages.kernels]
    found = [k for k in kernels if k.name.startswith("triton_attention")]
    with ThreadPoolExecutor(2) as pool:
        assemblies = list(pool.map(partial(cross_compile, target=("cuda", 90)), found))
    for assembly in assemblies:
        # one block was measured faster than those that spill nothing
        few = 128 if head == 128 and assembly.source.name == "triton_attention_0" else 8
        assert assembly.spilled_bytes is not None and assembly.spilled_bytes <= few
        assert assembly.shared_bytes <= 227 * 1024
        assert "HGMMA" in assembly.levels["sass"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("head", [64, 128])
def test_on_a_gpu(name: str, head: int) -> None:
    assert error(name, head) <= 2
