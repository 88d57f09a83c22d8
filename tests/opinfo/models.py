"""Errors of the named models against float64, beside eager's:

    python -m tests.opinfo.models --dtypes float32 bfloat16

Small configurations; outputs, gradients and what the module keeps, each tensor by `compare.beyond`, with the
longest sum of the model's loop graphs. Prints the worst tensor of each model; ends with 1 if one is above 1.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import sys
from typing import Any

import torch

import minicompile as mc
from minicompile.bench import networks as _networks  # noqa: F401  registers its models
from minicompile.bench.models import MODELS, Model
from minicompile.ops.events import Event, observer
from minicompile.ops.registry import scoped
from tests.opinfo.compare import beyond, length_of


def in_double(model: Model, given: list[Any]) -> list[torch.Tensor]:
    """The model's results from the same numbers in double precision."""
    module, *rest = copy.deepcopy(given[:-1] if model.step else given)
    for value in [*module.parameters(), *module.buffers(), *rest]:
        if value.is_floating_point():
            value.data = value.data.double()
    step = [torch.optim.AdamW(module.parameters(), given[-1].defaults["lr"])] if model.step else []
    return model.run(model.fn, [module, *rest, *step])


def worst(model: Model, dtype: torch.dtype) -> tuple[float, int, int]:
    """The largest ratio, the place of its tensor among the results, and the length it was given."""
    make = lambda: model.make_inputs("cpu", dtype, small=True)  # noqa: E731
    double = in_double(model, make())
    eager = model.run(model.fn, make())
    mc.reset()
    lengths = [1]

    def listen(event: Event) -> None:
        if event.kind == "loops":
            lengths.extend(map(length_of, event.subject.operations))

    with scoped():
        observer("lengths")(listen)
        ours = model.run(mc.compile(model.fn, options={"verify": True}), make())
    length = max(lengths)
    found = [
        (beyond(a.detach(), b.detach(), c.detach(), length), i, length)
        for i, (a, b, c) in enumerate(zip(eager, ours, double, strict=True))
        if a.is_floating_point()
    ]
    return max(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", nargs="*", default=["float32"])
    parser.add_argument("--models", nargs="*", default=["*"], help="`fnmatch` patterns")
    chosen = parser.parse_args()
    ratios = []
    for name, model in MODELS.items():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in chosen.models):
            continue
        for dtype in chosen.dtypes:
            ratio, place, length = worst(model, getattr(torch, dtype))
            ratios.append(ratio)
            print(f"{ratio:.3f}  {name} {dtype}: result {place}, length {length}", flush=True)
    return 1 if max(ratios, default=0.0) > 1 else 0


if __name__ == "__main__":
    sys.exit(main())
