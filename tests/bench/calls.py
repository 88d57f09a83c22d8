"""`python -m tests.bench.calls`: what calling and capturing cost beside torch.compile, in one process.

The same functions under both compilers, timed in turn; medians. A whole call with backend "eager" is mostly
kernels. What a compiler itself adds is seen with an instant backend, which gives outputs made beforehand:
then a call is its guards, the fetching of inputs and the putting together of the result. Capturing is the
first call with such a backend: from the frame to the graph, without a backend's work.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import minicompile
from minicompile.bench.machine import table_text
from minicompile.bench.timing import time_in_turns, time_text
from minicompile.errors import BackendError

SECONDS = 0.5
"""To time a figure for."""
LAYERS = 12


@dataclass(frozen=True)
class Figure:
    """Seconds of minicompile and of torch.compile: ours should be at most `target` of theirs."""

    name: str
    ours: float
    theirs: float
    target: float | None = None

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    @property
    def met(self) -> bool:
        return self.target is None or self.ratio <= self.target

    def row(self) -> list[str]:
        target = "" if self.target is None else f"1/{1 / self.target:.0f}"
        return [
            self.name,
            time_text(self.ours),
            time_text(self.theirs),
            f"1/{1 / self.ratio:.1f}",
            target,
        ]


class Instant:
    """A backend whose graphs give the outputs that they gave when they ran first."""

    def __init__(self) -> None:
        self.outputs: Any = None

    def __call__(self, gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            if self.outputs is None:
                self.outputs = gm(*inputs)
            return self.outputs

        return run


def weighted(a: torch.Tensor, b: torch.Tensor, k: int, s: float) -> torch.Tensor:
    """Two tensors, two scalars, a trivial graph."""
    return a * k + b * s


def gpt2() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """GPT-2 of transformers with 12 narrow layers, and its input. Raises BackendError without the library."""
    if importlib.util.find_spec("transformers") is None:
        raise BackendError("this needs the library transformers: pip install transformers")
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens: dict[str, Any] = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(n_layer=LAYERS, n_embd=48, n_head=4, **tokens)).eval()
    return model, (torch.randint(0, 128, (1, 16)),)


def in_turns(
    name: str, ours: Callable[[], object], theirs: Callable[[], object], target: float | None
) -> Figure:
    """Calls of both compilers, timed in turns."""
    timings = time_in_turns({"ours": ours, "theirs": theirs}, SECONDS, "cpu")
    return Figure(name, timings.median("ours"), timings.median("theirs"), target)


def call_figure(
    name: str, target: Any, args: tuple[Any, ...], backend: Any, limit: float | None
) -> Figure:
    """Calls of what both compilers made of a function or module."""
    ours = minicompile.compile(target, backend=backend() if callable(backend) else backend)
    theirs = torch.compile(target, backend=backend() if callable(backend) else backend)
    for call in (ours, theirs):
        call(*args)
    return in_turns(name, lambda: ours(*args), lambda: theirs(*args), limit)


def capture_figure(name: str, target: Any, args: tuple[Any, ...], limit: float) -> Figure:
    """First calls, each after forgetting everything; one before that pays for imports."""

    def first(compile_with: Any, reset: Any) -> Callable[[], object]:
        instant = Instant()

        def call() -> None:
            reset()
            compile_with(target, backend=instant)(*args)

        call()
        return call

    ours = first(minicompile.compile, minicompile.reset)
    return in_turns(name, ours, first(torch.compile, torch.compiler.reset), limit)


def figures() -> list[Figure]:
    a, b = torch.randn(2), torch.randn(2)
    model, tokens = gpt2()
    small, large = "2 tensors, 2 scalars", f"GPT-2, {LAYERS} layers"
    return [
        call_figure(f"{small}: call, instant backend", weighted, (a, b, 2, 3.0), Instant, 1 / 8),
        call_figure(f"{small}: call, kernels included", weighted, (a, b, 2, 3.0), "eager", None),
        call_figure(f"{large}: call, instant backend", model, tokens, Instant, 1 / 3),
        call_figure(f"{large}: call, kernels included", model, tokens, "eager", None),
        capture_figure(f"{large}: capture", model, tokens, 1 / 2),
    ]


def run(threads: int) -> int:
    """Measure and print; 1 if a target is missed."""
    warnings.simplefilter("ignore")
    if threads:
        torch.set_num_threads(threads)
    found = figures()
    header = ("median", "minicompile", "torch.compile", "ratio", "target")
    print("calling and capturing, backend eager or instant")
    print(table_text(header, [figure.row() for figure in found]))
    return 0 if all(figure.met for figure in found) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.bench.calls", description=__doc__)
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch's kernels")
    sys.exit(run(parser.parse_args().threads))
