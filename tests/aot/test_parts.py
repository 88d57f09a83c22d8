"""Results that eager differentiates one after the other can be so when compiled, and no others."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import minicompile as mc
from minicompile import compat
from minicompile.aot.result import Part, RuntimeMetadata
from minicompile.plugins.graph_cache.store import plain, tuples
from tests.dynamo.helpers import explained

Program = Callable[[torch.Tensor, torch.Tensor], Any]


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def shared_inputs(x: Any, w: Any) -> Any:
    return (x * w).sum(), (x @ w).sin(), w.exp()


def shared_operation(x: Any, w: Any) -> Any:
    y = (x @ w).tanh()
    return y.sin(), y.cos(), w.exp()


def shared_operations_that_keep_nothing(x: Any, w: Any) -> Any:
    y = torch.cat([x, w.t()]) + 1
    return y.sin(), y[1:].cos().t(), (y.sum(0, keepdim=True).expand(4, 4) * w).double()


def nothing_is_kept(x: Any, w: Any) -> Any:
    return x + w, x.sum(0), (w.t() - x)[1:]


def equal_results(x: Any, w: Any) -> Any:
    return x * 2, x * 2, w * 2


def one_result_in_another(x: Any, w: Any) -> Any:
    y, z = x.exp(), w + 1
    return y, y.detach() * w, z, z * x


def without_gradients(x: Any, w: Any) -> Any:
    return x.detach() * 2, x > 0, x.sin(), (w.detach() + 1).long(), w.cos()


def no_input_is_reached(x: Any, w: Any) -> Any:
    with torch.no_grad():
        row = x[0]
    return row.exp(), row.sin() + 1, (w * row).exp()


def not_one_input_is_reached(x: Any, w: Any) -> Any:
    with torch.no_grad():
        row = x[0]
    return row.exp(), (row * w.detach()).sin()


def slopes_of_zero(x: Any, w: Any) -> Any:
    return x.floor(), x * 2, w.round(), torch.where(w > 0, x, w)


def views(x: Any, w: Any) -> Any:
    y, z = x.sin(), w.exp()
    return y[0], y.t(), z.t(), z.detach()[1:]


def written_to(x: Any, w: Any) -> Any:
    x.mul_(2)
    return x, (w * w).sum(), x.detach() * w


def part_of_it_written_to(x: Any, w: Any) -> Any:
    x[1:].mul_(w[1:].detach())
    return (w * 3).sin().sum(), x[0] * 2


PROGRAMS = [
    shared_inputs,
    shared_operation,
    shared_operations_that_keep_nothing,
    nothing_is_kept,
    equal_results,
    one_result_in_another,
    without_gradients,
    no_input_is_reached,
    not_one_input_is_reached,
    slopes_of_zero,
    views,
    written_to,
    part_of_it_written_to,
]


def outcomes(call: Program, orders: Sequence[Any], alone: bool, **how: Any) -> Iterator[Any]:
    """What each order of differentiating results gives, up to a refusal. `alone`: gradients of the program's
    inputs if it leaves them as they are; else of the leaves that they are computed from."""
    for order in orders:
        x, w = leaf(4, 4), leaf(4, 4, seed=1)
        given = [x.sin(), w.sin()]  # which keep something, too
        results = call(*given)
        for step in order:
            some = [results[i] for i in step]
            tangents = [torch.full_like(result, 1.5) for result in some]
            try:
                if alone:
                    yield torch.autograd.grad(some, given, tangents, allow_unused=True, **how)
                else:
                    torch.autograd.backward(some, tangents, **how)
                    yield [None if leaf.grad is None else leaf.grad.clone() for leaf in (x, w)]
            except RuntimeError as error:
                assert "second time" in str(error)
                yield "refused"
                break


def orders_of(fn: Program) -> list[Any]:
    """Each result alone, one after the other; then some at once, and some again."""
    results = fn(leaf(4, 4) * 1, leaf(4, 4) * 1)
    trained = [i for i, result in enumerate(results) if result.requires_grad]
    one_by_one = [[(i,) for i in order] for order in itertools.permutations(trained)]
    others = [[trained], [trained, trained[:1]], [trained[1:], trained[:1]]]
    return [*one_by_one[:6], *others, *([(i,), (i,)] for i in trained)]


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("fn", PROGRAMS)
def test_results_can_be_differentiated_one_after_the_other_where_eager_does_it(
    fn: Program, dynamic: bool | None
) -> None:
    check(fn, mc.compile(fn, backend="aot_eager", dynamic=dynamic))


@pytest.mark.long
@pytest.mark.parametrize(
    "fn", [shared_operations_that_keep_nothing, written_to, views, not_one_input_is_reached]
)
def test_kernels_of_each_part_give_the_same(fn: Program) -> None:
    check(fn, mc.compile(fn))
    check(fn, mc.compile(fn), retain_graph=True)


def check(fn: Program, call: Program, **how: Any) -> None:
    orders = orders_of(fn)
    for alone in {fn not in (written_to, part_of_it_written_to), False}:
        both = (outcomes(each, orders, alone, **how) for each in (call, fn))
        for ours, right in zip(*both, strict=True):
            if isinstance(right, str):
                assert ours == right
            else:
                torch.testing.assert_close(ours, right)


def test_how_many_parts_there_are() -> None:
    def gan(x: Any, w: Any) -> Any:
        return (x[0] @ w).tanh().mean(), (x[1] @ w).tanh().mean()

    def logits_and_loss(x: Any, w: Any) -> Any:
        logits = x @ w
        return logits, logits.exp().mean()

    for fn, count in ((gan, 2), (logits_and_loss, 1), (shared_operation, 2), (nothing_is_kept, 3)):
        aot = mc.trace(fn, leaf(4, 4), leaf(4, 4)).aot
        assert aot is not None and len(aot.metadata.parts) == count
        assert ("a backward of their own" in str(aot.metadata)) == (count > 1)


class Doubled(torch.autograd.Function):
    """An operation of the user's, whose backward makes numbers of no gradient."""

    @staticmethod
    def forward(_: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(_: Any, tangent: Any) -> Any:
        return tangent * 2


def used_up(w: Any) -> Any:
    y = w.exp()
    torch.autograd.grad(y.sum(), w)
    return y


def one_reaches_more(x: Any, y: Any) -> Any:
    h = x.exp()
    return h + 1, h * y


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_history_that_a_result_does_not_come_from_is_left_alone(backend: str) -> None:
    def run(call: Program, history: Any, used_later: bool) -> Any:
        x, w = leaf(3), leaf(3, seed=1)
        y = history(w)
        first, second = call(x.sin(), y)
        if used_later:
            torch.autograd.grad(y.sum(), w)
        first.sum().backward(retain_graph=True)
        assert w.grad is None
        try:
            second.sum().backward()
        except RuntimeError as error:
            return str(error)
        return x.grad, w.grad

    compiled = mc.compile(one_reaches_more, backend=backend)
    for history in (Doubled.apply, torch.exp, used_up):
        for later in {False, history is torch.exp}:
            ours, right = (run(call, history, later) for call in (compiled, one_reaches_more))
            if isinstance(right, str):
                assert ours == right
            else:
                torch.testing.assert_close(ours, right)


def test_results_that_share_an_operation_are_not_divided() -> None:
    """They would be where one reaches a history that another does not: that frame runs in eager."""
    leaves, histories = (leaf(4), leaf(4)), (leaf(4) * 2, leaf(4) * 2)
    for inputs in (leaves, (leaf(4) * 2, leaf(4))):
        aot = mc.trace(one_reaches_more, *inputs).aot
        assert aot is not None and aot.metadata.parts == (Part((0, 1), (0, 1)),)
    compiled = mc.compile(one_reaches_more)
    torch.testing.assert_close(compiled(*histories), one_reaches_more(*histories))
    assert "share an operation" in explained(compiled).breaks[0].reason


def test_a_state_may_be_changed_beside_a_loss() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, state: Any, x: Any) -> Any:
            state.mul_(2)
            self.seen.add_(x.sum(0))
            return torch.tanh(self.linear(x)).square().mean()

    def run(wrap: Any) -> Any:
        torch.manual_seed(0)
        model, x = Model(), leaf(4, 4)
        state = x * 1.0
        wrap(model)(state, torch.ones(4, 4)).backward()
        state.exp().sum().backward()
        return x.grad, model.seen, [p.grad for p in model.parameters()]

    torch.testing.assert_close(run(mc.compile), run(lambda model: model))


