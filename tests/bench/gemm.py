"""`python -m tests.bench.gemm`: matrix products with what follows them, on a GPU, device time.

Each is compiled with max-autotune by us and by torch.compile, and by us without templates: a library's
product and a kernel of what follows. All take turns in one process, on inputs that the cache no longer holds.
Against float64, our error may be at most twice that of the library's product. Exits with 1 where we are
slower than either, by more than NOISE, or less exact.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import minicompile as mc
from minicompile.bench.timing import CACHES, device_timer, l2_bytes, run_in_turns

NOISE = 0.01
"""Two measurements of one thing differ by so much."""
WORSE = 2.0
"""By how much our error may exceed the library's."""
MODE = "max-autotune-no-cudagraphs"


@dataclass(frozen=True)
class Case:
    """A function, and the sizes of what it is given."""

    fn: Callable[..., Tensor]
    sizes: tuple[tuple[int, ...], ...]


def linear_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1)


def linear_residual(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return y + F.linear(x, w, b)


CASES = {
    "linear_gelu 8192x1024x4096": Case(linear_gelu, ((8192, 1024), (4096, 1024), (4096,))),
    "linear_gelu 4096x4096x4096": Case(linear_gelu, ((4096, 4096), (4096, 4096), (4096,))),
    "swiglu 4096x2048x5504": Case(swiglu, ((4096, 2048), (5504, 2048), (5504, 2048))),
    "scores 64x1024x64": Case(scores, ((64, 1024, 64), (64, 1024, 64))),
    "linear_residual 64x8192x1024": Case(
        linear_residual, ((64, 8192), (1024, 8192), (1024,), (64, 1024))
    ),
}


def inputs(case: Case, device: str, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Random numbers; weights are scaled so that results have the size of inputs."""
    made = torch.Generator(device).manual_seed(seed)
    found = [torch.randn(size, generator=made, device=device) for size in case.sizes]
    terms = case.sizes[0][-1]
    scaled = [found[0], *(x / terms**0.5 if x.shape[-1] == terms else x for x in found[1:])]
    return [x.to(dtype) for x in scaled]


def error(found: Tensor, exact: Tensor) -> float:
    """The root of the mean square of differences."""
    return float((found.double() - exact).square().mean().sqrt())


def contest(case: Case, rivals: Sequence[str], seconds: float, device: str) -> dict[str, Any]:
    """Device seconds and error of each way."""
    ways: dict[str, Callable[..., Tensor]] = {
        "ours": mc.compile(case.fn, mode=MODE),
        "library": mc.compile(case.fn),
        "torch": torch.compile(case.fn, dynamic=False, mode=MODE),
    }
    size = sum(2 * torch.Size(s).numel() for s in case.sizes)
    count = max(2, min(8, 1 + CACHES * l2_bytes(device) // size))
    sets = [inputs(case, device, torch.bfloat16, seed) for seed in range(count)]
    exact = case.fn(*(x.double() for x in sets[0]))
    errors, timers = {}, {}
    with torch.no_grad():
        for name in rivals:
            errors[name] = error(ways[name](*sets[0]), exact)
            timers[name] = device_timer([partial(ways[name], *given) for given in sets])
        del exact
        timings = run_in_turns(timers, seconds)
    return {
        "errors": errors,
        "seconds": {name: timings.median(name) for name in rivals},
        "ratios": {name: timings.ratio("ours", name) for name in rivals if name != "ours"},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", default="", help="only those whose name begins so")
    parser.add_argument("--rivals", default="ours,library,torch")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each case")
    chosen = parser.parse_args(arguments)
    rivals, missed = chosen.rivals.split(","), []
    for name, case in CASES.items():
        if not name.startswith(chosen.case):
            continue
        found = contest(case, rivals, chosen.seconds, "cuda")
        times = ", ".join(f"{n} {1e6 * s:.1f} us" for n, s in found["seconds"].items())
        ratios = ", ".join(f"by {n} {ratio}" for n, ratio in found["ratios"].items())
        errors = ", ".join(f"{n} {e:.2e}" for n, e in found["errors"].items())
        print(f"{name}: {times}; ours {ratios}; errors {errors}", flush=True)
        missed += [
            f"{name}: slower than {n}" for n, r in found["ratios"].items() if r.median > 1 + NOISE
        ]
        if found["errors"]["ours"] > WORSE * found["errors"].get("library", float("inf")):
            missed.append(f"{name}: less exact than the library")
    print("\n".join(missed) or "no target missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
