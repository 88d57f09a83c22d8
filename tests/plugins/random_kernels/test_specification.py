"""Random numbers in kernels, with fallback_random=False.

- They are Triton's numbers, from seeds drawn at each call, the same in every language and order of loops.
- The backward pass, and a region that is computed again, see the forward's numbers.
- They are distributed as they should be; what has no rule stays eager's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import minicompile as mc
from minicompile.ops import philox

IN_KERNELS = {"fallback_random": False, "verify": True}
LANGUAGES = ["cpp", "triton"]


def compiled(function: Any, language: str = "auto", **options: Any) -> Any:
    return mc.compile(function, options={**IN_KERNELS, "device_codegen": language, **options})


def seeded(function: Any, *args: Any) -> Any:
    torch.manual_seed(5)
    return function(*args)


def numbers(
    number: int, size: tuple[int, ...], count: int, kind: Any = philox.rand, device: str = "cpu"
) -> Any:
    """What operator `number` of `count` must give: the compiled call first draws a seed for each."""
    info = torch.iinfo(torch.int64)
    seeds = seeded(lambda: torch.randint(info.min, info.max, (count,), device=device))
    return kind(seeds[number], torch.arange(math.prod(size), device=device).view(size))


def test_the_words_are_those_of_the_paper() -> None:
    """Salmon et al.'s test vectors (Random123, kat_vectors: philox4x32 10)."""
    first, second = philox.words(torch.tensor([0, -1]), torch.tensor([0, -1]))
    assert [hex(word) for word in (first[0], second[0])] == ["0x6627e8d5", "0xe169c58d"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_same_numbers_in_every_language(language: str) -> None:
    def draw(x: Tensor) -> Any:
        return torch.rand_like(x), torch.randn_like(x), torch.rand(7), torch.bernoulli(x, 0.3)

    uniform, normal, other, chosen = seeded(compiled(draw, language), torch.empty(33, 5))
    assert torch.equal(uniform, numbers(0, (33, 5), 4))
    torch.testing.assert_close(normal, numbers(1, (33, 5), 4, philox.randn), rtol=0, atol=4e-6)
    assert torch.equal(other, numbers(2, (7,), 4))
    assert torch.equal(chosen, (numbers(3, (33, 5), 4) < 0.3).float())


@pytest.mark.parametrize("kind", ["rand", "randn"])
def test_the_operator_in_a_graph_draws_as_kernels_do(kind: str) -> None:
    seeds = torch.tensor([3, -9])
    found = torch.ops.minicompile.philox(seeds, 1, (4, 3), kind)
    assert torch.equal(found, getattr(philox, kind)(seeds[1], torch.arange(12).view(4, 3)))


@pytest.mark.gpu
def test_a_gpu_gives_the_same_numbers_and_recomputes_the_mask() -> None:
    def draw(x: Tensor) -> Any:
        return F.dropout(x, 0.25), torch.randn_like(x)

    x = torch.ones(300, 70, device="cuda", requires_grad=True)
    call = compiled(draw)
    dropped, normal = seeded(call, x)
    kept = numbers(0, (300, 70), 2, device="cuda") < 0.75
    assert torch.equal(dropped != 0, kept)
    expected = numbers(1, (300, 70), 2, philox.randn, "cuda")
    torch.testing.assert_close(normal, expected, rtol=0, atol=1e-3)
    dropped.sum().backward()
    assert torch.equal(x.grad != 0, kept)
    assert [value.name for value in mc.trace(call, x).aot.partition.saved] == ["randint"]


def test_dropout_is_one_kernel_and_its_backward_reads_a_byte_for_each_element() -> None:
    x = torch.randn(64, 100, requires_grad=True)
    trace = mc.trace(compiled(lambda x: F.dropout(torch.relu(x), 0.25) * 2), x)
    assert len(trace.kernels) == 1
    assert [str(e.op) for e in trace.loops.externs] == ["aten.randint.low"]
    assert all(value.bytes <= x.numel() for value in trace.aot.partition.saved)


@pytest.mark.parametrize(
    ("language", "partitioner", "budget"),
    [
        ("cpp", "min_cut", None),
        ("cpp", "min_cut", 0.0),
        ("cpp", "default", None),
        ("triton", "min_cut", 0.0),
    ],
)
def test_the_backward_pass_sees_the_forwards_numbers(
    language: str, partitioner: str, budget: float | None
) -> None:
    def f(x: Tensor) -> Tensor:
        return F.dropout(x.sin(), 0.5) * torch.rand_like(x)

    call = compiled(f, language, partitioner=partitioner, memory_budget=budget)
    x = torch.randn(9, 11, requires_grad=True)
    result = seeded(call, x)
    torch.rand(3)  # whoever draws in between changes nothing
    result.sum().backward()
    weight = (numbers(0, (9, 11), 2) < 0.5) * 2 * numbers(1, (9, 11), 2)
    torch.testing.assert_close(result, x.sin() * weight)
    torch.testing.assert_close(x.grad, x.cos() * weight)
    if budget == 0:
        aot = mc.trace(call, x).aot
        assert [value.name for value in aot.partition.saved if not value.is_input] == ["randint"]
        called = {node.target for node in aot.backward.nodes}
        assert philox.PHILOX in called and torch.ops.aten.randint.low not in called


class Noisy(torch.autograd.Function):
    """Its gradient is a random number."""

    @staticmethod
    def forward(ctx, x):
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.rand(9, 11)


@pytest.mark.parametrize("fallback", [False, True])
def test_a_backward_pass_that_draws_does_so_each_time(fallback: bool) -> None:
    x = torch.randn(9, 11, requires_grad=True)
    result = compiled(lambda x: Noisy.apply(x), fallback_random=fallback)(x)
    grads = [
        seeded(torch.autograd.grad, result.sum(), x, None, True)[0],
        torch.autograd.grad(result.sum(), x, retain_graph=True)[0],
    ]
    drawn = seeded(torch.rand, 9, 11) if fallback else numbers(0, (9, 11), 1)
    assert torch.equal(grads[0], drawn) and not torch.equal(*grads)


def test_a_checkpoint_region_is_recomputed_with_its_numbers() -> None:
    def f(x: Tensor) -> Any:
        return checkpoint(lambda x: F.dropout(x.sin(), 0.5).cos(), x, use_reentrant=False)

    x = torch.randn(9, 11, requires_grad=True)
    call = compiled(f)
    saved = mc.trace(call, x).aot.partition.saved
    assert {value.name for value in saved} == {"x", "randint"}
    seeded(call, x).sum().backward()
    weight = (numbers(0, (9, 11), 1) < 0.5) * 2
    torch.testing.assert_close(x.grad, -(x.sin() * weight).sin() * weight * x.cos())


def test_each_operator_and_each_call_has_numbers_of_its_own() -> None:
    def f(x: Tensor) -> Any:
        return torch.rand_like(x), torch.rand_like(x), torch.randn_like(x), torch.randn_like(x)

    call, x = compiled(f), torch.empty(20_000)
    first, again = seeded(call, x), call(x)
    assert all(map(torch.equal, first, seeded(call, x)))
    correlation = torch.corrcoef(torch.stack([*first, *again])) - torch.eye(8)
    assert correlation.abs().max() < 0.04  # five standard deviations


def bell(x: Tensor) -> Tensor:
    """The normal distribution's values become uniform ones."""
    return 0.5 + 0.5 * torch.erf(x / 2**0.5)


DISTRIBUTED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "wide": (lambda x: x.clone().uniform_(-3, 5), lambda x: (x + 3) / 8),
    "shifted": (lambda x: x.clone().normal_(2, 0.5), lambda x: bell((x - 2) / 0.5)),
}
"""What draws, and what makes of its numbers uniform ones."""


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_they_are_distributed_as_they_should_be(name: str) -> None:
    draw, uniform = DISTRIBUTED[name]
    n = 400_000
    values = uniform(seeded(compiled(draw), torch.zeros(n))).double()
    grid = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    # Kolmogorov and Smirnov: one in ten thousand is larger
    assert (values.sort().values - grid).abs().max() < 2.2 / n**0.5
    assert values.min() >= 0 and values.max() <= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_upper_bound_is_never_drawn(dtype: torch.dtype) -> None:
    x = torch.ones(10**5, dtype=dtype)
    for low, high in ((0, 1), (1, 2), (1000, 1004)):
        drawn = seeded(compiled(lambda x: x.clone().uniform_(low, high)), x)  # noqa: B023
        assert drawn.dtype is dtype
        assert (drawn >= low).all() and (drawn < drawn.new_tensor(high)).all()
    if dtype is not torch.float32:
        step = torch.finfo(dtype).eps / 2
        expected = (numbers(0, x.shape, 1) / step).floor().mul(step).to(dtype)
        assert torch.equal(seeded(compiled(torch.rand_like), x), expected)


