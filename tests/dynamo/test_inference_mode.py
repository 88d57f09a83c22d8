"""Compiled functions under `torch.inference_mode()`: eager's values, inference tensors where eager's are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import minicompile as mc
from minicompile.debug.history import Explanation
from tests.dynamo.helpers import dispatcher, equal


def flags(result: Any) -> list[bool]:
    if isinstance(result, torch.Tensor):
        return [result.is_inference()]
    return [flag for item in result for flag in flags(item)] if isinstance(result, tuple) else []


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except (RuntimeError, TypeError) as error:
        return type(error)


def called(function: Callable[..., Any], make: Callable[[], tuple[Any, ...]]) -> Any:
    torch.manual_seed(0)
    given = make()
    return given, outcome(function, *given)


def assert_like_eager(
    function: Any, make: Callable[[], tuple[Any, ...]], calls: int = 3, **options: Any
) -> Explanation:
    """Calls a function plain and compiled, in the mode of this thread; compares results and arguments."""
    run = mc.compile(function, **{"backend": "eager", **options})
    for _ in range(calls):
        (plain, expected), (given, result) = called(function, make), called(run, make)
        assert equal(result, expected)
        assert flags(result) == flags(expected)
        assert all(map(equal, plain, given)) if all(map(torch.is_tensor, plain)) else True
        assert flags(given) == flags(plain)
    found = dispatcher(run)
    return found.explanation()


def model() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 2)
    return nn.Sequential(*layers).eval()


MODEL = model()
with torch.inference_mode():
    INFERENCE_MODEL = model()


def forward(a: torch.Tensor) -> torch.Tensor:
    return MODEL(a)


@torch.inference_mode()
def decorated(a: torch.Tensor) -> torch.Tensor:
    return MODEL(a) * 2


def with_block(a: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return MODEL(a) * 2


def calls_decorated(a: torch.Tensor) -> torch.Tensor:
    return decorated(a)


def with_inference_parameters(a: torch.Tensor) -> torch.Tensor:
    return INFERENCE_MODEL(a)


def normal() -> tuple[torch.Tensor]:
    with torch.inference_mode(False):
        return (torch.randn(3, 4),)


def inference() -> tuple[torch.Tensor]:
    with torch.inference_mode():
        return (torch.randn(3, 4),)


@pytest.mark.parametrize("make", [normal, inference])
@pytest.mark.parametrize("function", [forward, with_inference_parameters])
def test_a_call_in_inference_mode_is_one_graph(
    function: Any, make: Callable[[], tuple[Any, ...]]
) -> None:
    with torch.inference_mode():
        found = assert_like_eager(function, make)
    assert (found.graph_count, len(found.breaks), found.eager_calls) == (1, 0, 0)
    assert found.op_count >= 4


@pytest.mark.parametrize("make", [normal, inference])
@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("function", [decorated, with_block, calls_decorated])
def test_a_block_of_inference_mode_is_a_graph_of_its_own(
    function: Any, outside: bool, make: Callable[[], tuple[Any, ...]]
) -> None:
    with torch.inference_mode(outside):
        found = assert_like_eager(function, make)
    assert [n for n in (c.graph.op_count for c in found.captures) if n] == [found.op_count]
    assert found.op_count >= 4
    assert {stop.id for stop in found.breaks} == {"inference-mode"}


def test_modes_and_inference_tensors_each_have_a_graph_of_their_own() -> None:
    run = mc.compile(lambda a: (a * 2, a.view(-1), a), backend="aot_eager")
    (a,), (b,) = normal(), inference()
    for _ in range(2):
        for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
            for given in (a, b):
                with mode():
                    result, expected = run(given), (given * 2, given.view(-1), given)
                assert equal(result, expected)
                assert flags(result) == flags(expected)
    found = dispatcher(run).explanation()
    assert found.graph_count == 4
    whats = [(stop.id, stop.reason) for stop in found.breaks]
    assert whats == [("inference-mode", "an inference tensor is used outside of inference mode")]


# -- what differs between inference tensors and others


def views(a: torch.Tensor) -> Any:
    return a.view(-1), a.t(), a[0], a.detach(), a.data, a.expand(3, 4), a.contiguous(), a


def fresh_and_views(a: torch.Tensor) -> Any:
    b = a + 1
    return b, b[0], b.view(-1), b.detach()


def writes(a: torch.Tensor) -> Any:
    a.mul_(2)
    a[0] = 1
    return a.sum(), a[1]


def asks(a: torch.Tensor) -> Any:
    b = a * 2
    known = (
        torch.is_inference_mode_enabled(), torch.is_grad_enabled(), a.is_inference(), b.is_inference(),
        torch.is_inference(a[0]), b.requires_grad,
    )  # fmt: skip
    return b + sum(known), known


def nothing_but_views_of_a_block(a: torch.Tensor) -> Any:
    with torch.inference_mode():
        return a.view(-1), a[1:]


def version_of_result(a: torch.Tensor) -> Any:
    return (a * 2)._version


def false_block(a: torch.Tensor) -> Any:
    with torch.inference_mode(False):
        return a * 2, torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def before_inside_after(a: torch.Tensor) -> Any:
    before = a + 1
    with torch.inference_mode():
        inside = before * 2
    return before, inside, inside * 3, inside.view(-1)


def breaks_inside(a: torch.Tensor) -> Any:
    with torch.inference_mode():
        b = a * 2
        print(end="")
        b = b + 1
    return b, b + 1


def enters_by_hand(a: torch.Tensor) -> Any:
    block = torch.inference_mode()
    block.__enter__()
    b = a * 2
    block.__exit__(None, None, None)
    return b, torch.is_inference_mode_enabled()


def requires_grad_inside(a: torch.Tensor) -> Any:
    with torch.inference_mode():
        return (a * 2).requires_grad_()


PROGRAMS: list[Any] = [
    views, fresh_and_views, writes, asks, nothing_but_views_of_a_block, version_of_result, false_block,
    before_inside_after, breaks_inside, enters_by_hand, requires_grad_inside, forward, decorated, with_block,
    with_inference_parameters,
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("make", [normal, inference])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_results_and_their_flags_are_eagers_in_every_mode(
    function: Any, mode: Any, make: Callable[[], tuple[Any, ...]]
) -> None:
    with mode():
        assert_like_eager(function, make, backend="aot_eager")


def test_autograd_gets_no_inference_tensor() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    (b,) = inference()

    def function(a: torch.Tensor) -> torch.Tensor:
        scaled = b * 2  # an ordinary tensor
        return (a @ weight + (scaled @ weight)).sin()

    run, (a,) = mc.compile(function, backend="aot_eager"), normal()
    expected = function(a).sum()
    expected.backward()
    gradient, weight.grad = weight.grad, None
    run(a).sum().backward()
    torch.testing.assert_close(weight.grad, gradient)


def test_a_view_made_in_inference_mode_may_be_written_to_where_eagers_may() -> None:
    def view(a: torch.Tensor) -> torch.Tensor:
        return a.view(-1)

    run = mc.compile(view, backend="aot_eager", fullgraph=True)
    for trained in (False, True):
        a, b = (torch.ones(3, requires_grad=trained) * 1 for _ in range(2))
        with torch.inference_mode():
            plain, made = view(a), run(b)
        expected = outcome(plain.add_, 1)
        assert equal(outcome(made.add_, 1), expected)
        assert equal(a.detach(), b.detach())


# -- caches and models


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = (nn.Linear(16, 16) for _ in range(3))
        self.register_buffer("cache", torch.zeros(1, 8, 16))

    def forward(self, a: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        self.cache.index_copy_(1, at, self.key(a))
        mask = torch.arange(8) <= at
        scores = (self.query(a) @ self.cache.transpose(1, 2)).masked_fill(~mask, -torch.inf)
        return self.out(scores.softmax(-1) @ self.cache)


@pytest.mark.parametrize("made_under_the_mode", [True, False])
def test_a_decode_loop_with_a_cache_is_one_graph(made_under_the_mode: bool) -> None:
    with torch.inference_mode(made_under_the_mode):
        torch.manual_seed(0)
        plain = Decoder().eval()
        torch.manual_seed(0)
        model = Decoder().eval()
    run = mc.compile(model)
    with torch.inference_mode():
        a = b = torch.randn(1, 1, 16)
        for step in range(6):
            at = torch.tensor([step])
            a, b = plain(a, at), run(b, at)
            torch.testing.assert_close(a, b)
            torch.testing.assert_close(plain.cache, model.cache)
            assert b.is_inference()
    assert model.cache.is_inference() == made_under_the_mode
    found = dispatcher(run).explanation()
    assert (found.graph_count, len(found.breaks), found.eager_calls) == (1, 0, 0)
