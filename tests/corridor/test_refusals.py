"""What the corridor can't do ends in eager's answer and a reason, or in one clear sentence."""

from __future__ import annotations

import warnings

import pytest
import torch

import minicompile as mc
from minicompile.errors import BackendError


def test_a_shape_error_is_eagers_and_names_the_users_line():
    def f(x, y):
        z = x + 1
        return z @ y  # the line

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    with pytest.raises(RuntimeError) as eager:
        f(x, y)
    with pytest.raises(type(eager.value)) as compiled:
        mc.compile(f)(x, y)
    assert str(compiled.value) == str(eager.value)
    assert "return z @ y" in str(compiled.traceback[-1].statement)


def test_without_a_compiler_one_sentence_says_what_to_install_and_eager_runs():
    def f(x):
        return torch.relu(x) + 1

    x = torch.randn(5)
    options = {"cpp_compiler": "no-such-compiler", "disk_cache": False}
    with pytest.warns(UserWarning, match=r"install g\+\+") as seen:
        found = mc.compile(f, options=options)(x)
    assert len(seen) == 1
    assert torch.equal(found, f(x))
    with pytest.raises(BackendError, match=r"install g\+\+"):
        mc.compile(f, options=options, fullgraph=True)(x)


def test_without_a_compiler_a_trace_has_the_text_of_every_kernel_and_says_so():
    def f(x):
        return torch.softmax(x, -1)

    x = torch.randn(5, 5, requires_grad=True)
    expected = mc.trace(f, x)
    compiled = mc.compile(
        f, options={"cpp_compiler": "no-such-compiler-to-trace", "disk_cache": False}
    )
    with pytest.warns(UserWarning, match=r"kernels .* can't run here: .* install g\+\+") as seen:
        found = mc.trace(compiled, x)
        mc.trace(compiled, x)
    assert len(seen) == 1 and seen[0].filename == __file__
    assert found.kernels[0].text == expected.kernels[0].text
    assert found.backward.kernels[0].text == expected.backward.kernels[0].text


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_without_a_compiler_other_backends_still_work(backend):
    def f(x):
        return torch.relu(x) + 1

    x = torch.randn(5)
    with warnings.catch_warnings(action="error"):
        options = {"cpp_compiler": "no-such-compiler"}
        assert torch.equal(mc.compile(f, backend=backend, options=options)(x), f(x))


TRANSFORMED = {
    "vjp": lambda w, x: torch.func.vjp(torch.sin, w)[1](x)[0] * 2,
    "linearize": lambda w, x: torch.func.linearize(torch.sin, w)[1](x) * 2,
    "functionalize": lambda w, x: torch.func.functionalize(torch.sin)(w) + x,
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_torch_func_transform_inside_runs_in_eager_with_a_reason(name):
    fn, w, x = TRANSFORMED[name], torch.randn(3), torch.randn(3)
    assert torch.equal(mc.compile(fn)(w, x), fn(w, x))
    assert "is called" in mc.explain(fn)(w, x).breaks[0].reason


@pytest.mark.parametrize("compiled_before", [False, True])
def test_a_compiled_function_under_a_transform_or_with_a_tangent_runs_in_eager(compiled_before):
    def fn(x):
        return x.sin() * 2

    def tangent(run):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(w, x)
            return torch.autograd.forward_ad.unpack_dual(run(dual)).tangent

    w, x = torch.randn(3), torch.randn(3)
    for outside in (
        lambda run: torch.vmap(run)(torch.stack([w, x])),
        lambda run: torch.func.jacfwd(torch.func.jacrev(run))(w),
        tangent,
    ):
        compiled = mc.compile(fn)
        if compiled_before:
            compiled(w)
        torch.testing.assert_close(outside(compiled), outside(fn))
