"""Models of transformers, compiled and not: outputs, gradients, graphs, breaks, beside torch.compile's.

    python -m tests.dynamo.architectures [names] [--without-reference] [--backend aot_eager]

Each model runs twice in eval mode without gradients and twice in training mode with a backward pass.
With the backend "eager" the same operators run, so every bit is compared. Other backends may round
differently: there the models run in float64, so that a difference is a mistake and not rounding (the gradient
of a key's bias in attention, for one, is zero but for rounding).
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import minicompile as mc
from minicompile.dynamo.result import GraphBreak
from tests.dynamo.architecture_zoo import ALL, Architecture, Inputs
from tests.dynamo.helpers import explained

MODES = ("inference", "training")
CALLS = 2
"""Calls in each mode: the second one runs what the first one compiled."""
TOLERANCE = 1e-5
"""How far a value may be from eager's where other operators run, relative to its tensor's largest."""
NOISE = 1e-12
"""What counts as zero there, in float64."""


# -- one run


def leaves(value: Any) -> list[Any]:
    """Everything that a model's output consists of: tensors, constants, and the types of what holds them."""
    kind = type(value)
    if isinstance(value, torch.Tensor | int | float | str | type | torch.dtype) or value is None:
        return [value]
    if isinstance(value, dict):
        return [kind, *value, *leaves(list(value.values()))]
    if isinstance(value, list | tuple):
        return [kind, *(leaf for item in value for leaf in leaves(item))]
    return [kind, *leaves(vars(value))] if hasattr(value, "__dict__") else [kind]


def tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def run(call: Callable[..., Any], model: torch.nn.Module, inputs: Inputs, mode: str) -> list[Any]:
    """What one call shows: its output, and in training every gradient and buffer. `call` is `model`, or
    compiled from it."""
    model.train(mode == "training")
    model.zero_grad()
    torch.manual_seed(1)
    if mode == "inference":
        with torch.no_grad():
            return leaves(call(**inputs))
    out = call(**inputs)
    parts = [part for part in tensors(out) if part.requires_grad]
    assert parts, "nothing to differentiate"
    sum(part.pow(2).mean() for part in parts).backward()  # type: ignore[union-attr]
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return [*leaves(out), *leaves(gradients), *leaves(dict(model.named_buffers()))]


def difference(left: Any, right: Any, tolerance: float) -> str:
    """How one leaf differs from another; empty if it does not. Tolerance 0: in any bit but those of a NaN."""
    if type(left) is not type(right):
        return f"{left!r:.60} is no {type(right).__name__}"
    if not isinstance(left, torch.Tensor):
        return "" if left == right else f"{left!r:.60} is not {right!r:.60}"
    facts = [(t.dtype, tuple(t.shape), t.requires_grad) for t in (left, right)]
    if facts[0] != facts[1]:
        return f"{facts[0]} is not {facts[1]}"
    if tolerance == 0 or not left.is_floating_point():
        same = torch.equal(left.isnan(), right.isnan()) and torch.equal(
            left.nan_to_num(), right.nan_to_num()
        )
        return "" if same else "a tensor is not the same in every bit"
    left, right = left.detach(), right.detach()
    scale = float(right.abs().max()) if right.numel() else 0.0
    close = torch.allclose(left, right, rtol=0, atol=scale * tolerance + NOISE, equal_nan=True)
    return (
        ""
        if close
        else f"a tensor differs by {float((left - right).abs().max() / scale):.1e} of its scale"
    )


def differences(left: list[Any], right: list[Any], tolerance: float) -> list[str]:
    if len(left) != len(right):
        return [f"{len(left)} parts, not {len(right)}"]
    return list(filter(None, (difference(a, b, tolerance) for a, b in zip(left, right))))


# -- one architecture


@dataclasses.dataclass
class Count:
    """What a compiler made of one model in one mode."""

    graphs: int
    breaks: int
    frames: int = 0
    """Calls that ran the whole frame in eager."""
    wrong: list[str] = dataclasses.field(default_factory=list)
    reasons: list[GraphBreak] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def whole(self, other: Count | None) -> bool:
        """Whether there are no breaks, or at least no more pieces than another compiler's."""
        if self.frames or other is None:
            return not self.frames and not self.breaks
        return self.breaks <= other.breaks and self.graphs <= other.graphs


def check(entry: Architecture, mode: str, backend: str = "eager") -> Count:
    """Run a model compiled by minicompile and a copy of it in eager, and compare."""
    tolerance = 0.0 if backend == "eager" and not entry.asks else TOLERANCE
    model, inputs = entry.make()
    if tolerance and entry.in_float64:
        model = model.double()
        inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    plain = copy.deepcopy(model)
    compiled = mc.compile(model, backend=backend)
    wrong: list[str] = []
    start = time.perf_counter()
    for _ in range(CALLS):
        ours, theirs = run(compiled, model, inputs, mode), run(plain, plain, inputs, mode)
        wrong += differences(ours, theirs, tolerance)
    found, seconds = explained(compiled), time.perf_counter() - start
    reasons = list(found.breaks)
    return Count(found.graph_count, len(reasons), found.eager_calls, wrong, reasons, seconds)


def reference(entry: Architecture, mode: str) -> Count:
    """What torch.compile makes of the model."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    graphs = 0

    def count(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return gm.forward

    model, inputs = entry.make()
    start = time.perf_counter()
    compiled = torch.compile(model, backend=count)
    for _ in range(CALLS):
        run(compiled, model, inputs, mode)
    seconds = time.perf_counter() - start
    return Count(graphs, sum(counters["graph_break"].values()), seconds=seconds)


# -- the table


def told(count: Count | None) -> str:
    return "" if count is None else f"{count.graphs:3} {count.breaks:3}"


def row(
    entry: Architecture, backend: str, with_reference: bool
) -> tuple[str, bool, bool, list[str]]:
    """A line of the table, whether all is right, whether it is whole, and what is to be said about it."""
    cells, reasons, right, whole = [], [], True, True
    for mode in MODES:
        try:
            ours = check(entry, mode, backend)
        except Exception as error:  # shown as wrong
            ours = Count(0, 0, 0, [f"{type(error).__name__}: {error}"])
        theirs = reference(entry, mode) if with_reference else None
        verdict = "wrong" if ours.wrong else "right"
        cells.append(f"{told(ours)} {ours.frames:3} | {told(theirs):7} | {verdict}")
        reasons += [f"wrong in {mode}: {text}" for text in ours.wrong[:3]]
        reasons += [f"{mode}: {reason}" for reason in ours.reasons]
        right &= not ours.wrong
        whole &= ours.whole(theirs)
    return f"{entry.name:15} {entry.family:15} | {' | '.join(cells)}", right, whole, reasons


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; all of them if left out")
    parser.add_argument("--without-reference", action="store_true", help="leave out torch.compile")
    parser.add_argument("--backend", default="eager")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    chosen = [ALL[name] for name in arguments.names or ALL]
    with_reference = not arguments.without_reference
    part = "ours: graphs, breaks, whole eager frames | torch.compile: graphs, breaks"
    print(f"inference and training, each {part}")
    rights = wholes = 0
    for entry in chosen:
        line, right, whole, reasons = row(entry, arguments.backend, with_reference)
        print(line, *reasons, sep="\n    ", flush=True)
        rights, wholes = rights + right, wholes + whole
    how = "in no more pieces than torch.compile's" if with_reference else "without breaks"
    print(f"{rights} of {len(chosen)} right; {wholes} of {len(chosen)} {how}")
    return int(rights < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
