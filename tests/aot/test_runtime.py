"""The runtime wrapper: autograd, mutated inputs, tangents, second derivatives, autocast, memory."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

import minicompile as mc
from minicompile import compat
from minicompile.aot.autograd import ahead_of_time
from minicompile.aot.runtime import interpret, make_callable
from minicompile.errors import Unsupported
from minicompile.options import Options
from tests.aot.helpers import capture, compile_aot, forward_and_gradients, module_function


def leaf(*size):
    return torch.randn(*size, requires_grad=True)


def both(fn, inputs):
    call, result = compile_aot(fn, inputs)
    for got, expected in zip(*(forward_and_gradients(f, inputs) for f in (call, fn)), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)
    return call, result


def test_outputs_that_do_not_require_grad_are_marked():
    call, _ = both(lambda x: (x.sin(), x.argmax(), x.detach() * 2, (x > 0).float()), [leaf(3, 4)])
    outputs = call([leaf(3, 4)])
    assert [o.requires_grad for o in outputs] == [True, False, False, False]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_casts_of_what_was_detached_require_no_grad(backend):
    x = torch.randn(3, requires_grad=True)
    fn = lambda x: (x.detach().to(torch.bfloat16).float(), x.detach().double())  # noqa: E731
    found = mc.compile(fn, backend=backend)(x)
    assert not any(value.requires_grad for value in found)
    torch.testing.assert_close(found, fn(x))


def test_an_output_that_is_an_input_is_that_object():
    x, w = torch.randn(3), leaf(3)
    call, _ = both(lambda x, w: (x, w, x * w, w), [x, w])
    outputs = call([x, w])
    assert outputs[0] is x and outputs[1] is w and outputs[3] is w


def test_gradients_flow_through_outputs_that_are_views_of_inputs():
    both(lambda w: (w.t(), w.t() * 2, w[0]), [leaf(3, 4)])


def test_gradients_flow_through_several_views_of_one_intermediate():
    def fn(w):
        y = w.sin()
        return y[0], y[:, 1], y.t()

    call, _ = both(fn, [leaf(3, 4)])
    first, second, _ = call([leaf(3, 4)])
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_constants_and_sizes_are_outputs():
    call, _ = compile_aot(lambda x: (x.cos(), None, 3, "text"), [leaf(2)])
    assert call([leaf(2)])[1:] == [None, 3, "text"]


def test_missing_and_expanded_and_transposed_tangents():
    def fn(w):
        return w @ w.t(), w.sin().t(), w.sum()

    w = leaf(3, 3)
    call, _ = compile_aot(fn, [w])
    for choose in (
        lambda a, b, c: a.sum(),
        lambda a, b, c: b.sum() + c,
        lambda a, b, c: (
            (a.t() * torch.arange(9.0).view(3, 3)).sum() + (b * torch.arange(9.0).view(3, 3)).sum()
        ),
        lambda a, b, c: c * 2,
    ):
        (got,) = torch.autograd.grad(choose(*call([w])), w)
        (expected,) = torch.autograd.grad(choose(*fn(w)), w)
        torch.testing.assert_close(got, expected)


def test_unused_parameters_get_no_gradient():
    x, w, unused = torch.randn(3), leaf(3), leaf(3)
    call, _ = compile_aot(lambda x, w, u: x * w, [x, w, unused])
    gradients = torch.autograd.grad(call([x, w, unused])[0].sum(), [w, unused], allow_unused=True)
    assert gradients[0] is not None and gradients[1] is None


def test_autograd_does_not_go_on_to_inputs_that_no_result_depends_on():
    x, unused = leaf(3), leaf(3).exp()
    call, _ = compile_aot(lambda x, u: (x.sin(), u > 0), [x, unused])
    unused.sum().backward()  # its graph can't be used again
    call([x, unused])[0].sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_second_derivative_raises_even_with_a_constant_tangent():
    w = leaf(3)
    call, _ = compile_aot(lambda w: (w**3).sum(), [w])
    (gradient,) = torch.autograd.grad(call([w])[0], w, create_graph=True)
    torch.testing.assert_close(gradient.detach(), 3 * w.detach() ** 2)
    with pytest.raises(RuntimeError, match="second derivatives"):
        gradient.sum().backward()


def test_backward_twice_needs_retain_graph_as_in_eager():
    w = leaf(3)
    call, _ = compile_aot(lambda w: w.sin().sum(), [w])
    loss = call([w])[0]
    first = torch.autograd.grad(loss, w, retain_graph=True)
    second = torch.autograd.grad(loss, w)
    torch.testing.assert_close(first, second)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(loss, w)


def test_a_saved_input_that_changes_before_backward_is_noticed():
    x, w = torch.randn(3), leaf(3)
    call, _ = compile_aot(lambda x, w: (x * w).sum(), [x, w])
    loss = call([x, w])[0]
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("copy", [torch.clone, lambda x: x[:2].clone(), lambda x: x.t().clone()])
def test_a_copy_of_an_input_is_kept_and_not_the_input(copy):
    x, w = torch.randn(3, 3), leaf(1)
    call, _ = compile_aot(lambda x, w: (copy(x) * w).sum(), [x, w])
    expected, loss = copy(x).sum().view(1), call([x, w])[0]
    x.add_(1)
    loss.backward()
    torch.testing.assert_close(w.grad, expected)


def test_saved_tensors_die_with_the_backward_and_intermediates_earlier():
    w = leaf(64)
    call, result = compile_aot(lambda w: (w.exp().sin() * w.exp()).sum(), [w])
    alive = []

    def watch(run):
        def wrapped(inputs):
            outputs = run(inputs)
            assert not inputs
            alive.extend(
                weakref.ref(o) for o in outputs[1:] if isinstance(o, torch.Tensor) and o is not w
            )
            return outputs

        return wrapped

    call = make_callable(result, watch(interpret(result.forward)), interpret(result.backward))
    loss = call([w])[0]
    loss.backward()
    gc.collect()
    assert all(ref() is None for ref in alive)


def test_mutated_input_and_gradient_that_needs_its_old_contents():
    def fn(x, w):
        y = (x.sin() * w).sin()
        x.add_(1)
        return y

    for partitioner in ("min_cut", "default"):
        x, w = torch.randn(64), leaf(64)
        mine, theirs = x.clone(), x.clone()
        call, _ = compile_aot(fn, [mine, w], options=Options(partitioner=partitioner))
        got = torch.autograd.grad(call([mine, w])[0].sum(), w)
        expected = torch.autograd.grad(fn(theirs, w).sum(), w)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(mine, theirs)


def test_a_parameter_updated_without_grad():
    def step(w, g):
        with torch.no_grad():
            w.sub_(0.1 * g)
        return (w * 1).sum()

    w, g = leaf(3), torch.randn(3)
    expected = w.detach() - 0.1 * g
    with torch.no_grad():
        call, _ = compile_aot(step, [w, g])
        call([w, g])
    torch.testing.assert_close(w.detach(), expected)
    assert w._version > 0


def test_grad_mode_inside_the_graph_is_obeyed():
    def fn(w):
        with torch.no_grad():
            scale = w.abs().sum()
        return w * scale

    both(fn, [leaf(4)])


def test_recorded_grad_mode_switches_are_obeyed():
    graph, fakes, _ = capture(lambda w: w.sin() * w, [leaf(3)])
    nodes = {n.name: n for n in graph.nodes}
    with graph.gm.graph.inserting_before(nodes["sin"]):
        graph.gm.graph.call_function(torch._C._set_grad_enabled, (False,))
    with graph.gm.graph.inserting_after(nodes["sin"]):
        graph.gm.graph.call_function(torch._C._set_grad_enabled, (True,))
    result = ahead_of_time(graph, fakes, Options(), training=True)
    call = make_callable(result, interpret(result.forward), interpret(result.backward))
    w = leaf(3)
    (gradient,) = torch.autograd.grad(call([w])[0].sum(), w)
    torch.testing.assert_close(gradient, w.detach().sin())
    assert torch.is_grad_enabled()


def test_without_a_differentiable_output_there_is_no_backward():
    call, result = compile_aot(lambda w: w.detach() + 1, [leaf(3)])
    assert result.backward is None and not result.metadata.trains
    assert not call([leaf(3)])[0].requires_grad


def test_autocast_at_call_time_does_not_cast_again():
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    call, _ = compile_aot(lambda x, w: x @ w, [x, w])
    with torch.autocast("cpu", torch.bfloat16):
        got = call([x, w])[0]
    torch.testing.assert_close(got, x @ w)


def test_recorded_autocast_regions_are_obeyed_and_left():
    x, w = torch.randn(4, 4), leaf(4, 4)

    def fn(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ w
        return y, x @ w

    graph, fakes, _ = capture(lambda x, w: (x @ w, x @ w), [x, w])
    first = next(n for n in graph.nodes if n.op == "call_function")
    with graph.gm.graph.inserting_before(first):
        arguments = ("cpu", torch.bfloat16, True, None)
        enter = graph.gm.graph.call_function(torch.amp.autocast_mode._enter_autocast, arguments)
    with graph.gm.graph.inserting_after(first):
        graph.gm.graph.call_function(torch.amp.autocast_mode._exit_autocast, (enter,))
    result = ahead_of_time(graph, fakes, Options(), training=True)
    call = make_callable(result, interpret(result.forward), interpret(result.backward))
    assert [o.dtype for o in call([x, w])] == [torch.bfloat16, torch.float32]
    for got, expected in zip(*(forward_and_gradients(f, [x, w]) for f in (call, fn)), strict=True):
        torch.testing.assert_close(got, expected)


def test_dropout_mask_in_backward_is_the_forward_mask():
    w = leaf(1000)
    call, result = compile_aot(lambda w: F.dropout(w, 0.5, True), [w])
    assert not any(
        torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
        for n in result.backward.nodes
    )
    out = call([w])[0]
    (gradient,) = torch.autograd.grad(out.sum(), w)
    torch.testing.assert_close(gradient, torch.where(out == 0, 0.0, 2.0))
    assert 400 < (out == 0).sum() < 600


def test_dropout_draws_anew_at_each_call():
    x = torch.ones(100)
    call, _ = compile_aot(lambda x: F.dropout(x, 0.5, True) + F.dropout(x, 0.5, True), [x])
    assert not torch.equal(call([x])[0], call([x])[0])
    assert {0.0, 2.0, 4.0} == set(call([torch.ones(1000)[:100]])[0].tolist())


def test_cuda_fakes_are_refused_by_a_build_without_cuda():
    if torch.backends.cuda.is_built():
        pytest.skip("this build has CUDA")
    graph, fakes, _ = capture(lambda x: x.sin(), [torch.randn(3)])
    fake = compat.new_fake(fakes[0].fake_mode, (3,), (1,), torch.float32, torch.device("cuda"))
    with pytest.raises(Unsupported, match="without CUDA"):
        ahead_of_time(graph, [fake], Options(), training=True)


def test_data_dependent_values_are_refused_with_the_users_line():
    graph, fakes, _ = capture(lambda x: x.sin() + 1, [torch.randn(3)])
    node = next(n for n in graph.nodes if n.name == "sin")
    node.target = torch.nonzero
    with pytest.raises(Unsupported) as caught:
        ahead_of_time(graph, fakes, Options(), training=False)
    assert caught.value.where is not None and caught.value.where.file == "user.py"


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(4)
        self.head = torch.nn.Linear(4, 5)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


def test_conv_and_batch_norm_train_as_eager_over_several_steps():
    torch.manual_seed(0)
    module, reference = Block(), Block()
    reference.load_state_dict(module.state_dict())
    x, target = torch.randn(4, 3, 6, 6), torch.randint(5, (4,))
    fn, state = module_function(module)

    def loss(*args):
        return F.cross_entropy(fn(*args[:-1]), args[-1])

    call, result = compile_aot(loss, [*state, x, target])
    ours = torch.optim.SGD(module.parameters(), 0.1)
    theirs = torch.optim.SGD(reference.parameters(), 0.1)
    for _ in range(4):
        got, expected = call([*state, x, target])[0], F.cross_entropy(reference(x), target)
        torch.testing.assert_close(got, expected)
        for optimizer, value in ((ours, got), (theirs, expected)):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    for (name, a), b in zip(module.state_dict().items(), reference.state_dict().values()):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


def test_gradients_reach_the_input_that_an_output_views_not_another_in_its_memory():
    def fn(row, x):
        return row * 1, x.reshape(4, 5)

    weight, grads = torch.randn(4, 5), []
    for call in (mc.compile(fn, fullgraph=True), fn):
        x = torch.arange(20.0).reshape(5, 4).requires_grad_()
        (call(x[-1], x)[1] * weight).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)
