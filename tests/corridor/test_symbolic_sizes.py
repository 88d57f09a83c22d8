"""One symbolic dimension runs from capture to kernels in both languages: one compilation, many sizes."""

from __future__ import annotations

import copy
import random
import warnings

import pytest
import torch
import torch.nn.functional as F

import minicompile as mc
from minicompile.lessons.model import GPT, GPTConfig

LANGUAGES = ["cpp", "triton"]


@pytest.mark.long
@pytest.mark.parametrize("language", LANGUAGES)
def test_the_lesson_model_trains_at_several_batch_sizes_from_one_compilation(language):
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_embd=16, n_head=2, block_size=8))
    reference = copy.deepcopy(model)
    compiled = mc.compile(
        model, fullgraph=True, options={"device_codegen": language, "recompile_limit": 1}
    )
    for size in (3, 2, 5):
        tokens = torch.randint(0, 90, (size, 9))
        idx, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        for tensor in (idx, targets):
            mc.mark_dynamic(tensor, 0)
        model.zero_grad(set_to_none=True)
        reference.zero_grad(set_to_none=True)
        losses = [compiled(idx, targets)[1], reference(idx, targets)[1]]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[0], losses[1], atol=1e-5, rtol=1e-5)
        for got, want in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(got.grad, want.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("language", LANGUAGES)
def test_kernels_take_the_size_as_an_argument(language):
    def f(x):
        return torch.softmax(x * 2, -1).sum(0)

    x = torch.randn(6, 10)
    mc.mark_dynamic(x, 0)
    trace = mc.trace(mc.compile(f, options={"device_codegen": language}), x)
    [symbol] = {symbol for plan in trace.plans for symbol in plan.sizes}
    assert any(
        str(symbol) in kernel.lines[0].text or str(symbol) in kernel.text
        for kernel in trace.kernels
    )


def test_size_one_gets_its_own_version():
    def f(x):
        return x + x.shape[0]

    compiled = mc.compile(f, fullgraph=True)
    for size in (4, 7, 1):
        x = torch.randn(size, 3)
        mc.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), f(x))


def rows(*size):
    return torch.arange(1.0, 1 + torch.Size(size).numel()).reshape(size)


PROGRAMS = {
    "cat with a slice": lambda a: torch.cat([a, a[..., :1]], -1),
    "cat with a class token": lambda a: torch.cat([torch.zeros(a.shape[0], 1, 8), a], 1),
    "cat of two sizes": lambda a: torch.cat([a, a[:, 1:]], 1) * 2,
    "pad": lambda a: F.pad(a, (1, 1, 0, 2), value=1.5),
    "new, one wider": lambda a: torch.zeros(a.shape[0], a.shape[1] + 1) + 1,
    "triu": lambda a: torch.ones(a.shape[1], a.shape[1] + 1).triu(1),
    "repeat and flip": lambda a: a.reshape(-1).repeat(2).flip(0),
    "expand and flip": lambda a: a[None].expand(2, *a.shape).reshape(-1).flip(0),
    "repeat and flip rows": lambda a: a.repeat(1, 2, 1).flip(1),
    "reshape to a number": lambda a: a.reshape(-1, 8) * 2,
    "attention heads": lambda a: a.view(*a.shape[:2], 2, 4).transpose(1, 2) * 2,
    "rows merged": lambda a: a.reshape(a.shape[0] * a.shape[1], 8) * 2,
    "reshape to one size": lambda a: a.reshape(20, 4) + 1,
    "reshape with the rest": lambda a: a.reshape(a.shape[0], 2, -1) * 1.5,
    "chunk": lambda a: a.chunk(2, -1)[0] * 2,
    "uneven chunk": lambda a: a.chunk(2, 1)[-1] * 2,
    "split": lambda a: a.split(3, -1)[0] * 2,
    "pixel_shuffle": lambda a: F.pixel_shuffle(a.reshape(4, -1, a.shape[0]), 2),
    "stack with a constant": lambda a: torch.stack([a[0, 0], torch.ones(8)]),
    "nll_loss": lambda a: F.nll_loss(a[0].T.log_softmax(1), torch.arange(8) % 5),
    "steps from a negative start": lambda a: a[:, -6::4] * 2,
    "a quotient that is 1": lambda a: a[::2].repeat(2, 1, 2),
}


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_dynamic_programs_are_right_at_the_first_size_and_at_others(name):
    f = PROGRAMS[name]
    compiled = mc.compile(f, dynamic=True)
    for size in ((2, 5, 8), (4, 5, 8), (2, 6, 8), (8, 7, 8), (1, 10, 8)):
        check(f, compiled, [rows(*size)])


def check(f, compiled, inputs):
    """The same as eager: values, strides and the first input's gradient, or an error of the same type."""
    mine = [tensor.clone() for tensor in inputs]
    if inputs[0].is_floating_point():
        inputs[0].requires_grad_()
        mine[0].requires_grad_()
    try:
        want = f(*inputs)
    except (RuntimeError, IndexError) as error:
        with pytest.raises(type(error)):
            compiled(*mine)
        return
    got = compiled(*mine)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4, equal_nan=True)
    if want.requires_grad:
        got.square().sum().backward()
        want.square().sum().backward()
        torch.testing.assert_close(
            mine[0].grad, inputs[0].grad, atol=1e-3, rtol=1e-3, equal_nan=True
        )


