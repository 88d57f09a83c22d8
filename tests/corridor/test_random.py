"""Random numbers in kernels (`fallback_random=False`): Triton's numbers, from seeds drawn at each call."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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


def seeds(count: int, device: str = "cpu") -> torch.Tensor:
    """What the compiled call draws first."""
    info = torch.iinfo(torch.int64)
    torch.manual_seed(5)
    return torch.randint(info.min, info.max, (count,), device=device)


def numbers(number: int, size: tuple[int, ...], count: int, kind: Any = philox.rand) -> Any:
    """What operator `number` of `count` must give."""
    places = torch.arange(math.prod(size)).view(size)
    return kind(seeds(count)[number], places)


def test_the_words_are_those_of_the_paper():
    """Salmon et al.'s test vectors (Random123, kat_vectors: philox4x32 10)."""
    place = torch.tensor([0, -1])
    first, second = philox.words(torch.tensor([0, -1]), place)
    assert [hex(word) for word in (first[0], second[0])] == ["0x6627e8d5", "0xe169c58d"]
    assert not torch.equal(first[:1], first[1:])


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_same_numbers_in_every_language(language):
    def draw(x):
        return torch.rand_like(x), torch.randn_like(x), torch.rand(7), torch.bernoulli(x, 0.3)

    x = torch.empty(33, 5)
    uniform, normal, other, chosen = seeded(compiled(draw, language), x)
    assert torch.equal(uniform, numbers(0, (33, 5), 4))
    torch.testing.assert_close(normal, numbers(1, (33, 5), 4, philox.randn), rtol=0, atol=4e-6)
    assert torch.equal(other, numbers(2, (7,), 4))
    assert torch.equal(chosen, (numbers(3, (33, 5), 4) < 0.3).float())


@pytest.mark.long
def test_they_are_tritons_numbers(tmp_path):
    """tl.rand and tl.randn themselves, interpreted in a process of their own."""
    pytest.importorskip("triton")
    program = """
import torch, triton, triton.language as tl
from minicompile.ops import philox

@triton.jit
def kernel(u, n, seed, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    place = i.to(tl.int64) * 12345678901
    tl.store(u + i, tl.rand(seed, place))
    tl.store(n + i, tl.randn(seed, place))

u, n = torch.empty(2, 1024)
kernel[(1,)](u, n, -3141592653589793238, BLOCK=1024)
seed, places = torch.tensor(-3141592653589793238), torch.arange(1024) * 12345678901
assert torch.equal(u, philox.rand(seed, places))
torch.testing.assert_close(n, philox.randn(seed, places), rtol=0, atol=4e-6)
"""
    path = tmp_path / "kernel.py"  # Triton reads the source
    path.write_text(program)
    interpreted = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, str(path)], check=True, env=interpreted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_gives_the_same_numbers_and_recomputes_the_mask():
    def draw(x):
        return F.dropout(x, 0.25), torch.rand_like(x), torch.randn_like(x)

    x = torch.ones(300, 70, device="cuda", requires_grad=True)
    call = compiled(draw)
    dropped, uniform, normal = seeded(call, x)
    keys = seeds(3, device="cuda")
    places = torch.arange(x.numel(), device="cuda").view(x.shape)
    kept = philox.rand(keys[0], places) < 0.75
    assert torch.equal(dropped != 0, kept)
    assert torch.equal(uniform, philox.rand(keys[1], places))
    torch.testing.assert_close(normal, philox.randn(keys[2], places), rtol=0, atol=1e-3)
    dropped.sum().backward()
    assert torch.equal(x.grad != 0, kept)
    partition = mc.trace(call, x).aot.partition
    assert [value.name for value in partition.saved] == ["randint"]


def test_dropout_is_one_kernel_and_its_backward_reads_a_byte_for_each_element():
    def f(x):
        return F.dropout(torch.relu(x), 0.25) * 2

    x = torch.randn(64, 100, requires_grad=True)
    trace = mc.trace(compiled(f), x)
    assert len(trace.kernels) == 1 and [str(e.op) for e in trace.loops.externs] == [
        "aten.randint.low"
    ]
    assert all(value.bytes <= x.numel() for value in trace.aot.partition.saved)
    kept = numbers(0, (64, 100), 1) < 0.75
    found = seeded(compiled(f), x)
    torch.testing.assert_close(found, torch.relu(x) * kept / 0.75 * 2)
    found.sum().backward()
    torch.testing.assert_close(x.grad, (x > 0) * kept / 0.75 * 2)


