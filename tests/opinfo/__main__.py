"""Every operator of the installed torch against eager: `python -m tests.opinfo --jobs 8`.

For each OpInfo, variant (function, method, in place, `out=`) and kind of dtype some samples run in
eager and under `mc.compile`: values, dtypes, strides, shared memory, mutated inputs, exceptions and
gradients must agree. An operator counts as covered only if a call of it was in a captured graph that
ran; `--side both` counts the same for torch.compile. Its graphs run with backend="aot_eager": the same
operators are in them with every backend, and its C++ compiler takes seconds for each.

Through C++ kernels, in less than 8 minutes on 16 cores; once more to go on where the time was over:

    python -m tests.opinfo --backend inductor --variants function --limit-samples 2 --other-samples 1 \\
        --jobs 15 --minutes 7.5 --json opinfo.json

    --backend NAME        "inductor" or "aot_eager", which stops before the kernels
    --dynamic             all sizes are symbols
    --option NAME=VALUE   an option of mc.compile, also several: device_codegen=triton, inline=never
    --ops NAME ...        these only (names as in the table, `fnmatch` patterns)
    --from I --to J       a range of the database
    --jobs N              worker processes; each runs one operator at a time
    --limit-samples K     samples per variant and dtype
    --other-samples K     the same for all kinds but "float", if not as many
    --variants, --kinds   comma-separated
    --json FILE           one line per operator, written as it is done; those in it are not run again
    --minutes M           begin nothing new after that time, and stop what runs
    --timeout S           seconds for one operator
    --report FILE ...     print the table of such files and run nothing
"""

from __future__ import annotations

import argparse
import ast
import collections
import fnmatch
import itertools
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TextIO

import torch

from minicompile.options import Options, make_options
from tests.opinfo.cases import KINDS, LEFT_OUT, METADATA_ONLY, VARIANTS, cases, database
from tests.opinfo.compare import BACKENDS, Way, check, typically

MARK = "@@opinfo "


