"""What AOT autograd promises, each promise with one small program. Read this file first.

Programs run as compiled graphs, with no break, on both backends: their results, what they write to
inputs, which results share memory, and the gradients are eager's. Programs that the front desk leaves to
eager are in test_admit.py; the other files of the folder go deeper into one promise each.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import minicompile as mc
from minicompile.aot.result import AotResult
from minicompile.ops.nodes import is_random, writes
from tests.comparing import alias_pattern

aten = torch.ops.aten
BACKENDS = ["aot_eager", "inductor"]


def leaf(*size: int) -> torch.Tensor:
    return torch.randn(*size, requires_grad=True)


def writes_through_a_view(x, w):
    y = x * w
    y.t()[0].mul_(2)
    return y.exp(), y[0]


def outputs_are_inputs_and_each_other(x, w):
    y = x * w
    return x, y, y, w


def outputs_are_views_of_inputs_and_results(x, w):
    y = x @ w.t()
    return w.t(), w[1:], y[0], y[:, 1], y.t()


def constants_are_outputs(x, w):
    return (x * w).cos(), None, 3


def updates_statistics(x, w):
    mean, scale = torch.zeros(4), torch.ones(4)
    y = F.batch_norm(x * w, mean, scale, training=True)
    return y, mean, scale


def fills_a_cache(x, cache, w):
    cache[:, 1:3] = x * 2
    return (cache[:, :3] * w).sum()


def steps_a_parameter(x, w):
    with torch.no_grad():
        w.sub_(0.1 * x)
    return (w * x).sum()


def needs_the_old_contents(x, w):
    y = (x.sin() * w).sin()
    x.add_(1)
    return y


def switches_grad_mode(x, w):
    with torch.no_grad():
        scale = (w * 2).abs().sum()
    return w * scale, w.detach() * 2, x.argmax(), (w > 0).float()


def switches_autocast(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ w.t()
    return y, x @ w.t()


def draws_random_numbers(x, w):
    return F.dropout(x.sin() * w, 0.5) * w.exp(), torch.rand(2)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, tangent: Any) -> Any:
        return tangent * ctx.saved_tensors[0].cos() * 2


def has_its_own_gradient(x, w):
    return Doubled.apply(x * w) * x


def leaves_an_input_out(x, w):
    return x.sin() * 3


def pair() -> list[torch.Tensor]:
    return [torch.randn(4, 4), leaf(4, 4)]


PROGRAMS = {
    **dict.fromkeys(
        (
            *(writes_through_a_view, outputs_are_inputs_and_each_other, constants_are_outputs),
            *(outputs_are_views_of_inputs_and_results, updates_statistics, needs_the_old_contents),
            *(switches_grad_mode, switches_autocast, draws_random_numbers),
            *(has_its_own_gradient, leaves_an_input_out),
        ),
        pair,
    ),
    fills_a_cache: lambda: [torch.randn(2, 2), torch.zeros(2, 4), leaf(2, 3)],
    steps_a_parameter: lambda: [torch.randn(3), torch.randn(3)],
}


def outcome(call: Any, program: Any, make: Any) -> tuple[Any, ...]:
    """Everything that a caller can see of one call and of its backward."""
    torch.manual_seed(0)
    inputs = make()
    results = call(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    tensors = [x for x in results if isinstance(x, torch.Tensor)]
    learned = [x for x in tensors if x.requires_grad and x.grad_fn is not None]
    if learned:
        sum(x.float().sum() for x in learned).backward()
    seen = [x.detach() if isinstance(x, torch.Tensor) else x for x in (*results, *inputs)]
    facts = [(x.dtype, x.stride(), x.requires_grad) for x in tensors]
    return seen, [x.grad for x in inputs], facts, alias_pattern([*tensors, *inputs])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_compiled_call_is_eagers(program, backend):
    compiled, make = mc.compile(program, backend=backend, fullgraph=True), PROGRAMS[program]
    found, expected = (outcome(call, program, make) for call in (compiled, program))
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-5, atol=1e-6)
    assert found[2:] == expected[2:]


# The backward ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_results_are_differentiated_one_after_the_other(order, backend):
    """Each has a history of its own, as in eager, which nobody need retain."""

    def losses(a, b):
        return a.exp().sum(), (b.exp() * a.detach()).sum()

    found = []
    for call in (losses, mc.compile(losses, backend=backend)):
        a, b = (torch.linspace(-1, 1, 6).requires_grad_() for _ in range(2))
        results = call(a, b)
        for place in order:
            results[place].backward()
        found.append((a.grad, b.grad))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_result_that_is_not_differentiated_adds_nothing(backend):
    """Zeros times the infinite slope of the root would be NaN."""
    x = torch.zeros(3, requires_grad=True)
    mc.compile(lambda x: (x.sqrt(), x * 2), backend=backend)(x)[1].sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


def test_a_graph_is_differentiated_again_if_it_is_retained():
    w = leaf(3)
    loss = mc.compile(lambda w: w.sin().sum(), backend="aot_eager")(w)
    found = [torch.autograd.grad(loss, w, retain_graph=again)[0] for again in (True, False)]
    torch.testing.assert_close(*found)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, w)


def test_a_write_to_a_saved_tensor_is_noticed():
    x, w = torch.randn(3), leaf(3)
    loss = mc.compile(lambda x, w: (x * w).sum(), backend="aot_eager")(x, w)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_second_derivatives_raise_and_first_ones_may_be_used():
    w = leaf(3)
    loss = mc.compile(lambda w: (w**3).sum(), backend="aot_eager")(w)
    (gradient,) = torch.autograd.grad(loss, w, create_graph=True)
    torch.testing.assert_close(gradient.detach(), 3 * w.detach() ** 2)
    with pytest.raises(RuntimeError, match="second derivatives"):
        gradient.sum().backward()


# The graphs --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traced() -> AotResult:
    def program(x, w):
        y = F.dropout(F.silu(x.t() @ w.t()), 0.5, True)
        y[0].mul_(2)
        return (y.softmax(-1) @ w).sum()

    aot = mc.trace(program, torch.randn(4, 4), leaf(4, 4)).aot
    assert aot is not None
    return aot


def test_writes_and_shared_memory_are_gone_after_functionalization(traced):
    assert any(writes(node.target) for node in traced.recorded.nodes)
    assert not any(writes(node.target) for node in traced.level("full").nodes)


def test_levels_form_a_staircase(traced):
    """Core keeps softmax whole but has no `t` or `silu`; prims has none of them."""
    targets = {name: {n.target for n in graph.nodes} for name, graph in traced.levels.items()}
    assert {aten.t.default, aten.silu.default, aten._softmax.default} <= targets["full"]
    assert not {aten.t.default, aten.silu.default} & targets["core"]
    assert aten._softmax.default in targets["core"]
    assert aten._softmax.default not in targets["prims"]


def test_every_node_has_origins_a_value_and_a_phase(traced):
    for graph in (*traced.levels.values(), traced.forward, traced.backward):
        for node in (n for n in graph.nodes if n.op != "output"):
            assert node.meta["origins"] and "val" in node.meta
            assert node.meta["phase"] in ("forward", "backward")


def test_what_is_kept_and_what_is_recomputed_has_a_reason(traced):
    partition = traced.partition
    assert all(value.reason for value in (*partition.saved, *partition.recomputed))
    assert partition.saved_bytes <= partition.default_bytes
    assert not any(is_random(node) for node in traced.backward.nodes)
