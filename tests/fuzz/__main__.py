"""Random programs until the time is over: `python -m tests.fuzz --minutes 5 --seed 0 --backend inductor`.

`--count 5000 --jobs 16` runs so many programs in so many processes.

Prints each program that behaves differently when compiled, made smaller, and writes it down as a test file.
Then how many there were, and how they ran. Exit code 1 if any differs, but for those whose plain result hangs
on rounding (`tests/fuzz/rounding.py`).
"""

from __future__ import annotations

import argparse
import faulthandler
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from minicompile import reset
from minicompile.ops.events import observer
from tests.fuzz.compare import BACKENDS, difference, undecided
from tests.fuzz.counting import Counting
from tests.fuzz.generator import Program, generate
from tests.fuzz.shrink import compiles, shrink

SLOW = 60
"""Seconds after which a program's stack is printed."""


def as_test(program: Program, why: str, backend: str) -> str:
    """A test that fails as long as the program behaves differently."""
    prelude = "widened(PRELUDE)" if program.wide else "PRELUDE"
    return f'''"""A random program (seed {program.seed}) that behaved differently when compiled."""

from tests.fuzz.compare import difference
from tests.fuzz.generator import PRELUDE{", widened" if program.wide else ""}

# {" ".join(why.split())[:200]}
PROGRAM = r"""
{program.function.strip()}
"""


def test_seed_{program.seed}_behaves_as_in_python() -> None:
    assert difference({prelude} + PROGRAM, {backend!r}) == ""
'''


def sharded(seed: int, count: int, jobs: int) -> int:
    """Run this command in several processes, a range of seeds each; how many of them failed."""
    share = -(-count // jobs)
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz", *sys.argv[1:], "--jobs", "1"]
    ranges = [["--seed", f"{seed + job * share}", "--count", f"{share}"] for job in range(jobs)]
    failed = sum(process.wait() != 0 for process in [subprocess.Popen(command + r) for r in ranges])
    print(f"{share * jobs} programs in {jobs} processes, {failed} of which met a difference")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--seed", type=int, default=0, help="the first program's seed")
    parser.add_argument("--count", type=int, help="how many programs, however long it takes")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the count")
    parser.add_argument("--backend", choices=sorted(BACKENDS), default="eager")
    parser.add_argument("--size", type=int, default=5, help="statements of a program")
    parser.add_argument("--show", action="store_true", help="print the first program, run nothing")
    parser.add_argument("--whole", action="store_true", help="don't make failures smaller")
    parser.add_argument("--write", type=Path, help="the folder for test files of what differs")
    options = parser.parse_args()
    if options.show:
        print(generate(options.seed, options.size))
        return 0
    if options.count is not None and options.jobs > 1:
        return int(sharded(options.seed, options.count, options.jobs) > 0)
    faulthandler.enable()
    torch.set_num_threads(1)
    counting = Counting()
    observer("fuzz")(counting.listen)
    end, seed, failed = time.monotonic() + 60 * options.minutes, options.seed, Counter[str]()
    hanging = 0
    while time.monotonic() < end if options.count is None else seed < options.seed + options.count:
        program = generate(seed, options.size)
        faulthandler.dump_traceback_later(SLOW, exit=False)
        if compiles(str(program)):
            try:
                why = difference(str(program), options.backend)
            except torch.AcceleratorError as error:  # of eager; no later call of this process works
                print(f"\nseed {seed} ends the run: {error}\n{program.function}")
                break
            counting.program()
        else:
            why, counting.how["not Python"] = "", counting.how["not Python"] + 1
        if why and undecided(str(program), options.backend, why):
            print(f"\nseed {seed} hangs on rounding: {why}", flush=True)
            why, hanging = "", hanging + 1
        if why:
            kind = why.partition(":")[0]
            failed[kind] += 1
            if not options.whole:

                def fails(text: str, kind: str = kind) -> bool:
                    return difference(text, options.backend).startswith(kind)

                program = shrink(program, fails)
                why = difference(str(program), options.backend)
                counting.graphs, counting.refused = 0, set()
            print(f"\nseed {seed}: {why}\n{program.function}", flush=True)
            if options.write:
                options.write.mkdir(parents=True, exist_ok=True)
                file = options.write / f"test_seed_{seed}_{options.backend}.py"
                file.write_text(as_test(program, why, options.backend))
        reset()
        seed += 1
    faulthandler.cancel_dump_traceback_later()
    print(f"{seed - options.seed} programs, {failed.total()} differ: {dict(failed)}", end="")
    print(f", {hanging} hang on rounding" * bool(hanging))
    print(counting)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
