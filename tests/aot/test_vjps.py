"""A gradient from outside: where it applies, what it is given, and what is said when it is wrong."""

from __future__ import annotations

import inspect
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import minicompile as mc
from minicompile.errors import OptionError
from tests.aot.helpers import compile_aot, listed
from tests.comparing import answer, cotangent

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def undone():
    torch.manual_seed(0)
    with mc.scoped():
        yield


def gradients(fn, *inputs):
    """By the compiled function; it gives what eager's forward gives."""
    call, _ = compile_aot(fn, list(inputs))
    found = answer(lambda *given: call([*given]), inputs)
    with torch.no_grad():
        for result, eager in zip(found.results, listed(fn)(*inputs), strict=True):
            torch.testing.assert_close(result, eager)
    return found.gradients


def eagers(fn, *inputs):
    return answer(listed(fn), inputs).gradients


def leaf(*size):
    return torch.randn(*size, requires_grad=True)


@pytest.mark.parametrize(
    "fn",
    [F.silu, nn.SiLU(), nn.SiLU(inplace=True), aten.silu.default, lambda x: F.silu(x).relu_() * 1],
    ids=["function", "module", "in_place", "operator", "before_an_in_place_operator"],
)
def test_a_rule_applies_however_the_operator_is_called(fn):
    x = leaf(3, 4)
    plain = gradients(lambda x: fn(x * 1), x)[0]
    torch.testing.assert_close(plain, eagers(lambda x: fn(x * 1), x)[0])

    @mc.register_vjp(aten.silu.default)
    def tenfold(grad, result, x):
        s = torch.sigmoid(x)
        return 10 * grad * (s + x * s * (1 - s))

    torch.testing.assert_close(gradients(lambda x: fn(x * 1), x)[0], 10 * plain)
    with mc.without("vjp:aten.silu"):
        torch.testing.assert_close(gradients(lambda x: fn(x * 1), x)[0], plain)


def test_it_is_given_result_and_arguments_as_they_were_at_the_call():
    @mc.register_vjp(aten.mul.Tensor)
    def products(grad, result, x, y):
        return grad * result, grad * x * y

    def fn(x, y):
        x, y = x + 1, y + 1
        z = x * y
        out = z.clone()
        for v in (x, y, z):
            v.detach().zero_()
        return out

    x, y = leaf(3, 4), leaf(3, 4)
    expected = cotangent(x) * ((x + 1) * (y + 1)).detach()
    for got in gradients(fn, x, y):
        torch.testing.assert_close(got, expected)


def test_several_results_and_arguments_without_a_gradient():
    seen = []

    @mc.register_vjp(aten.max.dim)
    def spread(grad, result, x, dim, keepdim=False):
        seen.append((grad, result))
        return (grad[0].unsqueeze(dim) / x.shape[dim]).expand(x.shape)

    x = leaf(3, 4)
    (got,) = gradients(lambda x: x.max(1), x)
    torch.testing.assert_close(got, (cotangent(x[:, 0]) / 4).unsqueeze(1).expand(3, 4))
    assert [g is None for g in seen[0][0]] == [False, True] and len(seen[0][1]) == 2

    @mc.register_vjp(aten.native_layer_norm.default)
    def only_the_weight(grads, results, x, shape, weight, bias, eps):
        return None, grads[0].sum(0), None

    x, weight = leaf(3, 4), leaf(4)
    call, _ = compile_aot(lambda x, w: F.layer_norm(x, (4,), w), [x, weight])
    call([x, weight])[0].sum().backward()
    torch.testing.assert_close(weight.grad, torch.full((4,), 3.0))
    assert x.grad is None or not x.grad.any()


def test_a_list_of_tensors_gets_a_list_of_gradients():
    @mc.register_vjp(aten.cat.default)
    def numbered(grad, result, tensors, dim=0):
        return [torch.full_like(x, float(i)) for i, x in enumerate(tensors)]

    first, second = gradients(lambda x, y: torch.cat([x, y], 1), leaf(3, 1), leaf(3, 2))
    assert not first.any() and second.eq(1).all()