STEPS = {
    "cat": lambda x, d, n: torch.cat([x] * n + [x.narrow(d, 0, 1)], d),
    "chunk": lambda x, d, n: x.chunk(n, d)[n % 2 - 1] * 2,
    "split": lambda x, d, n: x.split(n, d)[0] + 1,
    "stack": lambda x, d, n: torch.stack([x, x + 1], d),
    "repeat": lambda x, d, n: x.repeat(*([1] * d), n, *([1] * (x.dim() - d - 1))),
    "flip": lambda x, d, n: x.flip(d),
    "roll": lambda x, d, n: x.roll(n, d),
    "pad": lambda x, d, n: F.pad(x, (d, n), value=1.5),
    "slice": lambda x, d, n: x.transpose(0, d)[::n],
    "flat": lambda x, d, n: x.reshape(-1),
    "rows": lambda x, d, n: x.reshape(-1, x.shape[-1]),
    "swap": lambda x, d, n: x.reshape(x.shape[-1], *x.shape[1:-1], -1) if x.dim() > 1 else x,
    "transpose": lambda x, d, n: x.transpose(0, d),
    "sum": lambda x, d, n: x.sum(d, keepdim=True),
    "amax": lambda x, d, n: x.amax(d, keepdim=True) + x,
    "softmax": lambda x, d, n: x.softmax(d),
    "layer_norm": lambda x, d, n: F.layer_norm(x, x.shape[-1:]),
    "matmul": lambda x, d, n: x @ x.transpose(-1, -2) if x.dim() > 1 else x * 2,
    "embedding": lambda x, d, n: F.embedding(
        torch.arange(x.shape[d]) % 2, x.reshape(-1)[:4].view(2, 2)
    ),
    "cross_entropy": lambda x, d, n: F.cross_entropy(
        x.reshape(-1, x.shape[-1]), torch.zeros(x.numel() // x.shape[-1]).long(), reduction="none"
    ),
    "expand": lambda x, d, n: x[None].expand(n, *x.shape),
    "sizes": lambda x, d, n: x * x.shape[d] + torch.arange(x.shape[-1]),
}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40))
def test_random_dynamic_programs(seed):
    """A few steps in a row, compiled at one size and called at others."""
    draw = random.Random(seed)
    steps = [
        (STEPS[name], draw.random(), draw.randint(2, 3)) for name in draw.choices([*STEPS], k=3)
    ]

    def f(x):
        for step, place, number in steps:
            x = step(x, int(place * x.dim()), number)
        return x

    compiled = mc.compile(f, dynamic=True, options={"recompile_limit": 8})
    for size in ((5, 4), (2, 7), (1, 3)):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "internal error")
            check(f, compiled, [torch.randn(size)])


class Conv(torch.nn.Module):
    """Halves an image, doubles it again by a factor, and counts in batch statistics."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8)
        self.second = torch.nn.Conv2d(8, 8, 3, stride=2, padding=1)

    def forward(self, x):
        wide = F.relu(self.norm(self.first(x)))
        again = F.interpolate(self.second(wide), scale_factor=2.0, mode="nearest")
        return F.adaptive_avg_pool2d(F.max_pool2d(wide + again, 2), 2).flatten(1)


def test_a_convolutional_net_trains_at_several_batch_and_image_sizes_from_one_compilation():
    model = Conv()
    reference = copy.deepcopy(model)
    compiled = mc.compile(model, dynamic=True, fullgraph=True, options={"recompile_limit": 1})
    for size in ((2, 3, 8, 10), (3, 3, 12, 8), (4, 3, 16, 16)):
        x = torch.randn(size)
        for call, net in ((compiled, model), (reference, reference)):
            net.zero_grad()
            call(x).square().sum().backward()
        for got, want in zip(model.state_dict().values(), reference.state_dict().values()):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
        for got, want in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(got.grad, want.grad, atol=1e-4, rtol=1e-4)


def test_a_size_that_guards_make_an_expression_of_others_still_reaches_the_backward():
    def fn(x, weight, bias, n, c, spatial):
        return torch.native_group_norm(x, weight, bias, n, c, spatial, 2, 0.5)[0]

    compiled = mc.compile(fn, dynamic=True, fullgraph=True, options={"verify": True})
    for n, spatial in ((1, 3), (4, 5)):
        x = torch.randn(n, 6, spatial)
        given = [v.requires_grad_() for v in (x, torch.randn(6), torch.randn(6))]
        found, expected = (f(*given, n, 6, spatial) for f in (compiled, fn))
        torch.testing.assert_close(found, expected)
        gradients = (torch.autograd.grad(y.sin().sum(), given) for y in (found, expected))
        torch.testing.assert_close(*gradients)


def test_padding_with_a_number_known_at_run_time():
    def fn(x, value):
        return torch.constant_pad_nd(x, (1, -1, 2, 0), value) * 2

    compiled = mc.compile(fn, dynamic=True, fullgraph=True, options={"verify": True})
    for value in (2.0, -3.5):
        x = torch.randn(3, 4)
        torch.testing.assert_close(compiled(x, value), fn(x, value))
