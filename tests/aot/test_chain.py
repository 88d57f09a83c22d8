"""Gradients that are handed out while the compiled backward runs, for DistributedDataParallel: whatever is
done with the autograd graph gives eager's results. One process; test_distributed.py has two."""

from __future__ import annotations

import gc
import io
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import minicompile as mc
from minicompile.aot import chain, runtime

dist = pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")

WIDTH, LAYERS = 16, 6
BUCKET = 0.002
"""MiB: two layers."""


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mc.reset()
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        middle = None
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            middle = x * 2 if number == LAYERS // 2 else middle
        return x, middle


def pair(make: Callable[[], nn.Module] = Net, **options: Any) -> tuple[nn.Module, nn.Module]:
    """The same model, in eager and compiled inside of a DistributedDataParallel. Its backward has groups."""
    torch.manual_seed(0)
    eager = make()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(mc.compile(make(), **options), bucket_cap_mb=BUCKET)
    return eager, Unreduced(ddp)


class Unreduced(nn.Module):
    """Calls a DistributedDataParallel whose hooks wait for no gradient; its calls have groups."""

    def __init__(self, ddp: nn.Module) -> None:
        super().__init__()
        self.ddp = ddp

    def forward(self, x: torch.Tensor) -> Any:
        told = io.StringIO()
        with self.ddp.no_sync(), mc.logs("ddp", file=told):
            results = self.ddp(x)
        assert all("groups of gradients" in line for line in told.getvalue().splitlines())
        assert not results[0].requires_grad or "Link" in str(walk(results[0].grad_fn))
        return results


def walk(node: Any) -> list[str]:
    """The names of a node and those behind it."""
    left, names = [node], []
    while left:
        node = left.pop()
        names.append(node.name())
        left += [following for following, _ in node.next_functions if following is not None]
    return names


def agree(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def on_both(
    do: Callable[[nn.Module, torch.Tensor], Any], make: Callable[[], nn.Module] = Net
) -> None:
    eager, compiled = pair(make)
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    results = [do(model, x.clone().requires_grad_()) for model in (eager, compiled)]
    agree(*results)


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad for p in model.parameters()]


def test_all_gradients_and_a_second_backward_of_a_retained_graph() -> None:
    def do(model: nn.Module, x: torch.Tensor) -> Any:
        y, middle = model(x)
        loss = (y * y).sum() + middle.sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return [x.grad, *gradients(model)]

    on_both(do)


@pytest.mark.long
@pytest.mark.parametrize("which", range(2 * LAYERS))
def test_gradients_of_some_inputs_alone(which: int) -> None:
    def do(model: nn.Module, x: torch.Tensor) -> Any:
        return torch.autograd.grad(model(x)[0].sum(), [*model.parameters()][which])

    on_both(do)


