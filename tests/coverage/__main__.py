"""`python -m tests.coverage`: run the short tests, and list the lines of the core that none executes.

`--all` runs the long ones too, `--report` lists again what the last run left. A line that is listed is
deleted, or gets a test.
"""

from __future__ import annotations

import argparse
import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

from minicompile.options import child_environment
from tests.coverage.marks import blocks, core_digest, first_lines, is_marked
from tests.coverage.rows import FOLDER, executed_lines
from tests.imports import PACKAGE, ROOT, core_files

PYTEST = (
    *(sys.executable, "-m", "pytest", "-q", "--dist", "loadfile", "--no-loadscope-reorder"),
    *("--tb", "short", "-p", "tests.coverage.rows"),
)


def runs(numbers: Sequence[int]) -> Iterator[str]:
    """Yield ranges, as `3-5`, of `numbers`: the line of every statement, negative if it was executed."""
    start = end = 0
    for number in (*numbers, -1):
        if number > 0:
            start, end = start or number, number
        elif start:
            yield str(start) if start == end else f"{start}-{end}"
            start = 0


def report() -> str:
    """Return for each file of the core its lines that no test executes, as text."""
    executed, texts, total, missed = executed_lines(), list[str](), 0, 0
    for file in core_files():
        first, tree = first_lines()[file], ast.parse((PACKAGE / file).read_bytes())
        lines = sorted({s.lineno for block in blocks(tree) for s in block if is_marked(s)})
        signed = [-line if executed[first + line] else line for line in lines]
        count = sum(line > 0 for line in signed)
        total, missed = total + len(lines), missed + count
        if count:
            texts.append(f"{file} ({count} of {len(lines)}): {', '.join(runs(signed))}")
    return "\n".join(
        [*texts, f"{missed:,} of {total:,} statements of the core are executed by no test"]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run tests with marks, then print the report. Returns the exit code of pytest."""
    parser = argparse.ArgumentParser(prog="python -m tests.coverage", description=__doc__)
    parser.add_argument("--all", action="store_true", help="the long tests too")
    parser.add_argument("--jobs", default="2", help="processes (default 2)")
    parser.add_argument("--report", action="store_true", help="of the last run")
    parser.add_argument(
        "tests", nargs="*", default=["tests"], help="files or folders (default: all)"
    )
    chosen, code = parser.parse_args(arguments), 0
    if not chosen.report:
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.mkdir(parents=True)
        which = [] if chosen.all else ["-m", "not long"]
        command = [*PYTEST, "-n", chosen.jobs, *which, *chosen.tests]
        around = child_environment(PYTHONPATH=str(ROOT))
        code = subprocess.run(command, cwd=ROOT, env=around, check=False).returncode
        (FOLDER / "digest").write_text(core_digest())
    print(report())
    return code


if __name__ == "__main__":
    sys.exit(main())
