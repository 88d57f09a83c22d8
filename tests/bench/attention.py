"""Written-out attention on a GPU, compiled to the template, beside the library's: errors and time.

    python -m tests.bench.attention                 causal and with changed scores, bfloat16
    python -m tests.bench.attention causal --head 64 --length 2048
    python -m tests.bench.attention biased --flex   torch.compile's flex_attention by its own plain one, too

Each case is measured against float64, and may be off at most twice as far as scaled_dot_product_attention's
plain causal attention. Forward and training step take turns with the library's; a case with changed scores
is held against our plain causal one. The exit code is 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import minicompile as mc
from minicompile.bench.machine import table_text
from minicompile.bench.timing import time_in_turns
from minicompile.codegen.plan import KernelSource
from minicompile.options import Options
from minicompile.runtime.gpu_kernel import gpu_kernel, planned_tiles
from minicompile.runtime.triton import kernel_binary

AT_MOST_SLOWER, AT_MOST_MORE, AT_MOST_OFF = 1.25, 1.15, 2.0
"""Than the library; than the plain template, for changed scores; than the library's error."""
BATCH, HEADS = 4, 16
BACKENDS = torch.nn.attention.SDPBackend

Scores = Callable[..., Tensor]


def positions(s: Tensor) -> tuple[Tensor, Tensor]:
    i, j = (torch.arange(n, device=s.device) for n in s.shape[-2:])
    return i[:, None], j[None, :]


