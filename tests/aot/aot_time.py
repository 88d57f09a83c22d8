"""Time of ahead-of-time autograd, ours and torch.compile's, on the same captured graphs.

    python -m tests.aot.aot_time [model...]

Both get the torch-level graph and fake inputs, and give graphs of forward and backward for an inductor: ours
with its passes, torch's with inductor's decompositions and a compiler that does nothing. One process, in
turns, medians. The partitioners are timed inside and shown apart.
"""

from __future__ import annotations

import contextlib
import cProfile
import pstats
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import fx

from minicompile.aot import autograd
from minicompile.dynamo.result import Capture
from minicompile.options import Options
from tests.aot.partition_models import result_of
from tests.aot.training_graphs import training_capture

ROUNDS = 7
STAGES = ("trace", "functionalize", "run_passes", "lower_to", "partition")
"""Functions that `ahead_of_time` calls, in order."""

Times = dict[str, list[float]]


@contextlib.contextmanager
def clocked(module: Any, names: tuple[str, ...]) -> Iterator[dict[str, float]]:
    """Seconds spent in functions of a module, by name."""
    spent: dict[str, float] = defaultdict(float)

    def clock(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - start

        return run

    with contextlib.ExitStack() as stack:
        for name in names:
            patched = clock(name, getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, patched))
        yield spent


def ours(capture: Capture) -> dict[str, float]:
    with clocked(autograd, STAGES) as spent:
        start = time.perf_counter()
        result_of(capture, Options())
        total = time.perf_counter() - start
    return {**spent, "total": total}


def torch_inputs(capture: Capture) -> list[torch.Tensor]:
    """Fake inputs of torch's own kind like the captured ones."""
    mode = torch._subclasses.FakeTensorMode()
    with mode:
        return [
            torch.empty_strided(
                fake.shape, fake.stride(), dtype=fake.dtype, requires_grad=fake.requires_grad
            )
            for fake in capture.fakes
        ]


def theirs(capture: Capture) -> dict[str, float]:
    import torch._functorch.aot_autograd as aot
    import torch._inductor.lowering  # noqa: F401  the decompositions need it
    from torch._functorch import partitioners
    from torch._inductor.decomposition import select_decomp_table

    def nothing(gm: fx.GraphModule, inputs: Any) -> Any:
        return aot.make_boxed_func(gm.forward)

    inputs, decompositions = torch_inputs(capture), select_decomp_table()
    gm = fx.GraphModule(capture.graph.gm, capture.graph.gm.graph)
    with clocked(partitioners, ("min_cut_rematerialization_partition",)) as spent:
        start = time.perf_counter()
        aot.aot_module_simplified(
            gm,
            inputs,
            nothing,
            nothing,
            partitioners.min_cut_rematerialization_partition,
            decompositions,
        )
        total = time.perf_counter() - start
    return {"partition": sum(spent.values()), "total": total}


def measure(capture: Capture, rounds: int = ROUNDS) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of ours and theirs, in turns, after one round that doesn't count."""
    times: tuple[Times, Times] = (defaultdict(list), defaultdict(list))
    for round_ in range(rounds + 1):
        for one, run in zip(times, (ours, theirs)):
            for name, seconds in run(capture).items():
                if round_:
                    one[name].append(seconds)
    first, second = ({name: statistics.median(v) for name, v in one.items()} for one in times)
    return first, second


def profile(capture: Capture) -> None:
    with cProfile.Profile() as profiler:
        result_of(capture, Options())
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    names = [name for name in sys.argv[1:] if name != "--profile"] or ["gpt2", "resnet"]
    for name in names:
        capture = training_capture(name)
        mine, other = measure(capture)
        for who, found in (("ours", mine), ("torch", other)):
            rest = found["total"] - found["partition"]
            parts = ", ".join(f"{n} {s * 1e3:.0f}" for n, s in found.items() if n != "total")
            print(
                f"{name:7} {who:5} {found['total'] * 1e3:6.0f} ms, "
                f"{rest * 1e3:.0f} without partition ({parts})"
            )
        if "--profile" in sys.argv:
            profile(capture)
