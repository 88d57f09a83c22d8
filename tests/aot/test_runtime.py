"""The runtime wrapper: autograd, mutated inputs, tangents, second derivatives, autocast, memory."""

from __future__ import annotations

import pytest
import torch

import minicompile as mc
from minicompile import compat
from minicompile.aot.autograd import ahead_of_time
from minicompile.errors import Unsupported
from minicompile.options import Options
from tests.aot.helpers import capture, compile_aot


def leaf(*size):
    return torch.randn(*size, requires_grad=True)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_casts_of_what_was_detached_require_no_grad(backend):
    x = torch.randn(3, requires_grad=True)
    fn = lambda x: (x.detach().to(torch.bfloat16).float(), x.detach().double())  # noqa: E731
    found = mc.compile(fn, backend=backend)(x)
    assert not any(value.requires_grad for value in found)
    torch.testing.assert_close(found, fn(x))


def test_autograd_does_not_go_on_to_inputs_that_no_result_depends_on():
    x, unused = leaf(3), leaf(3).exp()
    call, _ = compile_aot(lambda x, u: (x.sin(), u > 0), [x, unused])
    unused.sum().backward()  # its graph can't be used again
    call([x, unused])[0].sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


@pytest.mark.parametrize("copy", [torch.clone, lambda x: x[:2].clone(), lambda x: x.t().clone()])
def test_a_copy_of_an_input_is_kept_and_not_the_input(copy):
    x, w = torch.randn(3, 3), leaf(1)
    call, _ = compile_aot(lambda x, w: (copy(x) * w).sum(), [x, w])
    expected, loss = copy(x).sum().view(1), call([x, w])[0]
    x.add_(1)
    loss.backward()
    torch.testing.assert_close(w.grad, expected)


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


def test_gradients_reach_the_input_that_an_output_views_not_another_in_its_memory():
    def fn(row, x):
        return row * 1, x.reshape(4, 5)

    weight, grads = torch.randn(4, 5), []
    for call in (mc.compile(fn, fullgraph=True), fn):
        x = torch.arange(20.0).reshape(5, 4).requires_grad_()
        (call(x[-1], x)[1] * weight).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)
