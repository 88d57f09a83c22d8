"""`python -m tests.mutation`: plant small faults in the core, one at a time, and see whether tests notice.

A fault is a change of one place of one file: a comparison turned, a number off by one, operands swapped,
`and` for `or`, a condition that no longer holds back what it guards. Files are drawn by their size in
tokens, places at random (`--seed`). Each fault is planted in a copy of the repository; the short tests of
its room run first, then all short tests, with `--all` the long ones too. What no test notices is listed, for
a verdict by hand: a test is missing, the code is not needed, or the change has no effect.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import queue
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from minicompile.options import child_environment
from tests.size import BESIDE, PACKAGE, ROOT, sizes

TURNED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
SWAPPED = {ast.Sub: "-", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%"}
TIMEOUT_SECONDS = 1500
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
        return f"{self.file}:{self.line}: {self.before!r} becomes {self.after!r}"

    @property
    def room(self) -> str:
        """The folder of tests that should notice first; "" for files that no room owns."""
        folder = self.file.parts[0]
        return folder if (ROOT / "tests" / folder).is_dir() else ""

    def plant(self, package: Path) -> bytes:
        """Write the changed file, and return what it held before."""
        path = package / self.file
        held = path.read_bytes()
        end = self.start + len(self.before.encode())
        assert held[self.start : end] == self.before.encode(), self
        path.write_bytes(held[: self.start] + self.after.encode() + held[end:])
        return held


def changes(node: ast.AST, text: str) -> Iterator[tuple[ast.AST, str]]:
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


def faults_of(file: Path) -> list[Fault]:
    """Return every fault that can be planted in a file, each in place of one line or a part of it."""
    text = (PACKAGE / file).read_text(encoding="utf-8")
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    faults = []
    for node in ast.walk(ast.parse(text)):
        for place, after in changes(node, text):
            before = ast.get_source_segment(text, place)
            if before and before != after and "\n" not in before:
                start = starts[place.lineno - 1] + place.col_offset
                faults.append(Fault(file, place.lineno, start, before, after))
    return faults


def draw(count: int, seed: int) -> list[Fault]:
    """Return `count` different faults of the core, files drawn by their tokens."""
    source = random.Random(seed)
    core = {
        file: size.tokens for file, size in sizes(PACKAGE).items() if file.parts[0] not in BESIDE
    }
    possible = {file: faults_of(file) for file in core}
    files = [file for file in core if possible[file]]
    drawn: dict[Fault, None] = {}
    while len(drawn) < count:
        [file] = source.choices(files, [core[file] for file in files])
        drawn[source.choice(possible[file])] = None
    return list(drawn)


def noticed_by(fault: Fault, copy: Path, long: bool) -> str:
    """Return which tests of a copy of the repository notice a fault; "" if none does."""
    held = fault.plant(copy / "minicompile")
    command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", "-p", "no:warnings"]
    around = child_environment(PYTHONPATH=str(copy), XDG_CACHE_HOME=str(copy / "build" / "cache"))
    room = [["-m", "not long", f"tests/{fault.room}"]] if fault.room else []
    try:
        for chosen in (*room, ["-m", "not long"], *([["-m", "long"]] if long else [])):
            try:
                done = subprocess.run(
                    [*command, *chosen],
                    cwd=copy, env=around, capture_output=True, timeout=TIMEOUT_SECONDS, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return "a test that does not end"
            if done.returncode:
                return " ".join(chosen)
    finally:
        (copy / "minicompile" / fault.file).write_bytes(held)
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant faults and print who notices each, then how many nobody does."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--count", type=int, default=150, help="faults to plant (default 150)")
    parser.add_argument("--seed", type=int, default=0, help="draws others (default 0)")
    parser.add_argument(
        "--jobs", type=int, default=2, help="copies that are tested at a time (default 2)"
    )
    parser.add_argument("--all", action="store_true", help="the long tests too")
    chosen = parser.parse_args(arguments)
    faults, seen = draw(chosen.count, chosen.seed), Counter[bool]()
    with tempfile.TemporaryDirectory(prefix="minicompile_mutation_") as place:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(chosen.jobs):
            copies.put(Path(shutil.copytree(ROOT, Path(place, str(number)), ignore=AWAY)))

        def test(fault: Fault) -> str:
            copy = copies.get()
            try:
                return noticed_by(fault, copy, chosen.all)
            finally:
                copies.put(copy)

        with concurrent.futures.ThreadPoolExecutor(chosen.jobs) as pool:
            for fault, who in zip(faults, pool.map(test, faults), strict=True):
                seen[bool(who)] += 1
                print(f"{fault}\n    {'noticed by ' + who if who else 'NOT NOTICED'}", flush=True)
    print(f"noticed: {seen[True]} of {len(faults)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
