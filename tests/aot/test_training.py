"""Training steps of compiled functions beside eager's: hooks, second derivatives, random numbers, memory."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import minicompile as mc
from minicompile.aot.runtime import interpret, make_callable
from tests.aot.helpers import compile_aot
from tests.comparing import assert_scenario

BACKENDS = ("aot_eager", "inductor")


@pytest.fixture(params=BACKENDS)
def compiled(request):
    return lambda fn: mc.compile(fn, backend=request.param, fullgraph=True)


def leaf(*size):
    return torch.randn(*(size or (3, 4))).requires_grad_()


def several(x, w):
    """Outputs of every kind: read by others, a loss, without gradient, a view, of one input alone."""
    y = (x @ w).tanh()
    return y, (y * 2).sum(), y > 0, y.t(), x * 3


def outcome(call):
    """What a call gives, or the kind and the beginning of what it raises."""
    try:
        return call()
    except Exception as error:
        return type(error).__name__, str(error)[:60]


# Hooks and graphs --------------------------------------------------------------------------------


def hooks_on_inputs(compile_with):
    x, w, log = leaf(), leaf(4, 3), []
    x.register_hook(lambda t: log.append(list(t.shape)) or t * 2)
    w.register_post_accumulate_grad_hook(lambda p: log.append(p.grad.sum().item()))
    compile_with(several)(x, w)[1].backward()
    return log, x.grad, w.grad


def hooks_on_outputs(compile_with):
    x, w = leaf(), leaf(4, 3)
    outputs = compile_with(lambda x, w: ((x @ w).sin(), x * 3))(x, w)
    outputs[0].register_hook(lambda t: t * 3)
    outputs[1].retain_grad()
    (outputs[0].sum() + (outputs[1] ** 2).sum()).backward()
    return x.grad, w.grad, outputs[1].grad, [t.is_leaf for t in outputs]


def module_hooks(compile_with):
    model, log = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), []
    model[0].register_full_backward_hook(lambda _, given, out: log.append(out[0].sum().item()))
    x = leaf(2, 4)
    compile_with(model)(x).sum().backward()
    return log, x.grad


def retained_graph(compile_with):
    x, w = leaf(), leaf(4, 3)
    outputs = compile_with(several)(x, w)
    outputs[1].backward(retain_graph=True)
    once = x.grad.clone()
    outputs[1].backward(retain_graph=True)
    twice = x.grad.clone()
    outputs[0].sum().backward()
    return once, twice, x.grad, w.grad


def partial_backward(compile_with):
    x, w = leaf(), leaf(4, 3)
    outputs = compile_with(several)(x, w)

    def gradients(output, inputs, **options):
        return torch.autograd.grad(outputs[output].sum(), inputs, retain_graph=True, **options)

    unused = gradients(4, [x, w], allow_unused=True)
    return (
        gradients(3, [x, w]),
        gradients(4, x),
        unused[1] is None,
        outcome(lambda: gradients(4, w)),
        outcome(lambda: gradients(2, x)),
    )


def strange_tangents(compile_with):
    x, w = leaf(), leaf(4, 3)
    output = compile_with(several)(x, w)[0]
    tangents = (
        torch.ones(()).expand(3, 3),
        torch.randn(3, 3).t(),
        torch.randn(6, 6)[::2, ::2],
        torch.randn(5, 3)[1:4],
    )
    return [torch.autograd.grad(output, [x, w], t, retain_graph=True) for t in tangents]


def no_elements(compile_with):
    x, w = leaf(0, 4), leaf(4, 3)
    outputs = compile_with(several)(x, w)
    (outputs[0].sum() + outputs[1]).backward()
    return x.grad, w.grad


def sparse_tangent(compile_with):
    w = leaf(5, 3)
    table = compile_with(lambda w: w * 2)(w)
    F.embedding(torch.tensor([1, 1, 2]), table, sparse=True).sum().backward()
    return w.grad.to_dense() if w.grad.is_sparse else w.grad


def saved_tensor_hooks(compile_with):
    x, w, packed = leaf(), leaf(4, 3), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(1) or t.clone(), lambda t: t
    ):
        outputs = compile_with(several)(x, w)
    outputs[1].backward()
    return bool(packed), x.grad, w.grad


def saved_input_changed(compile_with):
    x, w = leaf(), leaf(4, 3)
    outputs = compile_with(several)(x, w)
    with torch.no_grad():
        w.add_(1)
    return outcome(outputs[1].backward)


def backward_twice(compile_with):
    output = compile_with(lambda x: x.sin() * x)(leaf())
    output.sum().backward()
    return outcome(lambda: output.sum().backward())


def accumulated(compile_with):
    model, x, places = nn.Linear(4, 3), torch.randn(2, 4), []
    call = compile_with(model)
    for _ in range(3):
        call(x).sum().backward()
        places.append(model.weight.grad.data_ptr())
    return model.weight.grad, model.bias.grad, len(set(places)), list(model.weight.grad.stride())


def copied_and_pickled(compile_with):
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), torch.randn(2, 4)
    call = compile_with(model)
    call(x).sum().backward()
    copies = [copy.deepcopy(call), pickle.loads(pickle.dumps(call))]
    for one in copies:
        one(x).sum().backward()
    return [one[0].weight.grad for one in copies]


SCENARIOS = (
    *(hooks_on_inputs, hooks_on_outputs, retained_graph, partial_backward, strange_tangents),
    *(no_elements, sparse_tangent, saved_tensor_hooks, accumulated, copied_and_pickled),
    *(saved_input_changed, backward_twice),
)


@pytest.mark.long
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_training_is_as_in_eager(scenario, compiled):
    assert_scenario(scenario, compiled)


def test_threads_may_share_a_retained_graph(compiled):
    x, found = leaf(200, 200), {}
    output = compiled(lambda x: x.sin())(x)

    def differentiate(number):
        (found[number],) = torch.autograd.grad((output * number).sum(), x, retain_graph=True)

    threads = [threading.Thread(target=differentiate, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, gradient in found.items():
        torch.testing.assert_close(gradient, x.detach().cos() * number)
    assert len(found) == 8


def test_a_result_that_eager_does_not_save_may_be_written_to_before_backward(compiled):
    def scenario(compile_with):
        x, y = leaf(), torch.rand(3, 4) + 1
        quotient = compile_with(lambda x, y: y / (x.abs() + 1))(x, y)
        with torch.no_grad():
            quotient.zero_()
        quotient.sum().backward()
        return x.grad

    assert_scenario(scenario, compiled)


# Second derivatives ------------------------------------------------------------------------------


def cube(x):
    return (x**3).sum()


def penalty(compile_with):
    model, x = nn.Linear(4, 1), leaf()
    (gradient,) = torch.autograd.grad(compile_with(model)(x).tanh().sum(), x, create_graph=True)
    (gradient.norm() - 1).pow(2).backward()


def first(compile_with, fn=cube, **options):
    x = leaf(3)
    (gradient,) = torch.autograd.grad(compile_with(fn)(x).sum(), x, create_graph=True)
    return torch.autograd.grad(gradient.sum(), x, **options)


def with_history(compile_with):
    x = leaf(3)
    y = x * 2
    (gradient,) = torch.autograd.grad(compile_with(cube)(y), y, create_graph=True)
    return torch.autograd.grad(gradient.sum(), x, allow_unused=True)


def functional(name, *tangents):
    def ask(compile_with):
        return getattr(torch.autograd.functional, name)(
            compile_with(cube), torch.ones(3), *tangents
        )

    return ask


ASKED = {
    "grad of grad": first,
    "unused allowed": lambda c: first(c, allow_unused=True),
    "an input with history": with_history,
    "gradient penalty": penalty,
    "hessian": functional("hessian"),
    "hvp": functional("hvp", torch.ones(3)),
}


@pytest.mark.parametrize("name", ASKED)
def test_second_derivatives_raise_and_name_the_function(compiled, name):
    with pytest.raises(
        RuntimeError, match=r"second derivatives .*(cube|Linear|lambda).*mc.compile"
    ):
        ASKED[name](compiled)
    ASKED[name](lambda fn: fn)


def dual(compile_with):
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(torch.ones(3), torch.full((3,), 2.0))
        return torch.autograd.forward_ad.unpack_dual(compile_with(cube)(x)).tangent


def batched(compile_with):
    x = leaf(3)
    output = compile_with(lambda x: x.sin() * x)(x)
    many = torch.eye(3)
    over = torch.func.vmap(lambda v: torch.autograd.grad(output, x, v, retain_graph=True)[0])
    return over(many), torch.autograd.grad(output, x, many, is_grads_batched=True)


def left_a_transform(compile_with):
    kept, w = [], leaf(3)
    torch.func.grad(lambda x: kept.append(x.sin()) or x.sum())(torch.ones(3))
    compile_with(lambda a, w: a * w)(kept[0], w).sum().backward()
    return w.grad


TRANSFORMED = {
    "jacobian": functional("jacobian"),
    "vjp": functional("vjp"),
    "hooks on modules": module_hooks,
    "dual numbers": dual,
    "batched tangents": batched,
    "a wrapper that outlived its transform": left_a_transform,
    **{
        f"torch.func.{name}": lambda c, name=name: getattr(torch.func, name)(c(cube))(torch.ones(3))
        for name in ("grad", "jacrev", "jacfwd", "hessian")
    },
    "torch.func.vmap": lambda c: torch.func.vmap(c(cube))(torch.eye(3)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TRANSFORMED)
def test_other_derivatives_are_eagers(backend, name):
    assert_scenario(TRANSFORMED[name], lambda fn: mc.compile(fn, backend=backend))


# Random numbers ----------------------------------------------------------------------------------


def dropouts(x):
    return (
        F.dropout(F.dropout(x, 0.5) * torch.rand_like(x), 0.3) + torch.randn(4) + torch.rand(3, 1)
    )


RANDOM = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "several": dropouts,
    "unused draws": lambda x: (torch.rand(3), x * torch.rand(4))[1],
    "equal calls": lambda x: x * torch.rand(4) + x * torch.rand(4),
    "late use": lambda x: (lambda a, b: (x * b) * a)(torch.rand(4), torch.randn(3, 4)),
}


@pytest.mark.parametrize(
    ("name", "device"),
    [
        *((name, "cpu") for name in RANDOM),
        pytest.param("dropout", "cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_random_numbers_are_drawn_in_eagers_order(backend, name, device):
    found = []
    call = mc.compile(RANDOM[name], backend=backend, fullgraph=True)
    for fn in (call, RANDOM[name]):
        x = torch.ones(3, 4, device=device).requires_grad_()
        torch.manual_seed(3)
        out = fn(x)
        out.sum().backward()
        found.append([out.detach(), x.grad, torch.rand(2, device=device), torch.rand(1)])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpointed_calls_draw_the_same_mask_again(backend, reentrant):
    def scenario(compile_with):
        x, call = leaf(), compile_with(lambda x: F.dropout(x.sin(), 0.5) * x)
        checkpoint(call, x, use_reentrant=reentrant).sum().backward()
        return x.grad

    assert_scenario(scenario, lambda fn: mc.compile(fn, backend=backend))


# Memory ------------------------------------------------------------------------------------------


def watched(run, seen):
    """A compiled graph that notes which of its inputs are alive when it ends."""

    def call(inputs):
        references = [weakref.ref(value) for value in inputs if torch.is_tensor(value)]
        outputs = run(inputs)
        seen.append([reference() is not None for reference in references])
        assert not inputs
        return outputs

    return call


def test_the_forward_lets_go_of_inputs_and_the_backward_of_saved_tensors():
    w, alive = leaf(8), ([], [])
    _, result = compile_aot(lambda x, w: (x + 1) + w.sin().exp(), [torch.randn(8), w])
    graphs = result.forward, result.backward
    calls = [watched(interpret(graph), seen) for graph, seen in zip(graphs, alive)]
    call = make_callable(result, *calls)
    inputs = [torch.randn(8), w]
    output = call(inputs)[0]
    (output * 2).sum().backward()
    assert alive[0] == [[False, True]], "the caller owns w alone"
    assert not any(
        alive[1][0][i] for i, node in enumerate(result.partition.saved) if not node.is_input
    )
