"""Random programs until the time is over: `python -m tests.fuzz --minutes 5 --seed 0 --backend inductor`.

Prints each program that behaves differently when compiled, made smaller; then how many there were. Exit code
1 if any differs, but for those whose plain result hangs on rounding (`tests/fuzz/rounding.py`).
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import sys
import time
from collections import Counter

import torch

from minicompile import reset
from tests.fuzz.compare import BACKENDS, difference, undecided
from tests.fuzz.generator import generate
from tests.fuzz.shrink import compiles, shrink

SLOW = 60
"""Seconds after which a program's stack is printed."""


def judge(seed: int, size: int, backend: str) -> str:
    """What became of a seed's program; prints it if it differs."""
    program = generate(seed, size)
    if not compiles(str(program)):
        return "not Python"
    why = difference(str(program), backend)
    if not why:
        return "alike"
    kind = why.partition(":")[0]
    if undecided(str(program), backend, why):
        kind = "hangs on rounding"
    else:
        program = shrink(program, lambda text: difference(text, backend).startswith(kind))
    print(f"\nseed {seed}: {kind}, {why}\n{program.function}", flush=True)
    return kind


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--seed", type=int, default=0, help="the first program's seed")
    parser.add_argument("--count", type=int, help="how many programs, however long it takes")
    parser.add_argument("--backend", choices=sorted(BACKENDS), default="eager")
    parser.add_argument("--size", type=int, default=5, help="statements of a program")
    parser.add_argument("--show", action="store_true", help="print the first program, run nothing")
    options = parser.parse_args()
    if options.show:
        print(generate(options.seed, options.size))
        return 0
    faulthandler.enable()
    torch.set_num_threads(1)
    end, became = time.monotonic() + 60 * options.minutes, Counter[str]()
    for seed in itertools.islice(itertools.count(options.seed), options.count):
        if options.count is None and time.monotonic() > end:
            break
        faulthandler.dump_traceback_later(SLOW, exit=False)
        try:
            became[judge(seed, options.size, options.backend)] += 1
        except torch.AcceleratorError as error:  # of eager; no later call of this process works
            print(f"\nseed {seed} ends the run: {error}\n{generate(seed, options.size).function}")
            break
        reset()
    faulthandler.cancel_dump_traceback_later()
    print(f"{became.total()} programs: {dict(became)}")
    return int(bool(became.keys() - {"alike", "not Python", "hangs on rounding"}))


if __name__ == "__main__":
    sys.exit(main())
