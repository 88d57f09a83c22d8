"""Python floats, and ints that are no sizes, that a graph takes as inputs: one compilation, many values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import minicompile as mc
from minicompile.api import dispatcher_of
from tests.comparing import answer, assert_answer, assert_as_eager

PROGRAMS = {
    "product": lambda x, a, n: x * a,
    "product with an int": lambda x, a, n: x * n + x.long() * n,
    "sum": lambda x, a, n: x + a,
    "difference": lambda x, a, n: a - x,
    "quotient": lambda x, a, n: x / a,
    "divided by it": lambda x, a, n: a / (x.abs() + 1),
    "integers": lambda x, a, n: x.long() * a,
    "comparison": lambda x, a, n: (x > a, x.long() >= a, x <= -a),
    "where": lambda x, a, n: torch.where(x > 0, x, a),
    "full": lambda x, a, n: torch.full((3, 2), a, dtype=x.dtype) + x.sum(),
    "full_like": lambda x, a, n: torch.full_like(x, a) * x,
    "filled in place": lambda x, a, n: torch.zeros_like(x).fill_(a) + x,
    "masked_fill": lambda x, a, n: x.masked_fill(x > 0, a),
    "alpha": lambda x, a, n: torch.add(x, x.sin(), alpha=a) - torch.sub(x, x.cos(), alpha=a),
    "addcmul": lambda x, a, n: torch.addcmul(x, x, x, value=a),
    "clamp": lambda x, a, n: x.clamp(min=-a, max=a),
    "leaky_relu": lambda x, a, n: F.leaky_relu(x, a),
    "threshold": lambda x, a, n: F.threshold(x, a, a),
    "softplus": lambda x, a, n: F.softplus(x, a),
    "softmax at a temperature": lambda x, a, n: torch.softmax(x / a, -1),
    "matrix product": lambda x, a, n: torch.addmm(x, x[:, :5] @ x, x) * a,
    "a library's argument": lambda x, a, n: torch.histc(x.detach().float().clamp(0, 1), 4, 0, a),
    "used again by the backward": lambda x, a, n: (x.sin() * a).exp() * -n,
}
CALLS = [(0.3, 5), (0.1, 7), (2.0, 300)]
WAYS = {
    "cpp": {"options": {"device_codegen": "cpp"}},
    "triton": {"options": {"device_codegen": "triton"}},
    "eager's operators": {"backend": "aot_eager"},
}


def captures(compiled):
    return len(dispatcher_of(compiled).explanation().captures)


def values(dtype):
    return (torch.arange(25.0).reshape(5, 5) / 7 - 1.5).to(dtype).requires_grad_()


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_compilation_serves_every_value(name, way):
    f = PROGRAMS[name]
    for dtype, close in ((torch.float32, 2e-6), (torch.float64, 1e-12)):
        compiled = mc.compile(f, dynamic=True, fullgraph=True, **WAYS[way])
        for a, n in CALLS:
            assert_as_eager(compiled, f, values(dtype), a, n, rtol=close, atol=close)
        assert captures(compiled) == 1


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_number_known_at_run_time_rounds_as_a_constant_does(name):
    """Bit for bit, in half precision, where it matters when a number is rounded."""
    f, x = PROGRAMS[name], values(torch.bfloat16)
    compiled = mc.compile(f, dynamic=True)
    for a, n in CALLS:
        fixed = mc.compile(lambda x, a=a, n=n: f(x, a, n), dynamic=False)
        ours, theirs = answer(compiled, [x, a, n]), answer(fixed, [x])
        ours.written = theirs.written
        assert_answer(ours, theirs, rtol=0, atol=0)


PINNED = {
    "elu": lambda x, a: F.elu(x, a),
    "exponent": lambda x, a: x.abs() ** a,
    "lerp": lambda x, a: torch.lerp(x, x.cos(), a),
    "layer_norm": lambda x, a: F.layer_norm(x, x.shape[-1:], eps=a),
}


@pytest.mark.parametrize("name", PINNED)
def test_a_value_that_is_needed_while_compiling_becomes_a_guard(name):
    compiled = mc.compile(PINNED[name], dynamic=True)
    for a in (0.3, 0.7):
        assert_as_eager(compiled, PINNED[name], values(torch.float32), a, rtol=1e-5, atol=1e-5)
    assert captures(compiled) == 2


def test_what_needs_the_logarithm_of_a_number_stays_with_eager_or_fixes_the_number():
    f = lambda x, a: a**x  # noqa: E731
    compiled = mc.compile(f, dynamic=True)
    for x, a in ((values(torch.float32), 0.3), (values(torch.float32).detach(), 0.7)):
        assert_as_eager(compiled, f, x, a, rtol=1e-5, atol=1e-5)


def test_an_exponent_is_a_fixed_number():
    """Eager's kernels take the root for 0.5, which has another value at minus infinity than the power."""
    f, x = lambda x, a: x**a, torch.tensor([[-torch.inf, -0.0, 2.0]] * 2)
    assert_as_eager(mc.compile(f, dynamic=True), f, x, 0.5, rtol=0, atol=0)
