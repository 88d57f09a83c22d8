"""`python -m tests.bench.torch_side [NAME ...]`: `mc.compare_with_torch` on a dozen programs.

Exit code 1 if any of the four ways is wrong, fails or runs in eager. `--full` prints each comparison.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import minicompile as mc
from minicompile.lessons.model import GPT, GPTConfig

Program = Callable[[], tuple[Any, ...]]
PROGRAMS: dict[str, Program] = {}
"""Name -> function that gives what to call, and its arguments."""


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def lesson_model() -> tuple[GPT, torch.Tensor]:
    torch.manual_seed(0)
    config = GPTConfig(n_layer=1, n_embd=32, block_size=16)
    return GPT(config), torch.randint(config.vocab_size, (2, 16))


@program
def lesson_training() -> tuple[Any, ...]:
    model, tokens = lesson_model()
    return model, tokens, tokens


@program
def lesson_inference() -> tuple[Any, ...]:
    model, tokens = lesson_model()
    return model.requires_grad_(False).eval(), tokens


@program
def batch_norm_cnn() -> tuple[Any, ...]:
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(72, 4)), torch.randn(4, 3, 8, 8)


@program
def graph_break() -> tuple[Any, ...]:
    def broken(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ w)
        print(end="")
        return (y * 2).softmax(-1)

    return broken, torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)


@program
def in_place_on_input() -> tuple[Any, ...]:
    def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        return (x * w).sum(0)

    return scaled, torch.randn(6, 4), torch.randn(4, requires_grad=True)


@program
def dynamic_sizes() -> tuple[Any, ...]:
    def mean(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x).view(-1, 2).sum(0) / x.shape[0]

    return mc.compile(mean, dynamic=True), torch.randn(6, 4)


@program
def marked_dynamic() -> tuple[Any, ...]:
    x = torch.randn(6, 4, requires_grad=True)
    mc.mark_dynamic(x, 0)
    return (lambda x: torch.softmax(x, 0) * x.size(0)), x


@program
def embedding() -> tuple[Any, ...]:
    layers = nn.Embedding(10, 8), nn.LayerNorm(8), nn.Linear(8, 4)
    return nn.Sequential(*layers), torch.randint(10, (3, 5))


@program
def dropout_in_eval() -> tuple[Any, ...]:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU()).eval(), torch.randn(4, 8)


@program
def dropout_in_training() -> tuple[Any, ...]:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU()), torch.randn(4, 8)


@program
def views_and_integers() -> tuple[Any, ...]:
    def mixed(x: torch.Tensor, i: torch.Tensor) -> Any:
        y = x.t()
        return {"picked": y[i], "counts": (i + 1).cumsum(0), "view": y[1:], "same": x}

    return mixed, torch.randn(4, 6), torch.tensor([0, 2, 5])


@program
def attention() -> tuple[Any, ...]:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return (attend, *(torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3)))


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.torch_side", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PROGRAMS))
    parser.add_argument("--full", action="store_true", help="print all of each comparison")
    chosen = parser.parse_args(given)
    bad = 0
    for name in chosen.names or PROGRAMS:
        torch.manual_seed(0)
        start = time.perf_counter()
        found = mc.compare_with_torch(*PROGRAMS[name]())
        seconds = time.perf_counter() - start
        failed = [cell for cell in found.cells if cell.bad is not False]
        bad += bool(failed)
        print(f"{name} ({seconds:.0f} s): {found.conclusion}", flush=True)
        if chosen.full or failed:
            print(found, flush=True)
    print(f"{bad} of {len(chosen.names or PROGRAMS)} differ")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
