"""Nested frames: what eager code calls is captured too, and nothing else is different.

- Functions below a frame that runs in eager, and those called by the instruction at a break, are captured.
- Libraries, generators and what records nothing are left alone; what can't be captured runs as it is.
- Exceptions, tracebacks, recursion, closures, transforms and training are as without.
"""

from __future__ import annotations

import contextvars
import functools
import gc
import traceback
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import minicompile as mc
from minicompile.dynamo import hook
from minicompile.plugins.nested_frames.frames import MAX_CLOSURES
from tests.dynamo.helpers import (
    dispatcher,
    equal,
    explained,
    frames_of,
    in_eager,
    lenient,
    outcome,
)
from tests.dynamo.program_table import names
from tests.dynamo.program_table import run as run_program

x = torch.randn(3, 4)
needs_hook = pytest.mark.skipif(hook.load_hook() is None, reason="no C compiler")


def nested(run: Any) -> dict[str, tuple[int, int, int]]:
    """Of each nested function: graph operations, compiled calls, eager calls."""
    frames, found = frames_of(run), dict[str, tuple[int, int, int]]()
    for e in (made.explanation() for made in frames.dispatchers):
        name = e.name.split("<locals>.")[-1]
        counts = e.op_count, e.compiled_calls, e.eager_calls
        found[name] = tuple(map(sum, zip(found.get(name, (0, 0, 0)), counts)))  # type: ignore[assignment]
    return found


def seen(run: Any) -> set[str]:
    """Names of the functions that the hook asked about and that were not left alone at sight."""
    frames = frames_of(run)
    return {found.code.co_name for found in frames.codes.values()}


def helper(a: torch.Tensor, k: float = 2.0, *rest: Any, sign: int = 1, **named: Any) -> Any:
    return a.sin() * k * sign + sum(rest) + named.get("more", 0)


def eager_loop(a: torch.Tensor) -> Any:
    a.frac()
    return helper(a) + helper(a, 3.0, 1, 2, sign=-1, more=5)


@needs_hook
def test_functions_called_by_an_eager_frame_are_captured() -> None:
    run = in_eager(eager_loop)
    for _ in range(3):
        assert equal(run(x), eager_loop(x))
    assert nested(run) == {"helper": (10, 6, 0)}
    found = explained(run)
    assert (found.eager_calls, found.graph_count, found.op_count) == (3, 2, 10)
    assert "sin" in str(found)


@needs_hook
def test_functions_called_by_the_instruction_at_a_break_are_captured() -> None:
    def prints(a: torch.Tensor) -> torch.Tensor:
        b = helper(a)
        print(end="")
        return b * 3

    def function(a: torch.Tensor) -> torch.Tensor:
        return contextvars.copy_context().run(prints, a + 1) * 2

    run = lenient(function)
    for _ in range(3):
        assert equal(run(x), function(x))
    assert "prints" in nested(run) and "helper" not in nested(run)  # inlined into its graph


@needs_hook
def test_switched_off_they_run_in_eager() -> None:
    run = in_eager(eager_loop, plugins="none")
    assert equal(run(x), eager_loop(x))
    assert dispatcher(run).watchers == [] and explained(run).graph_count == 0


def test_without_a_compiler_the_wrapper_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "load_hook", lambda: None)
    run = in_eager(eager_loop)
    for _ in range(2):
        assert equal(run(x), eager_loop(x))
    assert explained(run).eager_calls == 2 and explained(run).graph_count == 0
    assert nested(run) == {}


@needs_hook
def test_the_hook_is_off_before_and_after() -> None:
    run = in_eager(eager_loop)
    run(x)
    before = nested(run)
    helper(x)
    with pytest.raises(AttributeError):
        run("text")
    helper(x)
    eager_loop(x)
    after = nested(run)
    assert before["helper"][1] == 2 and after["helper"][1] == 2


def chatty(values: list[int]) -> list[int]:
    return [value + 1 for value in values]


