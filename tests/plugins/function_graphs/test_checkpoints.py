"""Functions under torch.utils.checkpoint.

- They are part of the graph, with eager's results, gradients and random numbers.
- The backward keeps what the function was given, not what it computes.
- A function that changes something outside, and one that torch refuses, runs in eager, with the reason.
- Without the plug-in the graph ends at the call.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import minicompile as mc
from tests.comparing import assert_as_eager
from tests.dynamo.helpers import compiled, equal, explained, lenient, outcome
from tests.plugins.function_graphs.test_function_graphs import WEIGHT, X, Y, both, close


def twice(t: torch.Tensor, b: torch.Tensor, factor: int = 1) -> Any:
    """Random; with constants and containers in its result."""
    return {"all": [functional.dropout((t * WEIGHT).sin(), 0.5) * b * factor, t]}, factor


def checkpointed(a: torch.Tensor, b: torch.Tensor) -> Any:
    run = functools.partial(checkpoint, use_reentrant=False, determinism_check="none")
    found, factor = run(twice, a * 2, b, factor=3)
    return found["all"][0] * factor, found["all"][1], run(torch.sin, a)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_checkpoint_is_part_of_the_graph(backend: str) -> None:
    run = compiled(checkpointed, backend=backend)
    for seed in (1, 2):
        torch.manual_seed(seed)
        want = both(X, Y, checkpointed)
        torch.manual_seed(seed)
        assert close(both(X, Y, run), want, backend)
    (capture,) = explained(run).captures
    assert [graph.name for graph in capture.subgraphs] == ["checkpointed"] * 2
    with torch.no_grad():
        assert close(run(X, Y)[1], X * 2, backend)


def test_checkpoint_keeps_what_its_function_was_given() -> None:
    """Backward keeps the input alone, none of the values that the function computes from it.

    The capture's fake tensors are hidden from hooks.
    """
    kept: list[Any] = []

    def block(t: torch.Tensor) -> torch.Tensor:
        return t.sin().cos().exp()

    a = X.clone().requires_grad_()
    run = compiled(lambda t: checkpoint(block, t, use_reentrant=False) * 2)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        block(a)
        assert len(kept) == 3
        run(a)
    assert equal([t for t in kept[3:] if t.numel()], [a])  # torch 2.11 also saves an empty one


class Counted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.counted, a, use_reentrant=False)

    def counted(self, a: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return a.sin()


def test_checkpoint_that_changes_something_outside_runs_in_eager() -> None:
    results = []
    for wrap in (lambda model: model, lenient):
        model = Counted()
        call = wrap(model)
        results.append((both(X, Y, lambda a, b: call(a) + b), model.calls))  # noqa: B023
    assert equal(results[0], results[1]) and results[0][1] == 2


def test_checkpoint_that_changes_a_buffer_runs_in_eager() -> None:
    """In eager the running mean moves twice: forward, and again when backward runs the function again."""
    results = []
    for wrap in (lambda function: function, lenient):
        norm = torch.nn.BatchNorm1d(4)

        def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return checkpoint(norm, a, use_reentrant=False) + b  # noqa: B023

        run = wrap(program)
        results.append((both(X, Y, run), dict(norm.named_buffers())))
    assert equal(*results) and results[0][1]["num_batches_tracked"] == 2
    reason = explained(run).breaks[0]
    assert "in place" in reason.reason and "checkpoint(norm" in str(reason.user_line)


@pytest.mark.parametrize("options", [{"use_reentrant": True}, {"use_reentrant": False, "x": 1}])
def test_checkpoint_that_is_refused(options: dict[str, Any]) -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda t: t.sin(), a * 2, **options) + b

    run = lenient(program)
    assert equal(outcome(both, X, Y, run)[0], outcome(both, X, Y, program)[0])
    assert explained(run).breaks


def test_without_the_plugin_the_graph_ends_at_the_call() -> None:
    def program(a: torch.Tensor) -> torch.Tensor:
        return checkpoint(torch.sin, a * 2, use_reentrant=False) + 1

    without = mc.compile(program, backend="aot_eager", options={"plugins": "none"})
    assert_as_eager(without, program, X.clone().requires_grad_())
    assert explained(without).breaks
