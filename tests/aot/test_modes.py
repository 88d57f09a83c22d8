"""Modes at the first call and at the second: values, dtypes and requires_grad are eager's for every pair."""

from __future__ import annotations

import contextlib

import pytest
import torch

import minicompile as mc


@contextlib.contextmanager
def set_for_a_while(setter, value, before):
    setter(value)
    try:
        yield
    finally:
        setter(before)


MODES = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", torch.float16),
    "uncached": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "deterministic": lambda: set_for_a_while(torch.use_deterministic_algorithms, True, False),
    "float64": lambda: set_for_a_while(torch.set_default_dtype, torch.float64, torch.float32),
}


def plain(x, w):
    y = torch.nn.functional.linear(x, w)
    return y.relu(), y.softmax(-1), torch.ones(3) * 2, y.detach(), x * 2


def switches_grad(x, w):
    with torch.no_grad():
        scale = (x @ w).sum()
    with torch.enable_grad():
        loss = (x * w).sum()
    return scale * w, loss


def switches_autocast(x, w):
    with torch.autocast("cpu", enabled=False):
        a = x @ w
    with torch.autocast("cpu", torch.bfloat16):
        b = x @ w
    return a, b, x @ w


def writes(x, w):
    x.add_(1)
    return x @ w, x.t()


def outcome(fn, mode, made_in_inference):
    torch.manual_seed(0)
    with torch.inference_mode(made_in_inference):
        x, w = torch.randn(4, 4), torch.randn(4, 4)
    w.requires_grad_(not made_in_inference)
    try:
        with MODES[mode]():
            outputs = fn(x, w)
    except RuntimeError as error:
        return str(error)[:40], []
    facts = [(o.dtype, o.requires_grad, o.is_inference(), o.stride()) for o in outputs]
    differentiable = [o.float().sum() for o in outputs if o.requires_grad]
    if differentiable:
        torch.stack(differentiable).sum().backward()
    values = [o.detach().clone().float() for o in (*outputs, x, w.grad) if o is not None]
    return facts, values


@pytest.mark.long
@pytest.mark.parametrize("made_in_inference", [False, True])
@pytest.mark.parametrize("fn", [plain, switches_grad, switches_autocast, writes])
@pytest.mark.parametrize("first", MODES)
def test_any_mode_after_any_other(fn, first, made_in_inference):
    for second in MODES:
        mc.reset()
        call = mc.compile(fn, backend="aot_eager")
        for mode in (first, second):
            facts, values = outcome(call, mode, made_in_inference)
            expected_facts, expected = outcome(fn, mode, made_in_inference)
            assert facts == expected_facts, (first, second)
            torch.testing.assert_close(values, expected, rtol=1e-2, atol=1e-2)


def region_without(layer, x, sizes):
    with torch.autocast("cpu", enabled=False):
        return layer(x)


def after_a_break(layer, x, sizes):
    with torch.autocast("cpu", torch.bfloat16):
        sizes.append(x.sum().item())
    return layer(x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.float32])
def test_a_product_of_types_that_autocast_does_not_make_equal_raises_as_in_eager(dtype):
    def fn(x):
        with torch.autocast("cpu", torch.bfloat16):
            return x @ torch.ones(4, 4)

    mc.reset()
    found = []
    for call in (fn, mc.compile(fn, backend="aot_eager")):
        try:
            found.append(str(call(torch.ones(3, 4, dtype=dtype)).dtype))
        except RuntimeError as error:
            found.append(str(error))
    assert found[0] == found[1]


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("fn", [region_without, after_a_break])
def test_where_autocast_is_switched_off_no_rule_casts(fn, around):
    mc.reset()
    layer, x = torch.nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    found = []
    for call in (fn, mc.compile(fn, backend="aot_eager")):
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            y = call(layer, x, [])
        gradients = torch.autograd.grad((y * y).sum(), [x, layer.weight, layer.bias])
        found.append([y, *gradients])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_autocast_around_the_backward_changes_nothing():
    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    for backend in ("aot_eager", "inductor"):
        loss = mc.compile(lambda x, w: (x @ w).tanh().sum(), backend=backend)(x, w)
        with torch.autocast("cpu", torch.bfloat16):
            (got,) = torch.autograd.grad(loss, w)
        (expected,) = torch.autograd.grad((x @ w).tanh().sum(), w)
        torch.testing.assert_close(got, expected)


def test_a_mode_that_the_graph_leaves_on_is_off_when_it_is_traced_again() -> None:
    """It is, where inputs share memory that is written to."""

    def cut(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        b.mul_(2)
        product = a @ a.t()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            row = product[0]
            print(end="")
        return row

    for wrap in (lambda fn: fn, mc.compile):
        a = torch.ones(4, 4, requires_grad=True) * 1.0
        found = wrap(cut)(a, a.detach()[1:])
        assert found.dtype == torch.float32
