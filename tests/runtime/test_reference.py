"""The reference interpreter: handlers of one's own, and every named pattern and the lesson model as eager."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import minicompile
from minicompile import pipeline
from minicompile.aot.runtime import make_callable
from minicompile.api import backends
from minicompile.bench.patterns import PATTERNS, Subject
from minicompile.debug import reference
from minicompile.debug.reference import run_reference
from minicompile.lowering.lower import lower
from minicompile.ops.graph import Graph
from minicompile.ops.table import POINTWISE
from minicompile.options import Options


@pytest.fixture
def loops_run() -> Iterator[list[str]]:
    """A backend "reference" while a test runs: lowered graphs are interpreted. Lists the graphs run."""
    ran: list[str] = []

    def interpreter(graph: Graph, options: Options) -> Any:
        loops = lower(graph, options)

        def run(inputs: list[Any]) -> list[Any]:
            given = list(inputs)
            inputs.clear()
            ran.append(loops.name)
            return run_reference(loops, given)

        return run

    def compile_capture(capture: Any, options: Options) -> Any:
        aot = pipeline.differentiate(capture, options)
        backward = interpreter(aot.backward, options) if aot.backward is not None else None
        return make_callable(aot, interpreter(aot.forward, options), backward, capture.name)

    with backends.scoped():
        backends("reference")(lambda options: lambda capture: compile_capture(capture, options))
        yield ran
    minicompile.reset()


def test_a_handler_of_ones_own_counts_what_happens():
    """The example in the module's docstring, as it stands there."""
    x, y = torch.randn(8, 4), torch.randn(4)
    trace = minicompile.trace(lambda x, y: torch.exp(x) * y + 1, x, y)
    code = re.search(
        r"\n    class Counting.*?print\(Counting.flops\)\n", reference.__doc__, re.DOTALL
    )
    assert code is not None
    printed: list[Any] = []
    names = {**vars(reference), "POINTWISE": POINTWISE, "trace": trace, "x": x, "y": y}
    exec(inspect.cleandoc(code.group()), names | {"print": printed.append})
    assert printed == [32 * (POINTWISE["exp"].flops + 2)]


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_every_named_pattern_is_as_eager(pattern: Subject, loops_run: list[str]):
    compiled = minicompile.compile(pattern.fn, backend="reference", fullgraph=True)
    want = pattern.run(pattern.fn, pattern.make_inputs("cpu", torch.float32, scale="small"))
    have = pattern.run(compiled, pattern.make_inputs("cpu", torch.float32, scale="small"))
    assert len(loops_run) == 1 + pattern.training
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