@pytest.mark.parametrize("language", LANGUAGES)
def test_an_element_keeps_its_number_however_it_lies(language: str) -> None:
    """Counted by position: in views, permuted results, and loops in another order."""

    def f(x: Tensor) -> Any:
        turned = torch.rand_like(x.t())
        return turned, turned[1:, ::2] + 1, turned.reshape(-1).flip(0), turned.sum(0)

    x, expected = torch.randn(6, 9), numbers(0, (9, 6), 1)
    turned, part, flipped, total = seeded(compiled(f, language), x)
    assert turned.stride() == torch.rand_like(x.t()).stride()
    assert torch.equal(turned, expected)
    assert torch.equal(part, expected[1:, ::2] + 1)
    assert torch.equal(flipped, expected.reshape(-1).flip(0))
    torch.testing.assert_close(total, expected.sum(0))


def test_dynamic_sizes_count_by_the_size_at_hand() -> None:
    call = mc.compile(
        lambda x: F.dropout(torch.rand_like(x[1:]), 0.5), dynamic=True, options=IN_KERNELS
    )
    for size in ((5, 7), (8, 3), (2, 1)):
        rows = (size[0] - 1, size[1])
        expected = numbers(0, rows, 2) * (numbers(1, rows, 2) < 0.5) * 2
        torch.testing.assert_close(seeded(call, torch.empty(size)), expected)