@needs_hook
def test_what_records_nothing_is_left_alone() -> None:
    def function(a: torch.Tensor) -> Any:
        a.frac()
        total = 0
        for i in range(3):
            total += sum(chatty([i, 1]))
        return a * total

    run = in_eager(function)
    assert equal(run(x), function(x)) and equal(run(x), function(x))
    frames = frames_of(run)
    entries = {code.code.co_name: code.entry for code in frames.codes.values()}
    assert entries == {"chatty": hook.LEAVE} and nested(run) == {}


@needs_hook
def test_torch_the_standard_library_and_generators_are_left_alone() -> None:
    def rows(a: torch.Tensor) -> Any:
        yield from a

    def function(a: torch.Tensor) -> Any:
        a.frac()
        found = functools.reduce(lambda b, c: b + c.sin(), rows(a))
        return nn.functional.gelu(nn.Linear(4, 4, bias=False)(found * 0))

    run = in_eager(function)
    assert equal(run(x), function(x))
    assert seen(run) <= {"<lambda>"}


@needs_hook
def test_refused_functions_run_as_they_are_and_say_why() -> None:
    def refused(a: torch.Tensor) -> Any:
        a.frac()
        return helper(a)

    def function(a: torch.Tensor) -> Any:
        a.frac()
        return refused(a)

    run = in_eager(function)
    for _ in range(3):
        assert equal(run(x), function(x))
    assert nested(run)["refused"] == (0, 0, 1)  # not asked again
    assert nested(run)["helper"] == (5, 3, 0)
    reasons = [found.reason for found in explained(run).breaks]
    assert [reason.split("<locals>.")[-1] for reason in reasons] == [
        "function in eager",
        "refused in eager",
    ]


@needs_hook
def test_a_function_that_calls_itself() -> None:
    def countdown(a: torch.Tensor, n: int) -> torch.Tensor:
        print(end="")
        return a if n == 0 else countdown(a + n, n - 1).sin()

    run = lenient(countdown, options={"recompile_limit": 64})
    for n in (0, 3, 20):
        assert equal(run(x, n), countdown(x, n))
    plain: Any = in_eager(eager_recursion)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in (0, 3, 150):
            assert equal(plain(x, n), eager_recursion(x, n))


def eager_recursion(a: torch.Tensor, n: int) -> torch.Tensor:
    a.frac()
    return a if n == 0 else eager_recursion(a + 1, n - 1)


def endless(a: torch.Tensor) -> torch.Tensor:
    print(end="")
    return endless(a + 1)


