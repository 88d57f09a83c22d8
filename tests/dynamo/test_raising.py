"""A call that raises does so in eager's words, and leaves what eager leaves."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import minicompile as mc

ONES = torch.ones(3, 4)


def reads(a: torch.Tensor, i: torch.Tensor) -> Any:
    a.add_(1)
    return a[i].exp()


def puts(a: torch.Tensor, i: torch.Tensor) -> Any:
    a.mul_(2)
    a[i] = ONES
    return a * 2


def factors(a: torch.Tensor, i: torch.Tensor) -> Any:
    a.add_(1)
    return torch.linalg.cholesky(-torch.eye(3) * i)


def divides(a: torch.Tensor, i: torch.Tensor) -> Any:
    a.add_(1)
    return a.sum() + 7 // (i - 1)


def draws(a: torch.Tensor, i: torch.Tensor) -> Any:
    a += torch.rand(3, 4)
    return a[i]


def outcome(function: Callable[..., Any], *args: torch.Tensor) -> tuple[Any, ...]:
    """The exception, what the arguments hold, and the next random number."""
    torch.manual_seed(3)
    try:
        function(*args)
    except Exception as error:
        return type(error), str(error), [x.tolist() for x in args], torch.rand(()).item()
    return ("no exception",)


@pytest.mark.long
@pytest.mark.parametrize(
    "function",
    [reads, puts, factors, divides, draws],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_exception_and_the_arguments_are_eagers(function: Any, dynamic: bool) -> None:
    compiled = mc.compile(function, dynamic=dynamic)
    good = torch.arange(12.0).view(3, 4), torch.tensor([0, 2, 2])
    with contextlib.suppress(
        Exception
    ):  # a version is there, which no other value of the index makes anew
        compiled(*good)
    given = torch.arange(12.0).view(3, 4), torch.tensor([0, 1, 5])
    expected = outcome(function, *(x.clone() for x in given))
    assert expected[0] != "no exception"
    for _ in range(2):
        assert outcome(compiled, *(x.clone() for x in given)) == expected


def writes_both(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    a.add_(x)
    b.mul_(2)  # refused: b, made by the caller, doesn't know yet that its base requires grad now
    return a + b


def writes_after_a_break(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    a.add_(x)
    print(x.sum().item() > 0)
    b.mul_(2)
    return a + b


def writes_one(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return b.mul_(2) + x


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [writes_both, writes_after_a_break, writes_one])
def test_a_view_made_before_its_base_required_grad_gives_eagers_values_where_eager_gives_any(
    function: Any, dynamic: bool
) -> None:
    """Not promised: eager's refusal of a write to such a view."""
    compiled = mc.compile(function, backend="aot_eager", dynamic=dynamic)
    for history in ("before", "none", "since", "before", "since"):
        found = []
        for call in (compiled, function):
            base, x = torch.ones(2, 4), torch.ones(4, requires_grad=True)
            base = base * x if history == "before" else base
            a, b = base[0], base[1]
            if history == "since":
                a.mul_(x)
            found.append(outcome(call, a, b, x))
        refused = history == "since" or (history == "none" and function is not writes_one)
        assert (found[1][0] == "no exception") is not refused
        assert refused or found[0] == found[1]


def writes_unseen(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    a.detach().mul_(2)
    return a * x  # whose history is made anew, where it may be


def made_without_grad(base: torch.Tensor) -> Any:
    with torch.no_grad():
        return base[0], base[1]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [writes_both, writes_unseen])
def test_views_give_eagers_values_where_eager_lets_them_be_written_to(
    function: Any, dynamic: bool
) -> None:
    compiled = mc.compile(function, backend="aot_eager", dynamic=dynamic)
    makers = (lambda base: (base[0], base[1]), made_without_grad, torch.unbind)
    for make in (*makers, *makers):
        found = []
        for call in (compiled, function):
            base, x = torch.ones(2, 4, requires_grad=True) * 1, torch.ones(4)
            found.append(outcome(call, *make(base), x))
        assert (found[1][0] == "no exception") is (make is makers[0])
        assert make is not makers[0] or found[0] == found[1]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_view_made_before_its_base_was_made_a_leaf_gets_a_history_by_a_write(
    dynamic: bool,
) -> None:
    compiled, found = mc.compile(writes_unseen, backend="aot_eager", dynamic=dynamic), []
    compiled(*made_without_grad(torch.ones(2, 4)), torch.ones(4))
    for call in (compiled, writes_unseen):
        base = torch.ones(2, 4)
        a, b = base[0], base[1]
        base.requires_grad_()
        call(a, b, torch.ones(4)).sum().backward()
        found.append(base.grad)
    torch.testing.assert_close(*found)


