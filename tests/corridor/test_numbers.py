"""Python floats, and ints that are no sizes, that a graph takes as inputs: one compilation, many values."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from minicompile.aot.autograd import ahead_of_time
from minicompile.aot.runtime import interpret, make_callable
from minicompile.errors import Unsupported
from minicompile.options import Options
from minicompile.pipeline import compile_graph
from minicompile.shapes.expr import float_symbol
from tests.aot.helpers import capture, forward_and_gradients

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
    "full": lambda x, a, n: torch.full((3, 2), a) + x.sum(),
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
    "used again by the backward": lambda x, a, n: (x.sin() * a).exp() * -n,
}
COMPARED_WITH_ONE = {"alpha", "addcmul"}
"""Derivatives of these have no factor where the number is 1."""

CALLS = [(0.3, 5), (0.1, 7), (2.0, 300)]
EAGER = "eager's operators"


def compiled(f, inputs, language="cpp", symbolic=(1, 2)):
    """The function of a list of inputs, `symbolic` numbers among them; what is guarded of the float."""
    dynamic = {(0, 0): "s0", **{(i, 0): f"f{i}" for i in symbolic}}
    graph, fakes, env = capture(f, inputs, dynamic)
    options = Options(verify=True, device_codegen="auto" if language == EAGER else language)
    training = inputs[0].requires_grad
    aot = ahead_of_time(graph, fakes, options, training=training, shape_env=env)

    def build(part):
        if part is None or language == EAGER:
            return part and interpret(part)
        return compile_graph(part, options).finish()

    run = make_callable(aot, build(aot.forward), build(aot.backward))
    return run, [str(f.condition) for f in env.guards if f.condition.has(float_symbol("f1"))]


def values(dtype, requires_grad=True):
    x = (torch.arange(25.0).reshape(5, 5) / 7 - 1.5).to(dtype)
    return x.requires_grad_(requires_grad)


@pytest.mark.long
@pytest.mark.parametrize("language", ["cpp", "triton", EAGER])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_compilation_serves_every_value(name, language):
    f = PROGRAMS[name]
    for dtype, close in ((torch.float32, 2e-6), (torch.float64, 1e-12)):
        run, facts = compiled(f, [values(dtype), *CALLS[0]], language)
        assert facts == ["Ne(f1, 1.0)"] * (name in COMPARED_WITH_ONE)
        for a, n in CALLS:
            compare(*(forward_and_gradients(g, [values(dtype), a, n]) for g in (run, f)), close)


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_number_known_at_run_time_rounds_as_a_constant_does(name):
    """Bit for bit, in half precision, where it matters when a number is rounded."""
    f, x = PROGRAMS[name], values(torch.bfloat16)
    run, _ = compiled(f, [x, *CALLS[0]])
    for a, n in CALLS:
        fixed, _ = compiled(lambda x, a=a, n=n: f(x, a, n), [x], symbolic=())
        compare(forward_and_gradients(run, [x, a, n]), forward_and_gradients(fixed, [x]), 0.0)


def compare(got, want, close):
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=close, atol=close)


PINNED = {
    "elu": lambda x, a: F.elu(x, a),
    "exponent": lambda x, a: x.abs() ** a,
    "lerp": lambda x, a: torch.lerp(x, x.cos(), a),
    "layer_norm": lambda x, a: F.layer_norm(x, x.shape[-1:], eps=a),
    "dropout": lambda x, a: F.dropout(x, a, training=False),
}


@pytest.mark.parametrize("name", PINNED)
def test_a_value_that_is_needed_while_compiling_becomes_a_guard(name):
    f = PINNED[name]
    run, facts = compiled(f, [values(torch.float32), 0.3], symbolic=(1,))
    assert "Eq(f1, 0.3)" in facts or name == "dropout"
    got, want = (forward_and_gradients(g, [values(torch.float32), 0.3]) for g in (run, f))
    compare(got, want, 1e-5)


def test_what_needs_the_logarithm_of_a_number_stays_with_eager_or_fixes_the_number():
    """Up to torch 2.14 the derivative asks for `log(a)`; later ones ask for the value of `a` before that."""
    f = lambda x, a: a**x  # noqa: E731
    try:
        run, facts = compiled(f, [values(torch.float32), 0.3], symbolic=(1,))
    except Unsupported as reason:
        assert "log" in str(reason)
    else:
        assert "Eq(f1, 0.3)" in facts
        got, want = (forward_and_gradients(g, [values(torch.float32), 0.3]) for g in (run, f))
        compare(got, want, 1e-5)
    x = values(torch.float32, requires_grad=False)
    run, facts = compiled(f, [x, 0.3], symbolic=(1,))
    assert not any(fact.startswith("Eq") for fact in facts)
    torch.testing.assert_close(run([x, 0.7]), [0.7**x])


def test_an_exponent_is_a_fixed_number():
    """Eager's kernels take the root for 0.5, which has another value at minus infinity than the power."""
    x = torch.tensor([[-torch.inf, -0.0, 2.0]] * 2)
    run, facts = compiled(lambda x, a: x**a, [x, 0.5], symbolic=(1,))
    assert "Eq(f1, 0.5)" in facts
    torch.testing.assert_close(run([x, 0.5])[0], x**0.5, rtol=0, atol=0, equal_nan=True)


def test_a_library_call_gets_the_number():
    x = values(torch.float32, requires_grad=False)
    f = lambda x, a: torch.histc(x.clamp(0, 1), 4, 0, a)  # noqa: E731
    graph, fakes, env = capture(f, [x, 0.3], {(1, 0): "f1"})
    aot = ahead_of_time(graph, fakes, Options(), training=False, shape_env=env)
    compiled_graph = compile_graph(aot.forward, Options())
    assert re.search(r"aten_histc_default\(\w+, 4, 0, f\d\)", compiled_graph.stages.wrapper.text)
    run = make_callable(aot, compiled_graph.finish(), None)
    for a in (0.3, 2.0):
        torch.testing.assert_close(run([x, a])[0], f(x, a))


def test_numbers_show_in_kernel_and_wrapper():
    graph, fakes, env = capture(
        lambda x, a: x.sin() * a, [values(torch.float32), 0.3], {(0, 0): "s0", (1, 0): "f1"}
    )
    aot = ahead_of_time(graph, fakes, Options(), training=True, shape_env=env)
    stages = compile_graph(aot.forward, Options()).stages
    (kernel,) = stages.kernels
    assert "const double f1 = mc_double(f1_bits);" in kernel.text
    assert f"{kernel.name}(x0, buf0, s0, f1)" in stages.wrapper.text
    assert "Sym(f1)" in str(aot.backward)
