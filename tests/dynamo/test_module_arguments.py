"""Modules as arguments: those alike share a graph that takes their tensors, and nothing keeps them alive."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import minicompile as mc
from tests.dynamo.helpers import compiled, explained, lenient

x = torch.randn(3, 4)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.scale = 0, 2
        self.register_buffer("total", torch.zeros(4))

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.total += 1
        return a * self.scale + self.total


class Pair(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first if tied else nn.Linear(4, 4)

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(a))


class Marked(nn.Linear):
    mark = 0


def plain_call(m: Any, a: torch.Tensor) -> Any:
    return m(a)


def marks(m: Any, a: torch.Tensor) -> Any:
    m.mark += 1
    return m(a) + m.mark


def compares(m: Any, a: torch.Tensor) -> Any:
    return m[0](a), m[0] is m[1], m[0] == m[1], m[0] in [m[1]], len({m[0], m[1]})


def two_writes(m: Any, a: torch.Tensor) -> Any:
    m[0].mark += 1
    m[1].mark += 1
    return a + m[0].mark


def breaks(m: Any, a: torch.Tensor) -> Any:
    b = m(a)
    print(end="")
    return m(b)


def linear(i: int) -> nn.Module:
    return nn.Linear(4, 4)


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[int], Any], int]] = {
    "linear": (plain_call, linear, 1),
    "counter": (lambda m, a: (m(a), m.calls), lambda i: Counter(), 2),
    "batch norm": (plain_call, lambda i: nn.BatchNorm1d(4), 1),
    "training or not": (plain_call, lambda i: nn.Dropout().train(i % 2 == 0), 2),
    "tied or not": (plain_call, lambda i: Pair(i % 2 == 0), 2),
    "sizes": (plain_call, lambda i: nn.Linear(4, 4 + i % 2), 2),
    "frozen or not": (plain_call, lambda i: nn.Linear(4, 4).requires_grad_(i % 2 == 0), 2),
    "list": (lambda m, a: m[0](a) + m[1](a), lambda i: [nn.Linear(4, 4) for _ in range(2)], 1),
    "all parameters": (
        lambda m, a: a + sum(p.sum() for p in m.parameters()),
        lambda i: nn.Sequential(linear(i), linear(i)), 1,
    ),
    "written": (marks, lambda i: Marked(4, 4), 2),
    "given back": (lambda m, a: (m.weight, m(a)), linear, 1),
    "one module or two": (compares, lambda i: [m := nn.Linear(4, 4), m if i % 2 else nn.Linear(4, 4)], 3),
    "writes to one or two": (
        two_writes, lambda i: [m := Marked(4, 4), m if i % 2 else Marked(4, 4)], 4
    ),
    "large": (plain_call, lambda i: nn.Sequential(*[nn.Linear(4, 4) for _ in range(30)]), 2),
    "cut": (breaks, linear, 2),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_modules_alike_share_graphs_and_give_eagers_results(name: str) -> None:
    function, make, most = PROGRAMS[name]
    run = mc.compile(function, backend="aot_eager")
    for i in range(12):
        torch.manual_seed(i)
        plain = make(i)
        given = copy.deepcopy(plain)
        for _ in range(2):
            torch.manual_seed(0)
            expected = function(plain, x)
            torch.manual_seed(0)
            torch.testing.assert_close(run(given, x), expected)
        modules = [(plain, given)] if isinstance(plain, nn.Module) else []
        for left, right in modules:
            torch.testing.assert_close(right.state_dict(), left.state_dict())
            assert getattr(left, "mark", 0) == getattr(right, "mark", 0)
    found = explained(run)
    assert found.eager_calls == 0
    assert found.graph_count <= most


def test_a_hook_or_a_forward_of_its_own_gives_a_module_a_graph_of_its_own() -> None:
    run = lenient(plain_call)
    hooked, changed = nn.Linear(4, 4), nn.Linear(4, 4)
    hooked.register_forward_hook(lambda module, args, result: result + 1)
    changed.forward = lambda a: a * 2  # type: ignore[method-assign]
    for module in (nn.Linear(4, 4), hooked, changed, nn.Linear(4, 4)):
        torch.testing.assert_close(run(module, x), module(x))


def test_gradients_go_to_the_module_that_was_given() -> None:
    run = mc.compile(plain_call, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        module = nn.Linear(4, 4)
        run(module, x).sum().backward()
        torch.testing.assert_close(module.weight.grad, x.sum(0).expand(4, 4))
    assert explained(run).graph_count == 1


def test_layers_that_share_a_compiled_forward_share_its_graph() -> None:
    class Layer(nn.Linear):
        @mc.compile(backend="eager", fullgraph=True)
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return super().forward(a).relu()

    layers = [Layer(4, 4) for _ in range(12)]
    for layer in layers:
        torch.testing.assert_close(layer(x), torch.relu(x @ layer.weight.t() + layer.bias))
    assert explained(Layer.forward).graph_count == 1


# -- memory


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_of_a_thousand_modules_none_is_kept_alive() -> None:
    run = compiled(plain_call)
    run(nn.Linear(4, 4), x)
    kept: list[weakref.ref[nn.Module]] = []
    with no_collector():
        for _ in range(1000):
            module = nn.Linear(4, 4)
            run(module, x)
            kept.append(weakref.ref(module))
            del module
        assert not any(ref() is not None for ref in kept)
    assert explained(run).graph_count == 1


def breaks_off(module: nn.Module) -> Callable[..., Any]:
    def function(a: torch.Tensor) -> torch.Tensor:
        b = module(a)
        print(end="")
        return b * 2

    return function


def raises(module: nn.Module) -> Callable[..., Any]:
    def function(a: torch.Tensor) -> torch.Tensor:
        module(a)
        raise ValueError

    return function


def torch_raises(module: nn.Module) -> Callable[..., Any]:
    return lambda a: module(a) @ torch.ones(7, 7)


def calls_in_eager(module: nn.Module) -> Callable[..., Any]:
    def below(a: torch.Tensor) -> torch.Tensor:
        return module(a)

    def function(a: torch.Tensor) -> torch.Tensor:
        try:
            raise KeyError
        except KeyError:
            print(end="")  # no place to cut: the frame runs in eager
        return below(a)

    return function


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "make",
    [lambda m: m, lambda m: lambda a: m(a), breaks_off, raises, torch_raises, calls_in_eager],
    ids=["module", "function", "break", "raise", "torch raises", "nested"],
)
def test_dropping_what_was_compiled_frees_its_modules_without_the_collector(
    make: Callable[[nn.Module], Any], backend: str
) -> None:
    mc.compile(lambda a: a + 1, backend=backend)(x)  # torch's first capture leaves cycles
    with no_collector():
        module = nn.Linear(4, 4)
        run = mc.compile(make(module), backend=backend)
        for _ in range(2):
            with contextlib.suppress(ValueError, RuntimeError, TypeError):
                run(x)
        refs = weakref.ref(module), weakref.ref(module.weight)
        del run, module
        assert [ref() for ref in refs] == [None, None]