def check_operator(name: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """All verdicts of one operator."""
    op, found = database()[name], []
    way = Way(chosen.backend, chosen.dynamic, options_of(chosen))
    error = ""
    variants, kinds = tuple(chosen.variants.split(",")), tuple(chosen.kinds.split(","))
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            count = chosen.limit_samples, chosen.other_samples
            for case in cases(op, variants, kinds, *count):
                verdict = check(case, chosen.side, way)
                if verdict.ratio > 1:
                    draws = (cases(op, variants, kinds, *count, seed) for seed in range(1, 10))
                    typically(verdict, itertools.chain(*draws), way)
                found.append(verdict.as_dict())
        except Exception:
            error = traceback.format_exc(limit=-4)
    seconds = round(time.perf_counter() - start, 1)
    return {"op": name, "verdicts": found, "error": error, "seconds": seconds}


def options_of(chosen: argparse.Namespace) -> Options:
    """Verifying, and what was asked for; values are Python's, or else text."""
    given = dict(text.split("=", 1) for text in chosen.option)
    return make_options(options={"verify": True} | {k: parsed(v) for k, v in given.items()})


def parsed(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


# Workers -----------------------------------------------------------------------------------------


def work(chosen: argparse.Namespace) -> None:
    """Names come in by lines, results go out by lines."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        found = check_operator(line.strip(), chosen)
        print(MARK + json.dumps(found), flush=True)


class Worker:
    """A process that checks one operator at a time."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.process: subprocess.Popen[str] | None = None

    def started(self) -> subprocess.Popen[str]:
        if self.process is None:
            options = ["backend", "limit_samples", "other_samples", "side", "variants", "kinds"]
            given = [f"--{key.replace('_', '-')}={getattr(self.chosen, key)}" for key in options]
            given += ["--dynamic"] * bool(self.chosen.dynamic)
            given += [f"--option={text}" for text in self.chosen.option]
            command = [sys.executable, "-m", "tests.opinfo", "--worker", *given]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                command,
                text=True,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self.process

    def check(self, op: str, end: float) -> dict[str, Any] | None:
        """The operator's verdicts. A process that dies or takes too long is replaced, and told of.

        None: the whole run's time was over.
        """
        left = end - time.monotonic()
        if left <= 0:
            return None
        process = self.started()
        assert process.stdin is not None and process.stdout is not None
        late = threading.Timer(min(self.chosen.timeout, left), process.kill)
        late.start()
        try:
            process.stdin.write(op + "\n")
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith(MARK):
                    return json.loads(line[len(MARK) :])
        except BrokenPipeError:
            pass
        finally:
            late.cancel()
        code = process.wait()
        self.process = None
        ended = late.finished.is_set() and code == -9
        if ended and left < self.chosen.timeout:
            return None
        why = f"no end after {self.chosen.timeout:g} s" if ended else f"the process died ({code})"
        return {"op": op, "verdicts": [], "error": why, "seconds": 0.0}

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def run_all(names: list[str], chosen: argparse.Namespace) -> list[Any]:
    """Results of all operators that there was time for, written to `--json` as they come."""
    end = time.monotonic() + 60 * chosen.minutes
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    workers = [Worker(chosen) for _ in range(chosen.jobs)]
    for worker in workers:
        idle.put(worker)

    def one(name: str) -> dict[str, Any] | None:
        worker = idle.get()
        try:
            return worker.check(name, end)
        finally:
            idle.put(worker)

    done: list[Any] = []
    with (
        open(chosen.json or os.devnull, "a", encoding="utf-8") as file,
        ThreadPoolExecutor(chosen.jobs) as pool,
    ):
        for found in as_completed([pool.submit(one, name) for name in names]):
            if (result := found.result()) is not None:
                done.append(result)
                keep(result, file, len(done), len(names))
    for worker in workers:
        worker.stop()
    return done


def keep(found: dict[str, Any], file: TextIO, count: int, total: int) -> None:
    file.write(json.dumps(found) + "\n")
    file.flush()
    wrong = sum(bool(verdict["wrong"]) for verdict in found["verdicts"])
    if wrong or found["error"] or count % 25 == 0:
        end = found["error"].strip().splitlines()[-1:] or [""]
        print(f"[{count}/{total}] {found['op']}: {wrong} wrong {end[0]}", flush=True)


# The table ---------------------------------------------------------------------------------------


def merged(paths: list[str]) -> list[Any]:
    """Results of several runs: later ones replace earlier ones of the same side."""
    known: dict[str, Any] = {}
    for path in paths:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            new = json.loads(line)
            old = known.setdefault(new["op"], {**new, "verdicts": []})
            old["error"] = new["error"]
            verdicts = {verdict["case"]: verdict for verdict in old["verdicts"]}
            for verdict in new["verdicts"]:
                before = verdicts.setdefault(verdict["case"], verdict)
                theirs = verdict["theirs"] if before["theirs"] is None else before["theirs"]
                if verdict["in_graph"] is None:
                    verdict = before
                verdicts[verdict["case"]] = {**verdict, "theirs": theirs}
            old["verdicts"] = list(verdicts.values())
    return list(known.values())


def general(reason: str) -> str:
    """A reason without the names and numbers of one case."""
    reason = re.sub(r"0x[0-9a-f]+|\d+", "N", reason)
    return reason if len(reason) < 120 else reason[:117] + "..."


def loops_alone(verdicts: list[Any]) -> bool:
    """Whether no call's graph, forward or backward, leaves an operator to a library."""
    inside = [verdict for verdict in verdicts if verdict["in_graph"]]
    return bool(inside) and not any(verdict["externs"] for verdict in inside)


def report(results: list[Any], out: TextIO = sys.stdout) -> bool:
    """Print the table; whether nothing is wrong, nor errs more than is allowed in most draws."""
    results = sorted(results, key=lambda found: found["op"])
    verdicts = [verdict for found in results for verdict in found["verdicts"]]
    lost = [found for found in results if found["error"]]
    theirs_known = any(verdict["theirs"] is not None for verdict in verdicts)
    kernels = any(verdict["kernels"] for verdict in verdicts)

    def line(label: str, chosen: list[tuple[str, list[Any]]]) -> None:
        chosen = [(op, some) for op, some in chosen if some]
        cells = [
            len(chosen),
            sum(any(v["in_graph"] for v in some) for _, some in chosen),
            sum(any(v["theirs"] for v in some) for _, some in chosen) if theirs_known else "",
            sum(loops_alone(some) for _, some in chosen) if kernels else "",
            sum(any(v["wrong"] for v in some) for _, some in chosen),
            sum(len(some) for _, some in chosen),
            sum(bool(v["in_graph"]) for _, some in chosen for v in some),
            sum(bool(v["theirs"]) for _, some in chosen for v in some) if theirs_known else "",
            sum(bool(v["wrong"]) for _, some in chosen for v in some),
            sum(v["gradients"] > 0 for _, some in chosen for v in some),
        ]
        print(f"{label:<16}" + "".join(f"{cell!s:>9}" for cell in cells), file=out)

    def part(key: str, value: str) -> list[tuple[str, list[Any]]]:
        return [(f["op"], [v for v in f["verdicts"] if v[key] == value]) for f in results]

    heads = [
        "ops",
        "covered",
        "theirs",
        "loops",
        "wrong",
        "calls",
        "covered",
        "theirs",
        "wrong",
        "backward",
    ]
    print(f"{'':<16}" + "".join(f"{head:>9}" for head in heads), file=out)
    line("all", [(found["op"], found["verdicts"]) for found in results])
    for key in ("variant", "dtype"):
        for value in dict.fromkeys(verdict[key] for verdict in verdicts):
            line(value, part(key, value))

    reasons: collections.Counter[str] = collections.Counter()
    example: dict[str, set[str]] = collections.defaultdict(set)
    for found in results:
        for verdict in found["verdicts"]:
            if not verdict["in_graph"] and not verdict["eager_raises"]:
                for reason in verdict["breaks"] or ["nothing to compile"]:
                    reasons[general(reason)] += 1
                    example[general(reason)].add(found["op"])
    print("\nnot in a graph, by reason (calls, operators):", file=out)
    for reason, count in reasons.most_common():
        names = sorted(example[reason])
        print(f"{count:>6} {len(names):>4}  {reason}  [{', '.join(names[:4])}]", file=out)
    if theirs_known:
        missing = [
            found["op"]
            for found in results
            if any(v["theirs"] for v in found["verdicts"])
            and not any(v["in_graph"] for v in found["verdicts"])
        ]
        print(f"\nin torch.compile's graphs alone: {', '.join(missing) or 'none'}", file=out)
    externs = collections.Counter(
        op for f in results for op in {e for v in f["verdicts"] for e in v["externs"]}
    )
    if kernels:
        told = ", ".join(f"{op} {count}" for op, count in externs.most_common())
        print(f"\nleft to a library, with the number of operators: {told or 'none'}", file=out)
    far = [(f["op"], [v for v in f["verdicts"] if v["ratio"] > 1]) for f in results]
    worst = [max(some, key=lambda v: (v["typical"][0], v["ratio"])) for _, some in far if some]
    typical = sum(v["typical"][0] > 1 for v in worst)
    print(
        "\nerrors beyond twice eager's or 2 units in the last place, and the same with eager judged by ours: "
        f"{len(worst)} operators in one draw of numbers, {typical} in most of nine others",
        file=out,
    )
    for verdict in sorted(worst, key=lambda v: -v["typical"][0]):
        ratios = (verdict["ratio"], verdict["eagers"], *verdict["typical"])
        told = "{:.3g} ({:.3g}), in others {:.3g} ({:.3g})".format(*ratios)
        print(f"  {told}  {verdict['case']}, length {verdict['length']}", file=out)
    print("\nvalues are not compared:", file=out)
    for name, why in METADATA_ONLY.items():
        print(f"  {name}: {why}", file=out)
    print("\nleft out:", file=out)
    for (name, variant), why in LEFT_OUT.items():
        print(f"  {name} {variant}: {why}", file=out)
    wrong = [verdict for verdict in verdicts if verdict["wrong"]]
    print(f"\nwrong: {len(wrong)}", file=out)
    for verdict in wrong:
        print(f"  {verdict['case']}: {verdict['wrong'][:300]}", file=out)
    print(f"\nno verdict (crash, time limit, error of the check): {len(lost)}", file=out)
    for found in lost:
        print(f"  {found['op']}: {found['error'].strip().splitlines()[-1]}", file=out)
    return not wrong and not lost and not typical


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("--backend", choices=list(BACKENDS), default="aot_eager")
    made.add_argument("--dynamic", action="store_const", const=True, default=None)
    made.add_argument("--option", action="append", default=[])
    made.add_argument("--ops", nargs="*", default=[])
    made.add_argument("--from", dest="first", type=int, default=0)
    made.add_argument("--to", dest="last", type=int, default=None)
    made.add_argument("--jobs", type=int, default=1)
    made.add_argument("--limit-samples", type=int, default=3)
    made.add_argument("--other-samples", type=int, default=0)
    made.add_argument("--side", choices=("minicompile", "torch", "both"), default="both")
    made.add_argument("--variants", default=",".join(VARIANTS))
    made.add_argument("--kinds", default=",".join(KINDS))
    made.add_argument("--timeout", type=float, default=600.0)
    made.add_argument("--minutes", type=float, default=float("inf"))
    made.add_argument("--json", default="")
    made.add_argument("--report", nargs="*", default=[])
    made.add_argument("--worker", action="store_true")
    return made


def main(arguments: list[str]) -> int:
    chosen = parser().parse_args(arguments)
    if chosen.worker:
        work(chosen)
        return 0
    if chosen.report:
        return 0 if report(merged(chosen.report)) else 1
    names = list(database())[chosen.first : chosen.last]
    if chosen.ops:
        names = [n for n in names if any(fnmatch.fnmatch(n, p) for p in chosen.ops)]
    known = merged([chosen.json]) if chosen.json and Path(chosen.json).exists() else []
    known = [found for found in known if found["op"] in names]
    names = [n for n in names if n not in {found["op"] for found in known}]
    made = run_all(names, chosen)
    fine = report(known + made)
    if len(made) < len(names):
        again = "the same command goes on" if chosen.json else "give --json FILE to go on later"
        print(f"\nnot run, for the time was over: {len(names) - len(made)} operators; {again}")
    return 0 if fine and len(made) == len(names) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
