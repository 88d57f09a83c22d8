"""Models whose batch and sequence are symbolic, at many sizes: `python -m tests.corridor.dynamic_models`

Prints for each model, mode and size the largest difference from eager and how often the model was
captured so far. `--models gpt2,vit --modes training --language triton` chooses; `--sizes 2,3` instead of
all of SIZES. Exit code 1 if a difference is too large or captures aren't as `expected_captures` says.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import minicompile as mc
from tests.corridor.zoo import ZOO, outputs

SIZES = (2, 3, 1, 7, 8, 64)
TOLERANCE = 1e-4
IMAGES = ("vit",)
"""Models whose batch alone is symbolic."""

Size = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One call: how far it is from eager, and what was compiled so far."""

    size: Size
    worst: float
    captures: int
    eager_calls: int
    breaks: int


def inputs_of(name: str, size: Size) -> dict[str, torch.Tensor]:
    """Random inputs of a size, their batch (and sequence) marked."""
    if name in IMAGES:
        images = torch.randn(*size, 3, 16, 16)
        inputs = {"pixel_values": images, "labels": torch.randint(0, 5, size)}
    else:
        ids = torch.randint(1, 64, size)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    for tensor in inputs.values():
        mc.mark_dynamic(tensor, range(len(size)))
    return inputs


def results(
    model: torch.nn.Module, call: Callable[..., Any], inputs: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Loss, outputs and in training every gradient, by name."""
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(model.training):
        result = call(**inputs)
    if model.training:
        result.loss.backward()
    found = {f"output {key}": value.detach() for key, value in outputs(result).items()}
    grads = {f"gradient {key}": p.grad for key, p in model.named_parameters()}
    return found | {key: grad for key, grad in grads.items() if grad is not None}


def worst_difference(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """The largest one; infinite where something is missing or only one is NaN."""
    if got.keys() != want.keys():
        return float("inf")
    worst = 0.0
    for name, expected in want.items():
        found = got[name]
        if found.shape != expected.shape or not torch.equal(found.isnan(), expected.isnan()):
            return float("inf")
        worst = max(worst, float((found - expected).abs().nan_to_num().max()))
    return worst


def steps(
    name: str, training: bool, sizes: Sequence[Size], language: str = "cpp"
) -> Iterator[Step]:
    """Call a model compiled once, and the same in eager, at one size after the other."""
    torch.manual_seed(0)
    model, _ = ZOO[name]()
    model.train(training)
    reference = copy.deepcopy(model)
    options = {"device_codegen": language, "recompile_limit": 16}
    compiled = mc.compile(model, options=options)
    for size in sizes:
        inputs = inputs_of(name, size)
        want = results(reference, reference, inputs)
        worst = worst_difference(results(model, compiled, inputs), want)
        story = mc.api.dispatcher_of(compiled).explanation()
        yield Step(size, worst, len(story.captures), story.eager_calls, len(story.breaks))


def expected_captures(sizes: Sequence[Size]) -> int:
    """One for all sizes of two and more, one for each pattern of ones; and one more for unequal sizes if the
    first ones were equal, as these share a symbol.
    """
    shared = len(sizes[0]) == 2 and len(set(sizes[0])) == 1 and 1 not in sizes[0]
    kinds = set()
    for size in sizes:
        ones = tuple(extent == 1 for extent in size)
        kinds.add((ones, shared and not any(ones) and len(set(size)) == 1))
    return len(kinds)


def all_sizes(name: str, choices: Sequence[int]) -> list[Size]:
    """Every combination; the first two extents are unequal."""
    if name in IMAGES:
        return [(batch,) for batch in choices]
    pairs = list(itertools.product(choices, repeat=2))
    return sorted(pairs, key=lambda pair: pair != (choices[0], choices[1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(ZOO))
    parser.add_argument("--modes", default="training,inference")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--language", default="cpp", choices=("cpp", "triton"))
    options = parser.parse_args()
    choices, failed = [int(size) for size in options.sizes.split(",")], 0
    for name, mode in itertools.product(options.models.split(","), options.modes.split(",")):
        seen, begun = list[Size](), time.monotonic()
        for step in steps(name, mode == "training", all_sizes(name, choices), options.language):
            seen.append(step.size)
            right = step.worst <= TOLERANCE and step.captures == expected_captures(seen)
            right = right and not step.eager_calls and not step.breaks
            failed += not right
            print(
                f"{name:8} {mode:10} {step.size!s:10} worst {step.worst:.1e}"
                f" captures {step.captures}{'' if right else '  WRONG: ' + str(step)}",
                flush=True,
            )
        print(f"{name} {mode}: {len(seen)} sizes, {time.monotonic() - begun:.0f} s")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
