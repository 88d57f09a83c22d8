"""Random programs until the time is over: `python -m tests.fuzz --seconds 60 --seed 0 --backend eager`.

Prints each program that behaves differently when compiled, made smaller, ready to run. Exit code 1 if any.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
from collections import Counter

import torch

from minicompile import reset
from tests.fuzz.compare import TOLERANCES, difference
from tests.fuzz.generator import PRELUDE, generate
from tests.fuzz.shrink import compiles, shrink

SLOW = 60
"""Seconds after which a program's stack is printed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0, help="the first program's seed")
    parser.add_argument("--count", type=int, help="how many programs, however long it takes")
    parser.add_argument("--backend", choices=sorted(TOLERANCES), default="eager")
    parser.add_argument("--size", type=int, default=7)
    parser.add_argument("--show", action="store_true", help="print the first program, run nothing")
    parser.add_argument("--whole", action="store_true", help="don't make failures smaller")
    options = parser.parse_args()
    if options.show:
        print(generate(options.seed, options.size))
        return 0
    faulthandler.enable()
    torch.set_num_threads(1)
    end, seed, failed = time.monotonic() + options.seconds, options.seed, Counter[str]()
    while time.monotonic() < end if options.count is None else seed < options.seed + options.count:
        program = generate(seed, options.size)
        faulthandler.dump_traceback_later(SLOW, exit=False)
        if compiles(str(program)) and (why := difference(str(program), options.backend)):
            kind = why.partition(":")[0]
            failed[kind] += 1
            if not options.whole:

                def fails(text: str, kind: str = kind) -> bool:
                    return difference(text, options.backend).startswith(kind)

                program = shrink(program, fails)
                why = difference(str(program), options.backend)
            print(f"\nseed {seed}: {why}\n{str(program).removeprefix(PRELUDE)}", flush=True)
        reset()
        seed += 1
    print(f"{seed - options.seed} programs, {failed.total()} differ: {dict(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