def test_a_backward_that_stops_early_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    _, compiled = pair()
    alive: list[Any] = []

    def in_turn(*args: Any) -> Any:
        made = chain.in_turn(*args)
        alive.append(weakref.ref(made))
        return made

    monkeypatch.setattr(runtime, "in_turn", in_turn)
    y, _ = compiled(torch.randn(3, WIDTH))
    last = [*compiled.parameters()][-1]
    torch.autograd.grad(y.sum(), [last])
    gc.disable()
    try:
        assert len(alive) == 1 and alive[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("output", (0, 1))
def test_a_tangent_that_is_missing(output: int) -> None:
    def do(model: nn.Module, x: torch.Tensor) -> Any:
        model(x)[output].sum().backward()
        return [x.grad, *gradients(model)]

    eager, compiled = pair()
    x = torch.randn(3, WIDTH)
    for one, other in zip(
        do(eager, x.clone().requires_grad_()), do(compiled, x.clone().requires_grad_())
    ):
        assert (one is None) == (other is None)
        agree(one, other)


def test_gradients_with_create_graph_can_be_used_but_not_differentiated() -> None:
    eager, compiled = pair()
    x = torch.randn(3, WIDTH)
    found = []
    for model in (eager, compiled):
        loss = model(x)[0].square().sum()
        found.append(torch.autograd.grad(loss, [*model.parameters()], create_graph=True))
    agree(*found)
    with pytest.raises(RuntimeError, match="second derivatives of a compiled function"):
        found[1][0].sum().backward()


def test_batched_gradients() -> None:
    def do(model: nn.Module, x: torch.Tensor) -> Any:
        y = model(x)[0]
        tangents = torch.stack([torch.ones_like(y), torch.full_like(y, 2.0)])
        return torch.autograd.grad(y, [x, *model.parameters()], tangents, is_grads_batched=True)

    on_both(do)


def test_hooks_on_saved_tensors() -> None:
    def do(model: nn.Module, x: torch.Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
            loss = model(x)[0].square().sum()
        loss.backward()
        return [x.grad, *gradients(model)]

    on_both(do)


def test_an_optimizer_that_steps_as_soon_as_a_gradient_is_there() -> None:
    def do(model: nn.Module, x: torch.Tensor) -> Any:
        def step(parameter: torch.Tensor) -> None:
            with torch.no_grad():
                parameter -= 0.5 * parameter.grad
            parameter.grad = None

        hooks = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
        for _ in range(2):
            model(x)[0].square().sum().backward()
        [hook.remove() for hook in hooks]
        return [x.grad, *(p.detach() for p in model.parameters())]

    on_both(do)


def test_what_the_backward_still_needs_may_not_change_meanwhile() -> None:
    for model in pair():
        parameters = [*model.parameters()]

        def spoil(_: torch.Tensor, weight: torch.Tensor = parameters[0]) -> None:
            with torch.no_grad():
                weight.mul_(100)

        parameters[-1].register_hook(spoil)
        x = torch.randn(3, WIDTH, requires_grad=True)
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            model(x)[0].square().sum().backward()


def test_autograd_keeps_the_memory_of_gradients_that_are_handed_out() -> None:
    _, compiled = pair()
    seen: dict[int, int] = {}
    for number, p in enumerate(compiled.parameters()):
        p.register_hook(lambda g, number=number: seen.update({number: g.data_ptr()}))
    compiled(torch.randn(3, WIDTH))[0].sum().backward()
    assert seen == {number: p.grad.data_ptr() for number, p in enumerate(compiled.parameters())}


def test_an_error_in_the_middle_is_raised_and_the_next_backward_is_right() -> None:
    eager, compiled = pair()
    x = torch.randn(3, WIDTH)
    middle = [*compiled.parameters()][LAYERS]
    hook = middle.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compiled(x)[0].sum().backward()
    hook.remove()
    for model in (eager, compiled):
        model.zero_grad()
        model(x)[0].sum().backward()
    agree(gradients(compiled), gradients(eager))


def test_threads_run_backwards_of_one_graph() -> None:
    eager, compiled = pair()
    x = torch.randn(3, WIDTH)
    expected = torch.autograd.grad(eager(x)[0].sum(), [*eager.parameters()])
    loss, found = compiled(x)[0].sum(), list[Any]()

    def run() -> None:
        for _ in range(20):
            found.append(torch.autograd.grad(loss, [*compiled.parameters()], retain_graph=True))

    threads = [threading.Thread(target=run) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(found) == 60
    for one in found:
        agree(one, expected)


@pytest.mark.parametrize("reentrant", (True, False))
def test_under_activation_checkpointing(reentrant: bool) -> None:
    def do(model: nn.Module, x: torch.Tensor) -> Any:
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)[0].sum().backward()
        return [x.grad, *gradients(model)]

    on_both(do)


def test_under_autocast() -> None:
    def do(model: nn.Module, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x)[0].float().square().sum()
            loss.backward()
        return [g.dtype for g in gradients(model)]

    eager, compiled = pair()
    x = torch.randn(3, WIDTH)
    assert do(eager, x) == do(compiled, x)
    for one, other in zip(gradients(eager), gradients(compiled)):
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.1)


class Tied(Net):
    """Its first weight is used at both ends, and one gradient is the output's tangent itself."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.other = (nn.Parameter(torch.zeros(3, WIDTH)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, middle = super().forward(x)
        return y @ self.layers[0].weight + self.shift + self.other, middle


def test_a_parameter_used_in_several_places_and_tangents_that_are_gradients() -> None:
    def do(model: nn.Module, x: torch.Tensor) -> Any:
        y, _ = model(x)
        y.backward(torch.arange(y.numel(), dtype=y.dtype).view(y.shape))
        next(p for p in model.parameters() if p.shape[0] == 3).grad.add_(
            1
        )  # must not show in the other's
        return [x.grad, *gradients(model)]

    on_both(do, Tied)


def test_dynamic_sizes() -> None:
    eager, compiled = pair(dynamic=True)
    for rows in (2, 5, 1, 9):
        x = torch.randn(rows, WIDTH)
        for model in (eager, compiled):
            model.zero_grad()
            model(x)[0].square().sum().backward()
        agree(gradients(compiled), gradients(eager))


def test_a_graph_that_hands_out_gradients_while_it_runs_is_no_cuda_graph() -> None:
    told = io.StringIO()
    with mc.logs("cudagraphs", file=told):
        _, compiled = pair(mode="reduce-overhead")
        y = compiled(torch.randn(3, WIDTH))[0]
    y.sum().backward()
    assert "no CUDA graph: it hands out gradients while it runs" in told.getvalue()


def test_one_bucket_needs_no_chain() -> None:
    model, told = mc.compile(Net()), io.StringIO()
    with mc.logs("ddp", file=told):
        y, _ = DistributedDataParallel(model)(torch.randn(3, WIDTH))
    assert "gradients come out at its end" in told.getvalue()
    assert "Link" not in str(walk(y.grad_fn))


def test_parameters_that_are_not_reduced_fill_no_bucket() -> None:
    model = Net()
    ignored = [name for name, _ in model.named_parameters() if name != "layers.0.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    told = io.StringIO()
    with mc.logs("ddp", file=told):
        DistributedDataParallel(mc.compile(model), bucket_cap_mb=BUCKET)(torch.randn(3, WIDTH))
    assert "gradients come out at its end" in told.getvalue()
