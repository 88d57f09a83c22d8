"""Cases to measure (patterns and models at several sizes), and the compilers that are compared."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import minicompile
from minicompile.bench import networks  # noqa: F401  registers its models
from minicompile.bench.models import MODELS
from minicompile.bench.patterns import (
    MEMORY_BOUND,
    ON_GPU,
    PATTERNS,
    Input,
    Scale,
    Subject,
    make_tensors,
)
from minicompile.errors import unknown

EAGER, TORCH, OURS = "eager", "torch.compile", "minicompile"


@dataclass(frozen=True)
class ComparedCompiler:
    """One way to run a function: `compile` takes a function or module and `mode=`, gives what to call;
    `cache_variable` is the environment variable that names its cache on disk."""

    compile: Callable[..., Any]
    cache_variable: str = ""


COMPILERS = {
    EAGER: ComparedCompiler(lambda fn, mode=None: fn),
    TORCH: ComparedCompiler(partial(torch.compile, dynamic=False), "TORCHINDUCTOR_CACHE_DIR"),
    OURS: ComparedCompiler(partial(minicompile.compile, dynamic=False), "MINICOMPILE_CACHE_DIR"),
}
"""By name; all compile for fixed sizes."""


TINY = Subject(
    "call", lambda x, y: x.sin() + y, partial(make_tensors, [Input("2"), Input("2")], False)
)
"""Next to no arithmetic: what remains is the price of a call."""


@dataclass(frozen=True)
class BenchCase:
    """One thing to measure, of a kind of KINDS."""

    name: str
    kind: str
    subject: Subject
    scale: Scale
    training: bool

    def inputs(self, device: str, dtype: torch.dtype) -> list[Any]:
        """The same at every call; what gets gradients requires them if this is training."""
        made: list[Any] = self.subject.make_inputs(device, dtype, self.scale)
        if self.training:
            return made
        return [x.detach() if isinstance(x, Tensor) else x for x in made]


def in_float64(inputs: Sequence[Any]) -> list[Any]:
    """The same numbers in float64."""
    made: list[Any] = []
    for x in copy.deepcopy(list(inputs)):
        if isinstance(x, nn.Module):
            made.append(x.double())
        elif x.is_floating_point():
            made.append(x.detach().double().requires_grad_(x.requires_grad))
        else:
            made.append(x)
    return made


KINDS = ("call", "pattern", "model")


def find_cases(
    names: Sequence[str], kinds: Sequence[str], scales: Sequence[Scale]
) -> list[BenchCase]:
    """Those named, or all of the kinds wanted; at the scale "gpu" those that are for GPUs.

    Raises MinicompileError for a name that isn't known.
    """
    every = [BenchCase("call", "call", TINY, "small", training=False)]
    for found, scale in itertools.product(PATTERNS.values(), scales):
        for ending in ("", ", training")[: 1 + found.training]:
            usual = found.name + ending in ON_GPU if scale == "gpu" else found.name in MEMORY_BOUND
            if found.name in names if names else usual:
                name = f"{found.name}, {scale}{ending}"
                every.append(BenchCase(name, "pattern", found, scale, bool(ending)))
    every += [
        BenchCase(model.name, "model", model, "large", model.training)
        for model in MODELS.values()
        if names or model.gpu == ("gpu" in scales)
    ]
    known = {case.subject.name for case in every} | set(PATTERNS)
    for name in names:
        if name not in known:
            raise unknown("case", name, sorted(known))
    return [c for c in every if (c.subject.name in names if names else c.kind in kinds)]
