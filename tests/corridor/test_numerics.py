"""Eager's values to the bit, its dtypes and its strides, where they are easily missed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, tensor

import minicompile as mc
from tests.comparing import answer, assert_as_eager

BF16, FP16, I8, I32, U8 = torch.bfloat16, torch.float16, torch.int8, torch.int32, torch.uint8
INF = float("inf")

Case = tuple[Callable[..., Any], Sequence[Tensor]]


def bf16(*values: float) -> Tensor:
    return tensor(values, dtype=BF16)


def fp16(*values: float) -> Tensor:
    return tensor(values, dtype=FP16)


def column_major() -> Tensor:
    return torch.arange(1.0, 7.0).reshape(2, 3).T


PROMOTION: dict[str, Case] = {
    "number less bytes": (lambda x: 0.5 - x, [tensor([1, 255], dtype=U8)]),
    "alpha of int8": (
        lambda x, y: torch.add(x, y, alpha=2),
        [tensor([255], dtype=U8), tensor([-83], dtype=I8)],
    ),
    "alpha of bf16": (lambda x, y: torch.sub(x, y, alpha=3), [tensor([0.0]), bf16(0.00099945)]),
    "addcmul of bytes": (
        lambda x, y: torch.addcmul(x, y, y, value=2),
        [tensor([1.0]), tensor([20], dtype=U8)],
    ),
    "addcdiv": (
        lambda x, y: torch.addcdiv(x, y, y + 3, value=2),
        [torch.ones(1, dtype=torch.float64), tensor([20.0])],
    ),
    "mean as fp16": (lambda x: x.mean(dtype=FP16), [tensor([70000, 1])]),
    "mean as bf16": (lambda x: x.mean(0, dtype=BF16), [torch.linspace(1, 2, 90).view(30, 3)]),
    "ldexp": (torch.ldexp, [tensor([1.5, 3.7]), bf16(0.1, 3.3)]),
    "arange": (lambda x: torch.arange(0, 1, 0.15) * x, [torch.ones(7, dtype=torch.float64)]),
    "root of fp16": (lambda x: (x**0.5, x**-0.5), [fp16(-INF, -0.0, 0.0, 2.0)]),
    "index_add of bools": (
        lambda x, i: x.index_add(0, i, x, alpha=2),
        [tensor([True]), tensor([0])],
    ),
    "huber_loss": (F.huber_loss, [fp16(1, 2), bf16(3, 2)]),
}

LEAVING_HALF: dict[str, Case] = {
    "==": (lambda x, y: (x + y) == x, [bf16(256), bf16(1)]),
    "long": (lambda x, y: (x + y).long(), [bf16(256), bf16(1)]),
    "fp16": (lambda x, y: (x * y).half(), [bf16(0.1), bf16(3.3)]),
    "bool": (lambda x: (x * x).bool(), [fp16(-1e-5, 2)]),
    "floor": (lambda x, y: (x + y).floor(), [bf16(3.99), bf16(0.004)]),
    "argmax": (lambda x, y: (x + y).argmax(), [bf16(256, 257, 256), bf16(0, 0, 1)]),
    "sum": (lambda x: x.sum().float() + (x * x).sum(dtype=torch.float32), [bf16(1, 0.01, 3.3)]),
}

STRIDES: dict[str, Case] = {
    "power of a number": (lambda x: (2**x, (2**x).is_contiguous()), [column_major()]),
    "logsigmoid": (lambda x: F.logsigmoid(x * 0), [column_major()]),
    "rrelu": (F.rrelu, [column_major()]),
    "batch_norm": (
        lambda x: F.batch_norm(x, torch.zeros(2), torch.ones(2), eps=1e-9),
        [column_major()],
    ),
    "batch_norm, channels last": (
        lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3), eps=1e-9),
        [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)],
    ),
    "two layouts": (
        lambda x, y: (
            torch.copysign(x, y), torch.xlogy(x, y), x // y, torch.div(y, x, rounding_mode="floor")
        ),
        [column_major(), torch.ones(3, 2)],
    ),
}  # fmt: skip

TRITON: dict[str, Case] = {
    "floor division": (lambda x: (x // 3, x % 3), [torch.linspace(-9, 9, 8)]),
    "by a fraction": (lambda x: x // 3.5, [torch.arange(-5, 5)]),
    "scalar condition": (torch.minimum, [torch.ones(1, 1), torch.linspace(-2, 2, 5)]),
}

LANGUAGES = {"cpp": PROMOTION | LEAVING_HALF | STRIDES, "triton": LEAVING_HALF | TRITON}


EXACT = {"rtol": 0, "atol": 0}


@pytest.mark.long
@pytest.mark.parametrize(
    ("language", "name"), [(lang, name) for lang, table in LANGUAGES.items() for name in table]
)
def test_results_are_eagers(language: str, name: str) -> None:
    if language == "triton":
        pytest.importorskip("triton")
    fn, inputs = LANGUAGES[language][name]
    compiled = mc.compile(fn, fullgraph=True, options={"device_codegen": language})
    assert_as_eager(compiled, fn, *inputs, **EXACT)


EVERY_KIND: dict[str, Callable[..., Any]] = {
    "scaled": lambda x, y, i, m: (torch.add(x, y, alpha=2.5), torch.sub(i, i.flip(0), alpha=3)),
    "of integers": lambda x, y, i, m: (i.signbit(), i.isnan(), i.floor(), torch.logical_xor(i, m)),
    "of bools": lambda x, y, i, m: (
        m.byte().argmax(1),
        m.maximum(m.flip(1)),
        m.cumsum(1),
        m.amax(0),
    ),
    "truncated": lambda x, y, i, m: torch.div(x, y, rounding_mode="trunc"),
    "of nothing": lambda x, y, i, m: (x[:0].sum(0), x[:, :0].prod(1), x[:0].relu()),
    "written": lambda x, y, i, m: (
        x.clone().copy_(i[0]),
        i.clone().fill_(7),
        x.new_ones(4).add_(m[0]),
    ),
    "drawn": lambda x, y, i, m: torch.empty_like(x).bernoulli_(x.sigmoid()),
}


@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_every_kind_of_operand_in_one_program(language: str) -> None:
    def program(*given: Tensor) -> list[Any]:
        return [fn(*given) for fn in EVERY_KIND.values()]

    x, y, i = torch.randn(3, 4), torch.randn(3, 4) * 3, torch.arange(-5, 7).view(3, 4)
    compiled = mc.compile(program, fullgraph=True, options={"device_codegen": language})
    assert_as_eager(compiled, program, x, y, i, i % 2 == 0)


INDEXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_select": lambda x, i: x.index_select(0, i),
    "embedding": lambda x, i: F.embedding(i, x),
}


@pytest.mark.parametrize("name", INDEXED)
def test_a_negative_index_is_an_error_where_eager_says_so(name: str) -> None:
    f, x = INDEXED[name], torch.randn(3, 2)
    assert_as_eager(mc.compile(f), f, x, tensor([2]), **EXACT)
    with pytest.raises((IndexError, RuntimeError)):
        mc.compile(f)(x, tensor([-1]))


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "fill": lambda x: x.fill_(2.0),
    "masked": lambda x: x.masked_fill_(x > 0, 0.5),
    "a row": lambda x: x[0].add_(1),
    "an element": lambda x: x.index_put_((tensor([1]),), tensor(4.0)),
}


@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors")
@pytest.mark.parametrize("name", WRITES)
def test_writes_to_an_expanded_input_are_eagers(name: str) -> None:
    x = torch.ones(1, 3).expand(2, 3)
    assert_as_eager(mc.compile(WRITES[name]), WRITES[name], x, **EXACT)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest"])
def test_images_of_bytes_are_resampled_as_in_eager(mode: str) -> None:
    image = torch.arange(0, 245, 7).to(U8).reshape(1, 1, 5, 7)
    f = lambda x: F.interpolate(x, size=(3, 9), mode=mode)  # noqa: E731
    assert_as_eager(mc.compile(f), f, image, **EXACT)


def test_targets_of_known_length_train_at_symbolic_sizes() -> None:
    f = lambda x: F.nll_loss(x.log_softmax(1), torch.arange(8) % 7)  # noqa: E731
    for rows in (8, 10):
        x = torch.randn(rows, 7, requires_grad=True)
        assert_as_eager(mc.compile(f, dynamic=True), f, x, rtol=1e-5, atol=1e-6)


SIGNS: dict[str, Callable[[Tensor], Any]] = {
    "an integer between floats loses the sign of zero": lambda x: (
        1 / x.long().float(),
        1 / x.int().double(),
        x.long() <= 0.5,
    ),
    "zero gradients of views are ordinary zeros": lambda x: x.reshape(-1).sgn(),
}


@pytest.mark.parametrize("name", SIGNS)
def test_zeros_are_eagers(name: str) -> None:
    x = tensor([-0.3, 0.3, -1.5, 1e10], requires_grad=True)
    assert_as_eager(mc.compile(SIGNS[name]), SIGNS[name], x, **EXACT)


def test_a_condition_that_is_always_true_is_a_constant_in_triton() -> None:
    fn = lambda x: F.relu6(torch.cat([x, x], 0))  # noqa: E731
    x = torch.arange(-3.0, 3.0).view(2, 3).half().requires_grad_()
    assert_as_eager(mc.compile(fn, options={"device_codegen": "triton"}), fn, x, **EXACT)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("trained", [False, True])
def test_unused_random_numbers_are_drawn_all_the_same(backend: str, trained: bool) -> None:
    def fn(a: torch.Tensor) -> torch.Tensor:
        _ = a + torch.rand(4)
        return a * 2

    states = []
    for run in (fn, mc.compile(fn, backend=backend)):
        answer(run, [torch.ones(4, requires_grad=trained)])
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
