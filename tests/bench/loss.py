"""`python -m tests.bench.loss`: cross-entropy of a linear layer on a GPU: memory, time, errors.

Eager, torch.compile and minicompile (whose default computes the logits in chunks) take turns in one process.
Memory is the peak above the inputs; errors are those of the loss and of both gradients against float64. Exits
with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import minicompile as mc
from minicompile.bench.timing import device_timer, peak_bytes, run_in_turns

MEMORY, TIME, ERROR = 1 / 3, 1.1, 2.0
"""At most: peak memory by eager's; time by torch.compile's; errors by eager's."""


def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w), target)


def shifted(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """As language models write it: a batch, float32 logits, each token predicts the next one."""
    logits = F.linear(x.view(8, -1, x.shape[-1]), w).float()
    rows, known = logits[:, :-1].flatten(0, 1), target.view(8, -1)[:, 1:].flatten()
    return F.cross_entropy(rows, known)


CASES = {"loss": loss, "shifted": shifted}


def step(fn: Callable[..., Tensor], x: Tensor, w: Tensor, target: Tensor) -> list[Tensor]:
    out = fn(x, w, target)
    return [out.detach(), *torch.autograd.grad(out, (x, w))]


def inputs(sizes: Sequence[int], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    rows, width, classes = sizes
    made = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, width, generator=made, device="cuda", dtype=dtype)
    w = torch.randn(classes, width, generator=made, device="cuda", dtype=dtype) / width**0.5
    target = torch.randint(classes, (rows,), generator=made, device="cuda")
    return [x.requires_grad_(), w.requires_grad_(), target]


def off(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """The root of the mean square of differences, by that of the numbers."""
    return [
        float((a.double() - b).square().mean().sqrt() / b.square().mean().sqrt())
        for a, b in zip(found, exact)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs=3, default=[8192, 768, 50257], metavar="N")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each case")
    chosen = parser.parse_args(arguments)
    missed = 0
    for name, fn in CASES.items():
        given = inputs(chosen.sizes, torch.bfloat16)
        x, w, target = given
        doubles = [t.detach().double().requires_grad_() for t in (x, w)]
        exact = step(fn, doubles[0], doubles[1], target)
        ways = {"ours": mc.compile(fn), "torch": torch.compile(fn, dynamic=False), "eager": fn}
        errors, peaks, timers = {}, {}, {}
        for way, called in ways.items():
            errors[way] = off(step(called, *given), exact)
        del exact
        for way, called in ways.items():
            run = partial(step, called, *given)
            peaks[way] = peak_bytes(run, "cuda")
            timers[way] = device_timer([run], "cuda")
        timings = run_in_turns(timers, chosen.seconds)
        for way in ways:
            ms, mib = 1e3 * timings.median(way), peaks[way] / 2**20
            text = " ".join(f"{e:.2e}" for e in errors[way])
            print(f"{name:8} {way:6} {ms:8.3f} ms, peak {mib:8.1f} MiB, errors {text}")
        memory, ratio = peaks["ours"] / peaks["eager"], timings.ratio("ours", "torch")
        worse = max(a / b for a, b in zip(errors["ours"], errors["eager"]))
        print(f"{name}: memory {memory:.3f} of eager, time {ratio} of torch.compile,", end=" ")
        print(f"errors {worse:.2f} of eager", flush=True)
        missed += memory > MEMORY or ratio.median > TIME or worse > ERROR
    print(f"{missed} of {len(CASES)} miss a target")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
