"""Cases to measure (patterns and models at several sizes), and the compilers that are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import minicompile
from minicompile.bench import networks  # noqa: F401  registers its models
from minicompile.bench.models import MODELS, Model
from minicompile.bench.patterns import MEMORY_BOUND, ON_GPU, PATTERNS, Input, Pattern, Scale
from minicompile.compat import tree_leaves
from minicompile.errors import unknown

EAGER, TORCH, OURS = "eager", "torch.compile", "minicompile"


@dataclass(frozen=True)
class Compiler:
    """One way to run a function.

    compile          takes a function or module and the compilers' `mode`; gives what to call
    modules          imported before a first call is timed, since importing isn't compiling
    cache_variable   the environment variable that names its cache on disk
    """

    compile: Callable[..., Any]
    modules: tuple[str, ...] = ()
    cache_variable: str = ""


def by_torch(fn: Any, mode: str | None = None) -> Any:
    """Compile for fixed sizes by PyTorch's own compiler."""
    return torch.compile(fn, dynamic=False, mode=mode)


def by_minicompile(fn: Any, mode: str | None = None) -> Any:
    """Compile for fixed sizes by ours."""
    return minicompile.compile(fn, dynamic=False, mode=mode)


TORCH_MODULES = ("torch._dynamo", "torch._inductor.compile_fx")
COMPILERS: dict[str, Compiler] = {
    EAGER: Compiler(lambda fn, mode=None: fn),
    TORCH: Compiler(by_torch, TORCH_MODULES, "TORCHINDUCTOR_CACHE_DIR"),
    OURS: Compiler(
        by_minicompile, ("minicompile.pipeline", "minicompile.api"), "MINICOMPILE_CACHE_DIR"
    ),
}


def tiny(x: Tensor, y: Tensor) -> Tensor:
    """Next to no arithmetic: what remains is the price of a call."""
    return x.sin() + y


TINY = Pattern("call", tiny, (Input("2"), Input("2")))


@dataclass(frozen=True)
class Case:
    """One thing to measure, of a kind of KINDS."""

    name: str
    kind: str
    subject: Pattern | Model
    scale: Scale
    training: bool

    @property
    def mode(self) -> str | None:
        """What both compilers are given as `mode`."""
        return self.subject.mode if isinstance(self.subject, Model) else None

    def inputs(self, device: str, dtype: torch.dtype) -> list[Any]:
        """The same at every call; what gets gradients requires them if this is training."""
        if isinstance(self.subject, Model):
            return self.subject.make_inputs(device, dtype)
        made = self.subject.make_inputs(device, dtype, self.scale)
        return made if self.training else [tensor.detach() for tensor in made]

    def results(self, fn: Callable[..., Any], inputs: list[Any]) -> list[Tensor]:
        """Outputs, gradients and what the inputs are afterwards."""
        return self.subject.run(fn, inputs)

    def step(self, fn: Callable[..., Any], inputs: list[Any]) -> Callable[[], object]:
        """What is timed: a call, in training with the backward; its results are dropped."""
        if isinstance(self.subject, Model):
            return partial(self.subject.once, fn, inputs, self.subject.learnt(inputs))
        if not self.training:
            return lambda: fn(*inputs)
        wanted = [tensor for tensor in inputs if tensor.requires_grad]

        def outputs() -> list[Tensor]:
            found = tree_leaves(fn(*inputs))
            return [o for o in found if isinstance(o, Tensor) and o.requires_grad]

        down = [torch.rand_like(output) for output in outputs()]
        return lambda: torch.autograd.grad(outputs(), wanted, down)


def in_float64(inputs: Sequence[Any]) -> list[Any]:
    """The same numbers in float64; an optimizer gets the copied module's parameters."""
    made: list[Any] = []
    for given in inputs:
        if isinstance(given, nn.Module):
            made.append(copy.deepcopy(given).double())
        elif isinstance(given, torch.optim.Optimizer):
            made.append(type(given)(made[0].parameters(), lr=given.defaults["lr"]))  # type: ignore[call-arg]
        elif given.is_floating_point():
            made.append(given.detach().double().requires_grad_(given.requires_grad))
        else:
            made.append(given)
    return made


KINDS = ("call", "pattern", "model")


def find_cases(names: Sequence[str], kinds: Sequence[str], scales: Sequence[Scale]) -> list[Case]:
    """Those named, or all of the kinds wanted; at the scale "gpu" those that are for GPUs.

    Raises MinicompileError for a name that isn't known.
    """
    every = [Case("call", "call", TINY, "small", training=False)]
    for found in PATTERNS.values():
        for scale in scales:
            for training in (False, True)[: 1 + found.training]:
                name = found.name + ", training" * training
                usual = name in ON_GPU if scale == "gpu" else found.name in MEMORY_BOUND
                if found.name in names if names else usual:
                    name = f"{found.name}, {scale}" + ", training" * training
                    every.append(Case(name, "pattern", found, scale, training))
    for model in MODELS.values():
        if names or model.gpu == ("gpu" in scales):
            every.append(Case(model.name, "model", model, "large", model.training))
    known = {case.subject.name for case in every} | set(PATTERNS)
    for name in names:
        if name not in known:
            raise unknown("case", name, sorted(known))
    return [c for c in every if (c.subject.name in names if names else c.kind in kinds)]
