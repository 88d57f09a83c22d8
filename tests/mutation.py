"""`python -m tests.mutation`: plant small faults in the core, one at a time, and see whether tests notice.

A fault is a change of one place of one file: a comparison turned, a number off by one, operands swapped,
`and` for `or`, a condition that no longer holds back what it guards. Numbers outside of functions stay: most
are measured choices, as of how much to unroll, and others are as right. Files are drawn by their size in
tokens, places at random (`--seed`); `--faults FILE` plants those that an earlier run printed. The last
`python -m tests.coverage` says which tests execute the faulty line: those of `make test` run, then the long
ones; each time those of the fault's room and of tests/expected first, then quick ones, until they add up to
`--seconds`. A fault in a line that none executes survives at once. A test notices a fault if it fails with it
and passes without.
Survivors are listed for a verdict by hand: a test is missing, the code is not needed, or nothing changes.
`--verdicts FILE` has verdicts from earlier runs, and the table counts what changes nothing apart.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import itertools
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from minicompile.options import child_environment, default_cache_dir
from tests.coverage.marks import blocks, first_lines, is_marked
from tests.coverage.rows import rows
from tests.imports import PACKAGE, ROOT, core_files
from tests.size import sizes

TURNED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
SWAPPED = {ast.Sub: "-", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%"}
AWAY = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", "*.egg-info")


@dataclass(frozen=True)
class Fault:
    """A change of one place: `before` becomes `after` at byte `start` of a file of the package."""

    file: Path
    line: int
    start: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.change}"

    @property
    def change(self) -> str:
        return f"{self.before!r} becomes {self.after!r}"

    @property
    def room(self) -> str:
        return self.file.parts[0] if len(self.file.parts) > 1 else "front door"

    def plant(self, package: Path) -> bytes:
        """Write the changed file, and return what it held before."""
        path = package / self.file
        held = path.read_bytes()
        end = self.start + len(self.before.encode())
        assert held[self.start : end] == self.before.encode(), self
        path.write_bytes(held[: self.start] + self.after.encode() + held[end:])
        return held


def changes(node: ast.AST, text: str) -> Iterator[tuple[ast.expr, str]]:
    """Yield what a node could be instead: the part of the tree, and the text in its place."""

    def part(of: ast.AST) -> str:
        return ast.get_source_segment(text, of) or ""

    match node:
        case ast.Compare(left, [operator], [right]) if type(operator) in TURNED:
            yield node, f"{part(left)} {TURNED[type(operator)]} {part(right)}"
        case ast.BinOp(left, operator, right) if type(operator) in SWAPPED:
            yield node, f"({part(right)}) {SWAPPED[type(operator)]} ({part(left)})"
        case ast.BoolOp(operator, values):
            other = " or " if isinstance(operator, ast.And) else " and "
            yield node, other.join(f"({part(value)})" for value in values)
        case ast.Constant(int(number)) if not isinstance(number, bool):
            yield node, str(number + 1)
        case ast.If(test, [ast.Return() | ast.Raise() | ast.Continue()], []):
            yield test, "False"


def nodes(tree: ast.AST, inside: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Yield every node, and whether it is in the body of a function."""
    yield tree, inside
    for name, part in ast.iter_fields(tree):
        body = inside or (isinstance(tree, ast.FunctionDef) and name == "body")
        for node in part if isinstance(part, list) else [part]:
            if isinstance(node, ast.AST):
                yield from nodes(node, body)


def faults_of(file: Path) -> list[Fault]:
    """Return every fault that can be planted in a file, each in place of one line or a part of it."""
    text = (PACKAGE / file).read_text(encoding="utf-8")
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    faults = []
    for node, inside in nodes(ast.parse(text)):
        if isinstance(node, ast.Constant) and not inside:
            continue
        for place, after in changes(node, text):
            before = ast.get_source_segment(text, place)
            if before and before != after and "\n" not in before:
                start = starts[place.lineno - 1] + place.col_offset
                faults.append(Fault(file, place.lineno, start, before, after))
    return faults


def draw(count: int, seed: int) -> list[Fault]:
    """Return `count` different faults of the core, files drawn by their tokens."""
    source = random.Random(seed)
    possible = {file: faults_of(file) for file in core_files()}
    files = [file for file in core_files() if possible[file]]
    weights = [sizes(PACKAGE)[file].tokens for file in files]
    drawn: dict[Fault, None] = {}
    while len(drawn) < count:
        [file] = source.choices(files, weights)
        drawn[source.choice(possible[file])] = None
    return list(drawn)


