"""Functions that torch calls later or with other tensors: custom autograd functions, vmap, scans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.utils.checkpoint import checkpoint

import minicompile
from tests.dynamo.helpers import compiled, equal, explained, lenient, outcome

Function = torch.autograd.Function
SCALE = 2.0
WEIGHT = torch.randn(4, requires_grad=True)
CALLS: list[int] = []


class Cubed(Function):
    """Its gradient is ten times too large, so that nobody takes the forward's own for it."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, k: float = 1.0) -> torch.Tensor:
        ctx.save_for_backward(a)
        ctx.k = k
        return a**3 * k

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (a,) = ctx.saved_tensors
        return 30 * a**2 * grad * ctx.k, None


class LargestAndWhere(Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        values, where = (a + b).max(1)
        ctx.mark_non_differentiable(where)
        ctx.save_for_backward(where)
        ctx.shape = a.shape
        return values, where

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, unused: torch.Tensor) -> Any:
        assert unused.dtype == torch.int64
        (where,) = ctx.saved_tensors
        spread = torch.zeros(ctx.shape).scatter(1, where[:, None], 7 * grad[:, None])
        return spread if ctx.needs_input_grad[0] else None, None


class Staged(Function):
    """Forward and setup_context apart; saves its output and an intermediate value."""

    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * b).exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        a, b = inputs
        ctx.save_for_backward(output, None, a)
        ctx.other = b.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        out, nothing, a = ctx.saved_tensors
        assert nothing is None
        return grad * out * ctx.other, Cubed.apply(grad * out, 2) * a


