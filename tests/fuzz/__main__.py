"""Random programs against eager until the time is over: `python -m tests.fuzz views --minutes 5 --seed 0`.

Prints each program that is wrong when it is compiled, made smaller where its kind can be; then how many there
were. Exit code 1 if any is wrong.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import logging
import sys
import time
from collections.abc import Callable

import torch

from minicompile import reset
from tests.fuzz import compare, generator, loop_checks, loops, shrink, size_checks, sizes, views
from tests.plugins.flash_attention import programs as attention

SLOW = 120
"""Seconds after which a program's stack is printed."""
SIZE = 5
"""Statements of a Python program."""


def python(seed: int, backend: str) -> str:
    """Python around tensors, call by call.

    A program whose plain result already depends on rounding (`rounding.py`) is named, and is not wrong.
    """
    program = generator.generate(seed, SIZE)
    if not shrink.compiles(str(program)):
        return ""
    why = compare.difference(str(program), backend)
    if not why:
        return ""
    if compare.undecided(str(program), backend, why):
        print(f"seed {seed} depends on rounding: {why}", flush=True)
        return ""
    kind = why.partition(":")[0]
    small = shrink.shrink(program, lambda text: compare.difference(text, backend).startswith(kind))
    return f"{why}\n{small.function}"


def view(seed: int, backend: str) -> str:
    """Views and writes through them."""
    outcome = views.run(seed, backend)
    return outcome.difference and f"{outcome.difference}\n{outcome.text}"


def size(seed: int, backend: str) -> str:
    """Sizes that decide branches, shapes and values: compiled at one size and called at others."""
    program = sizes.generate(seed)
    found = size_checks.run(program, backend)
    if not found.why:
        return ""
    small, why = size_checks.shrink(program, backend, found.why)
    return f"{why}\n{small}"


def loop(seed: int, backend: str) -> str:
    """Loops through scheduling and code generation, against the reference interpreter."""
    program = loops.generate(seed)
    why = loop_checks.failure(program, loop_checks.LANGUAGES[backend])
    return f"{why}\n{program}" if why else ""


def attend(seed: int, backend: str) -> str:
    """Written-out attention through the template of kernels."""
    why = attention.wrong(seed)
    return why and f"{why}\n{attention.generate(seed).text}"


KINDS: dict[str, Callable[[int, str], str]] = {
    "python": python, "views": view, "sizes": size, "loops": loop, "attention": attend,
}  # fmt: skip
"""What is wrong with a seed's program on a backend, and the program; "" if nothing is."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS, nargs="?", default="python")
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--seed", type=int, default=0, help="the first program's seed")
    parser.add_argument("--count", type=int, help="how many programs, however long it takes")
    parser.add_argument("--backend", choices=sorted(compare.BACKENDS), default="inductor")
    chosen = parser.parse_args()
    if chosen.kind == "loops" and chosen.backend not in loop_checks.LANGUAGES:
        parser.error(f"loops are generated for one of: {', '.join(loop_checks.LANGUAGES)}")
    faulthandler.enable()
    logging.disable(logging.ERROR)  # torch reports operators that raise on fakes
    torch.set_num_threads(1)
    end, programs, wrong = time.monotonic() + 60 * chosen.minutes, 0, 0
    for seed in itertools.islice(itertools.count(chosen.seed), chosen.count):
        if chosen.count is None and time.monotonic() > end:
            break
        faulthandler.dump_traceback_later(SLOW, exit=False)
        try:
            why = KINDS[chosen.kind](seed, chosen.backend)
        except torch.AcceleratorError as error:  # of eager; no later call of this process works
            print(f"\nseed {seed} ends the run: {error}", flush=True)
            break
        programs += 1
        wrong += bool(why)
        if why:
            print(f"\nseed {seed}: {why}", flush=True)
        reset()
    faulthandler.cancel_dump_traceback_later()
    print(f"{programs} programs, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
