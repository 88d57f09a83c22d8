"""`python -m tests.compat.suite`: run the tests with this torch, then print what each release gave.

Every run leaves its report in build/compat/results; the table has a row for each. `make compat` makes the
environments. Exit code: pytest's. Further arguments go to pytest: a file of tests, `-k name`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from minicompile.versions import installed, release

RESULTS = Path(__file__).parents[2] / "build" / "compat" / "results"
NAMES = ("torch", "triton", "Python")
HEAD = """| PyTorch | Triton | Python | passed | failed | skipped |
| --- | --- | --- | ---: | ---: | ---: |"""
PYTEST = (
    *("-q", "-n", "2", "--dist", "loadfile"),
    *("--no-loadscope-reorder", "--max-worker-restart", "0"),
)
"""As `make test` and `make test-all` run it."""


def row(report: Path) -> str:
    """One release's row, from pytest's report, whose name has the versions. Errors count as failed."""
    versions = report.stem.split("_")
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    counts = ("tests", "failures", "errors", "skipped")
    tests, failures, errors, skipped = (sum(int(s.get(c, 0)) for s in suites) for c in counts)
    failed = failures + errors
    numbers = (tests - failed - skipped, failed, skipped)
    return f"| {' | '.join(versions)} | {' | '.join(f'{number:,}' for number in numbers)} |"


def table(folder: Path) -> str:
    """What each release gave, the oldest first."""
    reports = sorted(folder.glob("*.xml"), key=lambda path: (release(path.stem), path.stem))
    return "\n".join([HEAD, *map(row, reports)])


def main(arguments: Sequence[str]) -> int:
    RESULTS.mkdir(parents=True, exist_ok=True)
    report = RESULTS / f"{'_'.join(installed(name) or 'none' for name in NAMES)}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *PYTEST, f"--junitxml={report}", *arguments]
    code = subprocess.run(command).returncode
    print(table(RESULTS))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