@pytest.mark.parametrize(
    ("language", "partitioner", "budget"),
    [
        ("cpp", "min_cut", None),
        ("cpp", "min_cut", 0.0),
        ("cpp", "min_cut", 1.0),
        ("cpp", "default", None),
        ("triton", "min_cut", None),
        ("triton", "min_cut", 0.0),
    ],
)
def test_the_backward_pass_sees_the_forwards_numbers(language, partitioner, budget):
    def f(x):
        return F.dropout(x.sin(), 0.5) * torch.rand_like(x)

    call = compiled(f, language, partitioner=partitioner, memory_budget=budget)
    x = torch.randn(9, 11, requires_grad=True)
    found = seeded(call, x)
    torch.rand(3)  # whoever draws in between changes nothing
    found.sum().backward()
    weight = (numbers(0, (9, 11), 2) < 0.5) * 2 * numbers(1, (9, 11), 2)
    torch.testing.assert_close(found, x.sin() * weight)
    torch.testing.assert_close(x.grad, x.cos() * weight)


class Noisy(torch.autograd.Function):
    """Its gradient is a random number."""

    @staticmethod
    def forward(ctx, x):
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.rand(9, 11)


@pytest.mark.parametrize("fallback", [False, True])
def test_a_backward_pass_that_draws_does_so_each_time(fallback):
    def f(x):
        return Noisy.apply(x)

    x = torch.randn(9, 11, requires_grad=True)
    found = compiled(f, fallback_random=fallback)(x)
    grads = [
        seeded(torch.autograd.grad, found.sum(), x, None, True)[0],
        torch.autograd.grad(found.sum(), x, retain_graph=True)[0],
    ]
    drawn = seeded(torch.rand, 9, 11) if fallback else numbers(0, (9, 11), 1)
    assert torch.equal(grads[0], drawn) and not torch.equal(*grads)


def test_what_is_recomputed_comes_from_the_saved_seeds():
    def f(x):
        return F.dropout(x.sin(), 0.5)

    x = torch.randn(9, 11, requires_grad=True)
    aot = mc.trace(compiled(f, memory_budget=0.0), x).aot
    assert [value.name for value in aot.partition.saved if not value.is_input] == ["randint"]
    called = {node.target for node in aot.backward.nodes}
    assert philox.PHILOX in called and torch.ops.aten.randint.low not in called


def test_a_checkpoint_region_is_recomputed_with_its_numbers():
    def block(x):
        return F.dropout(x.sin(), 0.5).cos()

    def f(x):
        return checkpoint(block, x, use_reentrant=False)

    x = torch.randn(9, 11, requires_grad=True)
    call = compiled(f)
    partition = mc.trace(call, x).aot.partition
    assert {value.name for value in partition.saved} == {"x", "randint"}
    seeded(call, x).sum().backward()
    weight = (numbers(0, (9, 11), 1) < 0.5) * 2
    torch.testing.assert_close(x.grad, -(x.sin() * weight).sin() * weight * x.cos())


def test_each_operator_and_each_call_has_numbers_of_its_own():
    def f(x):
        return torch.rand_like(x), torch.rand_like(x), torch.randn_like(x), torch.randn_like(x)

    call, x = compiled(f), torch.empty(20_000)
    first, again = seeded(call, x), call(x)
    repeated = seeded(call, x)
    assert all(map(torch.equal, first, repeated))
    drawn = torch.stack([*first, *again])
    correlation = torch.corrcoef(drawn) - torch.eye(8)
    assert correlation.abs().max() < 0.04  # five standard deviations