def test_a_composite_operator_can_have_one():
    @mc.register_vjp(aten.scaled_dot_product_attention.default)
    def attention(grad, result, q, k, v, *args, **kwargs):
        return grad * 2, grad * 3, grad * 4, None

    q, k, v = (leaf(1, 2, 5, 8) for _ in range(3))
    found = gradients(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), q, k, v)
    for factor, got in zip((2, 3, 4), found, strict=True):
        torch.testing.assert_close(got, factor * cotangent(q))


def test_a_custom_operator():
    with torch.library._scoped_library("mini_vjp", "FRAGMENT"):

        @torch.library.custom_op("mini_vjp::twice", mutates_args=())
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        twice.register_fake(torch.empty_like)
        twice.register_autograd(lambda ctx, grad: grad * 2)
        x = leaf(3, 4)
        fn = torch.ops.mini_vjp.twice.default
        torch.testing.assert_close(gradients(fn, x)[0], 2 * cotangent(x))

        @mc.register_vjp(fn)
        def straight_through(grad, result, x):
            return grad

        torch.testing.assert_close(gradients(fn, x)[0], cotangent(x))


def test_inference_and_eager_are_as_ever():
    @mc.register_vjp(aten.silu.default)
    def never(grad, result, x):
        raise AssertionError

    x = leaf(3, 4)
    with torch.no_grad():
        call, result = compile_aot(F.silu, [x])
        torch.testing.assert_close(call([x])[0], F.silu(x))
        assert aten.silu.default in {n.target for n in result.level("full").nodes}
    F.silu(x).sum().backward()
    x.grad = None
    F.silu(x.detach())
    call, _ = compile_aot(lambda x: F.silu(x.detach()) + x, [x])
    call([x])[0].sum().backward()
    assert x.grad.eq(1).all()


WRONG = {
    "shape": lambda grad, result, x: grad.sum(),
    "dtype": lambda grad, result, x: grad.double(),
    "too many": lambda grad, result, x: (grad, grad),
    "python error": lambda grad, result, x: grad.nonsense,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_an_error_that_names_its_line(name):
    mc.register_vjp(aten.silu.default)(WRONG[name])
    line = inspect.getsourcelines(WRONG[name])[1]
    x = leaf(3, 4)
    with pytest.raises(OptionError, match=rf"vjp of aten\.silu\.default at .*vjps\.py:{line}: "):
        mc.compile(lambda x: F.silu(x * 1), backend="aot_eager")(x)
    with mc.without("vjp:aten.silu"):
        expected = eagers(F.silu, x)[0]
        torch.testing.assert_close(gradients(F.silu, x)[0], expected)


def test_sizes_that_a_rule_assumes_to_be_equal_become_guards():
    mc.register_vjp(aten.silu.default)(lambda grad, result, x: grad[: x.shape[1]])
    call = mc.compile(lambda x: F.silu(x), backend="aot_eager", dynamic=True, fullgraph=True)
    x = leaf(3, 3)
    torch.testing.assert_close(torch.autograd.grad(call(x).sum(), x)[0], torch.ones(3, 3))
    with pytest.raises(OptionError, match="the gradient of a"):
        call(leaf(4, 3))


@pytest.mark.parametrize("op", [aten.silu_.default, aten.view.default, aten.silu, F.silu])
def test_what_has_no_gradient_of_its_own_is_refused(op):
    with pytest.raises(TypeError, match=r"silu|view"):
        mc.register_vjp(op)(lambda *args: None)


def test_other_threads_keep_torchs_formula_meanwhile():
    """A rule runs in the middle of our trace; another thread, even under the dispatcher that we use, does not
    meet it."""
    from minicompile import compat

    seen = []

    def other():
        x = leaf(3)
        with compat.python_dispatcher():
            F.silu(x).sum().backward()
        s = torch.sigmoid(x.detach())
        seen.append(torch.allclose(x.grad, s + x.detach() * s * (1 - s)))

    @mc.register_vjp(aten.silu.default)
    def slow(grad, result, x):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return grad

    torch.testing.assert_close(gradients(F.silu, leaf(3))[0], cotangent(torch.empty(3)))
    assert seen == [True]