class Reversed(Function):
    """Gives its input back."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        return a

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad


class Flattened(Function):
    """A view of its input; asks for its gradient's layout."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        ctx.shape = a.shape
        return a.view(-1, 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if not grad.is_contiguous():
            grad = grad.contiguous()
        return grad.view(ctx.shape) * 3


class Scaled(Function):
    """Its backward reads a global."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        return a * SCALE

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * SCALE


class Counting(Function):
    """Its backward changes something outside."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        return a * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        CALLS.append(1)
        return grad * 3


class Strided(Function):
    """Its backward computes with its gradient's strides."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        return a * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * (grad.stride()[0] + 1)


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(a)
        return a.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 5


PROGRAMS: dict[str, Callable[..., Any]] = {
    "constants": lambda a, b: Cubed.apply(a * 2, 2).sin() + b,
    "twice the same": lambda a, b: Staged.apply(a, a) * b,
    "two": lambda a, b: Staged.apply(a, b),
    "marked": lambda a, b: LargestAndWhere.apply(a, b),
    "input given back": lambda a, b: (Reversed.apply(a).sin(), Reversed.apply(a + b)),
    "view": lambda a, b: Flattened.apply(a + b) * 2,
    "gradient of another layout": lambda a, b: Flattened.apply(a * b).T.contiguous().sum(1),
    "global": lambda a, b: Scaled.apply(a) + b,
    "inside no_grad": lambda a, b: quietly(Cubed.apply, a) + a,
    "in a loop": lambda a, b: sum(Cubed.apply(a, k) for k in range(3)),
}


def quietly(function: Any, *args: Any) -> Any:
    with torch.no_grad():
        return function(*args)


def both(a: torch.Tensor, b: torch.Tensor, call: Callable[..., Any]) -> Any:
    """What a call gives, and the gradients."""
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in (a, b)]
    WEIGHT.grad = None
    out = call(*leaves)
    parts = [t for t in (out if isinstance(out, tuple) else (out,)) if t.requires_grad]
    if parts:
        sum(part.square().sum() for part in parts).backward()
    return out, [t.grad for t in (*leaves, WEIGHT)]


X, Y = torch.randn(3, 4), torch.randn(3, 4)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_custom_function_is_part_of_the_graph(name: str, backend: str) -> None:
    program = PROGRAMS[name]
    run = compiled(program, backend=backend)
    for a, b in [(X, Y), (Y, X)]:
        (got, got_grads), (want, want_grads) = both(a, b, run), both(a, b, program)
        assert close(got, want, backend) and close(got_grads, want_grads, backend)
        with torch.no_grad():
            assert close(run(a, b), program(a, b), backend)
    assert explained(run).graph_count == 2  # with gradients and without


@pytest.mark.parametrize("name", PROGRAMS)
def test_custom_function_with_symbolic_sizes(name: str) -> None:
    run = compiled(PROGRAMS[name], dynamic=True)
    for rows in (3, 5, 6):
        a, b = torch.randn(rows, 4), torch.randn(rows, 4)
        assert equal(both(a, b, run), both(a, b, PROGRAMS[name]))
    assert explained(run).graph_count == 1


def close(left: Any, right: Any, backend: str) -> bool:
    if backend == "eager":
        return equal(left, right)
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(close(a, b, backend) for a, b in zip(left, right))
    if left is None or right is None:
        return left is right
    return left.requires_grad == right.requires_grad and torch.allclose(left, right, rtol=1e-5)


VIEWS: dict[str, Callable[..., Any]] = {
    "of an input": lambda a, b: (Reversed.apply(a), b * 2),
    "of a view of an input": lambda a, b: (Flattened.apply(a.T.T)[0], b * 2),
    "of another output": lambda a, b: (c := a + b, Reversed.apply(c)),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", VIEWS)
def test_outputs_that_are_views_by_a_custom_function(name: str, backend: str) -> None:
    """Gradients go through the function, also where it gives what shares memory with an input."""
    run = lenient(VIEWS[name], backend=backend)
    assert close(both(X, Y, run), both(X, Y, VIEWS[name]), backend)


def test_its_graphs_are_shown() -> None:
    run = compiled(PROGRAMS["constants"])
    both(X, Y, run)
    (capture,) = explained(run).captures
    assert [graph.name for graph in capture.subgraphs] == ["Cubed", "Cubed_backward"]
    assert "def Cubed_backward(gradient: 'f32[3, 4]', mul: 'f32[3, 4]'):" in str(capture)


def test_second_derivatives_are_refused() -> None:
    a = X.clone().requires_grad_()
    out = compiled(PROGRAMS["constants"])(a, Y)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(out.sum(), a, create_graph=True)


@pytest.mark.parametrize("function", [Counting, InPlace, Strided])
def test_what_runs_in_eager(function: Any) -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (function.apply(a * 2) + b).sum()

    run = lenient(program)
    for expected in (program, run):
        CALLS.clear()
        assert equal(both(X, Y, run), both(X, Y, program))
        assert len(CALLS) == (2 if function is Counting else 0), expected
    assert explained(run).breaks


# -- vmap


def rows(a: torch.Tensor, b: torch.Tensor) -> Any:
    return torch.vmap(lambda x, y: {"dot": (x * y).sum() + WEIGHT.sum(), "rest": x - y})(a, b)


MAPPED: dict[str, Callable[..., Any]] = {
    "dictionary": lambda a, b: tuple(rows(a, b).values()),
    "columns out": lambda a, b: torch.vmap(lambda x: (x * 2, x.sum()), -1, (1, 0))(a)[0] + b,
    "nested": lambda a, b: torch.vmap(torch.vmap(lambda x, y: x * y + a.sum()))(a, b),
    "pairs": lambda a, b: torch.vmap(lambda p: p[0] @ p[1], in_dims=((0, 1),))((a, b.T)),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", MAPPED)
def test_vmap_is_part_of_the_graph(name: str, backend: str) -> None:
    program = MAPPED[name]
    run = compiled(program, backend=backend)
    for a, b in [(X, Y), (Y, X)]:
        (got, got_grads), (want, want_grads) = both(a, b, run), both(a, b, program)
        assert close(got, want, backend) and close(got_grads, want_grads, backend)
    assert explained(run).graph_count == 1


def test_vmap_that_torch_refuses() -> None:
    def program(a: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda x: x + torch.rand(()))(a)

    ours, theirs = outcome(lenient(program), X), outcome(program, X)
    assert ours[0] == theirs[0] == "raised" and equal(ours[1][1], theirs[1][1])


def test_associative_scan() -> None:
    from torch._higher_order_ops.associative_scan import associative_scan

    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        def combine(left: Any, right: Any) -> Any:
            return left[0] * right[0], right[0] * left[1] + right[1]

        return associative_scan(combine, (a, b), dim=1, combine_mode="generic")[1]

    a, b = torch.randn(2, 5), torch.randn(2, 5)
    run = compiled(program)
    assert equal(both(a, b, run), both(a, b, program))
    assert explained(run).graph_count == 1


def test_modules_made_after_torch_compile_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """It wraps nn.Module.__init__ at its first use."""
    from torch._dynamo import mutation_guard

    for name in ("__init__", "__setstate__"):
        monkeypatch.setattr(torch.nn.Module, name, getattr(torch.nn.Module, name))
    monkeypatch.setattr(torch.nn.Module, "___needs_generation_tag_patch", True, raising=False)
    mutation_guard.install_generation_tagging_init()
    assert torch.nn.Module.__init__ is not mutation_guard.unpatched_nn_module_init
    run = compiled(lambda a: torch.nn.ReLU()(a))
    assert equal(run(X), X.relu()) and explained(run).graph_count == 1


class ScaledLater(torch.autograd.Function):
    """Its backward reads a number from outside."""

    factor = 5

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ScaledLater.factor


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_a_number_that_a_backward_reads_is_the_one_of_now_or_an_error(
    dynamic: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = minicompile.compile(lambda x: ScaledLater.apply(x), dynamic=dynamic)
    for factor in (5, 6, 7):  # from the second on it varies
        monkeypatch.setattr(ScaledLater, "factor", factor)
        x = torch.ones(3, requires_grad=True)
        call(x).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [factor] * 3
    y = call(x)
    monkeypatch.setattr(ScaledLater, "factor", 10)
    with pytest.raises(RuntimeError, match="what backward reads changed"):
        y.sum().backward()


class GivesBack(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def test_an_input_given_back_under_no_grad_requires_none() -> None:
    def fn(x: torch.Tensor) -> Any:
        with torch.no_grad():
            y = GivesBack.apply(x)
        return y, y * 3, y is x

    for requires_grad in (True, False):
        x = torch.ones(3, requires_grad=requires_grad)
        assert equal(compiled(fn)(x), fn(x))


class ChecksFirst(Cubed):
    @classmethod
    def apply(cls, x: torch.Tensor) -> Any:
        assert x.dim() == 1
        return super().apply(x) + 1


HELD_APPLY = Cubed.apply


@pytest.mark.parametrize("function", [ChecksFirst.apply, lambda x: ChecksFirst.apply(x) * 2,
                                      lambda x: HELD_APPLY(x) * 2])  # fmt: skip
def test_an_apply_that_is_held_or_overridden_is_part_of_the_graph(function: Any) -> None:
    run = compiled(lambda x: function(x).sin())
    x, y = (torch.arange(3.0, requires_grad=True) for _ in range(2))
    assert equal(run(x), function(y).sin())
    run(x).sum().backward()
    function(y).sin().sum().backward()
    assert equal(x.grad, y.grad) and explained(run).graph_count == 1


def test_a_ctx_has_every_attribute_that_torch_gives_it_or_is_refused() -> None:
    raising_or_deprecated = {"input_grad_buffers", "saved_variables"}
    public = {name for name in dir(BackwardCFunction) if not name.startswith("_")}
    for name in sorted(public - raising_or_deprecated):

        class Asks(GivesBack):
            asked = name

            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x + hasattr(ctx, Asks.asked)

        x = torch.ones(3, requires_grad=True)
        call = minicompile.compile(lambda x: Asks.apply(x), backend="eager")
        assert equal(call(x), Asks.apply(x)), name


@pytest.mark.parametrize("reason", ["autograd-function", "function-transform", "checkpoint"])
def test_without_the_plugin_the_graph_ends_with_a_reason(reason: str) -> None:
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "autograd-function": lambda x: Cubed.apply(x.sin()) * 2,
        "function-transform": lambda x: torch.vmap(torch.sum)(x.sin()) * 2,
        "checkpoint": lambda x: checkpoint(torch.exp, x.sin(), use_reentrant=False) * 2,
    }
    plugins = [p for p in minicompile.Options().plugins if p != "function_graphs"]
    run = lenient(calls[reason], options={"plugins": plugins})
    results = []
    for call in run, calls[reason]:
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        y = call(x)
        y.sum().backward()
        results.append((y, x.grad))
    assert equal(*results)
    assert reason in {stop.id for stop in explained(run).breaks}
