"""Every operator of the installed torch against eager: `python -m tests.opinfo --jobs 8`.

For each OpInfo, variant (function, method, in place, `out=`) and kind of dtype some samples run in eager and
under `mc.compile`: values, dtypes, strides, shared memory, mutated inputs, exceptions and gradients must
agree. An operator counts as covered only if a call of it was in a captured graph that ran. By default its
graphs run with backend="aot_eager": the same operators are in them with every backend, and the C++ compiler
takes seconds for each. Through C++ kernels: `--backend inductor --variants function --samples 2`. Exit code 1
if anything differs.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import re
import sys

from tests.opinfo.cases import KINDS, LEFT_OUT, METADATA_ONLY, VARIANTS, database
from tests.opinfo.compare import BACKENDS
from tests.opinfo.workers import Result, Row, run_all


def report(results: list[Result]) -> bool:
    """Print the table; whether nothing is wrong."""
    every = [(result.op, row) for result in results for row in result.rows]
    print(f"{'':<16}" + "".join(f"{h:>9}" for h in ("ops", "covered", "calls", "covered", "wrong")))

    def line(label: str, some: list[tuple[str, Row]]) -> None:
        inside = [(op, row) for op, row in some if row.in_graph]
        ops, covered = ({op for op, _ in rows} for rows in (some, inside))
        cells = len(ops), len(covered), len(some), len(inside), sum(bool(r.wrong) for _, r in some)
        print(f"{label:<16}" + "".join(f"{cell:>9}" for cell in cells))

    line("all", every)
    for key in ("variant", "dtype"):
        for value in dict.fromkeys(getattr(row, key) for _, row in every):
            line(value, [(op, row) for op, row in every if getattr(row, key) == value])
    reasons: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for op, row in every:
        for reason in row.breaks if not row.in_graph else ():
            reasons[re.sub(r"0x[0-9a-f]+|\d+", "N", reason)[:120]][op] += 1
    print("\nnot in a graph, by reason (calls, operators):")
    for reason, ops in sorted(reasons.items(), key=lambda item: -item[1].total()):
        print(f"{ops.total():>6} {len(ops):>4}  {reason}  [{', '.join(sorted(ops)[:4])}]")
    wrong = {row.case: row.wrong[:300] for _, row in every if row.wrong}
    lost = {result.op: result.error.strip().splitlines()[-1] for result in results if result.error}
    left = {" ".join(pair): why for pair, why in LEFT_OUT.items()}
    parts = {"values are not compared": METADATA_ONLY, "left out": left}
    for title, part in {**parts, "wrong": wrong, "no verdict": lost}.items():
        print(
            f"\n{title}: {len(part)}", *(f"  {name}: {why}" for name, why in part.items()), sep="\n"
        )
    return not wrong and not lost


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--backend", choices=list(BACKENDS), default="aot_eager")
    parser.add_argument("--dynamic", action="store_const", const=True, help="all sizes are symbols")
    parser.add_argument("--option", action="append", default=[], help="device_codegen=triton, ...")
    parser.add_argument("--ops", nargs="*", default=["*"], help="these only: `fnmatch` patterns")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--samples", type=int, default=3, help="of each variant and dtype")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one operator")
    chosen = parser.parse_args()
    names = [n for n in database() if any(fnmatch.fnmatch(n, p) for p in chosen.ops)]
    results = run_all(names, chosen)
    return 0 if report(sorted(results, key=lambda result: result.op)) else 1


if __name__ == "__main__":
    sys.exit(main())