class Counted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls = torch.nn.BatchNorm1d(4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.norm(x.sin())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_checkpoint_that_ends_early_leaves_what_eager_leaves(backend: str) -> None:
    found = []
    for wrap in (lambda module: module, lambda module: mc.compile(module, backend=backend)):
        module, x = Counted(), torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
        checkpoint(wrap(module), x, use_reentrant=False).exp().sum().backward()
        assert module.calls == 2
        found.append([x.grad, *module.buffers()])
    torch.testing.assert_close(*found)


def test_what_somebodys_own_backend_raises_is_no_reason_to_run_in_eager() -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        def run(*given: Any) -> Any:
            raise NotImplementedError("not yet")

        return run

    compiled = mc.compile(lambda x: x.sin(), backend=backend)
    with pytest.raises(NotImplementedError, match="not yet"):
        compiled(torch.ones(3))


def test_what_an_operator_in_python_raises_is_eagers() -> None:
    with torch.library._scoped_library("raising", "FRAGMENT"):

        @torch.library.custom_op("raising::refuse", mutates_args=())
        def refuse(x: torch.Tensor) -> torch.Tensor:
            raise ValueError("not this one")

        refuse.register_fake(torch.empty_like)

        def f(a: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            a.add_(1)
            return refuse(a)

        given = torch.zeros(3), torch.zeros(3)
        expected = outcome(f, *(x.clone() for x in given))
        assert outcome(mc.compile(f), *(x.clone() for x in given)) == expected


def survives(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.mul_(2)
    try:
        a.mul_(torch.linalg.cholesky(b).sum())
    except RuntimeError:
        return a * 3
    return a + b


def cleans_up(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    try:
        a.mul_(2 * b)
        return a + torch.linalg.cholesky(a.detach())
    finally:
        b.add_(1)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("function", [survives, cleans_up])
def test_handlers_run_where_a_graph_raises_before_it_writes_to_inputs(
    function: Any, trained: bool
) -> None:
    compiled = mc.compile(function, backend="aot_eager")
    for sign in (1, -1, 1, -1):
        found = []
        for call in (function, compiled):
            leaf = torch.ones(3, 3, requires_grad=trained)
            a, b = leaf * 1, torch.eye(3) * sign
            try:
                result = call(a, b)
            except RuntimeError as error:
                assert sign < 0 and "cholesky" in str(error)
                result = None
            if trained:
                a.sum().backward()
            found.append((result, a, b, leaf.grad))
        torch.testing.assert_close(*found)


def test_what_a_graph_raises_after_it_has_written_to_inputs_is_the_calls_exception() -> None:
    """Backend "eager" writes at once: the frame could not run again on what the inputs held."""
    compiled = mc.compile(survives, backend="eager")
    compiled(torch.ones(3, 3), torch.eye(3))
    with pytest.raises(RuntimeError, match="cholesky"):
        compiled(torch.ones(3, 3), -torch.eye(3))


@pytest.mark.parametrize("wrap", [lambda f: f, functools.partial])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_what_a_hook_raises_is_the_callers(backend: str, wrap: Any) -> None:
    packed: list[torch.Tensor] = []

    @wrap
    def pack(x: torch.Tensor) -> torch.Tensor:
        packed.append(x)
        if len(packed) == 1:
            raise KeyError("full")
        return x

    def f(x: torch.Tensor) -> torch.Tensor:
        try:
            return (x.sin() * x.cos()).sum()
        finally:
            packed.append(x)

    compiled = mc.compile(f, backend=backend)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), pytest.raises(KeyError):
        compiled(torch.ones(4, requires_grad=True))
    assert len(packed) == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_input_is_written_to_once_where_memory_runs_out_later(dynamic: bool) -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        sums = (b * a.sum()).cumsum(0).flip(0).cumsum(0)
        return sums[:, None] * 2 + sums

    a, compiled = torch.zeros(4), mc.compile(f, dynamic=dynamic)
    compiled(a, torch.ones(4))
    with pytest.raises(RuntimeError, match="allocate"):
        compiled(a, torch.ones(10**7))
    assert a.tolist() == [2.0] * 4


class Seen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


@pytest.mark.parametrize(
    "function",
    [
        lambda x: Seen.apply(x * 2),
        lambda x: Seen.apply(x * 2)[1:],
        lambda x: (Seen.apply(x * 2).t(), x.sin()),
        lambda x: (Seen.apply(x), x.sin()),
    ],
)
def test_a_view_that_a_custom_function_gives_is_differentiated_as_in_eager(function: Any) -> None:
    found = []
    for call in (function, mc.compile(function)):
        x = torch.ones(3, 3, requires_grad=True)
        first, *_ = results if isinstance(results := call(x), tuple) else (results,)
        first.sum().backward(retain_graph=True)
        found.append(x.grad)
    torch.testing.assert_close(*found)


def both_ways_raise(a: torch.Tensor) -> None:
    if a.sum() > 0:
        raise ValueError("positive")
    raise KeyError("negative")


def checks_around_a_write(a: torch.Tensor) -> None:
    if not (a > 0).all():
        raise ValueError("not positive")
    a.sub_(1)
    if not (a > 0).all():
        raise LookupError("not positive now")


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("function", [both_ways_raise, checks_around_a_write])
def test_a_check_of_values_raises_what_eager_raises(function: Any, backend: str, mode: Any) -> None:
    """Where a graph may have written to an input when the check fails, it ends before the check."""
    compiled = mc.compile(function, backend=backend)
    with mode():
        for value in (2.0, -1.0, 1.0):
            a, b = torch.full((2, 3), value), torch.full((2, 3), value)
            assert (outcome(compiled, a), a.tolist()) == (outcome(function, b), b.tolist())
