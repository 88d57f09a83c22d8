"""Operators that write to memory that they also read, and modes that a capture meets inputs in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import minicompile as mc
from tests.comparing import assert_scenario
from tests.dynamo.helpers import in_eager


def add_halves(x):
    x[:, :2].add_(x[:, 2:])
    x[:, ::2] += x[:, 1::2]
    return x.mul_(x)


def one_after_the_other(x):
    a, b = x.clone(), x + 1
    torch._foreach_add_([a, b], [b, a])
    return a, b


def assert_as_eager_of(fn, scenario):
    """A scenario gives the same with a function and with its compiled form."""
    mc.reset()
    assert_scenario(lambda compile: scenario(compile(fn)), compile_aot_eager)


def compile_aot_eager(fn):
    return mc.compile(fn, backend="aot_eager")


@pytest.mark.parametrize("fn", [add_halves, one_after_the_other])
@pytest.mark.parametrize("dynamic", [None, True])
def test_writes_beside_what_is_read(fn, dynamic):
    mc.reset()
    x = torch.randn(4, 4)
    other = x.clone()
    whole = fn is add_halves  # the other is left to eager
    compiled = mc.compile(fn, backend="aot_eager", dynamic=dynamic, fullgraph=whole)
    torch.testing.assert_close((compiled(x), x), (fn(other), other))


def test_inputs_that_overlap_are_refused_only_where_they_do():
    def fn(x, y):
        return x.add_(y)

    mc.reset()
    call = mc.compile(fn, backend="aot_eager")
    row = torch.randn(6)
    torch.testing.assert_close(call(row[:3].clone(), row[:3]), row[:3] * 2)
    with pytest.raises(RuntimeError, match="single memory location"):
        call(row[:4], row[1:5])


@pytest.mark.parametrize("dynamic", [None, True])
def test_an_input_that_is_first_read_without_grad_keeps_its_history(dynamic):
    def fn(x):
        with torch.no_grad():
            scale = x * 2
        return scale, x * 3

    mc.reset()
    w = torch.randn(4, 4, requires_grad=True)
    scale, y = mc.compile(fn, backend="aot_eager", dynamic=dynamic)(w * 1)
    assert not scale.requires_grad
    y.sum().backward()
    torch.testing.assert_close(w.grad, torch.full((4, 4), 3.0))


@pytest.mark.parametrize("dynamic", [None, True])
def test_views_in_inference_mode_are_views_of_their_input(dynamic):
    mc.reset()
    w = torch.randn(4, 4, requires_grad=True)
    with torch.inference_mode():
        row, twice = mc.compile(lambda x: (x[0], x * 2), backend="aot_eager", dynamic=dynamic)(w)
    assert row._base is w and row.requires_grad and not row.is_inference()
    assert twice.is_inference()


def scaled(x, w, kept):
    return w * kept(x)


def scaled_after_a_break(x, w, kept):
    ends = x.sum().item()
    return w * kept(x) * (ends / ends)


def scaled_for_eager_code(x, w, kept):
    return w * kept(x)


@pytest.mark.parametrize("product", [scaled, scaled_after_a_break, scaled_for_eager_code])
@pytest.mark.parametrize("kept", [torch.abs, torch.clone, lambda x: x > 0, lambda x: x * 2 + 1])
def test_what_a_frame_writes_to_after_a_break_was_not_kept_for_the_backward(kept, product):
    def fn(x, w, numbers):
        y = product(x, w, kept)
        if product is scaled_for_eager_code:
            x.frac()
        numbers.append(x.sum().item())
        x[0] = 2
        return y

    mc.reset()
    found = []
    for call in (fn, in_eager(fn, backend="aot_eager")):
        w = torch.ones(3, requires_grad=True)
        call(torch.arange(3.0), w, []).sum().backward()
        found.append(w.grad)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("flat", [torch.floor, torch.sign, lambda x: x.round(decimals=0)])
def test_what_eager_keeps_for_a_gradient_of_zeros_is_not_kept_for_another_result(flat):
    """The gradient of `flat` is zero, without a tangent; what it is multiplied by is computed from `a`."""

    def fn(a, numbers):
        y = torch.tanh(a)
        numbers.append(flat(a.clamp(-1, 1)).max().item())
        a.zero_()
        return y

    def scenario(call):
        leaf = torch.arange(6.0, requires_grad=True)
        return torch.autograd.grad(call(leaf * 1, []).sum(), leaf)

    assert_as_eager_of(fn, scenario)


@pytest.mark.parametrize("write", [lambda b, a: b.copy_(a), lambda b, a: b.__setitem__(..., a)])
def test_what_was_written_is_kept_for_the_backward_not_what_it_was_written_from(write):
    def fn(a, b, numbers):
        write(b, a)
        y = b[0] * (a.mean() + b)
        numbers.append(y.sum().item())
        with torch.no_grad():
            a.mul_(2)
        return y

    def scenario(call):
        x = torch.arange(6.0).view(2, 3).requires_grad_()
        return torch.autograd.grad(call(x * 1, torch.zeros(2, 3), []).sum(), x)

    assert_as_eager_of(fn, scenario)


@pytest.mark.parametrize("sizes", ["fixed", "varying"])
def test_a_size_is_no_reason_to_keep_an_input(sizes):
    """The frame is cut before the subtraction, which eager refuses with other numbers of rows."""

    def fn(a, b):
        y = a.clone() - torch.tanh(a).sum(-1)
        b[..., 1] += 1
        return y

    mc.reset()
    found = []
    for call in (fn, mc.compile(fn, backend="aot_eager")):
        if sizes == "varying" and call is not fn:
            for rows in (3, 5):
                with pytest.raises(RuntimeError, match="must match the size"):
                    call(torch.ones(rows, 4, requires_grad=True) * 1, torch.ones(rows, 4))
        x = torch.arange(16.0).view(4, 4).requires_grad_()
        a = x * 1
        call(a, a.detach()[1:]).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)


def test_a_copy_of_a_result_is_kept_for_the_backward_when_the_frame_goes_on():
    def fn(x, mean, numbers):
        y = mean * x
        z = y.clone() * (y * 1.5)
        numbers.append(z.sum().item())
        y.mul_(2)
        return z

    def scenario(call):
        x = torch.arange(3.0, requires_grad=True)
        return torch.autograd.grad(call(x, torch.tensor([1.0, 2, 3]), []).sum(), x)

    assert_as_eager_of(fn, scenario)


def test_a_parameter_that_a_frame_steps_after_a_break_was_not_kept_for_the_backward():
    def fn(layer, x, numbers):
        y = torch.tanh(layer(x))
        numbers.append(x.sum().item())
        with torch.no_grad():
            layer.bias.add_(1)
        return y

    def scenario(call):
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 3)
        return torch.autograd.grad(call(layer, torch.ones(2, 3), []).sum(), layer.parameters())

    assert_as_eager_of(fn, scenario)


def test_a_result_is_no_part_of_the_memory_that_inputs_share():
    def fn(a, b):
        y = b + 1
        y.copy_(b)
        b.mul_(2)
        return y, a.sum()

    mc.reset()
    for call in (fn, mc.compile(fn)):
        a = torch.arange(16.0).view(4, 4)
        y, total = call(a, a[1:])
        assert torch.equal(y, torch.arange(4.0, 16).view(3, 4)) and total == 234
        assert y.storage_offset() == 0 and y.untyped_storage().nbytes() == 48


def test_a_view_of_a_constant_lies_where_it_lies_in_eager():
    mc.reset()
    view = mc.compile(lambda a: torch.ones_like(a)[..., 1:3], fullgraph=True)(torch.ones(4))
    assert view.tolist() == [1, 1]
    assert view.storage_offset() == 1 and view.untyped_storage().nbytes() == 16


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bool])
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_number_is_copied_into_a_tensor(dtype, dynamic):
    def fn(x, number):
        x[0].copy_(3)
        x[1:].copy_(number)
        return x + 1

    mc.reset()
    compiled = mc.compile(fn, dynamic=dynamic, fullgraph=True)
    for number in (2, 0.5, 7, True):
        found = []
        for call in (fn, compiled):
            x = torch.ones(3, 4).to(dtype)
            found.append((call(x, number), x))
        torch.testing.assert_close(*found)


def test_a_result_that_only_a_tensor_of_the_frame_is_behind_requires_grad():
    def fn(x):
        y = x.detach().requires_grad_()
        return (y * y).sum()

    mc.reset()
    got = mc.compile(fn, backend="aot_eager")(torch.randn(3))
    assert got.requires_grad and not got.is_leaf
    got.backward()


def test_an_lstm_in_evaluation_has_gradients():
    torch.manual_seed(0)
    module, x = torch.nn.LSTM(3, 4), torch.randn(2, 5, 3)
    call = mc.compile(module, backend="aot_eager")
    call(x)
    module.eval()
    call(x)[0].sum().backward()
    got = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    module(x)[0].sum().backward()
    torch.testing.assert_close(got, [p.grad for p in module.parameters()])


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("arguments", [(0.5, False), (0.0, True)])
def test_dropout_that_drops_nothing_gives_its_input(arguments, dynamic):
    def fn(x):
        z = x * 2
        y = torch.nn.functional.dropout(z, *arguments)
        y.add_(1)
        return y, z, torch.dropout(x, *arguments)

    mc.reset()
    x = torch.randn(4, 4)
    y, z, same = mc.compile(fn, backend="aot_eager", dynamic=dynamic)(x)
    assert y is z and same is x
    torch.testing.assert_close(z, x * 2 + 1)


@pytest.mark.parametrize("given", [False, True])
def test_a_view_that_is_made_a_leaf_is_one(given: bool) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x if given else x * 2).detach()[0].requires_grad_()

    assert mc.compile(f)(torch.ones(3, 4)).requires_grad


@pytest.mark.parametrize("make", [lambda x: x, torch.t, lambda x: x[:2]])
def test_views_without_history_of_an_input_that_is_a_view_itself(make: Any) -> None:
    """They require grad if what is viewed does in the end: a leaf that views data does not count."""

    def fn(x: torch.Tensor) -> Any:
        with torch.no_grad():
            y = x[0]
        return y * 3, x * 2

    for given in (make(torch.ones(3, 3)).requires_grad_(), make(torch.ones(3, 3).requires_grad_())):
        want, have = fn(given), mc.compile(fn, backend="aot_eager")(given)
        assert [x.requires_grad for x in want] == [x.requires_grad for x in have]