def test_what_one_part_keeps_dies_with_its_backward() -> None:
    alive: list[Any] = []

    def packed(value: torch.Tensor) -> torch.Tensor:
        copy = value.clone()
        alive.append(weakref.ref(copy))
        return copy

    x, w = leaf(4, 4), leaf(4, 4)
    with torch.autograd.graph.saved_tensors_hooks(packed, lambda value: value):
        first, second = mc.compile(lambda x, w: (x.exp().sin(), w.exp()), backend="aot_eager")(x, w)
    count = len(alive)
    first.sum().backward()
    left = sum(ref() is not None for ref in alive)
    assert 0 < left < count
    second.sum().backward()
    assert not any(ref() is not None for ref in alive)
    torch.testing.assert_close([x.grad, w.grad], [(x.exp().cos() * x.exp()), w.exp()])


def test_what_one_part_keeps_may_not_be_written_to_and_what_another_keeps_may() -> None:
    call = mc.compile(lambda x, w, s, t: (x * s, w * t), backend="aot_eager")
    x, w, s, t = leaf(3), leaf(3), torch.ones(3), torch.ones(3)
    first, second = call(x, w, s, t)
    t.add_(1)
    first.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.sum().backward()
    assert x.grad is not None and w.grad is None


def test_derivatives_of_a_part_are_refused_batched_ones_are_not() -> None:
    call = mc.compile(lambda x, w: (x**3, w.sin(), w.cos()))
    x, w = leaf(3), leaf(3)
    cube, sine, _ = call(x, w)
    (gradient,) = torch.autograd.grad(cube.sum(), x, create_graph=True)
    torch.testing.assert_close(gradient.detach(), 3 * x.detach() ** 2)
    with pytest.raises(RuntimeError, match="second derivatives"):
        gradient.sum().backward()
    (batched,) = torch.autograd.grad(sine, w, torch.eye(3), is_grads_batched=True)
    torch.testing.assert_close(batched, torch.diag(w.detach().cos()))


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(_: Any, tangent: Any) -> Any:
        return tangent + torch.rand_like(tangent)