def causal(s: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
    i, j = positions(s)
    return s.masked_fill(j > i, -torch.inf)


def biased(s: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
    return causal(s + bias, bias, slopes)


def alibi(s: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
    i, j = positions(s)
    return causal(s + slopes * (j - i), bias, slopes)


def capped(s: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
    return causal(20 * torch.tanh(s / 20), bias, slopes)


def windowed(s: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
    i, j = positions(s)
    return s.masked_fill((j > i) | (i - j >= 1024), -torch.inf)


CASES: dict[str, Scores] = {f.__name__: f for f in (causal, biased, alibi, capped, windowed)}


def attention(scores: Scores, q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
    s = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    return torch.softmax(scores(s, *more), -1).to(v.dtype) @ v


def inputs(
    head: int, length: int, dtype: Any, device: str, batch: int = BATCH, heads: int = HEADS
) -> list[Tensor]:
    torch.manual_seed(0)
    made = [torch.empty if device == "cpu" else torch.randn][0]
    q, k, v = (
        made(batch, heads, length, head, dtype=dtype, device=device).requires_grad_() for _ in "qkv"
    )
    bias = made(heads, length, length, dtype=dtype, device=device)
    return [q, k, v, bias, made(heads, 1, 1, device=device).abs() * 0.01]


def compiled(name: str, **options: Any) -> Callable[..., Tensor]:
    chosen = {"plugins": ["flash_attention"], "device_codegen": "triton", **options}
    return mc.compile(
        partial(attention, CASES[name]), fullgraph=True, dynamic=False, options=chosen
    )


def kernels_of(name: str, head: int, length: int) -> list[KernelSource]:
    """What will be compiled, without a GPU."""
    given = inputs(head, length, torch.bfloat16, "cpu")
    trace = mc.trace(compiled(name, device_codegen="triton"), *given)
    kernels = [kernel for stages in trace.graphs.values() for kernel in stages.kernels]
    with torch.no_grad():
        trace = mc.trace(compiled(name, device_codegen="triton"), *given)
    return [*kernels, *trace.graphs["forward"].kernels]


def precompile(case: tuple[str, int, int]) -> None:
    """In a process of its own, so that all cores compile; the disk keeps the machine code."""
    for source in kernels_of(*case):
        kernel = gpu_kernel(source, planned_tiles(source.plan))
        kernel_binary(kernel, list(kernel.types)[: kernel.counts[0]], ("cuda", 90), Options())


def gradients(fn: Callable[..., Tensor], given: Sequence[Tensor], down: Tensor) -> list[Tensor]:
    out = fn(*given)
    return [out, *torch.autograd.grad(out, given[:3], down)]


def library(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def worst(found: Sequence[Tensor], right: Sequence[Tensor]) -> list[float]:
    """The largest difference of each, by the largest number."""
    return [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, right)]


def error(name: str, head: int, length: int = 1000) -> float:
    """Of results and gradients against float64, by that of the library's plain causal attention."""
    given = inputs(head, length, torch.bfloat16, "cuda", 1, 2)
    down = torch.randn_like(given[0])

    def errors(fn: Callable[..., Tensor], reference: str) -> list[float]:
        exact = [x.detach().double().requires_grad_(x.requires_grad) for x in given]
        right = gradients(partial(attention, CASES[reference]), exact, down.double())
        return worst(gradients(fn, given, down), right)

    ours, theirs = errors(compiled(name), name), errors(library, "causal")
    return max(a / b for a, b in zip(ours, theirs))


def flex(name: str, bias: Tensor, slopes: Tensor) -> Callable[..., Tensor]:
    """A case for torch.compile's flex_attention."""
    mods: dict[str, Any] = {
        "biased": lambda s, b, h, i, j: s + bias[h, i, j],
        "alibi": lambda s, b, h, i, j: s + slopes[h, 0, 0] * (j - i),
        "capped": lambda s, b, h, i, j: 20 * torch.tanh(s / 20),
    }
    far = 1024 if name == "windowed" else 2**30
    length, device = bias.shape[-1], str(bias.device)
    band = create_block_mask(
        lambda b, h, i, j: (i >= j) & (i - j < far), None, None, length, length, device
    )
    call = partial(flex_attention, score_mod=mods.get(name), block_mask=band)
    compiled = torch.compile(lambda q, k, v: call(q, k, v), dynamic=False, fullgraph=True)
    return lambda q, k, v, *more: compiled(q, k, v)


def times(
    name: str, head: int, length: int, seconds: float, with_flex: bool = False
) -> list[list[float]]:
    """Milliseconds of forward and backward: ours, the library's (the plain template's for changed scores),
    and flex_attention's for these scores and for plain ones."""
    fns = {"ours": compiled(name), "theirs": library if name == "causal" else compiled("causal")}
    given = inputs(head, length, torch.bfloat16, "cuda")
    if with_flex:
        torch.compiler.reset()  # it recompiles one function only so often
        fns |= {f"flex {n}": flex(n, *given[3:]) for n in (name, "causal")}
    down = torch.randn_like(given[0])
    calls: dict[str, Any] = {}
    for side, fn in fns.items():
        calls[f"{side} forward"] = torch.no_grad()(partial(fn, *given))
        calls[f"{side} step"] = partial(gradients, fn, given, down)
    for call in calls.values():
        call()
    found = time_in_turns(calls, seconds, "cuda")
    both = []
    for side in fns:
        forward_ms, step_ms = (1e3 * found.median(f"{side} {what}") for what in ("forward", "step"))
        both.append([forward_ms, step_ms - forward_ms])
    return both


def run(chosen: argparse.Namespace) -> int:
    names = chosen.names or list(CASES)
    cases = [(n, h, size) for n in names for h in chosen.head for size in chosen.length]
    cases = [case for case in cases if case[0] == "causal" or case[2] == max(chosen.length)]
    with ProcessPoolExecutor(chosen.jobs, get_context("spawn")) as pool:
        list(
            pool.map(
                precompile,
                {*cases, *((n, h, 1000) for n, h, _ in cases)} if chosen.jobs > 1 else [],
            )
        )
    missed, rows = 0, []
    for name, head, length in cases:
        off = error(name, head)
        ours, theirs, *others = times(name, head, length, chosen.seconds, chosen.flex)
        ratios = [a / b for a, b in zip(ours, theirs)]
        limit = AT_MOST_SLOWER if name == "causal" else AT_MOST_MORE
        bad = off > AT_MOST_OFF or max(ratios) > limit
        missed += bad
        flops = 4 * BATCH * HEADS * length * length * head / 2
        speeds = [flops * times / ms / 1e9 for times, ms in zip((1, 2.5), ours)]
        rows.append(
            [name, str(head), str(length), f"{off:.2f}"]
            + [f"{ms:.3f}" for ms in (*ours, *theirs)]
            + [f"{ratio:.2f}" for ratio in ratios]
            + [f"{speed:.0f}" for speed in speeds]
            + [f"{a:.3f} ({a / b:.2f})" for a, b in zip(*others[:1], *others[-1:])]
            + ["missed" if bad else ""]
        )
        print(*rows[-1], flush=True)
    head_row = [
        "case",
        "head",
        "length",
        "error",
        "forward ms",
        "backward ms",
        "theirs",
        "theirs",
        "ratio",
    ]
    flexes = ["flex (ratio)"] * 2 * chosen.flex
    print(table_text([*head_row, "ratio", "TFLOP/s", "TFLOP/s", *flexes, ""], rows))
    print(f"{missed} of {len(rows)} miss a target")
    return int(missed > 0)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.attention", description=__doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (all)")
    add("--head", type=int, nargs="+", default=[64, 128], help="sizes of heads")
    add(
        "--length",
        type=int,
        nargs="+",
        default=[2048, 8192],
        help="tokens; changed scores: the most",
    )
    add("--seconds", type=float, default=1.0, help="to measure each case")
    add("--flex", action="store_true", help="time torch.compile's flex_attention, too")
    add("--jobs", type=int, default=1, help="processes that compile beforehand")
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(run(arguments()))