def read_faults(path: Path) -> list[Fault]:
    """Return the faults that a file lists as they are printed. Raises SystemExit if one isn't possible."""
    texts = {line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()}
    possible = {str(fault): fault for file in core_files() for fault in faults_of(file)}
    if unknown := texts - possible.keys():
        raise SystemExit(f"the core has no place for these faults: {sorted(unknown)}")
    return [possible[text] for text in sorted(texts)]


NOTHING = "nothing changes"
"""How the verdict on a fault begins that no test can notice."""


def read_verdicts(path: Path) -> dict[Fault, str]:
    """Return the verdicts of a file, which has lines `file: 'before' becomes 'after' -> verdict`.

    The number of a line may stand behind the file, as printed. A verdict that does not fit exactly one place
    of the core is said and left out.
    """
    places: dict[str, list[Fault]] = defaultdict(list)
    for fault in itertools.chain.from_iterable(map(faults_of, core_files())):
        places[str(fault)].append(fault)
        places[f"{fault.file}: {fault.change}"].append(fault)
    verdicts = {}
    for line in filter(None, path.read_text(encoding="utf-8").splitlines()):
        text, _, verdict = line.rpartition(" -> ")
        if len(fitting := places[text]) == 1:
            verdicts[fitting[0]] = verdict
        else:
            print(f"fits {len(fitting)} places: {line}")
    return verdicts


# ---- which tests run


def lines_to_ask_for(fault: Fault) -> set[int]:
    """Return the numbers of lines: tests that execute one of them may notice the fault.

    That is the statement with the fault. What is executed when a module is imported matters to whatever uses
    the module: then every statement of its functions.
    """
    tree = ast.parse((PACKAGE / fault.file).read_bytes())
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = [
        s for function in functions for block in blocks(function) for s in block if is_marked(s)
    ]
    around = [s for s in inside if s.lineno <= fault.line <= (s.end_lineno or 0)]
    asked = [max(around, key=lambda s: s.lineno)] if around else inside
    return {first_lines()[fault.file] + statement.lineno for statement in asked}


@dataclass(frozen=True)
class Tests:
    """Tests that execute the line of a fault, in the order in which they run."""

    names: list[str]
    left_out: int
    """How many more execute it: there is no time for them."""


def tests_for(faults: Sequence[Fault], seconds: float) -> dict[Fault, tuple[Tests, Tests]]:
    """Return for each fault what `make test` runs of the tests that may notice it, and what it leaves out."""
    asked = {fault: sorted(lines_to_ask_for(fault)) for fault in faults}
    executing: dict[tuple[Fault, bool], list[tuple[bool, float, str]]] = defaultdict(list)
    for row in rows():
        marks = row.marks
        for fault, lines in asked.items():
            if row.test and any(marks[line] for line in lines):
                elsewhere = not row.test.startswith((f"tests/{fault.room}/", "tests/expected/"))
                executing[fault, row.long].append((elsewhere, row.seconds, row.test))

    def chosen(fault: Fault, long: bool) -> Tests:
        left, names = seconds, list[str]()
        for _, took, name in sorted(executing[fault, long]):
            if names and took > left:
                break
            left -= took
            names.append(name)
        return Tests(names, len(executing[fault, long]) - len(names))

    return {fault: (chosen(fault, False), chosen(fault, True)) for fault in faults}