@needs_hook
@pytest.mark.parametrize("function", [endless, lambda a: [print(end=""), endless(a)]])
def test_endless_recursion_ends_in_the_same_error(function: Any) -> None:
    run = lenient(function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            assert outcome(run, x)[1][0] is RecursionError


def fails(a: torch.Tensor, k: int) -> torch.Tensor:
    b = a * 2
    if k:
        print(end="")
        raise ValueError(f"k is {k}")
    return b @ torch.ones(7, 7)


def calls_fails(a: torch.Tensor, k: int) -> Any:
    a.frac()
    return fails(a, k)


@needs_hook
@pytest.mark.parametrize("k", [0, 1])
def test_exceptions_and_their_tracebacks(k: int) -> None:
    def shown(function: Callable[..., Any]) -> dict[str, int | None]:
        """The last line of each of the functions; after a graph break one has several frames."""
        with pytest.raises((ValueError, RuntimeError)) as caught:
            function(x, k)
        frames = traceback.extract_tb(caught.value.__traceback__)
        return {f.name: f.lineno for f in frames if f.filename == __file__ and f.name != "shown"}

    run = in_eager(calls_fails)
    for _ in range(3):
        assert shown(run) == shown(calls_fails)
        assert outcome(run, x, k) == outcome(calls_fails, x, k)


@needs_hook
def test_closures_of_one_code_are_told_apart() -> None:
    def scaled(k: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda a: a * k

    permanent = [scaled(float(k)) for k in range(3)]

    def function(a: torch.Tensor, fresh: int) -> Any:
        a.frac()
        total = [f(a) for f in permanent]
        for k in range(fresh):
            total.append(scaled(k + 0.5)(a))
        return total

    run = in_eager(function)
    for _ in range(3):
        assert equal(run(x, 0), function(x, 0))
        assert equal(run(x, 20), function(x, 20))
    assert len(frames_of(run).dispatchers) <= MAX_CLOSURES


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return self.linear(a).relu()


class Chain(nn.Module):
    def __init__(self, keep: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(10))
        self.keep = keep

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        a.frac()
        for block in self.blocks:
            a = checkpoint(block, a, use_reentrant=False) if self.keep else block(a)
        return a


@needs_hook
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_modules_below_an_eager_frame_train(backend: str) -> None:
    ours, theirs = Chain(), Chain()
    theirs.load_state_dict(ours.state_dict())
    run = in_eager(ours, backend=backend)
    for _ in range(2):
        found, wanted = run(x), theirs(x)
        torch.testing.assert_close(found, wanted)
        found.sum().backward()
        wanted.sum().backward()
    for mine, other in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(mine.grad, other.grad)
    assert nested(run) == {"Chain.forward": (0, 0, 1), "Block.forward": (20, 20, 0)}


@needs_hook
def test_what_is_recomputed_runs_both_times_as_it_is() -> None:
    ours, theirs = Chain(keep=True), Chain(keep=True)
    theirs.load_state_dict(ours.state_dict())
    run = in_eager(ours, backend="aot_eager")
    for _ in range(2):
        run(x).sum().backward()
        theirs(x).sum().backward()
    for mine, other in zip(ours.parameters(), theirs.parameters()):
        assert equal(mine.grad, other.grad)
    assert set(nested(run)) == {"Chain.forward"}


@needs_hook
def test_transforms_see_their_functions_as_they_are() -> None:
    def square(a: torch.Tensor) -> torch.Tensor:
        return (a * a).sum()

    def function(a: torch.Tensor) -> Any:
        a.frac()
        traced = torch.fx.symbolic_trace(square)
        return torch.func.vmap(torch.func.grad(square))(a), str(traced.graph), square(a)

    run = in_eager(function, backend="aot_eager")
    for _ in range(2):
        assert equal(run(x), function(x))


def below_eager(function: Any) -> Any:
    """The function, called by a frame that can't be captured."""

    def outer(*args: Any, **kwargs: Any) -> Any:
        x.frac()
        return function(*args, **kwargs)

    return outer


@pytest.mark.long
@needs_hook
@pytest.mark.parametrize(("table", "name"), names()[::4], ids=[name for _, name in names()[::4]])
def test_programs_below_an_eager_frame(table: str, name: str) -> None:
    theirs, _ = run_program(table, name, below_eager)
    ours, _ = run_program(table, name, lambda function: in_eager(below_eager(function)))
    assert ours == theirs


@needs_hook
def test_reset_forgets_nested_frames_too() -> None:
    run = in_eager(eager_loop)
    run(x)
    assert nested(run)
    mc.reset()
    assert nested(run) == {}
    assert equal(run(x), eager_loop(x)) and nested(run)["helper"][1] == 2


@needs_hook
def test_nothing_is_kept_alive() -> None:
    def make() -> Any:
        def inner(a: torch.Tensor) -> torch.Tensor:
            b = a * 2
            print(end="")
            return b + 1

        def function(a: torch.Tensor) -> Any:
            a.frac()
            return [inner(a) for _ in (1, 2)]

        return in_eager(function)

    run = make()
    for _ in range(2):
        run(x)
    alive = [weakref.ref(d) for d in (dispatcher(run), *frames_of(run).dispatchers)]  # type: ignore[union-attr]
    assert len(alive) >= 2
    del run
    gc.collect()
    assert [reference() for reference in alive] == [None] * len(alive)


@needs_hook
def test_a_compiled_function_below_an_eager_frame_keeps_its_own_backend() -> None:
    used: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        used.append("own")
        return gm.forward

    own = mc.compile(helper, backend=backend)

    def function(a: torch.Tensor) -> Any:
        a.frac()
        return own(a)

    run = in_eager(function)
    assert equal(run(x), function(x)) and used == ["own"]
    assert nested(run) == {}