def test_a_part_draws_its_own_random_numbers_alone() -> None:
    call = mc.compile(lambda x, w: (Noisy.apply(x), Noisy.apply(w)))
    x, w = leaf(3), leaf(3)
    for result, given in zip(call(x, w), (x, w)):
        torch.manual_seed(0)
        result.sum().backward()
        after = torch.rand(1)
        torch.manual_seed(0)
        assert given.grad is not None
        torch.testing.assert_close((given.grad, after), (1 + torch.rand(3), torch.rand(1)))


def test_hooks_and_large_tangents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minicompile.aot.runtime.LARGE", 0)

    def run(wrap: Any) -> Any:
        x, w, seen = leaf(4, 4), leaf(4, 4), list[Any]()
        w.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient.clamp(-1, 1))
        first, second, _ = wrap(shared_inputs)(x, w)
        second.register_hook(lambda gradient: gradient * 2)
        (first * 3 + second.sum()).backward()
        return x.grad, w.grad, seen

    torch.testing.assert_close(run(mc.compile), run(lambda fn: fn))


def test_where_saved_tensors_come_all_at_once_parts_still_come_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compat.autograd, "UNPACKS_ONE", False)
    check(views, mc.compile(views, backend="aot_eager"))


def test_a_trace_shows_the_graph_of_each_part() -> None:
    trace = mc.trace(shared_inputs, leaf(4, 4), leaf(4, 4))
    assert list(trace.graphs) == ["forward", "backward", "backward_2", "backward_3"]
    assert 'trace.graph("backward_2").kernels' in str(trace)
    assert "backward_2.kernels" in trace.stages
    assert "or another part's" in str(trace.diff("aot.backward", "backward_2.loops"))
    assert "backward_3 cpp" in str(trace.roofline())


def test_parts_are_written_to_disk_as_they_are() -> None:
    aot = mc.trace(shared_inputs, leaf(4, 4) * 2, leaf(4, 4) * 2).aot
    assert aot is not None
    kept = tuples(plain(aot.metadata)["parts"])
    assert kept == tuple(map(tuple, aot.metadata.parts))
    assert RuntimeMetadata((), parts=kept).parts == aot.metadata.parts


def test_results_that_reach_no_input_still_require_grad() -> None:
    def stopped(x: torch.Tensor) -> Any:
        y = x * 2
        with torch.no_grad():
            row = y[0]
        return row + 1, y, (y * 0).floor()

    for wrap in (lambda fn: fn, mc.compile):
        x = leaf(3, 4)
        first, second, third = wrap(stopped)(x)
        assert first.requires_grad and second.requires_grad and third.requires_grad
        (first.sum() + second.sum()).backward()
        assert x.grad is not None and torch.equal(x.grad, torch.full((3, 4), 2.0))