COMMANDS = ("make test", "make test-all")
VARIABLE = "MINICOMPILE_ONLY_TESTS"
"""The environment variable that names a file: the node ids of the tests to run, in their order."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """As a plug-in of pytest: leave only the tests that the file names."""
    names = Path(os.environ[VARIABLE]).read_text(encoding="utf-8").split("\n")
    order = {name: number for number, name in enumerate(names)}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in order])
    items[:] = sorted(
        (item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid]
    )


class Copy:
    """A copy of the repository, to plant faults in, with a cache of compiled kernels of its own."""

    def __init__(self, folder: Path) -> None:
        shutil.copytree(ROOT, folder, ignore=AWAY)
        self.folder, self.cache = folder, folder / "build" / "cache"

    def run(self, tests: Sequence[str], limit: float) -> subprocess.CompletedProcess[str]:
        """Run tests until one fails."""
        shutil.rmtree(self.cache.parent, ignore_errors=True)
        self.cache.parent.mkdir()
        if Path(default_cache_dir()).is_dir():  # links: what a fault spoils is this copy's alone
            shutil.copytree(default_cache_dir(), self.cache, copy_function=os.link)
        names = self.folder / "build" / "tests"
        names.write_text("\n".join(tests), encoding="utf-8")
        around = child_environment(
            PYTHONPATH=str(self.folder),
            MINICOMPILE_CACHE_DIR=str(self.cache),
            OMP_NUM_THREADS="1",
            **{VARIABLE: str(names)},
        )
        command = [sys.executable, "-m", "pytest", "-xq", "--tb", "no", "-p", "tests.mutation"]
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        return subprocess.run(
            [*command, "-p", "no:cacheprovider", *files],
            cwd=self.folder, env=around, capture_output=True, text=True, timeout=limit, check=False,
        )  # fmt: skip

    def noticed_by(self, fault: Fault, tests: Sequence[str], limit: float) -> str:
        """Return which of `tests` notices a fault, or what else; "" if nothing does."""
        original = fault.plant(self.folder / "minicompile")
        try:
            done = self.run(tests, limit)
        except subprocess.TimeoutExpired:
            return f"a test that does not end in {limit:.0f} s"
        finally:
            (self.folder / "minicompile" / fault.file).write_bytes(original)
        if done.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            return ""
        said = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        failed = said[0].partition(" ")[2].partition(" - ")[0] if said else ""
        if failed in tests and self.run([failed], limit).returncode:
            return self.noticed_by(fault, [test for test in tests if test != failed], limit)
        return failed or f"pytest, which ends with {done.returncode}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant faults and print who notices each, then how many of each room nobody does."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--count", type=int, default=150, help="faults to plant (default 150)")
    parser.add_argument("--seed", type=int, default=0, help="draws others (default 0)")
    parser.add_argument("--faults", type=Path, help="a file of faults, a line each, as printed")
    parser.add_argument("--verdicts", type=Path, help="a file of verdicts on survivors")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time (default 2)")
    parser.add_argument(
        "--seconds", type=float, default=60, help="of tests for a fault (default 60)"
    )
    chosen = parser.parse_args(arguments)
    faults = read_faults(chosen.faults) if chosen.faults else draw(chosen.count, chosen.seed)
    verdicts = read_verdicts(chosen.verdicts) if chosen.verdicts else {}
    tests, limit = tests_for(faults, chosen.seconds), 60 + 10 * chosen.seconds
    seen: dict[str, Counter[str]] = defaultdict(Counter)
    survivors = []
    beside = Path(default_cache_dir()).parent  # links don't lead to another disk
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mutation_", dir=beside) as place:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(chosen.jobs):
            copies.put(Copy(Path(place, str(number))))

        def test(fault: Fault) -> tuple[Fault, str, str]:
            copy = copies.get()
            try:
                for command, those in zip(COMMANDS, tests[fault]):
                    if those.names and (who := copy.noticed_by(fault, those.names, limit)):
                        return fault, command, who
                return fault, "", ""
            finally:
                copies.put(copy)

        with concurrent.futures.ThreadPoolExecutor(chosen.jobs) as pool:
            for done in concurrent.futures.as_completed(pool.submit(test, f) for f in faults):
                fault, command, who = done.result()
                verdict = "" if command else verdicts.get(fault, "")
                seen[fault.room][NOTHING if verdict.startswith(NOTHING) else command] += 1
                short, long = tests[fault]
                text = f"noticed by {command}: {who}"
                if not command:
                    more = short.left_out + long.left_out
                    text = f"survives {len(short.names)} short and {len(long.names)} long tests"
                    text += f"; {more} more execute it" if more else ""
                    text += f"\n    {verdict}" if verdict else ""
                    survivors.append(f"{fault}\n    {text}")
                print(f"{fault}\n    {text}", flush=True)
    print("\nsurvivors:", *sorted(survivors), sep="\n")
    print(f"\n{'room':<12} {'faults':>6} {COMMANDS[0]:>12} {'and the long':>14} {NOTHING:>17}")
    for room, counts in [*sorted(seen.items()), ("all", sum(seen.values(), Counter()))]:
        first, second, none = (counts[kind] for kind in (*COMMANDS, NOTHING))
        print(f"{room:<12} {counts.total():>6} {first:>12} {first + second:>14} {none:>17}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
