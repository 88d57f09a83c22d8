"""Eager torch as oracle: trace to ATen, lower, run the loops in the reference interpreter, compare."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from minicompile.aot.levels import lower_to
from minicompile.debug.reference import run_reference
from minicompile.debug.verify import verify_body
from minicompile.lowering.ir import ComputedBuffer, LoopGraph
from minicompile.lowering.lower import lower
from minicompile.ops.graph import Graph
from minicompile.ops.origin import Origin, SourceLine
from minicompile.options import Options
from minicompile.scheduling.body import LoopBody, record
from tests.comparing import assert_same

torch.set_num_threads(1)


def flat(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [x for item in value for x in flat(item)]
    return [value]


def silu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    sigmoid = x.sigmoid()
    return grad * sigmoid * (1 + x * (1 - sigmoid))


COMPOSITE = {torch.ops.aten.silu_backward.default: silu_backward}
"""Operators that the AOT room takes apart while it traces, before any decomposition (aot/tracer.py)."""


def traced(fn: Callable[..., Any], args: Sequence[torch.Tensor]) -> Graph:
    """The functional ATen graph of `fn`, as the AOT room hands graphs on; an origin for each call in `fn`."""
    gm = make_fx(
        lambda *a: flat(fn(*a)),
        decomposition_table=COMPOSITE,
        tracing_mode="fake",
        _allow_non_fake_inputs=True,
    )(*args)
    gm.graph.eliminate_dead_code()
    for number, node in enumerate(gm.graph.nodes):
        line = SourceLine("user.py", number, "f")
        node.meta["origins"] = frozenset({Origin(node.name, str(node.target), (line,))})
    values = [node.meta.get("val") for node in gm.graph.nodes]
    mode = next(v.fake_mode for v in flat(values) if hasattr(v, "fake_mode"))
    mode.env = None  # a mode that make_fx made: no symbols
    graph = Graph(gm, "f", "make_fx")
    for level in ("core", "prims"):
        graph = lower_to(level, graph, mode)
        graph.gm.graph.eliminate_dead_code()
    return graph


def lowered(
    fn: Callable[..., Any], *args: torch.Tensor, options: Options | None = None
) -> LoopGraph:
    return lower(traced(fn, args), options or Options(verify=True))


def check_each(fns: dict[str, Callable[..., Any]], *args: torch.Tensor, **tolerance: Any) -> None:
    """`check` for many functions in one graph. Those that eager refuses are left out."""
    accepted = {}
    for name, fn in fns.items():
        with contextlib.suppress(RuntimeError, IndexError):
            fn(*args)
            accepted[name] = fn
    assert accepted
    graph = lowered(lambda *a: [flat(fn(*a)) for fn in accepted.values()], *args)
    record_all(graph)
    assert not graph.externs, [str(kernel) for kernel in graph.externs]
    found = iter(run_reference(graph, args))
    for name, fn in accepted.items():
        for want in flat(fn(*args)):
            try:
                assert_same(next(found), want, **tolerance)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


def record_all(graph: LoopGraph) -> list[LoopBody]:
    """Every loop can be recorded as a typed body."""
    bodies = []
    dtypes = {name: buffer.layout.dtype for name, buffer in graph.buffers.items()}
    for operation in graph.operations:
        if isinstance(operation, ComputedBuffer):
            bodies.append(record(operation, dtypes))
            verify_body(bodies[-1])
    return bodies


def check(
    fn: Callable[..., Any],
    *args: torch.Tensor,
    externs: int | None = 0,
    options: Options | None = None,
    **tolerance: float,
) -> LoopGraph:
    """Lowered `fn` gives eager's answer, with this many extern calls (None: any number)."""
    graph = lowered(fn, *args, options=options)
    graph.verify()
    record_all(graph)
    found = run_reference(graph, args)
    for got, want in zip(found, flat(fn(*args)), strict=True):
        assert_same(got, want, **tolerance)
    if externs is not None:
        assert len(graph.externs) == externs, [str(e) for e in graph.externs]
    return graph


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def run(graph: LoopGraph, *args: Any) -> list[Any]:
    return run_reference(graph, args)
