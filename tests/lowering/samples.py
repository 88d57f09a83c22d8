"""Samples of torch's operator database through lowering: results and gradients against eager, in the
reference interpreter. (`python -m tests.opinfo --backend inductor` runs the whole database in C++ kernels.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from minicompile import compat
from minicompile.aot.autograd import ahead_of_time
from minicompile.aot.runtime import make_callable
from minicompile.debug.reference import run_reference
from minicompile.errors import Unsupported
from minicompile.lowering.ir import LoopGraph
from minicompile.lowering.lower import lower
from minicompile.ops.graph import Graph
from minicompile.options import Options
from tests.aot.decomposition_samples import Sample, as_sample, database_samples, difference
from tests.aot.helpers import capture

__all__ = ["Found", "as_sample", "check", "run_operator"]


@dataclass
class Found:
    """What became of some samples: how many agree with eager, and what was wrong."""

    agreed: int = 0
    wrong: list[str] = field(default_factory=list)
    graphs: list[LoopGraph] = field(default_factory=list)

    @property
    def externs(self) -> Counter[tuple[str, str]]:
        """(operator, reason) of the calls that are no loops."""
        kernels = (kernel for graph in self.graphs for kernel in graph.externs)
        return Counter((str(kernel.op), kernel.reason) for kernel in kernels)

    def runner(self, graph: Graph | None) -> Callable[[list[Any]], list[Any]] | None:
        """Lower a graph. Return what runs it, and empties its list of inputs as a kernel would."""
        if graph is None:
            return None
        loops = lower(graph, Options(verify=True))
        self.graphs.append(loops)

        def run(inputs: list[Any]) -> list[Any]:
            given = list(inputs)
            inputs.clear()
            return run_reference(loops, given)

        return run


def symbols(inputs: list[torch.Tensor]) -> dict[tuple[int, int], str] | None:
    """A symbol for each size from 2 on of the contiguous inputs; equal sizes share one."""
    sizes = (
        (k, dim, size)
        for k, x in enumerate(inputs)
        for dim, size in enumerate(x.shape if x.is_contiguous() else ())
    )
    return {(k, dim): f"s{size}" for k, dim, size in sizes if size >= 2} or None


def check(sample: Sample, found: Found, dynamic: bool = False) -> None:
    """Compare a sample's results and gradients with eager's."""

    def leaves() -> list[torch.Tensor]:
        return [x.detach().clone().requires_grad_(x.requires_grad) for x in sample.inputs]

    inputs = leaves()
    try:
        expected = results_of(sample.fn, inputs)
    except Exception:  # eager refuses: nothing to compare
        return
    training = any(x.requires_grad for x in inputs)
    try:
        with compat.quiet_fakes():
            graph, fakes, env = capture(sample.fn, inputs, symbols(inputs) if dynamic else None)
            aot = ahead_of_time(graph, fakes, Options(), training=training, shape_env=env)
        forward, backward = found.runner(aot.forward), found.runner(aot.backward)
    except (Unsupported, *compat.FAKE_LIMITS):
        return
    assert forward is not None
    compiled = make_callable(aot, forward, backward, "sample")
    try:
        got = results_of(lambda *given: compiled(list(given)), leaves())
    except Exception as error:
        found.wrong.append(f"{sample.name}: {type(error).__name__}: {error}")
        return
    for number, (ours, wanted) in enumerate(zip(got, expected, strict=True)):
        if what := difference(ours, wanted, strides=False):
            found.wrong.append(f"{sample.name}: value {number}: {what[:300]}")
            return
    found.agreed += 1


def results_of(fn: Callable[..., Any], inputs: list[torch.Tensor]) -> list[Any]:
    """Results, then gradients for fixed cotangents."""
    torch.manual_seed(0)
    results = fn(*inputs)
    results = list(results) if isinstance(results, tuple | list) else [results]
    roots = [x for x in results if isinstance(x, torch.Tensor) and x.requires_grad]
    leaves = [x for x in inputs if x.requires_grad]
    if not roots or not leaves:
        return results
    torch.manual_seed(1)
    cotangents = [torch.randn(x.shape, dtype=torch.float64).to(x.dtype) for x in roots]
    return results + list(torch.autograd.grad(roots, leaves, cotangents, allow_unused=True))


def run_operator(name: str, most: int, dtypes: Iterable[torch.dtype]) -> Found:
    """The first samples of an operator, of each dtype."""
    found = Found()
    for dtype in dtypes:
        for sample in database_samples(name, dtype, most):
            check(sample, found)
    return found