X, EMPTY, SPECIAL = torch.randn(6), torch.empty(0, 3), torch.tensor([math.nan, math.inf] * 50)
CERTAIN: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, Tensor]] = {
    "no elements": (lambda x: F.dropout(x, 0.5) + torch.rand_like(x), EMPTY, EMPTY),
    "keeps all": (lambda x: F.dropout(x, 0.0), X, X),
    "drops all": (lambda x: F.dropout(x, 1.0), X, X * 0),
    "evaluation": (lambda x: F.dropout(x, 0.5, training=False), X, X),
    "certainly": (lambda x: torch.bernoulli(x, 1.0), X, torch.ones(6)),
    "never": (lambda x: torch.bernoulli(x, 0.0), X, X * 0),
    "infinity times 0": (lambda x: F.dropout(x, 0.5).isfinite().float(), SPECIAL, torch.zeros(100)),
}


@pytest.mark.parametrize("name", CERTAIN)
def test_where_nothing_depends_on_the_numbers(name: str) -> None:
    fn, x, expected = CERTAIN[name]
    assert torch.equal(compiled(fn)(x), expected)


def test_what_has_no_rule_stays_eagers() -> None:
    """float64 needs more random bits; by default, all numbers are eager's."""

    def f(x: Tensor) -> Any:
        return torch.rand_like(x), torch.randperm(5)

    x = torch.empty(4, dtype=torch.float64)
    assert all(map(torch.equal, seeded(compiled(f), x), seeded(f, x)))
    x = x.float()
    assert all(map(torch.equal, seeded(mc.compile(f), x), seeded(f, x)))
    with pytest.raises(RuntimeError):
        compiled(lambda x: torch.bernoulli(x, 1.5))(x)