def test_they_are_distributed_as_they_should_be():
    def f(x):
        return (
            torch.rand_like(x),
            torch.randn_like(x),
            x.clone().uniform_(-3, 5),
            x.clone().normal_(2, 0.5),
        )

    n = 400_000
    uniform, normal, wide, shifted = seeded(compiled(f), torch.zeros(n))
    both = {
        "uniform": uniform,
        "normal": 0.5 + 0.5 * torch.erf(normal / 2**0.5),
        "wide": (wide + 3) / 8,
        "shifted": 0.5 + 0.5 * torch.erf((shifted - 2) / 0.5 / 2**0.5),
    }
    grid = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    for name, values in both.items():
        distance = (values.double().sort().values - grid).abs().max()
        # Kolmogorov and Smirnov: one in ten thousand is larger
        assert distance < 2.2 / n**0.5, name
    assert abs(normal.mean()) < 5 / n**0.5 and abs(normal.var() - 1) < 5 * (2 / n) ** 0.5
    assert uniform.min() >= 0 and uniform.max() < 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_stay_below_one(dtype):
    def f(x):
        return torch.rand_like(x), F.dropout(x, 0.25), torch.randn_like(x)

    x = torch.ones(100_000, dtype=dtype, requires_grad=True)
    uniform, dropped, normal = seeded(compiled(f), x)
    assert {t.dtype for t in (uniform, dropped, normal)} == {dtype}
    step = torch.finfo(dtype).eps / 2
    assert torch.equal(uniform, (numbers(0, x.shape, 3) / step).floor().mul(step).to(dtype))
    assert uniform.max() == 1 - step
    kept = numbers(1, x.shape, 3) < 0.75
    torch.testing.assert_close(dropped, (kept / 0.75).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_upper_bound_is_never_drawn(dtype):
    drawn = seeded(compiled(lambda x: x.clone().uniform_(1000, 1004)), torch.empty(10**5).to(dtype))
    assert (drawn >= 1000).all() and (drawn < drawn.new_tensor(1004)).all()
    drawn = seeded(compiled(lambda x: x.clone().uniform_(1, 2)), torch.empty(10**5).to(dtype))
    assert (drawn >= 1).all() and (drawn < 2).all()


@pytest.mark.parametrize("language", LANGUAGES)
def test_an_element_keeps_its_number_however_it_lies(language):
    """Counted by position: in views, permuted results, and loops in another order."""

    def f(x):
        turned = torch.rand_like(x.t())
        return turned, turned[1:, ::2] + 1, turned.reshape(-1).flip(0), turned.sum(0)

    x = torch.randn(6, 9)
    expected = numbers(0, (9, 6), 1)
    turned, part, flipped, total = seeded(compiled(f, language), x)
    assert turned.stride() == torch.rand_like(x.t()).stride()
    assert torch.equal(turned, expected)
    assert torch.equal(part, expected[1:, ::2] + 1)
    assert torch.equal(flipped, expected.reshape(-1).flip(0))
    torch.testing.assert_close(total, expected.sum(0))


def test_dynamic_sizes_count_by_the_size_at_hand():
    def f(x):
        return F.dropout(torch.rand_like(x[1:]), 0.5)

    call = mc.compile(f, dynamic=True, options=IN_KERNELS)
    for size in ((5, 7), (8, 3), (2, 1)):
        rows = (size[0] - 1, size[1])
        expected = numbers(0, rows, 2) * (numbers(1, rows, 2) < 0.5) * 2
        torch.testing.assert_close(seeded(call, torch.empty(size)), expected)


def test_nothing_to_draw():
    """Empty tensors, one element, dropout that keeps or drops all, and evaluation."""
    x = torch.randn(6)
    assert compiled(lambda x: F.dropout(x, 0.5) + torch.rand_like(x))(torch.empty(0, 3)).shape == (
        0,
        3,
    )
    assert compiled(lambda x: torch.rand_like(x))(torch.tensor(1.0)).shape == ()
    assert torch.equal(compiled(lambda x: F.dropout(x, 0.0))(x), x)
    assert torch.equal(compiled(lambda x: F.dropout(x, 1.0))(x), torch.zeros(6))
    assert torch.equal(compiled(lambda x: F.dropout(x, 0.5, training=False))(x), x)
    assert torch.equal(compiled(lambda x: torch.bernoulli(x, 1.0))(x), torch.ones(6))
    assert torch.equal(compiled(lambda x: torch.bernoulli(x, 0.0))(x), torch.zeros(6))


def test_nan_and_infinity_survive_dropout_as_in_eager():
    x = torch.tensor([math.nan, math.inf, -math.inf] * 50)
    dropped = compiled(lambda x: F.dropout(x, 0.5))(x)
    assert dropped[::3].isnan().all()
    assert (dropped.isnan() | dropped.isinf()).all()  # infinity times 0 is NaN


def test_what_has_no_rule_stays_eagers():
    """float64 needs more random bits; a generator of the user's is the user's."""

    def f(x):
        return torch.rand_like(x), torch.randperm(5)

    x = torch.empty(4, dtype=torch.float64)
    assert all(map(torch.equal, seeded(compiled(f), x), seeded(f, x)))
    with pytest.raises(RuntimeError):
        compiled(lambda x: torch.bernoulli(x, 1.5))(torch.empty(4))
    with pytest.raises(RuntimeError):
        compiled(lambda x: x.clone().uniform_(3, 1))(torch.empty(4))


def test_by_default_the_numbers_are_eagers():
    def f(x):
        return F.dropout(x, 0.5) + torch.randn_like(x)

    x = torch.randn(50)
    assert torch.equal(seeded(mc.compile(f), x), seeded(f, x))


def test_interpreted_graphs_give_the_same_numbers():
    def f(x):
        return F.dropout(x.sin(), 0.5)

    x = torch.randn(9, 11)
    interpreted = mc.compile(f, backend="aot_eager", options=IN_KERNELS)
    torch.testing.assert_close(seeded(interpreted, x), seeded(compiled(f), x))


def test_the_loops_of_dropout_are_vectorised():
    """One truth value becomes a float without the conversion that gcc 12 can't vectorise."""
    text = str(mc.trace(compiled(lambda x: F.dropout(x, 0.5)), torch.randn(4096)).kernels[0])
    assert "? 1.0f : 0.0f" in text and "(float)tmp" not in text
