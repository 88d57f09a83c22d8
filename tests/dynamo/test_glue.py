"""Library functions that training programs call between their operations: in the graph, or one break at the
user's call, never inside; and steps whose logs grow don't recompile."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import distributions as D
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import record_function

from tests.dynamo.helpers import equal, explained, lenient
from tests.torch_versions import torch_has

x = torch.linspace(0.1, 1, 6).reshape(2, 3)
Program = Callable[[torch.Tensor], Any]


def graphs_and_breaks(function: Any) -> tuple[int, int]:
    """How many graphs with operations there are, and breaks."""
    found = explained(function)
    return sum(c.graph.op_count > 0 for c in found.captures), len(found.breaks)


class Trained(nn.Module):
    """Clips the gradients that it is called with."""

    def __init__(self, clip: Callable[..., Any]) -> None:
        super().__init__()
        self.clip, self.weight = clip, nn.Parameter(torch.ones(2, 3))
        self.weight.grad = torch.full((2, 3), 9.0)

    def forward(self, a: torch.Tensor) -> Any:
        a = a * 2
        self.clip(self.parameters(), 0.5)
        return a + 1


def drawn(draw: Callable[[], float]) -> Program:
    return lambda a: (a * 2 + draw()).sin()


def shuffled(a: torch.Tensor) -> Any:
    order = [0, 1, 2]
    random.shuffle(order)
    return a[:, order] * 2


@record_function("decorated")
def recorded(a: torch.Tensor) -> Any:
    with record_function("inside"):
        return a.sin()


def categorical(a: torch.Tensor) -> Any:
    chosen = D.Categorical(logits=a)
    action = chosen.sample()
    return action, chosen.log_prob(action), chosen.entropy()


def normal(a: torch.Tensor) -> Any:
    found = D.Independent(D.Normal(a, a.exp()), 1)
    sample = found.rsample()
    return sample, found.log_prob(sample), found.entropy()


def squashed(a: torch.Tensor) -> Any:
    found = D.TransformedDistribution(D.Normal(a, a.exp()), [D.TanhTransform(cache_size=1)])
    sample = found.rsample()
    return sample, found.log_prob(sample)


def one_kernel(a: torch.Tensor) -> Any:
    q = a.reshape(1, 1, 2, 3)
    with sdpa_kernel(SDPBackend.MATH):
        inside = torch.backends.cuda.flash_sdp_enabled()
        q = F.scaled_dot_product_attention(q, q, q)
    return q, inside, torch.backends.cuda.flash_sdp_enabled()


def double(a: torch.Tensor) -> Any:
    torch.set_default_dtype(torch.float64)
    a = torch.ones(3) + a
    torch.set_default_dtype(torch.float32)
    return a * 2


def detached(a: torch.Tensor) -> Any:
    b = a * 2
    c = b * a
    return b.detach_() is b, b * a, c


def mathematics(a: torch.Tensor) -> Any:
    array = a.detach().numpy()
    return a + float((array * 2).mean())


CASES: dict[str, tuple[Program, int, int]] = {
    "random": (drawn(random.random), 2, 1),
    "sample": (drawn(lambda: random.sample([1.5, 2.5], 1)[0]), 2, 1),
    "shuffle": (shuffled, 1, 1),
    "record_function": (lambda a: recorded(a * 2) + 1, 1, 0),
    "categorical": (categorical, 1, 0),
    "normal": (normal, 1, 0),
    "transformed": (squashed, 1, not torch_has("a transform holds its inverse")),
    "sdpa_kernel": (one_kernel, 2, 2),
    "set_default_dtype": (double, 2, 2),
    "text": (lambda a: (f"{(a * 2).sum():.3f}", a + 1), 2, 1),
    "detach_": (detached, 2, 1),
    "numpy": (mathematics, 2, 3),
}
"""Each program, its graphs and its breaks."""


@pytest.mark.parametrize("name", CASES)
def test_library_functions_are_in_the_graph_or_break_it_once(name: str) -> None:
    program, graphs, breaks = CASES[name]
    function, results = lenient(program), []
    for run in (program, function):
        random.seed(1)
        torch.manual_seed(1)
        a = x.clone().requires_grad_()
        results.append([run(a), torch.rand(2), random.random()])
    assert equal(*results)
    assert graphs_and_breaks(function) == (graphs, breaks)


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_clipping_gradients_makes_the_generator_and_reads_gradients_between_graphs(
    clip: Callable[..., Any],
) -> None:
    plain, module = Trained(clip), Trained(clip)
    function = lenient(module)
    for _ in range(3):
        assert equal(function(x), plain(x))
        assert equal(module.weight.grad, plain.weight.grad)
    assert graphs_and_breaks(function) == (2, 2)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_check_that_fails_raises_as_in_eager(backend: str) -> None:
    def program(a: torch.Tensor, log: list[Any]) -> Any:
        noise = torch.rand_like(a)
        log.append(noise)
        if not (a > 0).all():
            raise ValueError(f"negative: {a}")
        return D.Normal(a, a).log_prob(noise)

    function = lenient(program, backend=backend)
    for sign in (1, -9, 1):
        results = []
        for run in (program, function):
            torch.manual_seed(3)
            a, log = x * sign, list[Any]()
            try:
                result = run(a, log)
            except ValueError as error:
                result = str(error)
            results.append([result, a, log, torch.rand(2)])
        torch.testing.assert_close(*results) if sign > 0 else None
        assert sign > 0 or equal(*results)
    assert explained(function).graph_count == 1


def test_a_log_that_grows_makes_no_new_version() -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.saved = nn.Linear(3, 2), list[Any]()

        def forward(self, a: torch.Tensor) -> Any:
            chosen = D.Categorical(self.linear(a).softmax(-1))
            action = chosen.sample()
            self.saved.append(chosen.log_prob(action))
            self.saved += [action, self.saved]
            return action[0].item()

    policy = Policy()
    function = lenient(policy)
    found = []
    for run in (policy, function):
        torch.manual_seed(2)
        del policy.saved[:]
        actions = [run(x) for _ in range(12)]
        found.append((actions, policy.saved[::3], policy.saved[1::3]))
        assert all(log is policy.saved for log in policy.saved[2::3])
    assert equal(*found)
    assert graphs_and_breaks(function) == (1, 1)


def all_positive(a: torch.Tensor) -> bool:
    return bool((a > 0).all())


def some_negative(a: torch.Tensor) -> bool:
    return not all_positive(a)


def either(a: torch.Tensor) -> torch.Tensor:
    if some_negative(a) or some_negative(2 * a):
        raise ValueError("negative")
    return a.sqrt()


def caught(a: torch.Tensor) -> torch.Tensor:
    try:
        if not all_positive(a):
            raise ValueError("negative")
    except ValueError:
        return a - 5
    return a.sqrt()


@pytest.mark.parametrize("program", [either, caught])
def test_a_check_by_a_function_raises_as_in_eager(program: Program) -> None:
    function = lenient(program)
    assert equal(function(x), program(x))
    for sign in (-1, 1):
        results = []
        for run in (program, function):
            try:
                results.append(run(x * sign))
            except ValueError as error:
                results.append(str(error))
        assert equal(*results)
