"""What it costs to watch: compile time of the lesson model with logs, dump folder and traces, off and on.

    python -m tests.bench.tracing [--rounds 15] [--layers 2]

off    as everybody compiles: all observers there, none asked for; against a table without observers
on     every log channel verbose into a file, and the dump folder
trace  mc.trace

One training step's compilation each, its kernels in the disk cache, in turn round after round: medians of CPU
seconds, and of the ratios within rounds. Exit code 1 if off costs over 5% or the others over 50%.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import minicompile as mc
from minicompile.lessons.model import GPT, GPTConfig
from minicompile.ops.events import observer
from minicompile.ops.registry import scoped
from minicompile.shapes.expr import index_text

LIMITS = {"off": 0.05, "on": 0.5, "trace": 0.5}


def ways(folder: Path, layers: int) -> dict[str, Callable[[], object]]:
    model = GPT(GPTConfig(n_layer=layers))
    tokens = torch.randint(0, model.config.vocab_size, (4, model.config.block_size))

    def compiled(**options: object) -> None:
        mc.compile(model, options=options)(tokens, tokens)

    def bare() -> None:
        with scoped():
            observer.rules.clear()
            compiled()

    def on() -> None:
        with mc.logs("+all", file=folder / "logs.txt"):
            compiled(trace=True, debug_dir=str(folder / "dump"))

    return {
        "bare": bare,
        "off": compiled,
        "on": on,
        "trace": lambda: mc.trace(model, tokens, tokens),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=2)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = ways(Path(folder), chosen.layers)
        seconds: dict[str, list[float]] = {name: [] for name in found}
        for round in range(chosen.rounds + 1):
            order = list(found)[round % len(found) :] + list(found)[: round % len(found)]
            for name in order:
                mc.reset()
                index_text.cache_clear()
                began = time.process_time()
                found[name]()
                if round:  # the first fills the caches
                    seconds[name].append(time.process_time() - began)
    base = statistics.median(seconds["bare"])
    print(f"bare   {base:.3f} s of CPU, median of {chosen.rounds}")
    failed = False
    for name, limit in LIMITS.items():
        median = statistics.median(seconds[name])
        ratio = statistics.median(
            a / b for a, b in zip(seconds[name], seconds["bare"], strict=True)
        )
        failed |= ratio - 1 > limit
        print(f"{name:<6} {median:.3f} s, {ratio - 1:+.1%} (at most {limit:+.0%})")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
